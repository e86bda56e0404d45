"""The figures of this lab: each function draws its arguments and computes only positions. A colour is a rank
or an expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from dlo_lib.labkit.figures import (
    BACKGROUND,
    BLACK,
    BLUE,
    GREEN,
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
    styled,
    text_on,
)
from dlo_lib.labkit.predictions import Predicted, mark_predicted


@styled
def stored_and_used(counted: Mapping[str, tuple[int, int]]) -> Figure:
    """Billions of parameters that models store, and that one token uses."""
    (axes,) = panels(width=9, height=0.75 * len(counted) + 1.4)
    for row, (stored, used) in enumerate(counted.values()):
        for place, (value, colour) in enumerate(((stored, BLUE), (used, VERMILLION))):
            label = ("stored", "used by a token")[place] if row == 0 else None
            axes.barh(row + 0.38 * place, value / 1e9, 0.36, color=colour, label=label)
            axes.text(value / 1e9, row + 0.38 * place, f" {value / 1e9:.1f}", va="center")
    axes.set_yticks([row + 0.19 for row in range(len(counted))], list(counted))
    axes.invert_yaxis()
    axes.margins(x=0.12)
    legend(axes, "above", ncols=2)
    return finish(axes, "x", xlabel="billions of parameters")


@styled
def layer(choices: Sequence[Sequence[int]], num_experts: int) -> Figure:
    """A mixture-of-experts layer: tokens go to the experts that the router has chosen, and their results are
    added."""
    (axes,) = panels(width=10, height=0.62 * len(choices) + 1.1)
    last = len(choices) - 1
    for token, own in enumerate(choices):
        y = last - token
        for x, text in ((0.0, f"token {token}"), (7.4, f"result {token}")):
            axes.add_patch(Rectangle((x, y), 1.3, 0.62, facecolor=PALE))
            axes.text(x + 0.65, y + 0.31, text, ha="center", va="center", fontsize=SMALL)
        for one in own:
            middle = last * (1 - one / max(1, num_experts - 1)) + 0.31
            colour = RANKS[one].colour
            axes.plot([1.35, 3.55], [y + 0.31, middle], color=colour, linewidth=1.6)
            axes.plot([5.15, 7.35], [middle, y + 0.31], color=colour, linewidth=1.6)
    for one in range(num_experts):
        y = last * (1 - one / max(1, num_experts - 1))
        rows = sum(one in own for own in choices)
        axes.add_patch(Rectangle((3.6, y), 1.5, 0.62, facecolor=RANKS[one].colour))
        text = {"ha": "center", "va": "center", "fontsize": SMALL, "color": text_on(RANKS[one].colour)}
        axes.text(4.35, y + 0.31, f"expert {one}: {rows} row{'s' if rows != 1 else ''}", **text)
    for x, text in ((2.45, "dispatch"), (6.25, "combine")):
        axes.text(x, last + 0.95, text, ha="center", va="center", fontweight="bold")
    axes.set(xlim=(-0.1, 8.9), ylim=(-0.15, last + 1.25))
    axes.set_axis_off()
    return axes.get_figure()


@styled
def drops(factors: Sequence[float], shares: Mapping[str, Sequence[float]], guessed: Predicted) -> Figure:
    """The share of the choices that a capacity drops, against the capacity factor."""
    (axes,) = panels(width=8, height=3.4)
    for (name, values), style in zip(shares.items(), METHODS):
        axes.plot(factors, [100 * value for value in values], **style.line(marked=True), label=name)
    percent = {
        name: None if value is None else 100 * value for name, value in guessed.items() if value is not ...
    }
    mark_predicted(axes, dict.fromkeys(shares, 1.25), percent)
    legend(axes, "right")
    return finish(axes, "both", xlabel="capacity factor", ylabel="dropped choices (%)", ylim=(-2, None))


@styled
def collapse(shares: Mapping[str, Tensor]) -> Figure:
    """The share of the choices of each expert in each step of three trainings; a strong colour is a large
    share."""
    all_axes = panels(len(shares), width=11, height=3.1, sharey=True)
    shades = LinearSegmentedColormap.from_list("share", [BACKGROUND, BLUE, BLACK])
    for axes, (name, values) in zip(all_axes, shares.items()):
        image = axes.imshow(
            100 * values.T, aspect="auto", cmap=shades, vmin=0, vmax=50, interpolation="nearest"
        )
        axes.set_yticks(range(values.shape[1]))
        finish(axes, None, xlabel="step", ylabel="expert" if axes is all_axes[0] else "", title=name)
    bar = all_axes[0].get_figure().colorbar(image, ax=list(all_axes), pad=0.02)
    bar.set_label("share of the choices (%)")
    return all_axes[0].get_figure()


@styled
def exchange(counts: Sequence[Sequence[int]]) -> Figure:
    """The rows of each rank before and after the all-to-all. The colour is that of the rank that has the
    expert, the number is the expert."""
    world = len(counts)
    each = len(counts[0]) // world
    before = [
        [(rank, one) for one, count in enumerate(own) for _ in range(count)]
        for rank, own in enumerate(counts)
    ]
    after = [[row for rows in before for row in rows if row[1] // each == rank] for rank in range(world)]
    both = panels(2, width=11, height=0.95 * world + 0.9)
    widest = max(len(rows) for rows in before + after)
    for axes, table, title in zip(
        both, (before, after), ("before: sorted by expert", "after: sorted by source, then by expert")
    ):
        for rank, rows in enumerate(table):
            axes.text(-0.2, -rank + 0.3, f"rank {rank}", ha="right", va="center")
            for column, (source, one) in enumerate(rows):
                colour = RANKS[one // each].colour
                axes.add_patch(Rectangle((column, -rank), 0.92, 0.6, facecolor=colour))
                text = {"ha": "center", "va": "center", "fontsize": SMALL, "color": text_on(colour)}
                axes.text(column + 0.46, -rank + 0.3, f"{one}", **text)
                axes.text(
                    column + 0.46,
                    -rank - 0.05,
                    f"from {source}",
                    ha="center",
                    va="top",
                    fontsize=SMALL,
                    color=MUTED,
                )
        axes.set(xlim=(-1.6, widest + 0.1), ylim=(-world + 0.55, 0.8), title=title)
        axes.set_axis_off()
    return both[0].get_figure()


@styled
def traffic(sent: Mapping[int, float], held: Mapping[int, int], rows: Mapping[str, Sequence[int]]) -> Figure:
    """What a rank sends and stores against the number of ranks, and the rows that each of four ranks
    computes."""
    first, second, third = panels(3, width=11, height=3.1)
    worlds = range(len(sent))
    first.bar(worlds, list(sent.values()), 0.5, color=BLUE, label="measured")
    formula = [8 * (world - 1) / world for world in sent]
    first.plot(
        worlds, formula, "s", color=BLACK, markeredgecolor=BACKGROUND, markersize=8, label="8 (t - 1) / t"
    )
    first.legend(loc="upper left")
    finish(first, ylabel="sent by a rank, in T h", xlabel="ranks t", ylim=(0, 9))
    second.bar(worlds, [size / MIB for size in held.values()], 0.5, color=GREEN)
    finish(second, ylabel="MiB of experts on a rank", xlabel="ranks t")
    for axes in (first, second):
        axes.set_xticks(worlds, [str(world) for world in sent])
    for place, ((name, loads), style) in enumerate(zip(rows.items(), METHODS)):
        xs = [rank + 0.4 * place - 0.2 for rank in range(len(loads))]
        third.bar(xs, loads, 0.36, color=style.colour, label=name)
    third.set_xticks(range(4), [str(rank) for rank in range(4)])
    third.margins(y=0.35)
    third.legend(loc="upper left")
    finish(third, ylabel="rows computed", xlabel="rank of 4")
    return first.get_figure()


@styled
def against_fsdp(hidden: int, intermediate: int, num_experts: int, k: int, world: int) -> Figure:
    """What a rank sends for a layer in 16 bits, against its tokens: expert parallelism and FSDP."""
    (axes,) = panels(width=8, height=3.4)
    share = (world - 1) / world
    tokens = [2**power for power in range(10, 21)]
    weights = 3 * num_experts * hidden * intermediate
    travel = [2 * 4 * k * count * hidden * share / MIB for count in tokens]
    gather = 2 * 3 * weights * share / MIB
    first, second = METHODS[0], METHODS[1]
    axes.plot(tokens, travel, **first.line(marked=True), label=f"expert parallelism, t = {world}")
    axes.plot(tokens, [gather] * len(tokens), **second.line(marked=True), label=f"FSDP on {world} ranks")
    equal = 3 * weights / (4 * k * hidden)
    axes.axvline(equal, color=MUTED, linestyle=":")
    axes.text(equal, min(travel), f"equal at {equal:,.0f} tokens ", color=MUTED, ha="right", va="bottom")
    log_ticks(axes, "x", tokens, "{:,.0f}".format)
    log_ticks(axes, "y", [100, 1000, 10_000], "{:,.0f}".format, base=10)
    axes.tick_params(axis="x", rotation=30)
    legend(axes, "above", ncols=2)
    return finish(axes, "both", xlabel="tokens of a rank in a step", ylabel="MiB sent by a rank")


@styled
def grid(ep: int, replicas: int) -> Figure:
    """Ranks as a grid: expert groups are rows, the ranks with the same experts are columns."""
    (axes,) = panels(width=9, height=0.75 * replicas + 1.1)
    for row in range(replicas):
        for column in range(ep):
            colour = RANKS[column].colour
            axes.add_patch(Rectangle((2.6 * column, -row), 2.3, 0.7, facecolor=colour))
            text = {"ha": "center", "va": "center", "fontsize": 10, "color": text_on(colour)}
            axes.text(2.6 * column + 1.15, -row + 0.35, f"rank {row * ep + column}", **text)
        axes.text(2.6 * ep, -row + 0.35, f"expert group {row}: all-to-all of tokens", va="center")
    for column in range(ep):
        axes.text(
            2.6 * column + 1.15,
            0.85,
            f"part {column} of the experts",
            ha="center",
            va="bottom",
            fontsize=SMALL,
        )
    note = "replicas: the same experts, sum of the gradients"
    axes.text(1.3 * ep - 0.15, -replicas + 0.6, note, ha="center", va="top", fontsize=SMALL)
    axes.set(xlim=(-0.9, 2.6 * ep + 4.8), ylim=(-replicas + 0.15, 1.3))
    axes.set_axis_off()
    return axes.get_figure()
