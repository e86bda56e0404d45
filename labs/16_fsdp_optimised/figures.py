"""The figures of this lab: each function draws what it is given and computes nothing but positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dlo_lib.comm.calls import Kind
from dlo_lib.comm.trace import Trace
from dlo_lib.drawing import new_figure
from dlo_lib.hardware import gpu
from dlo_lib.profiling import Part
from dlo_lib.profiling.plot import COLOURS
from dlo_lib.profiling.report import MemoryReport

GIB = 2**30
LINES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
STYLES, MARKS = ("-", "--", "-.", ":"), ("o", "s", "D", "^")
LIMIT, GREY = "#B00020", "#666666"
ACTIONS = {"forward": "#4c78a8", "backward": "#9ecae9", "gather": "#009e73", "reduce": "#cc79a7"}
FORMS = {"ddp": "DDP", "fsdp": "FSDP", "fsdp + compile": "FSDP + torch.compile"}
CARDS = ("v100-16", "v100-32", "a100-40", "a100-80")


def _clean(axes: Axes, **labels: str) -> None:
    axes.set(**labels)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)


def last_step(trace: Trace, title: str) -> Figure:
    """What comes after the last barrier, in milliseconds from there."""
    begin = max(event.waited_until or event.issued for event in trace.select(Kind.BARRIER))
    end = max(event.waited_until or event.issued for event in trace.events)
    figure = trace.plot(f"one step: {title}", start=begin, end=end + 0.03 * (end - begin))
    axes = figure.axes[0]
    low, high = axes.get_xlim()
    ticks = [tick for tick in MaxNLocator(8).tick_values(0, high - low) if 0 <= tick <= high - low]
    axes.set_xticks([low + tick for tick in ticks], [f"{tick:g}" for tick in ticks])
    return figure


def plans(tables: Mapping[str, Sequence[tuple[str, int]]]) -> Figure:
    """Tables as they would run if a message took as long as a forward: the processor, the link, and the units that are whole."""
    figure = new_figure(11, 2.35 * len(tables))
    for axes, (name, table) in zip(figure.subplots(len(tables), 1, squeeze=False)[:, 0], tables.items()):
        _plan(axes, table)
        axes.set_title(f"{name}: {sum(kind == 'gather' for kind, _ in table)} gathers", loc="left", fontsize=10)
    return figure


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
    axes.step(times, [2.9 - 0.2 * count for count in held], where="post", color="black", linewidth=1.2)
    for when, count in zip(times, held):
        if count == max(held):
            axes.annotate(f"{count} units", (when, 2.9 - 0.2 * count), textcoords="offset points", xytext=(3, 3), fontsize=8)
            break
    axes.set_yticks([0, 1, 2.7], ["computes", "travels", "whole or\non the way"])
    axes.set_ylim(3.1, -0.5)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _bar(axes: Axes, row: float, begin: float, end: float, kind: str, k: int) -> None:
    dark = kind in ("forward", "gather", "reduce")
    axes.barh(row, end - begin, 0.72, left=begin, color=ACTIONS[kind], edgecolor="white")
    axes.text((begin + end) / 2, row, f"{kind} {k}", ha="center", va="center", fontsize=7, color="white" if dark else "black")


def policies(sent: Mapping[int, tuple[float, float]], peaks: Mapping[int, float], model: str) -> Figure:
    """Bytes sent by policy, measured and predicted; and the predicted peak of gathered weights of a large model."""
    figure = new_figure(11, 3.2)
    left, right = figure.subplots(1, 2)
    names = ["True", "a number", "False"]
    bars = left.bar(names, [measured / 2**10 for measured, _ in sent.values()], 0.6, color=LINES[0], label="measured by the tracer")
    left.plot(names, [own / 2**10 for _, own in sent.values()], "D", color="black", mfc="white", label="your function")
    left.bar_label(bars, fmt="%.0f", padding=6)
    left.margins(y=0.15)
    left.legend(frameon=False, fontsize=8, loc="upper right")
    _clean(left, ylabel="KiB gathered, sent by a rank", xlabel="reshard_after_forward; 4 ranks, the number is 2")
    bars = right.bar(names, list(peaks.values()), 0.6, color=LINES[1])
    right.bar_label(bars, fmt="%.2f", padding=3)
    right.margins(y=0.15)
    _clean(right, ylabel="GiB of gathered weights, peak", xlabel=f"blocks of {model} in bf16, 64 ranks; the number is 8")
    return figure


def wrapping(cases: tuple[list[float], dict[str, list[float]], list[float]]) -> Figure:
    """Forward time over the blocks in a unit, for links and tokens; and the peak of gathered weights."""
    counts, times, peaks = cases
    figure = new_figure(11, 3.6)
    left, right = figure.subplots(1, 2)
    for (name, values), colour, style, mark in zip(times.items(), LINES, STYLES, MARKS):
        left.plot(counts, values, style, marker=mark, color=colour, label=name)
    left.set_yscale("log")
    left.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 1.22), ncols=2)
    right.plot(counts, peaks, "o-", color=GREY)
    for axes, label in ((left, "forward pass (ms), your function"), (right, "GiB of gathered weights, peak")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, ["1/7" if count < 1 else str(count) for count in counts])
        axes.minorticks_off()
        _clean(axes, xlabel="blocks in a unit", ylabel=label)
    return figure


def checkpointing(reports: Mapping[bool, MemoryReport], model: str) -> Figure:
    """What a rank holds at the peak, without and with checkpointing."""
    figure = new_figure(9, 2.6)
    axes = figure.subplots()
    seen: set[Part] = set()
    for row, report in enumerate(reports.values()):
        left = 0.0
        for part, colour in COLOURS.items():
            width = report.at_peak[part] / GIB
            if width > 0.05:
                axes.barh(row, width, 0.6, left=left, color=colour, edgecolor="white", label=part.value if part not in seen else None)
                seen.add(part)
            left += width
        axes.text(left + 0.3, row, f"{left:.1f} GiB", va="center")
    axes.set_yticks(range(len(reports)), ["with checkpoints" if again else "without" for again in reports])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(f"GiB on one of 8 ranks at the peak, {model} with FSDP, 16 sequences of 512")
    return figure


def rounding(curves: Mapping[str, Sequence[float]]) -> Figure:
    """A weight over steps that are smaller than bf16 can see."""
    figure = new_figure(8, 3)
    axes = figure.subplots()
    for (name, values), colour, style in zip(curves.items(), (LIMIT, GREY, LINES[0]), ("-", "--", "-")):
        axes.plot(values, style, color=colour, label=name, drawstyle="steps-post" if "bf16" in name else "default")
    axes.legend(frameon=False, fontsize=8)
    _clean(axes, xlabel="steps of 0.001", ylabel="the weight")
    return figure


def links(sent: Mapping[str, Mapping[str, float]]) -> Figure:
    """Bytes inside and between nodes, by form."""
    figure = new_figure(8, 2.6)
    axes = figure.subplots()
    for row, parts in enumerate(sent.values()):
        left = 0.0
        for (where, count), colour in zip(parts.items(), (LINES[2], LIMIT)):
            axes.barh(row, count / 2**10, 0.55, left=left, color=colour, edgecolor="white", label=where if row == 0 else None)
            axes.text(left + count / 2**11, row, f"{count / 2**10:.0f}", ha="center", va="center", color="white")
            left += count / 2**10
    axes.set_yticks(range(len(sent)), list(sent))
    axes.invert_yaxis()
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("KiB sent by a rank in one step, mean over 4 ranks on 2 nodes")
    return figure


def sweep_memory(measured: Mapping[str, Sequence[tuple[int, float]]], model: str) -> Figure:
    """Peak memory over the batch, with the usable memory of cards."""
    figure = new_figure(9, 4.4)
    axes = figure.subplots()
    for (form, points), colour, style, mark in zip(measured.items(), LINES, STYLES, MARKS):
        axes.plot([b for b, _ in points], [m / GIB for _, m in points], style, marker=mark, color=colour, label=FORMS[form])
    for card in CARDS:
        usable = gpu(card).usable_bytes / GIB
        axes.axhline(usable, color=LIMIT, linestyle=":", linewidth=1)
        axes.annotate(
            card,
            (1, usable),
            xycoords=("axes fraction", "data"),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=LIMIT,
        )
    axes.set_ylim(0)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, 1.14), ncols=3)
    _clean(axes, xlabel="sequences of 512 tokens on a rank", ylabel=f"GiB at the peak, {model}, 1 of 8 ranks")
    return figure


def sweep_speed(measured: Mapping[str, Sequence[tuple[int, float]]]) -> Figure:
    """Sequences a second over the batch, of the small model."""
    figure = new_figure(8, 3.4)
    axes = figure.subplots()
    for (form, points), colour, style, mark in zip(measured.items(), LINES, STYLES, MARKS):
        axes.plot([b for b, _ in points], [rate for _, rate in points], style, marker=mark, color=colour, label=FORMS[form])
    axes.set_ylim(0)
    axes.legend(frameon=False, fontsize=8)
    _clean(axes, xlabel="sequences of 64 tokens on a rank", ylabel="sequences a second, 2 ranks")
    return figure


def break_even(winners: Mapping[int, tuple[str, int, float] | None], forms: Sequence[str], model: str) -> Figure:
    """The winner's sequences a second over the memory of the card."""
    figure = new_figure(9, 3.8)
    axes = figure.subplots()
    for form, colour, mark in zip(forms, LINES, MARKS):
        won = [(limit, chosen[2]) for limit, chosen in winners.items() if chosen is not None and chosen[0] == form]
        label = f"{FORMS[form]} wins" if won else f"{FORMS[form]} wins nowhere"
        axes.plot([limit for limit, _ in won], [rate for _, rate in won], mark, color=colour, label=label)
    nothing = [limit for limit, chosen in winners.items() if chosen is None]
    if nothing:
        axes.axvspan(min(nothing) - 1, max(nothing) + 1, color=GREY, alpha=0.2, label="nothing that was measured fits")
    for card in CARDS:
        usable = gpu(card).usable_bytes / GIB
        axes.axvline(usable, color=LIMIT, linestyle=":", linewidth=1)
        place = {"xycoords": ("data", "axes fraction"), "xytext": (0, 3), "textcoords": "offset points"}
        axes.annotate(card, (usable, 1), ha="center", fontsize=8, color=LIMIT, **place)
    axes.set_ylim(0, 1.1 * max((chosen[2] for chosen in winners.values() if chosen is not None), default=1.0))
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    _clean(axes, xlabel="usable memory of the card (GiB)", ylabel=f"sequences a second, one rank, {model}")
    return figure
