"""The figures of this lab: each draws its arguments and computes only positions. A colour is a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from dlo_lib.labkit.figures import (
    BACKGROUND,
    BLACK,
    BLUE,
    METHODS,
    MIB,
    MUTED,
    PALE,
    RANKS,
    SMALL,
    VERMILLION,
    finish,
    legend,
    log_ticks,
    panels,
    stacked_gib,
    styled,
    text_on,
)
from dlo_lib.labkit.predictions import Predicted, mark_predicted
from dlo_lib.profiling import Part

COMMUNICATION = VERMILLION
STORED = (Part.WEIGHTS, Part.OPTIMIZER_STATE)


@styled
def not_divided(peaks: Mapping[str, Mapping[Part, int]], world: int) -> Figure:
    """What one of many ranks holds at the peak of a step with FSDP, by part: a bar for each loss."""
    (axes,) = panels(width=10, height=0.7 * len(peaks) + 1.6)
    parts = [part for part in Part if part not in STORED]
    shown = [
        part
        for part in parts
        if any(peak.get(part, 0) > 0.01 * sum(peak.values()) for peak in peaks.values())
    ]
    bars = {
        form: {f"weights and optimiser, 1/{world}": sum(peak.get(part, 0) for part in STORED)}
        | {part.value: peak.get(part, 0) for part in shown}
        for form, peak in peaks.items()
    }
    stacked_gib(axes, bars, [sum(peak.values()) for peak in peaks.values()])
    return finish(axes, "x", xlabel=f"GiB on one of {world} ranks, at the peak of a step with FSDP")


def _matrix(
    axes: Axes, x: float, y: float, size: tuple[float, float], colours: Sequence[str], by: str, label: str
) -> None:
    """A matrix cut into parts ``by`` "columns" or "rows", with the label above; several colours are ranks."""
    width, height = size
    for part, colour in enumerate(colours):
        share = width / len(colours) if by == "columns" else height / len(colours)
        place = (x + part * share, y) if by == "columns" else (x, y + height - (part + 1) * share)
        extent = (share, height) if by == "columns" else (width, share)
        axes.add_patch(Rectangle(place, *extent, facecolor=colour, edgecolor=BACKGROUND, linewidth=1.5))
        text = {"ha": "center", "va": "center", "fontsize": SMALL, "color": text_on(colour)}
        if len(colours) > 1:
            axes.text(place[0] + extent[0] / 2, place[1] + extent[1] / 2, str(part), **text)
    axes.text(x + width / 2, y + height + 0.12, label, ha="center", va="bottom")


def _sign(axes: Axes, x: float, text: str, **options: object) -> None:
    axes.text(x, 1.0, text, ha="center", va="center", **{"fontsize": 13} | options)


@styled
def column_then_row(world: int) -> Figure:
    """Y = GELU(X A) B: A is cut by columns, so H has columns; B by rows, and partial sums are added."""
    ranks = [RANKS[rank].colour for rank in range(world)]
    (axes,) = panels(width=11, height=3)
    _matrix(axes, 0, 0.4, (1.0, 1.2), [PALE], "columns", "X, on all ranks")
    _sign(axes, 1.3, "·")
    _matrix(axes, 1.6, 0.5, (1.6, 1.0), ranks, "columns", "A, by columns")
    _sign(axes, 3.55, "→")
    _matrix(axes, 3.9, 0.4, (1.6, 1.2), ranks, "columns", "H = GELU(X A)")
    _sign(axes, 5.8, "·")
    _matrix(axes, 6.1, 0.2, (1.0, 1.6), ranks, "rows", "B, by rows")
    _sign(axes, 7.45, "→")
    for rank, colour in enumerate(ranks):
        left = 7.8 + 1.35 * rank
        _matrix(axes, left, 0.4, (1.0, 1.2), [colour], "columns", "partial sums" if rank == 0 else "")
        text = {"ha": "center", "va": "center", "color": text_on(colour), "fontsize": SMALL}
        axes.text(left + 0.5, 1.0, f"rank {rank}", **text)
        if rank:
            _sign(axes, left - 0.18, "+")
    left = 7.8 + 1.35 * world + 0.35
    _sign(axes, left - 0.45, "→")
    _matrix(axes, left, 0.4, (1.0, 1.2), [PALE], "columns", "Y, on all ranks")
    axes.text(left - 0.45, 0.25, "all-reduce", ha="center", va="top", color=COMMUNICATION, fontweight="bold")
    axes.set(xlim=(-0.2, left + 1.3), ylim=(-0.1, 2.2))
    axes.set_axis_off()
    return axes.get_figure()


@styled
def conjugate() -> Figure:
    """Forward and backward of a parallel region: where x and its gradient are copied, and where they are
    summed."""
    (axes,) = panels(width=11, height=2.7)
    boxes = ["CopyToRanks", "column\nlinear", "GELU", "row\nlinear", "SumOverRanks"]
    for row, (what, ends) in enumerate(
        {"forward": ("copy", "all-reduce"), "backward": ("all-reduce", "copy")}.items()
    ):
        y = 1.4 - 1.4 * row
        axes.text(-2.4, y, what, va="center", fontweight="bold")
        for column, name in enumerate(boxes):
            x, end = 2.2 * column, column in (0, len(boxes) - 1)
            text = ends[column > 0] if end else name
            summed = text == "all-reduce"
            fill = COMMUNICATION if summed else PALE
            axes.add_patch(
                Rectangle((x - 0.75, y - 0.38), 1.5, 0.76, facecolor=fill, edgecolor=MUTED, linewidth=0.8)
            )
            axes.text(x, y, text, ha="center", va="center", color=text_on(fill))
            if end:
                axes.text(x, y + 0.46, name, ha="center", va="bottom", fontsize=SMALL, color=MUTED)
        begin, end_of = ("x", "y") if row == 0 else ("∂x", "∂y")
        for column in range(len(boxes) - 1):
            left, right = 2.2 * column + 0.78, 2.2 * column + 1.42
            ends_at = (right, left) if row == 0 else (left, right)
            axes.annotate(
                "", (ends_at[0], y), (ends_at[1], y), arrowprops={"arrowstyle": "->", "color": BLACK}
            )
        axes.text(-1.0, y, begin, ha="center", va="center")
        axes.text(9.85, y, end_of, ha="center", va="center")
    axes.set(xlim=(-2.5, 10.2), ylim=(-0.6, 2.2))
    axes.set_axis_off()
    return axes.get_figure()


@styled
def vocabulary(tokens: Sequence[int], size: int, world: int) -> Figure:
    """Which rank finds the row of each token in its part of the table; the others contribute zeros."""
    left, right = panels(
        2, width=10, height=0.38 * world + 1.5, gridspec_kw={"width_ratios": [1, 2.2], "wspace": 0.15}
    )
    each = size // world
    for word in range(size):
        colour = RANKS[word // each].colour
        left.add_patch(Rectangle((0, -word), 3, 0.9, facecolor=colour))
        place = {"va": "center", "fontsize": SMALL}
        left.text(1.5, -word + 0.45, f"row of word {word}", ha="center", color=text_on(colour), **place)
    for rank in range(world):
        left.text(3.2, -each * rank - each / 2 + 0.95, f"rank {rank}", va="center")
    left.set(xlim=(-0.1, 4.6), ylim=(-size + 0.8, 1.1), title="the table")
    for column, token in enumerate(tokens):
        right.text(column + 0.48, 1.1, f"token {token}", ha="center", va="bottom", fontsize=SMALL)
        for rank in range(world):
            found = token // each == rank
            fill = RANKS[rank].colour if found else PALE
            right.add_patch(Rectangle((column, -rank), 0.95, 0.9, facecolor=fill))
            text = "row" if found else "0"
            right.text(
                column + 0.48,
                -rank + 0.45,
                text,
                ha="center",
                va="center",
                fontsize=SMALL,
                color=text_on(fill),
            )
    for rank in range(world):
        right.text(len(tokens) + 0.15, -rank + 0.45, f"rank {rank}", va="center")
    right.set(
        xlim=(-0.1, len(tokens) + 1.2),
        ylim=(-world + 0.8, 1.6),
        title="what a rank adds to the sum of each token",
    )
    for axes in (left, right):
        axes.set_axis_off()
    return left.get_figure()


@styled
def heads(num_heads: int, num_kv_heads: int, world: int) -> Figure:
    """Query heads, the heads of keys and values that they use, and the rank of each."""
    (axes,) = panels(width=9, height=2.2)
    group = num_heads // num_kv_heads
    for head in range(num_heads):
        owner = head * world // num_heads
        colour = RANKS[owner].colour
        axes.add_patch(Rectangle((head, 1.2), 0.9, 0.6, facecolor=colour))
        axes.text(
            head + 0.45, 1.5, f"rank {owner}", ha="center", va="center", fontsize=SMALL, color=text_on(colour)
        )
        kv = (head // group + 0.5) * group - 0.05
        axes.plot([head + 0.45, kv], [1.2, 0.6], color=MUTED, linewidth=1)
    for kv in range(num_kv_heads):
        owners = sorted({head * world // num_heads for head in range(kv * group, (kv + 1) * group)})
        width = (group - 0.1) / len(owners)
        for index, owner in enumerate(owners):
            colour = RANKS[owner].colour
            axes.add_patch(
                Rectangle((kv * group + index * width, 0), width, 0.6, facecolor=colour, edgecolor=BACKGROUND)
            )
            place = {"ha": "center", "va": "center", "fontsize": SMALL, "color": text_on(colour)}
            axes.text(kv * group + (index + 0.5) * width, 0.3, f"rank {owner}", **place)
    for y, text in ((1.5, "query heads"), (0.3, "key and value heads")):
        axes.text(-0.2, y, text, ha="right", va="center")
    shared = world > num_kv_heads
    title = f"{num_kv_heads} heads of keys and values on {world} ranks: "
    title += (
        f"{world // num_kv_heads} ranks need a copy of the same one"
        if shared
        else f"{num_kv_heads // world} on each rank"
    )
    axes.set(xlim=(-2.4, num_heads), ylim=(-0.1, 1.9), title=title)
    axes.set_axis_off()
    return axes.get_figure()


@styled
def sent_by_block(sent: Mapping[int, float], guessed: Predicted) -> Figure:
    """What a rank sends for a block, measured, and the formula, in units of b s h numbers."""
    (axes,) = panels(width=7, height=3.2)
    axes.bar(range(len(sent)), list(sent.values()), 0.5, color=BLUE, label="measured")
    formula = [8 * (world - 1) / world for world in sent]
    look = {"color": BLACK, "markeredgecolor": BACKGROUND, "markersize": 8}
    axes.plot(range(len(sent)), formula, "s", **look, label="8 (t - 1) / t")
    mark_predicted(axes, {f"{world} ranks": index for index, world in enumerate(sent) if world > 1}, guessed)
    axes.set_xticks(range(len(sent)), [f"{world} rank{'s' if world > 1 else ''}" for world in sent])
    axes.legend(loc="upper left")
    return finish(axes, ylabel="sent by a rank, in b s h", ylim=(0, 8))


@styled
def against_fsdp(parameters: int, hidden: int, world: int) -> Figure:
    """What a rank sends for a block in 16 bits, against its tokens: tensor parallelism and FSDP."""
    (axes,) = panels(width=8, height=3.4)
    share = (world - 1) / world
    tokens = [2**power for power in range(9, 18)]
    tensor = [2 * 8 * count * hidden * share / MIB for count in tokens]
    fsdp = 2 * 3 * parameters * share / MIB
    first, second = METHODS[0], METHODS[1]
    axes.plot(tokens, tensor, **first.line(marked=True), label=f"tensor parallelism, t = {world}")
    axes.plot(tokens, [fsdp] * len(tokens), **second.line(marked=True), label=f"FSDP on {world} ranks")
    equal = 3 * parameters / (8 * hidden)
    axes.axvline(equal, color=MUTED, linestyle=":")
    axes.text(equal, max(tensor), f" equal at {equal:,.0f} tokens", color=MUTED, va="top")
    log_ticks(axes, "x", tokens, "{:,.0f}".format)
    axes.set_yscale("log")
    axes.tick_params(axis="x", rotation=30)
    legend(axes, "above")
    return finish(axes, "both", xlabel="tokens of a rank in a step", ylabel="MiB sent by a rank")


@styled
def grid(tp: int, dp: int) -> Figure:
    """Ranks as a grid: tensor-parallel groups are rows, data-parallel groups are columns."""
    (axes,) = panels(width=8, height=0.75 * dp + 1.1)
    for row in range(dp):
        for column in range(tp):
            colour = RANKS[column].colour
            axes.add_patch(Rectangle((2.6 * column, -row), 2.3, 0.7, facecolor=colour))
            text = {"ha": "center", "va": "center", "fontsize": 10, "color": text_on(colour)}
            axes.text(2.6 * column + 1.15, -row + 0.35, f"rank {row * tp + column}", **text)
        axes.text(2.6 * tp, -row + 0.35, f"batch {row}: same tokens, all-reduce of activations", va="center")
    for column in range(tp):
        axes.text(
            2.6 * column + 1.15,
            0.85,
            f"part {column} of the weights",
            ha="center",
            va="bottom",
            fontsize=SMALL,
        )
    axes.text(
        1.3 * tp - 0.15,
        -dp + 0.55,
        "columns: the same part of the weights, mean of the gradients",
        ha="center",
        va="top",
        fontsize=SMALL,
    )
    axes.set(xlim=(-0.6, 2.6 * tp + 5.2), ylim=(-dp + 0.1, 1.3))
    axes.set_axis_off()
    return axes.get_figure()


@styled
def losses(curves: Mapping[str, Sequence[float]]) -> Figure:
    """The loss of each step, by run."""
    (axes,) = panels(width=8, height=3.2)
    for index, ((name, values), style) in enumerate(zip(curves.items(), METHODS)):
        width = max(1.5, 7 - 2.2 * index)  # equal curves lie on each other
        axes.plot(range(1, len(values) + 1), values, **style.line(), lw=width, alpha=0.85, label=name)
    axes.legend()
    return finish(axes, xlabel="step", ylabel="loss, mean over all tokens")


@styled
def sequence_form(sent: Mapping[str, float], kept: Mapping[str, int]) -> Figure:
    """What a rank sends, and what it keeps for backward, with tensor and with sequence parallelism."""
    both = zip(panels(2, width=9, height=3), ((sent, "MiB sent by a rank"), (kept, "MiB kept for backward")))
    for axes, (values, label) in both:
        for index, size in enumerate(values.values()):
            axes.bar(index, size / MIB, 0.5, color=METHODS[index].colour)
            axes.text(index, size / MIB, f"{size / MIB:.1f}", ha="center", va="bottom")
        axes.set_xticks(range(len(values)), [f"{name} parallelism" for name in values])
        axes.margins(y=0.15)
        figure = finish(axes, ylabel=label)
    return figure
