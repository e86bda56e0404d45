"""The visible checks of what a batch holds: its augmentations, and the weights of its classes.

That there is no loop is proved by the operations of two batches, run again here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dlo_lib.grading.checks.contract import Scenario, check
from dlo_lib.grading.checks.graphs import replay
from dlo_lib.labkit.compare import explaining, near, wrong_if

from .scenarios import augmented, cutmix_in_place, mixup_in_place, recorded_cutmix, recorded_mixup
from .twins import (
    APART,
    DOWN,
    EXCHANGED,
    FIRST_DOWN,
    INCLUSIVE,
    NO_HALF,
    NO_ROOT,
    OF_LAM,
    OUTSIDE,
    SHARED,
    SHORT,
    averaged,
    boxed,
    clear,
    in_rounds,
    kept_beyond_the_border,
    overwritten,
    targets_of,
)

CLASSES = 6
PARTNERS = "`partner` holds the numbers of images, not classes: the label of the partner is labels[partner]"
OVERWRITTEN = "Where an image and its partner are of one class, one assignment overwrites the other, and the row does not add up to 1: add the two shares"
IMAGES_EXCHANGED = "The images are exchanged: the box shows the partner, and the rest is the own image."


def pairs(t, batch: int, height: int, width: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Draw a batch with partners (none its own, some of the same class and some of another), shares and centres; its edges are clear of rounding."""

    def draw() -> dict[str, Any]:
        shift, order = t.integer(1, batch - 1), torch.tensor(t.shuffled(range(batch)))
        partner = torch.empty_like(order)
        partner[order] = order.roll(shift)
        return {
            "images": t.normal(batch, 3, height, width, dtype=dtype),
            "labels": t.integers(0, CLASSES - 1, batch),
            "partner": partner,
            "lam": torch.tensor([t.uniform(0.15, 0.85) for _ in range(batch)], dtype=dtype),
            "centres": torch.tensor([[t.uniform(0.0, 1.0), t.uniform(0.0, 1.0)] for _ in range(batch)], dtype=dtype),
        }

    def tells(case: dict[str, Any]) -> bool:
        equal = case["labels"] == case["labels"][case["partner"]]
        return clear(case["images"], case["lam"], case["centres"]) and bool(equal.any()) and not bool(equal.all())

    return t.draw_until(draw, tells)


def results(t, found: object, name: str, images: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
    """Return the images and the targets that a function returned."""
    mixed, targets = t.items(found, 2, "{name}(...): the images and the targets", name=name)
    t.tensor(mixed, "the images of {name}", name=name, shape=images.shape, dtype=images.dtype)
    t.tensor(targets, "the targets of {name}", name=name, shape=(len(images), CLASSES), dtype=lam.dtype)
    return mixed, targets


# -- 5 · mixup


def mixed(student, t, case: dict[str, Any]) -> tuple[Tensor, Tensor]:
    found = student.mixup(case["images"], case["labels"], case["partner"], case["lam"], CLASSES)
    return results(t, found, "mixup", case["images"], case["lam"])


@check("mixup", points=1)
def check_targets(student, t):
    "The targets"
    for dtype in (torch.float32, torch.float64):
        case = pairs(t, t.integer(4, 7), 2, 3, dtype)
        labels, partner, lam = case["labels"], case["partner"], case["lam"]
        with explaining({"Class values must be smaller": PARTNERS}):
            soft, (_, of_mixup) = student.soft_targets(labels, partner, lam, CLASSES), mixed(student, t, case)
        for got, name in ((soft, "soft_targets(...)"), (of_mixup, "the targets of mixup")):
            right = targets_of(labels, partner, lam, CLASSES)
            mistakes = {
                "The share belongs to the own label, 1 - share to that of the partner: they are exchanged.": targets_of(
                    labels, partner, 1 - lam, CLASSES
                ),
                "All rows have the share of the first image: each image has its own, share[:, None].": targets_of(
                    labels, partner, lam[:1].expand(len(lam)).clone(), CLASSES
                ),
                OVERWRITTEN: overwritten(labels, partner, lam, CLASSES, False),
            }
            numbers = F.one_hot(labels, CLASSES) * lam[:, None] + F.one_hot(partner % CLASSES, CLASSES) * (1 - lam[:, None])
            mistakes[PARTNERS] = numbers.to(lam.dtype)
            wrong_if(t, got, right, {OVERWRITTEN: overwritten(labels, partner, lam, CLASSES, True)}, rtol=1e-5, atol=1e-6)
            wrong_if(t, got, right, mistakes, rtol=1e-5, atol=1e-6)
            t.close(got, right, name)


@check("mixup", points=1)
def check_averaged(student, t):
    "The images"
    for dtype in (torch.float32, torch.float64):
        case = pairs(t, t.integer(4, 7), t.integer(2, 4), 3, dtype)
        images, partner, lam = case["images"], case["partner"], case["lam"]
        got, _ = mixed(student, t, case)
        right = averaged(images, partner, lam)
        mistakes = {
            "The images have the share 1 - lam of themselves: lam is the share of the image, 1 - lam that of its partner.": averaged(
                images, partner, 1 - lam
            ),
            "All images have the share of the first one: each has its own, lam[:, None, None, None].": averaged(
                images, partner, lam[:1].expand(len(lam)).clone()
            ),
        }
        wrong_if(t, got, right, mistakes, rtol=1e-5, atol=1e-6)
        t.close(got, right, "the images of mixup")


def same_arguments(student, t, name: str, in_place: Scenario) -> None:
    """Check that a function leaves its arguments unchanged."""
    case = pairs(t, t.integer(4, 6), 5, 4)
    found, after = t.items(student.run(in_place, classes=CLASSES, **case), 2, "the result")
    got, _ = results(t, found, name, case["images"], case["lam"])
    t.that(not torch.equal(got, case["images"]), "not tested yet: {name} returns the images unchanged", name=name)
    for argument, (value, before) in zip(case, zip(after, case.values())):
        t.that(torch.equal(value, before), "{name} has changed its argument {argument}: return new tensors", name=name, argument=argument)


def without_a_loop(student, t, name: str, recorded: Scenario) -> None:
    """Check that the number of operations does not grow with the batch, and that these operations are the whole function: run
    here on another batch, they give what the function returns for it."""
    few, many = t.integer(3, 5), t.integer(9, 12)
    cases = [pairs(t, batch, 6, 5) | {"classes": CLASSES} for batch in (few, many, many)]
    if name == "mixup":
        for case in cases:
            del case["centres"]
    found = t.items(student.run(recorded, batches=cases), 3, "the recorded calls of {name}", name=name)
    (small, _), (large, (images, targets)), (_, again) = (t.items(each, 2, "a recorded call") for each in found)
    results(t, (images, targets), name, cases[1]["images"], cases[1]["lam"])
    t.that(not near(images, cases[1]["images"]), "not tested yet: {name} returns the images unchanged", name=name)
    less, more = (sum(node["kind"] == "function" for node in graph["nodes"]) for graph in (small, large))
    t.that(
        more <= less,
        "{name} runs {less} operations on tensors for {few} images, and {more} for {many}: it loops over the images. Compute all of them at once.",
        name=name, less=less, few=few, more=more, many=many,
    )  # fmt: skip
    tensors = [value for value in cases[2].values() if isinstance(value, Tensor)]
    masked = "An index with a mask has a result whose size depends on the values, and a GPU would have to wait for it: use torch.where"
    with explaining({"nonzero": masked}):
        replayed = replay(large, tensors)
    lesson = (
        "Some values of {name} do not come from operations on its tensors (.item(), .tolist(), NumPy, a choice by `if`): "
        "a GPU would wait for each of them. Stay with tensors."
    )
    t.that(len(replayed) == 2 and all(near(mine, right, 1e-4, 1e-6) for mine, right in zip(replayed, again)), lesson, name=name)


@check("mixup", points=1)
def check_mixup_arguments(student, t):
    "The arguments are not changed"
    same_arguments(student, t, "mixup", mixup_in_place)


@check("mixup", points=1)
def check_mixup_loop(student, t):
    "No loop over the images"
    without_a_loop(student, t, "mixup", recorded_mixup)


# -- 6 · cutmix


def cut(student, t, case: dict[str, Any]) -> tuple[Tensor, Tensor]:
    found = student.cutmix(case["images"], case["labels"], case["partner"], case["lam"], case["centres"], CLASSES)
    return results(t, found, "cutmix", case["images"], case["lam"])


def boxes_case(student, t, batch: int, height: int, width: int, dtype: torch.dtype | None = None) -> None:
    case = pairs(t, batch, height, width)
    if dtype is not None:
        case["images"] = t.integers(0, 255, batch, 3, height, width).to(dtype)
    inputs = (case["images"], case["partner"], case["lam"], case["centres"])
    got, _ = cut(student, t, case)
    mistakes = {
        "All images have the box of the first one: each has its own, compare with first[:, None].": boxed(*inputs, SHARED),
        "The axes are exchanged: centres[:, 0] belongs to the height, centres[:, 1] to the width.": boxed(*inputs, EXCHANGED),
        "The sides have the share 1 - lam of the image, so the area has its square: the side is sqrt(1 - lam) of the size.": boxed(
            *inputs, NO_ROOT
        ),
        "The box has one pixel too many along each axis: it ends before `last`.": boxed(*inputs, INCLUSIVE),
        "The edges are rounded down (int, floor): round them to the nearest pixel.": boxed(*inputs, DOWN),
        "The first edges are rounded down (floor): round both to the nearest pixel.": boxed(*inputs, FIRST_DOWN),
        "The centre and the half of the side are rounded, and then added: round their sum and their difference.": boxed(*inputs, APART),
        "The box is twice as high and wide: half of its side lies on each side of the centre.": boxed(*inputs, NO_HALF),
        "The box has the share lam of the area: it has 1 - lam, and the rest is the own image.": boxed(*inputs, OF_LAM),
        "The last row and the last column are never in a box: `last` may be the size, because the box ends before it.": boxed(
            *inputs, SHORT
        ),
        IMAGES_EXCHANGED: boxed(*inputs, OUTSIDE),
    }
    wrong_if(t, got, boxed(*inputs), mistakes)
    t.close(got, boxed(*inputs), "the images of cutmix")


@check("cutmix", points=3)
def check_boxes(student, t):
    "Each image has its box, cut off at the border"
    boxes_case(student, t, t.integer(5, 8), t.integer(6, 8), t.integer(10, 13))
    boxes_case(student, t, t.integer(5, 8), t.integer(10, 13), t.integer(6, 8), torch.uint8)


@check("cutmix", points=2)
def check_true_area(student, t):
    "The weight of a label is the share of the pixels that are really kept"
    for dtype in (torch.float32, torch.float64):
        case = pairs(t, t.integer(6, 9), t.integer(6, 8), t.integer(6, 8), dtype)
        for number, image in enumerate(case["images"]):
            image.fill_(number)  # a pixel tells from which image it comes
        got, targets = cut(student, t, case)
        own = torch.stack([(image == number).double().mean() for number, image in enumerate(got)])
        t.that(bool((own < 1).any()), "not tested yet: cutmix replaces no pixel")
        inputs = (case["images"], case["partner"], case["lam"], case["centres"])
        wrong_if(t, got, boxed(*inputs), {IMAGES_EXCHANGED: boxed(*inputs, OUTSIDE)})
        labels, partner, lam = case["labels"], case["partner"], case["lam"]
        right = targets_of(labels, partner, own.to(dtype), CLASSES)
        mistakes = {
            "The weight is lam, as if the border cut nothing off: use the share of the pixels that the image keeps.": targets_of(
                labels, partner, lam, CLASSES
            ),
            "The weights of the two labels are exchanged: the own label has the share of the pixels that the image keeps.": targets_of(
                labels, partner, 1 - own.to(dtype), CLASSES
            ),
        }
        outside = "The area of the box counts pixels outside of the image: let the border cut `first` and `last` off, or take the mean of the mask."
        mistakes[outside] = targets_of(labels, partner, kept_beyond_the_border(*inputs[:1], lam, case["centres"]), CLASSES)
        wrong_if(t, targets, right, mistakes, rtol=1e-5, atol=1e-6)
        t.close(targets, right, "the targets of cutmix, compared with the share of the pixels that each image keeps,")


@check("cutmix", points=1)
def check_cutmix_arguments(student, t):
    "The arguments are not changed"
    same_arguments(student, t, "cutmix", cutmix_in_place)


@check("cutmix", points=2)
def check_cutmix_loop(student, t):
    "No loop over the images"
    without_a_loop(student, t, "cutmix", recorded_cutmix)


# -- 7 · weights


@check("weights", points=2)
def check_weights(student, t):
    "Every class has the same total weight"
    for classes in ([0, 1, 2], [1, 4, 7]):
        counts = [t.integer(2, 4), t.integer(6, 9), t.integer(12, 20)]
        labels = torch.tensor(t.shuffled([label for label, count in zip(classes, counts) for _ in range(count)]))
        got = student.sample_weights(labels)
        one_each = isinstance(got, Tensor) and got.dim() == 1 and len(got) < len(labels)
        t.that(not one_each, "sample_weights returns a weight for each class: a sampler needs one for each sample, weights[labels]")
        t.tensor(got, "sample_weights(labels)", shape=(len(labels),), dtype=torch.float64)
        t.that(bool((got > 0).all() and got.isfinite().all()), "a weight is not positive, or not finite")
        share = got / got.sum()
        frequency = torch.tensor([dict(zip(classes, counts))[label] for label in labels.tolist()]).double()
        right = 1 / frequency / len(classes)
        mistakes = {
            "The weights grow with the size of the class: a sample of a rare class needs the larger one.": frequency / frequency.sum(),
            "All weights are equal: this is the sampling of the data as they are.": torch.full_like(right, 1 / len(labels)),
        }
        wrong_if(t, share, right, mistakes)
        for label in classes:
            total = float(share[labels == label].sum())
            message = "the samples of class {label} have {got:.3g} of the weight, expected {want:.3g}: the same for each class that occurs"
            t.that(bool(abs(total - 1 / len(classes)) < 1e-9), message, label=label, got=total, want=1 / len(classes))
        t.close(share, right, "the weights, divided by their sum,")


@check("weights", points=1)
def check_recall(student, t):
    "The recall"

    def draw() -> tuple[Tensor, Tensor, int]:
        labels = t.integers(0, 3, t.integer(20, 40))
        predicted = torch.where(t.integers(0, 2, len(labels)) > 0, labels, t.integers(0, 3, len(labels)))
        return predicted, labels, t.integer(0, 3)

    def values(case: tuple[Tensor, Tensor, int]) -> list[float]:
        predicted, labels, label = case
        hits = float(((predicted == label) & (labels == label)).sum())
        return [
            hits / max(1, int((labels == label).sum())),
            hits / max(1, int((predicted == label).sum())),
            float((predicted == labels).float().mean()),
            hits / len(labels),
            float(((predicted == label) == (labels == label)).double().mean()),
        ]

    for _ in range(2):
        case = t.draw_until(draw, lambda case: len({round(value, 3) for value in values(case)}) == 5 and bool((case[1] == case[2]).any()))
        right, precision, accuracy, of_all, of_class = values(case)
        got = t.number(student.recall(*case), "recall(...)")
        mistakes = {
            "This is the precision, the share of the predictions of the class that are right: divide by the samples of the class.": precision,
            "This is the accuracy, over all classes: look at the samples of one class only.": accuracy,
            "This is the accuracy of the question whether a sample is of the class: it also counts the samples of other classes that are not taken for it. Look at the samples of the class only.": of_class,
            "The hits are divided by all samples: divide by the samples of the class.": of_all,
        }
        wrong_if(t, got, right, mistakes)
        t.close(got, right, "recall(...)")


# -- 12 · rand_augment


def rounds_case(student, t) -> tuple[list[Any], dict[str, Any]]:
    operations, rounds, batch = t.integer(4, 6), t.integer(2, 3), t.integer(8, 12)
    case = {
        "images": t.normal(batch, 1, 2, 2),
        "factors": [t.uniform(0.5, 2.0) for _ in range(operations)],
        "drawn": t.integers(0, operations - 2, rounds, batch),  # no image draws the last operation
        "magnitude": t.uniform(0.5, 1.5),
    }
    return t.items(student.run(augmented, **case), 3, "the result"), case


@check("rand_augment", points=1)
def check_rounds(student, t):
    "Each image passes its operations, round after round"
    for _ in range(2):
        (got, _, _), case = rounds_case(student, t)
        wrong = {
            "Only the first round is there: each image passes one operation of every row of `drawn`.": in_rounds(
                **case | {"drawn": case["drawn"][:1]}
            ),
            "The rounds come in the wrong order.": in_rounds(**case | {"drawn": case["drawn"].flip(0)}),
            "Only the last round is there: each round works on the result of the one before, not on `images`.": in_rounds(
                **case | {"drawn": case["drawn"][-1:]}
            ),
            "The operations come in the order of the list, not of the rounds: loop over the rounds first.": in_rounds(
                **case | {"drawn": case["drawn"].sort(0).values}
            ),
        }
        wrong_if(t, got, in_rounds(**case), wrong, 1e-5)
        t.close(got, in_rounds(**case), "the images of rand_augment")


@check("rand_augment", points=1)
def check_groups(student, t):
    "An operation is called once in a round, with all its images, and not without images"
    (got, sizes, _), case = rounds_case(student, t)
    t.tensor(got, "the images of rand_augment", shape=case["images"].shape)
    for number, calls in enumerate(t.items(sizes, len(case["factors"]), "the calls")):
        want = [int((row == number).sum()) for row in case["drawn"] if (row == number).any()]
        message = "operation {number} was called with {got} images, expected {want}: one call in each round in which images drew it"
        t.that(calls == want, message, number=number, got=calls, want=want)


@check("rand_augment", points=1)
def check_augment_arguments(student, t):
    "The images that are given are not changed"
    (got, _, same), case = rounds_case(student, t)
    t.tensor(got, "the images of rand_augment", shape=case["images"].shape)
    t.that(not near(got, case["images"]), "not tested yet: rand_augment returns the images unchanged")
    t.that(same is True, "rand_augment has changed the images that it was given: work on a copy (clone)")
