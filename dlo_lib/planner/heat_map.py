"""The MFU and the memory of the best plan by model and number of nodes, as tables and as a heat map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dlo_lib.base.drawing import new_figure
from dlo_lib.base.errors import UserError
from dlo_lib.planner.plans import Array
from dlo_lib.planner.search import GIB, PlanRequest, search
from dlo_lib.planner.stack import Stack

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def best_by_size(
    request: PlanRequest, models: Sequence[str], nodes: Sequence[int], stack: Stack | None = None
) -> tuple[Array, Array]:
    """Return the MFU and the GiB of the fastest plan, each (models, nodes); NaN where no plan fits.

    Args:
        request: the GPUs, batch and sequences; its model and number of GPUs are replaced.
    """
    mfu, memory = np.full((2, len(models), len(nodes)), np.nan)
    for row, model in enumerate(models):
        for column, count in enumerate(nodes):
            gpus = count * request.nodes.gpus_per_node
            try:
                found = search(replace(request, model=model, gpus=gpus), stack)
            except UserError:
                continue  # nothing fits: the cell stays empty
            mfu[row, column], memory[row, column] = found.cost.mfu[0], found.memory[0] / GIB
    return mfu, memory


def plot_heat_map(
    models: Sequence[str],
    nodes: Sequence[int],
    mfu: Array,
    memory: Array,
    title: str = "Predicted MFU, and memory of a GPU, of the best plan",
) -> Figure:
    """Draw MFU as colours; each cell has its percentage, and the memory of a GPU below."""
    figure = new_figure(1.6 + 1.1 * len(nodes), 1.4 + 0.8 * len(models))
    axes = figure.subplots()
    # Colours from the least to the largest, but over at least 10 points, so that equal cells look equal.
    found = 100 * mfu[np.isfinite(mfu)] if np.isfinite(mfu).any() else np.zeros(1)
    low = max(0.0, min(found.min(), found.max() - 10))
    image = axes.imshow(100 * mfu, cmap="viridis", aspect="auto", vmin=low, vmax=max(found.max(), low + 1))
    for row, column in np.ndindex(mfu.shape):
        if np.isnan(mfu[row, column]):
            axes.text(column, row, "no plan\nfits", ha="center", va="center", fontsize=7)
            continue
        said = f"{100 * mfu[row, column]:.0f} %\n{memory[row, column]:.0f} GiB"
        colour = "black" if 100 * mfu[row, column] > (low + found.max()) / 2 else "white"
        axes.text(column, row, said, ha="center", va="center", fontsize=8, color=colour)
    axes.set_xticks(range(len(nodes)), [str(count) for count in nodes])
    axes.set_yticks(range(len(models)), models)
    axes.set(xlabel="nodes")
    axes.set_title(title, fontsize=10)
    figure.colorbar(image, label="MFU in %")
    return figure
