"""The figures of this lab: each function draws its arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from dlo_lib.labkit.figures import (
    LIMIT,
    METHODS,
    MUTED,
    RANKS,
    finish,
    legend,
    log_ticks,
    panels,
    styled,
    text_on,
)


@styled
def by_position(slow: Sequence[float], fast: Sequence[float]) -> Figure:
    """The time of each token by its position, without and with a cache: medians of 15 neighbours."""
    (ax,) = panels(width=9, height=3.2)
    for (name, seconds), method in zip((("without a cache", slow), ("with a cache", fast)), METHODS):
        window = min(15, len(seconds))
        rows = np.lib.stride_tricks.sliding_window_view(1e3 * np.array(seconds), window)
        ax.plot(np.arange(len(rows)) + window // 2, np.median(rows, 1), label=name, **method.line())
    legend(ax, "above")
    return finish(ax, "both", xlabel="tokens written before", ylabel="ms a token", ylim=(0, None))


@styled
def roofline(
    batches: Sequence[int], lines: Mapping[str, Sequence[float]], prefill: float, ridge: float
) -> Figure:
    """The arithmetic intensity of decoding by batch for two lengths, a prefill, and the ridge."""
    (ax,) = panels(width=9, height=3.6)
    for (name, values), method in zip(lines.items(), METHODS):
        ax.plot(batches, values, label=name, **method.line(marked=True))
    ax.axhline(prefill, color=MUTED, linestyle="-.", label="prefill of one prompt of 2,048 tokens")
    ax.axhline(ridge, color=LIMIT, linestyle=":", label="ridge of an H100, bf16")
    log_ticks(ax, "x", [1, 4, 16, 64, 256, 1024])
    log_ticks(ax, "y", [1, 10, 100, 1000], base=10)
    legend(ax, "above", ncols=2)
    return finish(
        ax, "both", xlabel="sequences in the batch (logarithmic)", ylabel="FLOPs a byte (logarithmic)"
    )


@styled
def iterations(ways: Mapping[str, Sequence[Sequence[int]]]) -> Figure:
    """The requests that each iteration computes, by place in the batch, for each way."""
    axes = panels(1, len(ways), width=10.5, height=3.6, sharex=True)
    for ax, (name, steps) in zip(axes, ways.items()):
        places: list[int | None] = [None] * max(map(len, steps))
        for column, running in enumerate(steps):
            places = [each if each in running else None for each in places]
            for request in running:
                if request not in places:
                    places[places.index(None)] = request
            for row, request in enumerate(places):
                if request is None:
                    continue
                colour = RANKS[request].colour
                ax.barh(row, 1, 0.9, left=column, color=colour, edgecolor="white", linewidth=0.8)
                if column == 0 or request not in steps[column - 1]:
                    ax.text(column + 0.5, row, f"{request}", ha="center", va="center", color=text_on(colour))
        ax.set_yticks(range(len(places)))
        ax.invert_yaxis()
        finish(ax, None, title=f"{name}: {len(steps)} iterations", ylabel="place")
    axes[-1].set_xlabel("iteration")
    return finish(axes[-1], None)


@styled
def load(found: Mapping[tuple[str, float], tuple[float, float, float]]) -> Figure:
    """Time to the first token, time between tokens and goodput by the rate of requests."""
    names = list(dict.fromkeys(name for name, _ in found))
    axes = panels(3, width=12, height=3.4)
    titles = ("TTFT, quantile 95 %: seconds", "ITL, quantile 99 %: ms", "goodput: requests a second")
    for place, (ax, title) in enumerate(zip(axes, titles)):
        for name, method in zip(names, METHODS):
            rates = [rate for each, rate in found if each == name]
            values = [found[name, rate][place] * (1000 if place == 1 else 1) for rate in rates]
            ax.plot(rates, values, label=name, **method.line(marked=True))
        if place < 2:
            ax.axhline((1, 50)[place], color=LIMIT, linestyle=":", label="limit")
            ax.set_yscale("log")
            log_ticks(ax, "y", ([0.1, 1, 10, 100], [5, 10, 20, 50, 100, 200])[place], base=10)
        finish(ax, "both", xlabel="requests a second", ylabel=title)
    figure = finish(axes[2], "both")
    figure.legend(handles=axes[0].get_legend_handles_labels()[0], loc="outside lower center", ncols=4)
    return figure
