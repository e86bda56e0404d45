"""The figures of this lab; the cells compute the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from dlo_lib.labkit.figures import (
    BLACK,
    BLUE,
    LIMIT,
    METHODS,
    MUTED,
    SKY,
    VERMILLION,
    finish,
    legend,
    log_ticks,
    panels,
    styled,
)
from dlo_lib.labkit.predictions import mark_predicted


@styled
def waiting(waits: Sequence[float], steps: Sequence[float]) -> Figure:
    """Draw the time line of a training: for each step the wait for its batch and the computation."""
    (axes,) = panels(width=10, height=2.6)
    now = 0.0
    for number, (wait, step) in enumerate(zip(waits, steps)):
        for start, length, colour, name in (
            (now, wait, VERMILLION, "waits for the batch"),
            (now + wait, step, BLUE, "computes"),
        ):
            axes.barh(
                0, length, left=start, color=colour, edgecolor="white", label=name if number == 0 else None
            )
        now += wait + step
    axes.set_yticks([])
    legend(axes, "above", ncols=2)
    return finish(axes, "x", xlabel="time (s)", ylim=(-0.6, 0.6))


@styled
def throughput(
    speeds: Mapping[str, Mapping[int, float]],
    formula: Mapping[str, Mapping[int, float]],
    predicted: Mapping[str, float | None],
    cores: int,
) -> Figure:
    """Plot the images per second of two data sets against the number of workers: measured, by formula."""
    (axes,) = panels(height=4.4)
    for (name, found), style in zip(speeds.items(), METHODS):
        axes.plot(list(found), list(found.values()), **style.line(marked=True), label=f"{name}, measured")
        axes.plot(
            list(formula[name]),
            list(formula[name].values()),
            color=style.colour,
            linestyle=":",
            linewidth=1.3,
            label=f"{name}, formula",
        )
    axes.axvline(cores, color=MUTED, linestyle="--", linewidth=1, label=f"cores: {cores}")
    for name, style in zip(speeds, METHODS):
        own = {name: predicted.get(name)}
        look = {
            "marker": style.marker,
            "markersize": 10,
            "markeredgecolor": style.colour,
            "label": f"{name}, your prediction",
        }
        mark_predicted(axes, {name: 4}, own, **look)
    legend(axes, "right")
    return finish(
        axes,
        "both",
        xlabel="workers",
        ylabel="images per second",
        ylim=(0, None),
        xticks=sorted(next(iter(speeds.values()))),
    )


@styled
def prefetched(waits: Mapping[str, Sequence[float]]) -> Figure:
    """Plot the wait before each step for two lengths of the queue, where every second batch of a worker is
    slow."""
    (axes,) = panels(width=9, height=3.2)
    for (name, values), style in zip(waits.items(), METHODS):
        axes.plot(
            range(1, len(values) + 1),
            [1000 * value for value in values],
            **style.line(marked=True),
            label=name,
        )
    legend(axes, "right")
    return finish(axes, "both", xlabel="step", ylabel="wait (ms)", ylim=(0, None))


def _shown(image: Tensor) -> np.ndarray:
    """Return an image as values in [0, 1], (height, width) or (height, width, 3)."""
    pixels = image.float().permute(1, 2, 0).numpy()
    pixels = (pixels - pixels.min()) / max(1e-6, float(pixels.max() - pixels.min()))
    return pixels[:, :, 0] if pixels.shape[2] == 1 else pixels


def _grid(
    rows: Mapping[str, Sequence[np.ndarray]], below: Mapping[str, Sequence[str]], height: float
) -> Figure:
    count = len(next(iter(rows.values())))
    axes = panels(count, len(rows), width=1.45 * count, height=height * len(rows))
    for place, (name, images) in enumerate(rows.items()):
        for column, image in enumerate(images):
            one = axes[place * count + column]
            one.imshow(image, cmap="gray", interpolation="nearest")
            one.set_xticks([])
            one.set_yticks([])
            if name in below:
                one.set_xlabel(below[name][column], fontsize=9)
            if column == 0:
                one.set_ylabel(name, fontsize=10)
    figure = axes[0].get_figure(root=True)
    assert figure is not None
    return figure


def boxes(lam: Tensor, centres: Tensor, height: int, width: int) -> list[tuple[float, float, float, float]]:
    """Return the box of CutMix of each image, (left, top, width, height) in pixels, as far as it lies in the
    image."""
    found = []
    for half, (y, x) in zip(((1 - lam).sqrt() / 2).tolist(), centres.tolist()):
        top, bottom = (min(height, max(0, round((y + side) * height))) for side in (-half, half))
        left, right = (min(width, max(0, round((x + side) * width))) for side in (-half, half))
        found.append((left, top, right - left, bottom - top))
    return found


def _weights(row: Tensor, own: int) -> str:
    """Return the labels with a weight, the own one first."""
    named = [(label, weight) for label, weight in enumerate(row.tolist()) if weight > 0.005]
    return ", ".join(
        f"{label}: {weight:.2f}" for label, weight in sorted(named, key=lambda pair: pair[0] != own)
    )


@styled
def mixed(
    batches: Mapping[str, tuple[Tensor, Tensor]],
    labels: Tensor,
    frames: Mapping[str, Sequence[tuple[float, float, float, float]]],
) -> Figure:
    """Show an unchanged batch of digits, then the same with mixup and with CutMix; below each image its
    labels and their weights, the own one first. The frames are the boxes of CutMix."""
    rows = {name: [_shown(image) for image in images] for name, (images, _) in batches.items()}
    below = {
        name: [_weights(row, own) for row, own in zip(targets, labels.tolist())]
        for name, (_, targets) in batches.items()
    }
    figure = _grid(rows, below, 1.75)
    for place, name in enumerate(batches):
        for column, (left, top, width, height) in enumerate(frames.get(name, ())):
            frame = Rectangle(
                (left - 0.5, top - 0.5), width, height, fill=False, edgecolor=VERMILLION, linewidth=2
            )
            figure.axes[place * len(labels) + column].add_patch(frame)
    return figure


@styled
def rows_of_images(batches: Mapping[str, Tensor], operations: Sequence[Sequence[str]]) -> Figure:
    """Show several versions of the same images, a row for each version; below each column are the operations
    of its image."""
    below = {list(batches)[-1]: ["\n".join(names) for names in operations]}
    return _grid({name: [_shown(image) for image in images] for name, images in batches.items()}, below, 1.5)


@styled
def loop_or_batch(
    loops: Mapping[str, Mapping[int, float]], batches: Mapping[str, Mapping[int, float]]
) -> Figure:
    """Plot the time of CutMix against the size of the batch, as a loop over the images and on the whole batch
    at once."""
    axes = panels(len(loops), width=10, height=3.8, sharey=True)
    for one, (name, found) in zip(axes, loops.items()):
        for (label, values), style in zip(
            (("loop over images", found), ("whole batch", batches[name])), METHODS
        ):
            one.plot(
                list(values),
                [1000 * value for value in values.values()],
                **style.line(marked=True),
                label=label,
            )
        log_ticks(one, "x", list(found))
        one.set_yscale("log")
        finish(one, "both", xlabel="images in a batch", title=f"images of {name}")
    axes[0].set_ylabel("time (ms)")
    axes[0].legend()
    return axes[0].get_figure(root=True)


@styled
def rare(results: Mapping[str, Sequence[Mapping[str, float]]], label: int) -> Figure:
    """Plot recall and precision of the rare class and the accuracy for both samplers: points are seeds, bars
    their means."""
    (axes,) = panels(width=9, height=3.4)
    quantities, places = ("recall", "precision", "accuracy"), []
    for row, quantity in enumerate(quantities):
        for (name, runs), style, shift in zip(results.items(), METHODS, (-0.15, 0.15)):
            values = [100 * run[quantity] for run in runs if run[quantity] == run[quantity]]
            axes.plot(
                values,
                [row + shift] * len(values),
                **style.points(),
                alpha=0.6,
                label=name if row == 0 else None,
            )
            if values:
                axes.plot(
                    [sum(values) / len(values)] * 2,
                    [row + shift - 0.12, row + shift + 0.12],
                    color=style.colour,
                    linewidth=3,
                )
        places.append(row)
    axes.set_yticks(places, [f"recall of {label}", f"precision of {label}", "accuracy"])
    legend(axes, "above", ncols=2)
    return finish(axes, "both", xlabel="of the test images (%)", xlim=(-3, 103), ylim=(2.5, -0.5))


@styled
def stopping(curves: Mapping[str, Sequence[float]], stopped: int | None) -> Figure:
    """Plot training and validation loss over the epochs, with the best epoch and the one in which early
    stopping ends the training."""
    (axes,) = panels(width=9, height=3.8)
    for (name, values), style in zip(curves.items(), METHODS):
        axes.plot(range(1, len(values) + 1), values, **style.line(), label=name)
    validation = list(curves["validation"])
    end = len(validation) if stopped is None else stopped + 1
    best = min(range(end), key=validation.__getitem__)
    axes.plot(
        [best + 1],
        [validation[best]],
        color=BLACK,
        linestyle="",
        marker="*",
        markersize=13,
        label=f"best: epoch {best + 1}",
    )
    if stopped is not None:
        axes.axvline(end, color=LIMIT, linestyle=":", label=f"stops: epoch {end}")
    legend(axes, "right")
    return finish(axes, "both", xlabel="epoch", ylabel="loss", ylim=(0, None))


@styled
def seen(counts: Mapping[str, Sequence[int]]) -> Figure:
    """Plot how many images the interrupted epoch has shown never, once and twice, for each way to resume."""
    (axes,) = panels(width=9, height=3)
    names, left = list(counts), np.zeros(len(counts))
    for times, colour in enumerate((VERMILLION, SKY, BLUE)):
        share = np.array([100 * float(np.mean(np.asarray(found) == times)) for found in counts.values()])
        axes.barh(
            names, share, left=left, color=colour, edgecolor="white", label=("never", "once", "twice")[times]
        )
        left += share
    axes.invert_yaxis()
    legend(axes, "above", ncols=3, title=None)
    return finish(axes, "x", xlabel="images of the epoch (%)", xlim=(0, 100))
