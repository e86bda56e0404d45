"""The visible checks of the augmentation and of the update rule: properties that every right answer has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import check
from dlo_lib.labkit.compare import explaining, near
from dlo_lib.labkit.race import Coordinates

from .scenarios import augmented, augmented_beside, repeated, stepped
from .twins import direction_of, stripes, turned

# -- augment

SAME_CLASS = 9.0  # degrees: half of the distance of two classes
LEAST_CHANGE = 0.02  # of an image's norm
SEEDLESS = {"manual_seed expected a long": "The seed is a number: make a torch.Generator with it"}


def changed(student, t, images: Tensor, seed: int) -> Tensor:
    with explaining(SEEDLESS):
        got = student.augment(images, seed)
    return t.tensor(got, "augment(images, seed)", shape=images.shape, dtype=images.dtype)


def differs(one: Tensor, other: Tensor) -> bool:
    """Whether two images differ by more than can be called the same."""
    return bool((one - other).norm() > LEAST_CHANGE * other.norm())


@check("augment", points=2)
def check_class(student, t):
    "The stripes keep their direction, which is the class"
    for _ in range(2):
        images, before = stripes(t, 24, t.integer(24, 33))
        got = changed(student, t, images, t.integer(0, 10**6))
        moved = sum(map(differs, got, images))
        t.that(moved >= 2, "not tested yet: the images hardly change")
        after = direction_of(got)
        angle = turned(before, after)
        worst = int(angle.argmax())
        text = (
            "an image whose stripes have {before:.0f} degrees has about {after:.0f} degrees afterwards: "
            "that is another class, and the label stays"
        )
        kept = int((angle <= SAME_CLASS).sum())
        t.that(kept >= 18, text, before=float(before[worst]), after=float(after[worst]))


@check("augment", points=1)
def check_own_draws(student, t):
    "Each image of a batch has its own draws"
    image, _ = stripes(t, 1, t.integer(24, 33))
    copies = image.repeat(16, 1, 1, 1)
    after = changed(student, t, copies, t.integer(0, 10**6))
    moved = sum(differs(one, image[0]) for one in after)
    text = "of 16 copies of one image {moved} have changed by 2 % or more: let half of them change, or all"
    t.that(moved >= 2, text, moved=moved)
    text = "16 copies of one image are all changed alike: draw for each image, not once a batch"
    t.that(any(differs(one, after[0]) for one in after), text)


@check("augment", points=1)
def check_seed(student, t):
    "The seed decides, in every process"
    images, _ = stripes(t, 24, t.integer(24, 33))
    seeds = [t.integer(0, 10**6) for _ in range(5)]
    first = [changed(student, t, images, seed) for seed in seeds]
    pairs = [(one, other) for place, one in enumerate(first) for other in first[:place]]
    text = "two of five seeds give the same images: draw with torch.Generator().manual_seed(seed)"
    t.that(not any(near(one, other, 1e-5, 1e-5) for one, other in pairs), text)
    again = t.tensor(
        student.fresh(augmented, images=images, seed=seeds[1]), "augment(...)", shape=images.shape
    )
    text = "the same seed gives other images in another process, so that a run cannot be resumed"
    t.that(near(again, first[1], 1e-5, 1e-5), text)


@check("augment", points=1)
def check_beside(student, t):
    "The images that it gets, and PyTorch's global generator, stay as they are"
    images, _ = stripes(t, 12, t.integer(24, 33))
    seeds = t.integer(0, 10**6), t.integer(0, 10**6)
    seen = student.run(augmented_beside, images=images, seed=seeds[0], globally=seeds[1])
    got, after, draws = t.items(seen, 3, "the result")
    got = t.tensor(got, "augment(...)", shape=images.shape)
    t.that(any(map(differs, got, images)), "not tested yet: the images hardly change")
    text = "augment(...) has changed the images that it got: return a new tensor"
    t.that(near(t.tensor(after, "the images", shape=images.shape), images, 0.0, 0.0), text)
    want = torch.rand(4, generator=torch.Generator().manual_seed(seeds[1]))
    text = "augment(...) has changed PyTorch's global generator: draw from your own torch.Generator"
    t.that(near(t.tensor(draws, "draws", shape=want.shape), want, 0.0, 0.0), text)


# -- update


def gradients_of(t, steps: int) -> list[list[Tensor]]:
    """The gradients of a matrix and a vector, for each step."""
    shapes = [(t.integer(2, 5), t.integer(6, 9)), (t.integer(3, 6),)]
    return [[t.normal(*shape) for shape in shapes] for _ in range(steps)]


def rows_of(t, result: Any, gradients: list[list[Tensor]]) -> tuple[list[list[Tensor]], list[Any]]:
    """The updates of each step, and the states."""
    rows, states = t.items(result, 2, "the result")
    found = []
    for row, step in zip(t.items(rows, len(gradients), "the steps"), gradients):
        values = t.items(row, len(step), "the updates")
        found.append([t.tensor(v, "an update", shape=g.shape, dtype=g.dtype) for v, g in zip(values, step)])
    return found, t.items(states, len(gradients[0]), "the states")


def updates_of(student, t, gradients: list[list[Tensor]], steps: int, rate: float) -> list[list[Tensor]]:
    states = [{} for _ in gradients[0]]
    result = student.run(stepped, gradients=gradients, states=states, first=0, steps=steps, rate=rate)
    return rows_of(t, result, gradients)[0]


def bowl(student, t, rate: float, steps: int, case: tuple[list[Tensor], list[Tensor], list[Tensor]]) -> float:
    """What is left of the loss sum(c (p - m)^2) after some steps; the check makes the gradients."""
    starts, minima, curvatures = case
    values, states = [start.clone() for start in starts], [{} for _ in starts]

    def loss() -> float:
        parts = (c * (v - m) ** 2 for v, m, c in zip(values, minima, curvatures))
        return float(sum(part.sum() for part in parts))

    first = loss()
    for step in range(steps):
        gradients = [2 * c * (v - m) for v, m, c in zip(values, minima, curvatures)]
        found = student.run(stepped, gradients=[gradients], states=states, first=step, steps=steps, rate=rate)
        (updates,), states = rows_of(t, found, [gradients])
        values = [value - update for value, update in zip(values, updates)]
    return loss() / first


@check("update", points=2, seconds=20)
def check_descends(student, t):
    "The steps lead down"
    shapes, steps = [(t.integer(2, 4), t.integer(5, 7)), (t.integer(3, 6),)], t.integer(50, 70)
    starts, minima = ([t.normal(*shape) for shape in shapes] for _ in range(2))
    curvatures = [0.5 + t.normal(*shape).abs().clamp(max=2.0) / 2 for shape in shapes]
    left = min(bowl(student, t, rate, steps, (starts, minima, curvatures)) for rate in (0.2, 0.05, 0.015))
    text = "on a bowl {left:.0%} of the loss are left after {steps} steps, at the best of three rates"
    t.that(left <= 0.1, text + ". The judge subtracts what update returns.", left=left, steps=steps)


@check("update", points=1)
def check_schedule(student, t):
    "The steps become shorter, however many there are, and the last one is short"
    for low, high in ((20, 30), (60, 90)):
        steps = t.integer(low, high)
        (gradients,) = gradients_of(t, 1)
        rows = updates_of(student, t, [gradients] * steps, steps, t.uniform(0.05, 0.2))
        sizes = [float(sum(update.norm() for update in row)) for row in rows]
        t.that(max(sizes) > 0, "not tested yet: the updates are 0, see the first check")
        text = "the last of {steps} steps is {share:.0%} of the longest: let the rate fall to about 0"
        t.that(sizes[-1] <= 0.15 * max(sizes), text, steps=steps, share=sizes[-1] / max(sizes))
    late = sizes[3 * steps // 4] / max(sizes)
    text = (
        "of {steps} steps, the one at three quarters is {share:.0%} of the longest: let the rate fall earlier"
    )
    t.that(late <= 0.7, text, steps=steps, share=late)


@check("update", points=1)
def check_rate(student, t):
    "The updates are proportional to the rate"
    steps, rate, factor = t.integer(8, 12), t.uniform(0.01, 0.1), t.uniform(1.5, 4.0)
    gradients = gradients_of(t, steps - 2)  # the run is stopped earlier
    one = updates_of(student, t, gradients, steps, rate)
    other = updates_of(student, t, gradients, steps, factor * rate)
    length = float(sum(update.norm() for row in one for update in row))
    t.that(length > 0, "not tested yet: the updates are 0, see the first check")
    same = all(near(b, factor * a, 1e-3, 1e-6) for x, y in zip(one, other) for a, b in zip(x, y))
    t.that(
        same,
        "with {factor:.2f} times the rate, the updates are not {factor:.2f} times as long",
        factor=factor,
    )


@check("update", points=1)
def check_coordinates(student, t):
    "Shuffled rows and columns, and changed signs, shuffle the updates alike"
    steps, rate = t.integer(6, 9), t.uniform(0.01, 0.1)
    gradients = gradients_of(t, steps)
    places = [Coordinates.drawn(gradient, lambda: t.integer(0, 10**6)) for gradient in gradients[0]]
    hidden = [[place.hidden(gradient) for place, gradient in zip(places, row)] for row in gradients]
    plain = updates_of(student, t, gradients, steps, rate)
    other = updates_of(student, t, hidden, steps, rate)
    length = float(sum(update.norm() for row in plain for update in row))
    t.that(length > 0, "not tested yet: the updates are 0, see the first check")
    text = (
        "the update depends on where a weight stands, or on its sign: the judge shuffles rows and "
        "columns, so compute it from the gradients alone"
    )
    for row, found in zip(plain, other):
        for place, update, got in zip(places, row, found):
            t.that(near(place.shown(got), update, 1e-2, 1e-5), text)


@check("update", points=1)
def check_kept(student, t):
    "The gradients and the states that it gets stay as they are"
    steps = t.integer(3, 5)
    gradients = gradients_of(t, steps)
    states = [{} for _ in gradients[0]]
    seen = student.run(repeated, gradients=gradients, states=states, steps=steps + 4, rate=0.1)
    first, again = (t.items(row, len(states), "the updates") for row in t.items(seen, 2, "the result"))
    for one, other, gradient in zip(first, again, gradients[0]):
        one, other = (t.tensor(each, "an update", shape=gradient.shape) for each in (one, other))
        t.that(bool(one.norm() > 0), "not tested yet: the updates are 0, see the first check")
        text = (
            "called twice with the same gradients and states, update(...) gives two results: it changes what "
            "it gets, or remembers something elsewhere; return new tensors and new states"
        )
        t.that(near(other, one, 1e-4, 1e-7), text)


@check("update", points=1, seconds=20)
def check_resume(student, t):
    "A run that is stopped continues in another process"
    before, after = t.integer(2, 4), t.integer(2, 4)
    steps, rate = before + after + 2, t.uniform(0.01, 0.1)
    gradients = gradients_of(t, before + after)
    whole = updates_of(student, t, gradients, steps, rate)
    length = float(sum(update.norm() for row in whole for update in row))
    t.that(length > 0, "not tested yet: the updates are 0, see the first check")
    states = [{} for _ in gradients[0]]
    stopped = student.fresh(
        stepped, gradients=gradients[:before], states=states, first=0, steps=steps, rate=rate
    )
    _, kept = rows_of(t, stopped, gradients[:before])
    resumed = student.fresh(
        stepped, gradients=gradients[before:], states=kept, first=before, steps=steps, rate=rate
    )
    rows, _ = rows_of(t, resumed, gradients[before:])
    text = (
        "after a stop in step {before} the updates are others: keep all that a rule remembers in the states"
    )
    same = all(near(b, a, 1e-4, 1e-7) for x, y in zip(whole[before:], rows) for a, b in zip(x, y))
    t.that(same, text, before=before)
