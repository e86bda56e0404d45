"""The figures of this lab. They compute only means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from dlo_lib.labkit.figures import (
    BLACK,
    BLUE,
    GIB,
    LIMIT,
    METHODS,
    MUTED,
    SKY,
    finish,
    legend,
    log_ticks,
    panels,
    styled,
)
from dlo_lib.labkit.predictions import Predicted, mark_predicted


@styled
def naive_times(seconds: Sequence[float]) -> Figure:
    """Plot the time of each of the first steps as a bar."""
    (axes,) = panels(width=8, height=3.2)
    axes.bar(range(1, len(seconds) + 1), [1e3 * value for value in seconds], color=BLUE)
    return finish(
        axes, xlabel="step", ylabel="time (ms)", title="the first steps of a run, as a clock shows them"
    )


@styled
def ratio_bars(
    ratios: Mapping[str, float], predicted: Predicted, xlabel: str = "", ylabel: str = "time / median step"
) -> Figure:
    """Plot ratios as bars with the predictions; a line marks the ratio 1."""
    (axes,) = panels(width=7, height=3.4)
    axes.bar(list(ratios), list(ratios.values()), width=0.5, color=SKY)
    axes.axhline(1, color=MUTED, linestyle="--", linewidth=1)
    mark_predicted(axes, {name: place for place, name in enumerate(ratios)}, predicted)
    if axes.get_legend_handles_labels()[0]:
        legend(axes, "above")
    return finish(axes, xlabel=xlabel, ylabel=ylabel)


@styled
def scaled_runs(
    losses: Mapping[str, Sequence[float]], scales: Sequence[float], predicted: float | None
) -> Figure:
    """Plot the losses of the runs, and the scale of the dynamic scaler over the steps."""
    left, right = panels(2, width=11, height=4)
    for (name, curve), style in zip(losses.items(), METHODS):
        left.plot(_smooth(curve), **style.line(), label=name)
    legend(left, "below", ncols=2)
    right.step(range(len(scales)), scales, where="mid", color=BLACK)
    right.set_yscale("log", base=2)
    if isinstance(predicted, int | float):
        right.axvline(predicted, color=MUTED, linestyle="--", label=f"predicted: {predicted:g} skipped steps")
        legend(right, "below")
    finish(
        left, "both", xlabel="step", ylabel="loss, mean of 5 steps", title="gradients of activations in fp16"
    )
    return finish(right, "both", xlabel="step", ylabel="scale", title="your scaler")


def _smooth(curve: Sequence[float], width: int = 5) -> list[float]:
    return [
        sum(curve[max(0, end - width) : end]) / len(curve[max(0, end - width) : end])
        for end in range(1, len(curve) + 1)
    ]


@styled
def weight_paths(paths: Mapping[str, Sequence[float]], predicted: Predicted) -> Figure:
    """Plot a bf16 weight over many small updates, with and without a master weight."""
    (axes,) = panels(width=8, height=3.6)
    for (name, path), style in zip(paths.items(), METHODS):
        axes.plot(path, **style.line(), label=name)
    last = len(next(iter(paths.values()))) - 1
    mark_predicted(axes, dict.fromkeys(paths, last), predicted)
    legend(axes, "right")
    return finish(axes, "both", xlabel="step", ylabel="weight", title="200 updates of 0.001")


@styled
def layouts(seconds: Mapping[str, Mapping[str, float]], predicted: Predicted) -> Figure:
    """Plot the time of a step in both memory layouts, in fp32 and with bf16; diamonds are the times that the
    predictions imply."""
    (axes,) = panels(width=7, height=3.6)
    names = list(next(iter(seconds.values())))
    for number, (name, colour) in enumerate(zip(names, (BLUE, SKY))):
        places = [place + (number - 0.5) * 0.36 for place in range(len(seconds))]
        axes.bar(
            places, [1e3 * found[name] for found in seconds.values()], width=0.34, color=colour, label=name
        )
    implied = {
        dtype: 1e3 * found["contiguous"] / guess
        for dtype, found in seconds.items()
        if isinstance(guess := predicted.get(dtype), int | float) and guess > 0
    }
    mark_predicted(axes, {dtype: place + 0.18 for place, dtype in enumerate(seconds)}, implied)
    axes.set_xticks(range(len(seconds)), list(seconds))
    legend(axes, "right")
    return finish(axes, ylabel="time of a step (ms)")


@styled
def memory_of_batches(tries: Mapping[str, Mapping[int, float]], card: float, predicted: Predicted) -> Figure:
    """Plot the measured peak against the batch size for each precision, with the memory of the card as a
    limit."""
    (axes,) = panels(width=8, height=4)
    for (dtype, found), style in zip(tries.items(), METHODS):
        shown = {size: nbytes for size, nbytes in sorted(found.items()) if nbytes < 2.2 * card}
        axes.plot(
            list(shown), [nbytes / GIB for nbytes in shown.values()], **style.line(marked=True), label=dtype
        )
    axes.axhline(card / GIB, color=LIMIT, linestyle="--", label=f"card of {card / GIB:g} GiB")
    guesses = {dtype: card / GIB for dtype, guess in predicted.items() if isinstance(guess, int | float)}
    mark_predicted(axes, {dtype: float(predicted[dtype] or 0) for dtype in guesses}, guesses)
    legend(axes, "right")
    return finish(
        axes, "both", xlabel="batch", ylabel="peak memory (GiB)", title="a training step at 224 × 224 pixels"
    )


@styled
def throughput(images: Mapping[int, float], best: int, predicted: float | None) -> Figure:
    """Plot images per second against the batch size, with the smallest batch that reaches 90 % of the highest
    throughput."""
    (axes,) = panels(width=8, height=3.8)
    axes.plot(list(images), list(images.values()), **METHODS[0].line(marked=True))
    axes.axhline(0.9 * max(images.values()), color=MUTED, linestyle=":", label="90 % of the highest")
    axes.axvline(best, color=BLACK, linestyle="--", linewidth=1.2, label=f"best batch: {best}")
    mark_predicted(
        axes,
        {"best": float(predicted or 1)},
        {"best": images[best]} if isinstance(predicted, int | float) else {},
    )
    log_ticks(axes, "x", list(images))
    legend(axes, "right")
    return finish(axes, "both", xlabel="batch", ylabel="images per second", ylim=(0, None))
