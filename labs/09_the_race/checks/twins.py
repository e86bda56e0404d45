"""Expected values: FLOPs as PyTorch counts them, and with known mistakes; stripes and their direction; the
baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dlo_lib.base.one_thread import one_torch_thread
from dlo_lib.grading.checks.twins import twin
from dlo_lib.labkit import race

RIGHT = "right"


@twin
def flops_of(layers: Sequence[Sequence], size: int) -> dict[str, dict[str, int]]:
    """Return the counts by PyTorch's counter under RIGHT, and others under the name of a mistake."""
    found = {RIGHT: race.counted(layers, size)}
    for way in ("half", "same size", "colours", "no head", "no pool", "all twice", "once"):
        channels, side, products = 3, size, []
        for kind, *values in layers:
            if kind == "conv":
                out, kernel, stride = values
                side = side if way == "same size" else -(-side // stride)
                products.append(side**2 * kernel**2 * (3 if way == "colours" else channels) * out)
                channels = out
            elif kind == "pool" and way != "no pool":
                side //= 2
        products += [] if way == "no head" else [channels * race.CLASSES]
        forward = sum(products) * (1 if way == "half" else 2)
        backward = {"all twice": 2 * forward, "once": forward}.get(way, 2 * forward - 2 * products[0])
        found[way] = {"forward": forward, "backward": backward}
    return found


def stripes(t, count: int, size: int) -> tuple[Tensor, Tensor]:
    """Return images (count, 3, size, size) of stripes without noise, and their directions in degrees."""
    direction = 18.0 * t.integers(0, 9, count)
    theta, phase = torch.deg2rad(direction), 2 * math.pi * t.normal(count)
    place = torch.arange(size) - (size - 1) / 2
    across = torch.cos(theta)[:, None, None] * place + torch.sin(theta)[:, None, None] * place[:, None]
    wave = torch.sin(across * (2 * math.pi / t.uniform(6.0, 8.0)) + phase[:, None, None])
    contrast, brightness = 0.5 + t.normal(count, 3).abs() / 2, t.normal(count, 3) / 4
    return contrast[..., None, None] * wave[:, None] + brightness[..., None, None], direction


def direction_of(images: Tensor) -> Tensor:
    """Return the direction of the stripes in each image, in degrees, from the mean products of its slopes."""
    right = (images[..., 1:-1, 2:] - images[..., 1:-1, :-2]).double()
    down = (images[..., 2:, 1:-1] - images[..., :-2, 1:-1]).double()
    both, difference = 2 * (right * down).mean((1, 2, 3)), (right**2 - down**2).mean((1, 2, 3))
    return torch.rad2deg(torch.atan2(both, difference)) / 2 % 180


def turned(before: Tensor, after: Tensor) -> Tensor:
    """Return the angle between two directions, 0 to 90 degrees."""
    return ((after - before + 90) % 180 - 90).abs()


@twin
def baseline_scores(seeds: tuple[tuple[int, int], ...]) -> list[float]:
    """Return the accuracies of the baseline, for each seed of the images and of the run."""
    runs = [(race.images_of(images), run) for images, run in seeds]
    steps, rules = race.steps_of(race.BASELINE), race.BASELINE_RULES
    with one_torch_thread():
        models = [race.trained(race.BASELINE, data, steps, run, rules) for data, run in runs]
        return [race.accuracy(model, data) for model, (data, _) in zip(models, runs)]


T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def half_width(scores: Sequence[float]) -> float:
    """Return half the length of the 95 % interval of the mean, by the sums of the values and squares."""
    n, total = len(scores), sum(scores)
    variance = max(sum(value * value for value in scores) - total * total / n, 0.0) / (n - 1)
    return T95[n - 1] * math.sqrt(variance / n)


def is_shown(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    differences = [one - other for one, other in zip(ours, theirs)]
    return sum(differences) / len(differences) > half_width(differences)
