"""The figures of this lab: each draws its arguments and computes only positions. A colour is a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from dlo_lib.labkit.figures import (
    BACKGROUND,
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


def _colour(rank: int) -> str:
    return RANKS[rank].colour


def _cell(
    axes: Axes,
    x: float,
    y: float,
    fill: str,
    text: str = "",
    size: tuple[float, float] = (0.94, 0.94),
    **edge: object,
) -> None:
    """A filled rectangle with its lower left corner at (x, y), and a text in it."""
    axes.add_patch(Rectangle((x, y), *size, facecolor=fill, **{"edgecolor": "none"} | edge))
    if text:
        axes.text(
            x + size[0] / 2,
            y + size[1] / 2,
            text,
            ha="center",
            va="center",
            fontsize=SMALL,
            color=text_on(fill),
        )


@styled
def kept(parts_of: Mapping[str, Mapping[str, int]]) -> Figure:
    """What the forward of a sequence keeps for backward on one rank, for a whole sequence and for a part of
    it."""
    (axes,) = panels(width=9, height=0.6 * len(parts_of) + 1.4)
    stacked_gib(axes, parts_of)
    return finish(axes, "x", xlabel="GiB kept for backward on one rank")


@styled
def ring(ranks: int = 4, step: int = 0) -> Figure:
    """Blocks of queries (rows) and keys (columns), with the step in which a ring computes each; and where
    each block of keys is in one step."""
    if step >= ranks:
        raise ValueError(f"a ring of {ranks} ranks has the steps 0 to {ranks - 1}")
    left, right = panels(
        2, width=10, height=0.42 * ranks + 1.6, gridspec_kw={"width_ratios": [1, 1], "wspace": 0.1}
    )
    for query in range(ranks):
        for key in range(ranks):
            when = (query - key) % ranks
            if key > query:
                _cell(left, key, -query, BACKGROUND, "·")
                continue
            fill = _colour(query) if when == step else PALE
            _cell(left, key, -query, fill, f"step {when}")
        left.text(-0.15, -query + 0.47, f"queries {query}", ha="right", va="center", fontsize=SMALL)
        left.text(query + 0.47, 1.1, f"keys {query}", ha="center", va="bottom", fontsize=SMALL)
    left.set(xlim=(-1.4, ranks), ylim=(-ranks + 0.9, 1.7))
    for rank in range(ranks):
        owner = (rank - step) % ranks
        right.text(-0.1, -rank + 0.47, f"rank {rank}", ha="right", va="center")
        _cell(right, 0, -rank, _colour(rank), f"queries {rank}", (1.5, 0.94))
        _cell(right, 1.8, -rank, _colour(owner), f"keys {owner}", (1.5, 0.94))
        what = "computes" if owner <= rank else "sees none of them"
        right.text(
            3.5,
            -rank + 0.47,
            what + (", then sends them on" if step < ranks - 1 else ""),
            va="center",
            fontsize=SMALL,
        )
    right.set(xlim=(-0.9, 6.6), ylim=(-ranks + 0.9, 1.7), title=f"step {step}")
    for axes in (left, right):
        axes.set_axis_off()
    return left.get_figure()


@styled
def triangle(positions: Sequence[Sequence[int]]) -> Figure:
    """The keys that each query of a causal model sees; a row is a query in the colour of its rank."""
    seq = sum(map(len, positions))
    (axes,) = panels(width=6.5, height=4)
    seen = []
    for rank, row in enumerate(positions):
        for query in row:
            _cell(axes, 0, -query, _colour(rank), size=(query + 1, 0.9))
            _cell(axes, query + 1, -query, PALE, size=(seq - query - 1, 0.9))
        seen.append(sum(query + 1 for query in row))
    for rank, count in enumerate(seen):
        y = -3.2 * rank - 2
        _cell(axes, seq + 1, y, _colour(rank), f"rank {rank}", (3, 1.6))
        axes.text(seq + 4.4, y + 0.8, f"{count} scores", va="center")
    axes.text(seq / 2, 1.2, f"{seq} keys", ha="center", va="bottom")
    axes.text(-0.4, -seq / 2 + 1, f"{seq} queries", ha="right", va="center")
    axes.set(xlim=(-4.5, seq + 9), ylim=(-seq + 0.8, 2.4))
    axes.set_axis_off()
    return axes.get_figure()


@styled
def busy(steps_of: Mapping[str, Sequence[Sequence[float]]]) -> Figure:
    """When each rank computes and when it waits, in the steps of a ring; by the order of the tokens."""
    world = len(next(iter(steps_of.values())))
    rows = panels(
        1,
        len(steps_of),
        width=9,
        height=len(steps_of) * (0.3 * world + 0.8),
        sharex=True,
        gridspec_kw={"hspace": 0.3},
    )
    for axes, (name, steps) in zip(rows, steps_of.items()):
        begin = 0.0
        for step, parts in enumerate(steps):
            longest = max(parts)
            for rank, part in enumerate(parts):
                axes.barh(rank, longest, 0.7, left=begin, color=PALE, edgecolor=BACKGROUND)
                axes.barh(rank, part, 0.7, left=begin, color=_colour(rank), edgecolor=BACKGROUND)
            axes.text(begin + longest / 2, -0.55, f"step {step}", ha="center", va="bottom", fontsize=SMALL)
            begin += longest
        share = sum(map(sum, steps)) / (world * begin)
        axes.set_yticks(range(world), [f"rank {rank}" for rank in range(world)])
        axes.set_ylim(world - 0.5, -1.1)
        figure = finish(
            axes,
            "x",
            title=f"{name}: {begin:g} blocks, ranks compute {share:.0%} of the time (grey: a rank waits)",
        )
    rows[-1].set_xlabel("time, in full blocks")
    return figure


@styled
def losses(curves: Mapping[str, Sequence[float]]) -> Figure:
    """The loss of each step, by run."""
    (axes,) = panels(width=8, height=3.2)
    for index, ((name, values), style) in enumerate(zip(curves.items(), METHODS)):
        width = max(1.5, 7 - 2.2 * index)  # equal curves are on top of each other
        axes.plot(range(1, len(values) + 1), values, **style.line(), lw=width, alpha=0.85, label=name)
    axes.legend()
    return finish(axes, xlabel="step", ylabel="loss, mean over all tokens")


@styled
def ulysses(world: int) -> Figure:
    """Which rank has which heads of which part of the sequence, before and after an all-to-all."""
    (axes,) = panels(width=9, height=2.9)
    for side, (title, by_sequence) in enumerate(
        {"before: all heads of a part": True, "after: a part of the heads": False}.items()
    ):
        left = side * (world + 2.6)
        for part in range(world):
            for head in range(world):
                owner = part if by_sequence else head
                _cell(axes, left + part, -head, _colour(owner), f"rank {owner}")
        axes.text(left + world / 2, 1.5, title, ha="center", va="bottom")
        axes.text(left + world / 2, 1.05, "sequence →", ha="center", va="bottom", fontsize=SMALL, color=MUTED)
    for head in range(world):
        axes.text(-0.15, -head + 0.47, f"heads {head}", ha="right", va="center", fontsize=SMALL)
    middle = world + 1.3
    axes.annotate(
        "",
        (middle + 0.9, 0.9 - world / 2),
        (middle - 0.9, 0.9 - world / 2),
        arrowprops={"arrowstyle": "->", "color": VERMILLION, "lw": 2},
    )
    axes.text(middle, 1.05 - world / 2, "all-to-all", ha="center", va="bottom", color=VERMILLION)
    axes.set(xlim=(-1.2, 2 * world + 2.8), ylim=(-world + 0.9, 2.1))
    axes.set_axis_off()
    return axes.get_figure()


@styled
def sent_by_rank(
    worlds: Sequence[int], lines: Mapping[str, Sequence[float]], measured: Mapping[str, float]
) -> Figure:
    """What a rank sends for one layer in 16 bits, forward and backward, against the number of ranks; the
    points are measured."""
    (axes,) = panels(width=8, height=3.4)
    for (form, elements), style in zip(lines.items(), METHODS):
        axes.plot(worlds, [2 * count / MIB for count in elements], **style.line(), label=form)
        if form in measured:
            axes.plot([4], [2 * measured[form] / MIB], **style.points(), label=f"{form}, measured")
    log_ticks(axes, "x", worlds)
    log_ticks(axes, "y", [2**power for power in range(6, 15, 2)])
    legend(axes, "above")
    return finish(axes, "both", xlabel="ranks", ylabel="MiB sent by a rank")
