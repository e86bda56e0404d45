"""The figures of this lab: each function draws its arguments.

Colours of parts are those of ``plot_memory``, so that a part looks the same everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dlo_lib.labkit.figures import (
    BACKGROUND,
    BLACK,
    BLUE,
    GIB,
    KIB,
    LIMIT,
    METHODS,
    finish,
    legend,
    panels,
    styled,
)
from dlo_lib.profiling import MemoryReport, Part
from dlo_lib.profiling.plot import COLOURS

UNITS = {"GiB": GIB, "KiB": KIB}
PARTS = {"weights": Part.WEIGHTS, "gradients": Part.GRADIENTS, "optimizer": Part.OPTIMIZER_STATE}
NAMES = {0: "DDP", 1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3"}


@styled
def copies(held: Mapping[str, int], ranks: int) -> Figure:
    """The same state on every rank, the first ones drawn."""
    (ax,), shown = panels(width=10, height=3.8), 8
    for rank in range(shown):
        bottom = 0.0
        for name, part in PARTS.items():
            look = {"color": COLOURS[part], "edgecolor": BACKGROUND, "label": name if rank == 0 else None}
            ax.bar(rank, held[name] / GIB, 0.7, bottom=bottom, **look)
            bottom += held[name] / GIB
    text = f"... {ranks} ranks,\n{ranks * bottom:,.0f} GiB in all,\n{bottom:.0f} GiB of it different"
    ax.text(shown - 0.3, bottom / 2, text, va="center")
    ax.set_xlim(-0.6, shown + 2)
    ax.set_xticks(range(shown), [f"rank {rank}" for rank in range(shown)])
    legend(ax, "above")
    return finish(ax, ylabel="GiB on the rank")


@styled
def stages(
    measured: Mapping[int, Mapping[str, int]],
    predicted: Mapping[int, Mapping[str, float]],
    ranks: int,
    unit: Literal["GiB", "KiB"],
) -> Figure:
    """State of a rank by stage: measured bars, predicted diamonds at the top of each part."""
    (ax,), size = panels(width=9), UNITS[unit]
    longest = max(sum(held.values()) for held in (*measured.values(), *predicted.values())) / size
    for row, (stage, held) in enumerate(measured.items()):
        left, mark = 0.0, 0.0
        for name, part in PARTS.items():
            look = {"color": COLOURS[part], "edgecolor": BACKGROUND, "label": name if row == 0 else None}
            ax.barh(row, held[name] / size, 0.62, left=left, **look)
            left += held[name] / size
            mark += predicted[stage][name] / size
            label = "your function" if row == 0 and name == "weights" else None
            ax.plot(mark, row, "D", color=BLACK, ms=6, mfc=BACKGROUND, label=label)
        text = f"{left:.2f} {unit}, yours {mark:.2f}"
        ax.text(max(left, mark) + longest / 60, row, text, va="center")
    ax.set_yticks(range(len(measured)), [NAMES[stage] for stage in measured])
    ax.invert_yaxis()
    ax.margins(x=0.3)
    ax.legend(loc="lower right")
    return finish(ax, None, xlabel=f"{unit} of state on one of {ranks} ranks")


@styled
def losses(curves: Mapping[int, Sequence[float]]) -> Figure:
    """The loss, the mean over the ranks, by stage."""
    (ax,) = panels(width=8, height=3.6)
    for stage, values in curves.items():
        ax.plot(values, **METHODS[stage].line(), lw=6 - 1.4 * stage, alpha=0.8, label=NAMES[stage])
    ax.legend()
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return finish(ax, xlabel="step", ylabel="loss, mean over 4 ranks")


@styled
def budget(state: Mapping[int, Mapping[str, float]], ranks: int, limit: float) -> Figure:
    """State of a rank by stage, beside the memory of a GPU."""
    (ax,) = panels(width=9, height=3.2)
    for row, held in enumerate(state.values()):
        left = 0.0
        for name, part in PARTS.items():
            look = {"color": COLOURS[part], "edgecolor": BACKGROUND, "label": name if row == 0 else None}
            ax.barh(row, held[name] / GIB, 0.62, left=left, **look)
            left += held[name] / GIB
        # the line of the GPU does not cross the number
        box = {"facecolor": BACKGROUND, "edgecolor": "none", "pad": 1.5}
        ax.text(left + 0.6, row, f"{left:.1f} GiB", va="center", bbox=box, zorder=5)
    ax.axvline(limit / GIB, color=LIMIT, lw=1.5, label=f"a GPU of {limit / GIB:.0f} GiB")
    ax.set_yticks(range(len(state)), [NAMES[stage] for stage in state])
    ax.invert_yaxis()
    ax.set_xlim(0, 58)
    legend(ax, "above")
    return finish(
        ax, None, xlabel=f"GiB of state on one of {ranks} rank{'s' if ranks > 1 else ''}, by your function"
    )


@styled
def offload(
    tokens: Sequence[int],
    computing: Sequence[float],
    transfer: Mapping[str, float],
    update: Mapping[str, float],
) -> Figure:
    """Seconds of computing for a rank and step; of the transfer and of the update on the CPU."""
    (ax,) = panels(width=10, height=4.2)
    ax.plot(tokens, computing, "o-", color=BLUE, label="the GPU computes (calculated)")
    for (name, moved), style in zip(transfer.items(), list(METHODS.colours[1:4])):
        both = moved + update[name]
        text = (
            f"offload, {name}: transfer {moved:.2f} s (calculated)\n+ update {update[name]:.2f} s (measured)"
        )
        ax.axhline(both, color=style, ls=("-", "--", "-.")[list(transfer).index(name)], lw=1.8, label=text)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    legend(ax, "right")
    return finish(ax, xlabel="tokens of a rank and step", ylabel="seconds")


@styled
def rest(reports: Mapping[str, MemoryReport]) -> Figure:
    """The peak of a step by part, each at its own moment."""
    (ax,) = panels(width=10, height=2.8)
    peaks = {f"{name},\nat the {_moment(report)}": report.at_peak for name, report in reports.items()}
    parts = [part for part in Part if any(peak.get(part, 0) > 0.01 * GIB for peak in peaks.values())]
    for row, peak in enumerate(peaks.values()):
        left = 0.0
        for part in parts:
            size = peak.get(part, 0) / GIB
            look = {
                "color": COLOURS[part],
                "edgecolor": BACKGROUND,
                "label": part.value if row == 0 else None,
            }
            ax.barh(row, size, 0.6, left=left, **look)
            left += size
        ax.text(left, row, f" {left:.1f} GiB", va="center")
    ax.set_yticks(range(len(peaks)), peaks)
    ax.invert_yaxis()
    ax.margins(x=0.12)
    legend(ax, "right")
    return finish(ax, None, xlabel="GiB on one of 64 ranks, at the peak of a step")


def _moment(report: MemoryReport) -> str:
    """The phase of the peak, and in which half of the phase it is."""
    index = report.begin + int(report.total[report.begin :].argmax())
    phase = report.events[index].phase
    inside = [place for place, event in enumerate(report.events) if event.phase is phase]
    return f"{'start' if index < inside[len(inside) // 2] else 'end'} of {phase.value}"
