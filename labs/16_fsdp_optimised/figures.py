"""The figures of this lab. Each function draws its arguments and computes only positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dlo_lib.comm.calls import Kind
from dlo_lib.comm.tracing.events import Event
from dlo_lib.comm.tracing.timeline import KINDS, Picture, plot
from dlo_lib.comm.tracing.trace import Trace
from dlo_lib.hardware import gpu
from dlo_lib.labkit.figures import (
    BACKGROUND,
    BLACK,
    BLUE,
    GIB,
    GREEN,
    KIB,
    LIMIT,
    METHODS,
    MUTED,
    SKY,
    SMALL,
    VERMILLION,
    finish,
    gib,
    legend,
    log_ticks,
    panels,
    styled,
    text_on,
)
from dlo_lib.labkit.predictions import Predicted, mark_predicted, numbers
from dlo_lib.profiling import Part
from dlo_lib.profiling.plot import COLOURS
from dlo_lib.profiling.report import MemoryReport

GATHER, REDUCE = KINDS[Kind.ALL_GATHER], KINDS[Kind.REDUCE_SCATTER]
ACTIONS = {"forward": BLUE, "backward": SKY, "gather": GATHER, "reduce": REDUCE}
FORMS = {"ddp": "DDP", "fsdp": "FSDP", "fsdp + checkpointing": "FSDP + checkpointing"}
ABOVE = {"xytext": (0, 5), "textcoords": "offset points", "fontsize": SMALL}
SOLID = {"linestyle": "-", "linewidth": 3}
Point = tuple[int, float, float]
CARDS = ("v100-16", "v100-32", "a100-40", "a100-80")


@styled
def last_step(trace: Trace, title: str) -> Figure:
    """Draw what follows the last barrier, in milliseconds from the barrier.

    gloo reports the end of a reduction only to a process that waits for it. Of a reduction that is not waited
    for at once, only the start is drawn.
    """
    begin = max(event.waited_until or event.issued for event in trace.select(Kind.BARRIER))
    end = max(event.waited_until or event.issued for event in trace.events)
    length = end - begin
    drawn = list(_with_known_ends([event for event in trace.events if event.issued >= begin], 0.015 * length))
    figure = plot(
        Picture(drawn, trace.spans, trace.seconds), f"one step: {title}", begin, end + 0.03 * length
    )
    axes = figure.axes[0]
    low, high = axes.get_xlim()
    ticks = [tick for tick in MaxNLocator(8).tick_values(0, high - low) if 0 <= tick <= high - low]
    axes.set_xticks([low + tick for tick in ticks], [f"{tick:g}" for tick in ticks])
    return figure


def _with_known_ends(events: Sequence[Event], short: float) -> Iterator[Event]:
    """Give a reduction the length ``short`` if the process makes or awaits other calls before it waits for
    it."""
    for event in events:
        waited = event.waited_from
        others = [other for other in events if other.rank == event.rank and other is not event]
        moments = [
            moment for other in others for moment in (other.issued, other.waited_from) if moment is not None
        ]
        if (
            event.call.kind is Kind.REDUCE_SCATTER
            and waited is not None
            and any(event.issued < moment < waited for moment in moments)
        ):
            event = replace(event, done=event.begun + short)
        yield event


@styled
def plans(tables: Mapping[str, Sequence[tuple[str, int]]]) -> Figure:
    """Draw tables in time, with a message a little shorter than a forward: processor, link, whole units."""
    every = panels(rows=len(tables), width=13, height=2.4 * len(tables))
    for axes, (name, table) in zip(every, tables.items()):
        _plan(axes, table)
        axes.set_title(f"{name}: {sum(kind == 'gather' for kind, _ in table)} gathers")
    return axes.get_figure()


def _plan(axes: Axes, table: Sequence[tuple[str, int]]) -> None:
    processor = link = 0.0
    arrived: dict[int, float] = {}
    asked: dict[int, float] = {}
    changes: list[tuple[float, int]] = []
    for kind, k in table:
        if kind in ("forward", "backward"):
            begin = max(processor, arrived.get(k, 0.0))
            processor = begin + (1.0 if kind == "forward" else 2.0)
            _bar(axes, 0, begin, processor, kind, k)
        elif kind == "free":
            changes += [(asked.pop(k, processor), 1), (processor, -1)]
        else:
            begin = max(processor, link)
            link = begin + 0.85
            _bar(axes, 1, begin, link, kind, k)
            if kind == "gather":
                arrived[k], asked[k] = link, begin
    times, held, whole = [0.0], [0], 0
    for when, change in sorted(changes):
        whole += change
        times.append(when)
        held.append(whole)
    axes.step(times, [2.9 - 0.2 * count for count in held], where="post", color=BLACK, linewidth=1.5)
    for when, count in zip(times, held):
        if count == max(held):
            place = {"textcoords": "offset points", "xytext": (3, 3), "fontsize": SMALL}
            axes.annotate(f"{count} units", (when, 2.9 - 0.2 * count), **place)
            break
    axes.set_yticks([0, 1, 2.7], ["computing", "in transit", "whole or\nin transit"])
    axes.set_ylim(3.1, -0.5)
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _bar(axes: Axes, row: float, begin: float, end: float, kind: str, k: int) -> None:
    colour = ACTIONS[kind]
    axes.barh(row, end - begin, 0.8, left=begin, color=colour, edgecolor=BACKGROUND)
    text = {"ha": "center", "va": "center", "fontsize": SMALL, "color": text_on(colour)}
    axes.text((begin + end) / 2, row, f"{kind}\n{k}", **text)


@styled
def policies(sent: Mapping[int, tuple[float, float]], peaks: Mapping[int, float], model: str) -> Figure:
    """Draw bytes sent by policy, measured and predicted, and the peak of weights of a large model."""
    left, right = panels(2, width=11.5, height=3.6)
    names = ["True", "a number", "False"]
    counted = [measured / KIB for measured, _ in sent.values()]
    bars = left.bar(names, counted, 0.6, color=BLUE, label="measured by the tracer")
    yours = [own / KIB for _, own in sent.values()]
    left.plot(names, yours, "D", color=BLACK, mfc=BACKGROUND, label="your function")
    left.bar_label(bars, fmt="%.0f", padding=6)
    left.margins(y=0.15)
    left.legend(loc="upper right")
    xlabel = "reshard_after_forward; 4 ranks, the number is 2"
    finish(left, ylabel="KiB that a rank sends for gathers", xlabel=xlabel)
    bars = right.bar(names, list(peaks.values()), 0.6, color=VERMILLION)
    right.bar_label(bars, fmt="%.2f", padding=3)
    right.margins(y=0.15)
    xlabel = f"blocks of {model} in bf16, 64 ranks;\nthe number is 8"
    return finish(right, ylabel="GiB of gathered weights, peak", xlabel=xlabel)


@styled
def wrapping(cases: tuple[list[float], dict[str, list[float]], list[float]]) -> Figure:
    """Draw the forward time over the blocks in a unit, relative to one block per unit, and the peak of
    gathered weights."""
    counts, times, peaks = cases
    left, right = panels(2, width=11, height=4.4)
    one = counts.index(1)
    for (name, values), style in zip(times.items(), METHODS):
        relative = [value / values[one] for value in values]
        left.plot(counts, relative, **style.line(marked=True), label=f"{name}: {values[one]:.3g} ms")
    left.legend(title="with one block per unit", title_fontsize=SMALL, alignment="left")
    right.plot(counts, peaks, "o-", color=MUTED)
    ylabel = "forward pass, your function\n(1: one block per unit)"
    for axes, label in ((left, ylabel), (right, "GiB of gathered weights, peak")):
        log_ticks(axes, "x", counts, lambda count: "1/7" if count < 1 else f"{count:g}")
        figure = finish(axes, xlabel="blocks in a unit", ylabel=label)
    return figure


@styled
def checkpointing(reports: Mapping[str, MemoryReport], model: str, predicted: Predicted) -> Figure:
    """Draw what a rank holds at the peak, without and with checkpointing, and predictions in GiB."""
    (axes,) = panels(width=10, height=3)
    seen: set[Part] = set()
    for row, report in enumerate(reports.values()):
        left = 0.0
        for part, colour in COLOURS.items():
            width = report.at_peak[part] / GIB
            if width > 0.05:
                label = part.value if part not in seen else None
                axes.barh(row, width, 0.6, left=left, color=colour, edgecolor=BACKGROUND, label=label)
                seen.add(part)
            left += width
        axes.annotate(gib(left * GIB), (left, row), va="center", xytext=(6, 0), textcoords="offset points")
    mark_predicted(axes, {name: row + 0.2 for row, name in enumerate(reports)}, predicted, horizontal=True)
    axes.set_yticks(range(len(reports)), list(reports))
    axes.invert_yaxis()
    totals = [sum(report.at_peak.values()) / GIB for report in reports.values()]
    axes.set_xlim(0, 1.2 * max([*totals, *numbers(predicted, reports).values()]))
    legend(axes, "right")
    xlabel = f"GiB on one of 8 ranks at the peak, {model} with FSDP, 16 sequences of 512"
    return finish(axes, None, xlabel=xlabel)


@styled
def rounding(curves: Mapping[str, Sequence[float]], predicted: Predicted) -> Figure:
    """Draw a weight over steps that are too small for bf16, and predictions of its last value."""
    (axes,) = panels(width=8, height=3.2)
    for (name, values), colour, dashes in zip(curves.items(), (LIMIT, MUTED, BLUE), ("-", "--", "-.")):
        drawn = "steps-post" if "bf16" in name else "default"
        axes.plot(values, dashes, color=colour, label=name, drawstyle=drawn)
    mark_predicted(axes, {name: len(values) - 1 for name, values in curves.items()}, predicted)
    axes.legend()
    return finish(axes, xlabel="steps of 0.001", ylabel="the weight")


@styled
def links(sent: Mapping[str, Mapping[str, float]], predicted: Predicted) -> Figure:
    """Draw bytes inside and between nodes, by form. A prediction, in percent, is the border."""
    (axes,) = panels(width=9, height=2.6)
    for row, parts in enumerate(sent.values()):
        left = 0.0
        for (where, count), colour in zip(parts.items(), (GREEN, LIMIT)):
            kib, label = count / KIB, where if row == 0 else None
            axes.barh(row, kib, 0.55, left=left, color=colour, edgecolor=BACKGROUND, label=label)
            axes.text(left + kib / 2, row, f"{kib:.0f}", ha="center", va="center", color=text_on(colour))
            left += kib
    inside = {
        name: (1 - guess / 100) * sum(sent[name].values()) / KIB
        for name, guess in numbers(predicted, sent).items()
    }
    mark_predicted(axes, {name: row for row, name in enumerate(sent)}, inside, horizontal=True)
    axes.set_yticks(range(len(sent)), list(sent))
    axes.invert_yaxis()
    legend(axes, "right")
    return finish(axes, None, xlabel="KiB sent by a rank in one step, mean over 4 ranks on 2 nodes")


@styled
def sweep_memory(
    measured: Mapping[str, Sequence[tuple[int, float]]], model: str, predicted: Predicted
) -> Figure:
    """Draw the peak memory over the batch, with the usable memory of cards, and predictions in GiB at the
    largest batches."""
    (axes,) = panels(width=9.5, height=4.4)
    for (form, points), style in zip(measured.items(), METHODS):
        batches, peaks = zip(*points)
        axes.plot(batches, [peak / GIB for peak in peaks], **style.line(marked=True), label=FORMS[form])
    for card in CARDS:
        usable = gpu(card).usable_bytes / GIB
        axes.axhline(usable, color=LIMIT, linestyle=":", linewidth=1.5)
        place = {"xycoords": ("axes fraction", "data"), "xytext": (3, 0), "textcoords": "offset points"}
        axes.annotate(card, (1, usable), va="center", fontsize=SMALL, color=LIMIT, **place)
    mark_predicted(axes, {form: points[-1][0] for form, points in measured.items()}, predicted)
    axes.set_ylim(0)
    legend(axes, "above")
    ylabel = f"GiB at the peak, {model},\n1 of 8 ranks"
    return finish(axes, xlabel="sequences of 512 tokens on a rank", ylabel=ylabel)


@styled
def sweep_speed(measured: Mapping[str, Sequence[tuple[int, float]]], predicted: Predicted) -> Figure:
    """Draw sequences per second of the small model by batch, and predictions at the largest ones."""
    (axes,) = panels(width=8, height=3.6)
    for (form, points), style in zip(measured.items(), METHODS):
        axes.plot(*zip(*points), **style.line(marked=True), label=FORMS[form])
    mark_predicted(axes, {form: points[-1][0] for form, points in measured.items()}, predicted)
    axes.set_ylim(0)
    axes.legend()
    return finish(axes, xlabel="sequences of 64 tokens on a rank", ylabel="sequences per second, one rank")


@styled
def break_even(winners: Mapping[int, tuple[str, int] | None], runs: Mapping[str, Sequence[Point]]) -> Figure:
    """Draw the measured sequences per second of the winner over the memory of a rank."""
    (axes,) = panels(width=10, height=4)
    rates = {(form, batch): batch / seconds for form, points in runs.items() for batch, _, seconds in points}
    styles = dict(zip(runs, METHODS))
    spans = [
        (chosen, [limit for limit, _ in group])
        for chosen, group in groupby(winners.items(), lambda item: item[1])
    ]
    ends = [limits[0] for _, limits in spans[1:]] + [max(winners)]
    labelled: set[str] = set()
    for (chosen, limits), end in zip(spans, ends):
        if chosen is None:
            axes.axvspan(limits[0], end, color=MUTED, alpha=0.2, label="no measured point fits")
            continue
        form, batch = chosen
        label = None if form in labelled else f"{FORMS[form]} wins"
        labelled.add(form)
        axes.plot([limits[0], end], [rates[chosen]] * 2, **styles[form].points() | SOLID, label=label)
        axes.annotate(f"{batch}", ((limits[0] + end) / 2, rates[chosen]), ha="center", **ABOVE)
    for form in runs:
        if form not in labelled:
            axes.plot([], [], **styles[form].points() | SOLID, label=f"{FORMS[form]} wins nowhere")
    axes.set_ylim(0, 1.1 * max(rates.values()))
    legend(axes, "right")
    return finish(
        axes,
        xlabel="memory of a rank (MiB)",
        ylabel="sequences per second,\none rank, small model",
        title="numbers: the batch of the winner",
    )
