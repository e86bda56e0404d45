"""The expected values: mixtures image by image with slices, statistics of all rows at once, losses read one
by one."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dlo_lib.grading.checks.twins import twin

RIGHT, SHARED, EXCHANGED, NO_ROOT, INCLUSIVE = "right", "one box", "axes exchanged", "no root", "last pixel"
DOWN, NO_HALF, OF_LAM, SHORT, OUTSIDE = (
    "rounded down",
    "whole side",
    "share lam",
    "clamped",
    "outside of the box",
)
FIRST_DOWN, APART = "first edge rounded down", "centre and half rounded apart"


@twin
def targets_of(labels: Tensor, partner: Tensor, share: Tensor, classes: int) -> Tensor:
    """The labels as probabilities, image by image."""
    rows = torch.zeros(len(labels), classes, dtype=share.dtype)
    for row, own, other, part in zip(rows, labels.tolist(), labels[partner].tolist(), share):
        row[own] += part
        row[other] += 1 - part
    return rows


@twin
def averaged(images: Tensor, partner: Tensor, lam: Tensor) -> Tensor:
    """mixup, image by image."""
    pairs = zip(images, images[partner], lam)
    return torch.stack([part * own + (1 - part) * other for own, other, part in pairs])


def edges(images: Tensor, lam: Tensor, centres: Tensor, kind: str) -> list[list[tuple[float, float]]]:
    """The unrounded edges (first, last) of the box of each image, along y and x."""
    found = []
    for part, centre in zip(lam.double().tolist(), centres.double().tolist()):
        share = part if kind == OF_LAM else 1 - part
        side = (share if kind == NO_ROOT else math.sqrt(share)) * (2 if kind == NO_HALF else 1)
        places = centre[::-1] if kind == EXCHANGED else centre
        box = [(place * size, side * size / 2) for place, size in zip(places, images.shape[-2:])]
        if kind == APART:
            box = [(round(middle), round(half)) for middle, half in box]
        found.append([(middle - half, middle + half) for middle, half in box])
    return [found[0]] * len(found) if kind == SHARED else found


def clear(images: Tensor, lam: Tensor, centres: Tensor) -> bool:
    """Whether no edge is so near to the middle of a pixel that rounding depends on the precision."""
    values = [edge for box in edges(images, lam, centres, RIGHT) for pair in box for edge in pair]
    return all(abs(value % 1 - 0.5) > 1e-3 for value in values)


@twin
def boxed(images: Tensor, partner: Tensor, lam: Tensor, centres: Tensor, kind: str = RIGHT) -> Tensor:
    """CutMix, image by image with slices; ``kind`` is a mistake."""
    outer, inner = (images[partner], images) if kind == OUTSIDE else (images, images[partner])
    mixed = outer.clone()
    more, whole = int(kind == INCLUSIVE), math.floor if kind == DOWN else round
    for number, box in enumerate(edges(images, lam, centres, kind)):
        begin = math.floor if kind == FIRST_DOWN else whole
        (top, bottom), (left, right) = ((max(0, begin(low)), max(0, whole(high) + more)) for low, high in box)
        if kind == SHORT:
            bottom, right = min(bottom, images.shape[-2] - 1), min(right, images.shape[-1] - 1)
        mixed[number, :, top:bottom, left:right] = inner[number, :, top:bottom, left:right]
    return mixed


@twin
def kept(images: Tensor, lam: Tensor, centres: Tensor, kind: str = RIGHT) -> Tensor:
    """The share of its pixels that each image keeps; ``kind`` is a mistake."""
    own = torch.ones_like(images)
    none = torch.cat([own, torch.zeros_like(images)])  # the partner of an image of ones is one of zeros
    partner = torch.arange(len(images), 2 * len(images)).repeat(2)
    mixed = boxed(none, partner, lam.repeat(2), centres.repeat(2, 1), kind)
    return mixed[: len(images)].mean(dim=(1, 2, 3)).to(lam.dtype)


@twin
def kept_beyond_the_border(images: Tensor, lam: Tensor, centres: Tensor) -> Tensor:
    """The share that each image would keep if the border cut nothing off its box."""
    height, width = images.shape[-2:]
    areas = [
        math.prod(round(high) - round(low) for low, high in box) for box in edges(images, lam, centres, RIGHT)
    ]
    return 1 - torch.tensor(areas, dtype=lam.dtype) / (height * width)


@twin
def overwritten(labels: Tensor, partner: Tensor, share: Tensor, classes: int, own_last: bool) -> Tensor:
    """The labels, if the second assignment overwrites the first where both labels are equal."""
    rows = torch.zeros(len(labels), classes, dtype=share.dtype)
    for row, own, other, part in zip(rows, labels.tolist(), labels[partner].tolist(), share):
        for label, value in (
            ((other, 1 - part), (own, part)) if own_last else ((own, part), (other, 1 - part))
        ):
            row[label] = value
    return rows


@twin
def in_rounds(images: Tensor, factors: list[float], drawn: Tensor, magnitude: float) -> Tensor:
    """RandAugment with the operations x * factor + magnitude * number, image by image."""
    out = []
    for image, choices in zip(images, drawn.T.tolist()):
        for number in choices:
            image = image * factors[number] + magnitude * number
        out.append(image)
    return torch.stack(out)


@twin
def stopped(losses: list[float | None], patience: int, min_delta: float) -> tuple[list[bool], int]:
    """The answers of early stopping, and the call whose weights are kept."""
    best, kept, answers = math.inf, -1, []
    for number, loss in enumerate(losses):
        if loss is not None and loss < best - min_delta:
            best, kept = loss, number
        answers.append(number - kept >= patience)
    return answers, kept


@twin
def stopped_by_share(
    losses: list[float | None], patience: int, min_delta: float, absolute: bool
) -> list[bool]:
    """The answers if a loss has to be better by the share ``min_delta`` of the best one, or of its absolute
    value."""
    best, kept, answers = math.inf, -1, []
    for number, loss in enumerate(losses):
        least = min_delta * (abs(best) if absolute else best) if kept >= 0 else 0.0
        if loss is not None and loss < best - least:
            best, kept = loss, number
        answers.append(number - kept >= patience)
    return answers


@twin
def lined_up(
    counts: list[int], rank: int, world: int, worker: int, workers: int
) -> list[tuple[int, int, int]]:
    """The parts of shards of a worker, from the line of all samples."""
    line = [(shard, place) for shard, count in enumerate(counts) for place in range(count)]
    own = len(line) // world
    mine = line[rank * own : (rank + 1) * own][own * worker // workers : own * (worker + 1) // workers]
    places: dict[int, list[int]] = {}
    for shard, place in mine:
        places.setdefault(shard, []).append(place)
    return [(shard, min(each), max(each) + 1) for shard, each in places.items()]
