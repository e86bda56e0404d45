"""The figures of this lab. They compute only means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from dlo_lib.data.images import ImageData
from dlo_lib.labkit.figures import LIMIT, METHODS, MUTED, finish, legend, panels, styled
from dlo_lib.labkit.race import LEVEL


def _shown(axes: Axes, image: Tensor, title: str = "") -> None:
    low, high = image.min(), image.max()
    axes.imshow(((image - low) / (high - low)).permute(1, 2, 0).numpy())
    axes.set_axis_off()
    axes.set_title(title)


@styled
def examples(data: ImageData, clean: ImageData) -> Figure:
    """Training images of five classes, above without the noise, and below with it, as the models get them."""
    all_axes = panels(5, 2, width=8, height=3.6)
    for above, below, label in zip(all_axes[:5], all_axes[5:], (0, 2, 4, 6, 8)):
        row = int((data.train.labels == label).nonzero()[0])
        _shown(above, clean.train.images[row], data.classes[label])
        _shown(below, data.train.images[row])
    return all_axes[0].get_figure()


@styled
def mirrored(clean: ImageData) -> Figure:
    """A training image without its noise, its horizontal mirror, and its half turn: only the half turn has
    stripes of the same direction."""
    all_axes = panels(3, width=8, height=2.8)
    image = clean.train.images[int((clean.train.labels == 2).nonzero()[0])]
    forms = {"36 degrees": image, "mirror: 144": image.flip(2), "half turn: 36": image.flip(1, 2)}
    for axes, (name, form) in zip(all_axes, forms.items()):
        _shown(axes, form, name)
    return all_axes[0].get_figure()


@styled
def board(
    scores: Mapping[str, Sequence[float]],
    intervals: Mapping[str, tuple[float, float]],
    places: Mapping[str, int],
) -> Figure:
    """The leaderboard: the accuracy of each run as a point, the mean with its 95 % interval, and the place of
    each entry."""
    (axes,) = panels(width=9, height=1.4 + 0.42 * len(scores))
    names = sorted(scores, key=lambda name: -sum(scores[name]) / len(scores[name]))
    style = METHODS[0]
    for row, name in enumerate(names):
        percent = [100 * score for score in scores[name]]
        low, high = (100 * end for end in intervals[name])
        axes.plot([max(low, 0), min(high, 100)], [row, row], color=MUTED, linewidth=3, zorder=1)
        label = {"label": "a run"} if row == 0 else {}
        axes.plot(percent, [row] * len(percent), **style.points(), alpha=0.6, **label)
        mean = sum(percent) / len(percent)
        axes.plot([mean] * 2, [row - 0.3, row + 0.3], color=style.colour, linewidth=3)
    best = 100 * LEVEL.best_accuracy
    axes.axvline(best, color=LIMIT, linestyle="--", label=f"the best possible model: {best:.1f} %")
    axes.set_yticks(range(len(names)), [f"{places[name]} · {name}" for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    legend(axes, "below", ncols=2)
    return finish(axes, "x", xlabel="test accuracy (%)", xlim=(0, 101))
