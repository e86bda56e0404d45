"""The figures of this lab: each function draws what it is given and computes nothing of its own.

Colours are those of ``plot_memory``, so that a part looks the same everywhere. They stay apart for colour-blind readers, and nothing is
said by colour alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dlo_lib.drawing import new_figure
from dlo_lib.profiling import Part
from dlo_lib.profiling.plot import COLOURS

UNITS = {"GiB": 2**30, "KiB": 2**10}
GIB = UNITS["GiB"]
PARTS = {"weights": Part.WEIGHTS, "gradients": Part.GRADIENTS, "optimizer": Part.OPTIMIZER_STATE}
NAMES = {0: "DDP", 1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3"}
LINES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
STYLES = ("-", "--", "-.", ":")
LIMIT, GREY = "#B00020", "#666666"


def _axes(width: float, height: float) -> Axes:
    return new_figure(width, height).subplots()


def _clean(ax: Axes, **labels) -> Figure:
    ax.set(**labels)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", alpha=0.25)
    ax.set_axisbelow(True)
    return ax.get_figure()


def copies(held: Mapping[str, int], ranks: int) -> Figure:
    """The same state on every rank, the first ones drawn."""
    ax, shown = _axes(9, 3.6), 8
    for rank in range(shown):
        bottom = 0.0
        for name, part in PARTS.items():
            ax.bar(rank, held[name] / GIB, 0.7, bottom=bottom, color=COLOURS[part], edgecolor="white", label=name if rank == 0 else None)
            bottom += held[name] / GIB
    ax.text(
        shown - 0.3, bottom / 2, f"... {ranks} ranks,\n{ranks * bottom:,.0f} GiB in all,\n{bottom:.0f} GiB of it different", va="center"
    )
    ax.set_xlim(-0.6, shown + 2)
    ax.set_xticks(range(shown), [f"rank {rank}" for rank in range(shown)])
    ax.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, 1.14), ncols=3)
    return _clean(ax, ylabel="GiB on the rank")


def stages(
    measured: Mapping[int, Mapping[str, int]], predicted: Mapping[int, Mapping[str, float]], ranks: int, unit: Literal["GiB", "KiB"]
) -> Figure:
    """State of a rank by stage: measured bars, predicted diamonds at the top of each part."""
    ax, size = _axes(9, 3.8), UNITS[unit]
    longest = max(sum(held.values()) for held in (*measured.values(), *predicted.values())) / size
    for row, (stage, held) in enumerate(measured.items()):
        left, mark = 0.0, 0.0
        for name, part in PARTS.items():
            ax.barh(row, held[name] / size, 0.62, left=left, color=COLOURS[part], edgecolor="white", label=name if row == 0 else None)
            left += held[name] / size
            mark += predicted[stage][name] / size
            ax.plot(mark, row, "D", color="black", ms=5, mfc="white", label="your function" if row == 0 and name == "weights" else None)
        ax.text(max(left, mark) + longest / 80, row, f"{left:.2f} {unit}" if left < 10 else f"{left:.1f} {unit}", va="center")
    ax.set_yticks(range(len(measured)), [NAMES[stage] for stage in measured])
    ax.invert_yaxis()
    ax.margins(x=0.12)
    ax.legend(frameon=False, loc="lower right")
    figure = _clean(ax, xlabel=f"{unit} of state on one of {ranks} ranks")
    ax.grid(visible=False)
    return figure


def losses(curves: Mapping[int, Sequence[float]]) -> Figure:
    """The loss, the mean over the ranks, by stage."""
    ax = _axes(8, 3.4)
    for stage, values in curves.items():
        ax.plot(values, color=LINES[stage], ls=STYLES[stage], lw=6 - 1.4 * stage, alpha=0.8, label=NAMES[stage])
    ax.legend(frameon=False)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _clean(ax, xlabel="step", ylabel="loss, mean over 4 ranks")


def offload(tokens: Sequence[int], computing: Sequence[float], transfer: Mapping[int, float]) -> Figure:
    """Seconds of computing for the tokens of a rank and step, and of moving gradients and weights of its share."""
    ax = _axes(8, 3.6)
    ax.plot(tokens, computing, "o-", color=LINES[0], label="computing, by tokens of the rank and step")
    for (ranks, seconds), style in zip(transfer.items(), STYLES):
        ax.axhline(seconds, color=LIMIT, ls=style, lw=1.2, label=f"over PCIe, {ranks} rank{'s' if ranks > 1 else ''}")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.legend(frameon=False, fontsize=8)
    return _clean(ax, xlabel="tokens of a rank and step", ylabel="seconds")
