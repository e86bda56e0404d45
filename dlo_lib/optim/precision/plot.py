"""The values of tensors beside the ranges of number formats."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dlo_lib.base.drawing import new_figure
from dlo_lib.base.errors import UserError
from dlo_lib.optim.precision.formats import FORMATS, FloatFormat

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLES = (("#13589a", "-"), ("#c25000", "--"), ("#0e8256", "-."), ("#ae4a90", ":"))
"""Colour and line style of each tensor."""


def plot_range(
    tensors: Mapping[str, Tensor],
    formats: Sequence[FloatFormat] = (FORMATS["fp16"], FORMATS["bf16"], FORMATS["e4m3"], FORMATS["e5m2"]),
) -> Figure:
    """Draw a histogram of the exponents of each tensor, and below it the range of each format.

    The dark part of a range has normal numbers, the light part subnormal ones. Values to the left of a range
    become 0, values to the right overflow.

    Raises:
        UserError: a tensor has no finite value except 0.
    """
    counts = {name: _exponents(name, tensor) for name, tensor in tensors.items()}
    figure = new_figure(9, 2.6 + 0.35 * len(formats))
    histogram, ranges = figure.subplots(2, 1, sharex=True, height_ratios=[3, 0.2 + 0.6 * len(formats)])
    for number, (name, shares) in enumerate(counts.items()):
        colour, dashes = STYLES[number % len(STYLES)]
        histogram.step(
            list(shares), list(shares.values()), where="mid", color=colour, linestyle=dashes, label=name
        )
    histogram.set(ylabel="share of values", ylim=(0, None))
    histogram.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    lowest, highest = min(min(shares) for shares in counts.values()), max(max(s) for s in counts.values())
    for row, entry in enumerate(formats):
        smallest = math.log2(entry.smallest_subnormal)
        normal, largest = entry.smallest_exponent, math.log2(entry.max)
        ranges.barh(row, largest - normal, left=normal, height=0.5, color="#13589a")
        ranges.barh(row, normal - smallest, left=smallest, height=0.5, color="#9fc0dd")
    ranges.set_yticks(range(len(formats)), [entry.name for entry in formats])
    ranges.set_ylim(len(formats) - 0.5, -0.5)
    ranges.set(
        xlabel="exponent: log₂ of the absolute value", xlim=(min(lowest, -30) - 2, max(highest, 18) + 2)
    )
    for axes in (histogram, ranges):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.25)
    return figure


def _exponents(name: str, tensor: Tensor) -> dict[int, float]:
    """Return the share of the values of each exponent, from the smallest to the largest, with 0 between."""
    values = tensor.detach().flatten().double()
    values = values[torch.isfinite(values) & (values != 0)]
    if not len(values):
        raise UserError(f"{name} has no finite value except 0: there is nothing to draw")
    exponents = torch.frexp(values)[1] - 1
    first = int(exponents.min())
    shares = torch.bincount(exponents - first).double() / len(exponents)
    return {first + index: share for index, share in enumerate(shares.tolist())}
