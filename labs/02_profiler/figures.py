"""The figures of this lab; the cells compute the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dlo_lib.labkit.figures import (
    BLUE,
    BROWN,
    GREEN,
    PALE,
    SKY,
    VERMILLION,
    WINE,
    finish,
    legend,
    panels,
    styled,
)
from dlo_lib.labkit.predictions import mark_predicted
from dlo_lib.profiling import Ceilings, MeasuredOperation, TechnicalCheck, plot_roofline

PHASES = {
    "load": VERMILLION,
    "forward": BLUE,
    "backward": SKY,
    "optimizer": GREEN,
    "metrics": BROWN,
    "other": PALE,
}
KINDS = {"conversion": VERMILLION, "read": WINE, "operator": BLUE, "python": PALE}
ROWS = 5


@styled
def timeline(spans: Sequence[Mapping[str, Any]], phases: Sequence[str]) -> Figure:
    """Draw one step of a trace: time from left to right, and below each span the spans that it calls; the
    colour is that of the phase."""
    (axes,) = panels(width=10, height=3.4)
    first, stack = spans[0]["begin"], []
    least = (max(span["end"] for span in spans) - first) / 900  # about a pixel: thinner bars would vanish
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for span in spans:
        while stack and stack[-1][0] <= span["begin"]:
            stack.pop()
        phase = span["name"] if span["name"] in phases else stack[-1][1] if stack else "other"
        if len(stack) < ROWS:
            bars.setdefault((len(stack), phase), []).append(
                (span["begin"] - first, span["end"] - span["begin"])
            )
        stack.append((span["end"], phase))
    for (depth, phase), row in bars.items():
        place, colour = (depth - 0.43, 0.86), PHASES[phase]
        thin = [
            (begin, max(length, least)) for begin, length in row if length < 4 * least
        ]  # an edge would cover these
        axes.broken_barh(thin, place, facecolor=colour, linewidth=0)
        axes.broken_barh(
            [bar for bar in row if bar[1] >= 4 * least],
            place,
            facecolor=colour,
            edgecolor="white",
            linewidth=0.3,
        )
    axes.set_yticks(range(ROWS), ["step", "phase", "operator", "it calls", "they call"])
    legend(axes, "right", handles=[Patch(color=PHASES[phase], label=phase) for phase in phases])
    return finish(axes, "x", xlabel="time (ms)", ylim=(ROWS - 0.4, -0.6))


@styled
def kinds(phases: Mapping[str, Mapping[str, float]]) -> Figure:
    """Show the time of each phase in the trace as a bar, divided into conversions, reads, operators and
    Python."""
    (axes,) = panels(width=9, height=3.4)
    names, left = list(phases), [0.0] * len(phases)
    for kind, colour in KINDS.items():
        lengths = [found[kind] for found in phases.values()]
        axes.barh(names, lengths, left=left, color=colour, edgecolor="white", label=kind)
        left = [begin + length for begin, length in zip(left, lengths)]
    axes.invert_yaxis()
    legend(axes, "right")
    return finish(axes, "x", xlabel="time in a step (ms)")


@styled
def corrections(steps: Mapping[str, Mapping[str, float]], predicted: Mapping[str, float | None]) -> Figure:
    """Show a step of the program by the clock, divided into its phases, before and after each correction,
    with the predicted totals."""
    (axes,) = panels(width=10, height=3.4)
    places = {name: place for place, name in enumerate(steps)}
    for place, times in enumerate(steps.values()):
        left = 0.0
        for phase, colour in PHASES.items():
            length = max(0.0, times.get(phase, 0.0))
            axes.barh(
                place, length, left=left, color=colour, edgecolor="white", label=phase if place == 0 else None
            )
            left += length
        axes.annotate(f"{left:.1f} ms", (left, place), xytext=(5, 0), textcoords="offset points", va="center")
    mark_predicted(axes, places, predicted, horizontal=True)
    axes.set_yticks(list(places.values()), ["before", *(f"+ {name}" for name in list(steps)[1:])])
    axes.margins(x=0.12)
    legend(axes, "right")
    return finish(axes, "x", xlabel="time of a step (ms)", ylim=(len(steps) - 0.4, -0.6), xlim=(0, None))


def what_times_show(times: Mapping[str, float]) -> str:
    """Return whether each of these times, in ms, is shorter than the one before it, as the text says of
    corrections."""
    lines = []
    for (before, old), (after, new) in zip(times.items(), list(times.items())[1:]):
        if new >= old:
            lines.append(
                f"{after}: {new:.2f} ms, not less than {before}: {old:.2f} ms. This disagrees with the text; "
                "another program may be at work: run the cell again."
            )
    return "\n".join(lines) or "Each correction saves time, as the text says."


@styled
def two_tracks(
    tracks: Mapping[str, tuple[Sequence[tuple[float, float]], Sequence[tuple[float, float]]]],
) -> Figure:
    """Draw loading and training of an epoch on two tracks, for two loaders; where both bars are above each
    other, loading is hidden."""
    every = panels(1, len(tracks), width=10, height=1.9 * len(tracks))
    for axes, (name, (loading, training)) in zip(every, tracks.items()):
        for place, intervals, colour in ((0, loading, VERMILLION), (1, training, BLUE)):
            begins, lengths = [begin for begin, _ in intervals], [end - begin for begin, end in intervals]
            axes.barh(
                [place] * len(begins),
                lengths,
                left=begins,
                height=0.8,
                color=colour,
                edgecolor="white",
                linewidth=0.4,
            )
        axes.set_yticks((0, 1), ("loading", "training"))
        finish(axes, "x", title=name, ylim=(1.6, -0.6), xlabel="time (ms)")
    figure = every[0].get_figure(root=True)
    assert figure is not None
    return figure


@styled
def roofline(ceilings: Ceilings, points: Mapping[str, MeasuredOperation]) -> Figure:
    """Plot the two ceilings of this machine, and operators and steps at their arithmetic intensity and their
    FLOP/s."""
    return plot_roofline(ceilings, points)


@styled
def page(check: TechnicalCheck) -> Figure:
    """Show the technical check: the throughput against that of a step that does not wait, the parts of a
    step, and memory against the batch."""
    return check.plot()
