"""The visible checks of what a batch holds: its augmentations, and the weights of its classes.

That there is no loop is proved by the operations of two batches, run again here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dlo_lib.grading.checks.asked import Asked
from dlo_lib.grading.checks.contract import Scenario, check
from dlo_lib.grading.checks.graphs import observed
from dlo_lib.labkit.compare import explaining, near, same, wrong_if

from . import twins
from .scenarios import augmented, cutmix_in_place, mixup_in_place, recorded_cutmix, recorded_mixup
from .twins import (
    boxed,
)

PARTNERS = "`partner` holds the numbers of images, not classes: the label of the partner is labels[partner]"
OVERWRITTEN = (
    "Where an image and its partner are of one class, one assignment overwrites the other, and the row does "
    "not add up to 1: add the two shares"
)
IMAGES_EXCHANGED = "The images are exchanged: the box shows the partner, and the rest is the own image."


def pairs(
    t, batch: int, height: int, width: int, dtype: torch.dtype = torch.float32, classes: int = 0
) -> dict[str, Any]:
    """Draw a batch with partners (none its own, some of the same class and some of another), shares and
    centres; its edges are clear of rounding. ``classes`` is drawn if it is 0."""
    classes = classes or t.integer(5, 8)

    def draw() -> dict[str, Any]:
        shift, order = t.integer(1, batch - 1), torch.tensor(t.shuffled(range(batch)))
        partner = torch.empty_like(order)
        partner[order] = order.roll(shift)
        case = {"images": t.normal(batch, 3, height, width, dtype=dtype)}
        case |= {"labels": t.integers(0, classes - 1, batch), "partner": partner}
        case["lam"] = torch.tensor([t.uniform(0.15, 0.85) for _ in range(batch)], dtype=dtype)
        centres = [[t.uniform(0.0, 1.0), t.uniform(0.0, 1.0)] for _ in range(batch)]
        return case | {"centres": torch.tensor(centres, dtype=dtype), "classes": classes}

    def tells(case: dict[str, Any]) -> bool:
        equal = case["labels"] == case["labels"][case["partner"]]
        mixed = bool(equal.any()) and not bool(equal.all())
        return mixed and twins.clear(case["images"], case["lam"], case["centres"])

    return t.draw_until(draw, tells)


def of_mixup(case: dict[str, Any]) -> dict[str, Any]:
    """The arguments of mixup, which are those of CutMix without the centres."""
    return {name: value for name, value in case.items() if name != "centres"}


def results(t, found: object, name: str, case: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the images and the targets that a function returned."""
    images, lam = case["images"], case["lam"]
    mixed, targets = t.items(found, 2, "{name}(...): the images and the targets", name=name)
    t.tensor(mixed, "the images of {name}", name=name, shape=images.shape, dtype=images.dtype)
    t.tensor(
        targets, "the targets of {name}", name=name, shape=(len(images), case["classes"]), dtype=lam.dtype
    )
    return mixed, targets


# -- 5 · mixup


def mixed(student, t, case: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return results(t, student.mixup(*of_mixup(case).values()), "mixup", case)


def of_first(lam: Tensor) -> Tensor:
    """The share of the first image for all images, which is a mistake."""
    return lam[:1].expand(len(lam)).clone()


@check("mixup", points=1)
def check_targets(student, t):
    "The targets"
    for dtype in (torch.float32, torch.float64):
        case = pairs(t, t.integer(4, 7), 2, 3, dtype)
        labels, partner, lam, classes = (case[key] for key in ("labels", "partner", "lam", "classes"))
        with explaining({"Class values must be smaller": PARTNERS}):
            soft, (_, targets) = student.soft_targets(labels, partner, lam, classes), mixed(student, t, case)

        def with_share(share: Tensor) -> Tensor:
            return twins.targets_of(labels, partner, share, classes)  # noqa: B023

        overwritten = [twins.overwritten(labels, partner, lam, classes, last) for last in (False, True)]
        own, other = (F.one_hot(each % classes, classes) for each in (labels, partner))
        numbers = own * lam[:, None] + other * (1 - lam[:, None])
        mistakes = {
            "The share belongs to the own label, 1 - share to that of the partner: they are "
            "exchanged.": with_share(1 - lam),
            "All rows have the share of the first image: each image has its own, share[:, None].": with_share(
                of_first(lam)
            ),
            OVERWRITTEN: overwritten[0],
            PARTNERS: numbers.to(lam.dtype),
        }
        for got, name in ((soft, "soft_targets(...)"), (targets, "the targets of mixup")):
            wrong_if(t, got, with_share(lam), {OVERWRITTEN: overwritten[1]}, rtol=1e-5, atol=1e-6)
            same(t, got, with_share(lam), name, mistakes)


@check("mixup", points=1)
def check_averaged(student, t):
    "The images"
    exchanged = (
        "The images have the share 1 - lam of themselves: lam is the share of the image, 1 - lam that of "
        "its partner."
    )
    first = "All images have the share of the first one: each has its own, lam[:, None, None, None]."
    for dtype in (torch.float32, torch.float64):
        case = pairs(t, t.integer(4, 7), t.integer(2, 4), 3, dtype)
        images, partner, lam = case["images"], case["partner"], case["lam"]
        got, _ = mixed(student, t, case)
        wrong = {exchanged: 1 - lam, first: of_first(lam)}
        mistakes = {message: twins.averaged(images, partner, share) for message, share in wrong.items()}
        same(t, got, twins.averaged(images, partner, lam), "the images of mixup", mistakes)


def same_arguments(student, t, name: str, in_place: Scenario) -> None:
    """Check that a function leaves its arguments unchanged."""
    case = pairs(t, t.integer(4, 6), 5, 4)
    inputs = case if name == "cutmix" else of_mixup(case)
    found, after = t.items(student.run(in_place, inputs=inputs), 2, "the result")
    got, _ = results(t, found, name, case)
    t.that(
        not torch.equal(got, case["images"]), "not tested yet: {name} returns the images unchanged", name=name
    )
    message = "{name} has changed its argument {argument}: return new tensors"
    for argument in (key for key in inputs if key != "classes"):
        t.that(torch.equal(after[argument], case[argument]), message, name=name, argument=argument)


def of_whole_batch(name: str, case: dict[str, Any]) -> Iterator[list[Tensor]]:
    """Yield the images and the targets of the twin, and those of mistakes that other checks name."""
    labels, partner, lam, classes = (case[key] for key in ("labels", "partner", "lam", "classes"))

    def targets(share: Tensor) -> Iterator[Tensor]:
        yield twins.targets_of(labels, partner, share, classes)
        yield from (twins.overwritten(labels, partner, share, classes, last) for last in (False, True))
        numbers = F.one_hot(labels, classes) * share[:, None]
        yield numbers + F.one_hot(partner % classes, classes) * (1 - share[:, None])

    if name == "mixup":
        for part, share in itertools.product((lam, 1 - lam, of_first(lam)), repeat=2):
            images = twins.averaged(case["images"], partner, part)
            yield from ([images, rows] for rows in targets(share))
        return
    for kind in (twins.RIGHT, *BOXES.values()):
        own = twins.kept(case["images"], lam, case["centres"], kind)
        beyond = twins.kept_beyond_the_border(case["images"], lam, case["centres"])
        for share in (own, 1 - own, lam, 1 - lam, beyond, twins.kept(case["images"], lam, case["centres"])):
            yield from ([boxed(case, kind), rows] for rows in targets(share.to(lam.dtype)))


def tensors_of(case: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments, the inputs of a recorded graph."""
    return [value for value in case.values() if isinstance(value, Tensor)]


def without_a_loop(student, t, name: str, recorded: Scenario) -> None:
    """Check that the number of operations does not grow with the batch, and that these operations are the
    whole function: run here on another batch, they give what the function returns for it."""
    few, many, classes = t.integer(3, 5), t.integer(9, 12), t.integer(5, 8)

    def drawn(batch: int) -> dict[str, Any]:
        case = pairs(t, batch, 6, 5, classes=classes)
        return case if name == "cutmix" else of_mixup(case)

    def graph_and_result(case: dict[str, Any]) -> tuple[Any, Any]:
        (found,) = t.items(student.run(recorded, batches=[case]), 1, "the recorded call of {name}", name=name)
        graph, result = t.items(found, 2, "a recorded call")
        return graph, result

    (small, _), case = graph_and_result(drawn(few)), drawn(many)
    large, (images, targets) = graph_and_result(case)
    results(t, (images, targets), name, case)
    message = "not tested yet: {name} returns the images unchanged"
    t.that(not near(images, case["images"]), message, name=name)
    other, fewer = drawn(many), drawn(few)  # only now, when the graphs are fixed
    masked = (
        "An index with a mask has a result whose size depends on the values, and a GPU would have to wait "
        "for it: use torch.where"
    )
    with explaining({"nonzero": masked, "shape mismatch": masked}):
        replayed, ran = observed(large, tensors_of(other))
        _, ran_for_few = observed(small, tensors_of(fewer))
    less, more = len(ran_for_few), len(ran)
    message = (
        "{name} runs {less} operations on tensors for {few} images, and {more} for {many}: it loops over "
        "the images. Compute all of them at once."
    )
    t.that(more <= less, message, name=name, less=less, few=few, more=more, many=many)
    lesson = (
        "Some values of {name} do not come from operations on its tensors (.item(), .tolist(), NumPy, a "
        "choice by `if`): a GPU would wait for each of them. Stay with tensors."
    )
    good = len(replayed) == 2 and any(
        all(near(mine, right, 1e-4, 1e-6) for mine, right in zip(replayed, known))
        for known in of_whole_batch(name, other)
    )
    t.that(good, lesson, name=name)


@check("mixup", points=1)
def check_mixup_arguments(student, t):
    "The arguments are not changed"
    same_arguments(student, t, "mixup", mixup_in_place)


@check("mixup", points=1)
def check_mixup_loop(student, t):
    "No loop over the images"
    without_a_loop(student, t, "mixup", recorded_mixup)


# -- 6 · cutmix


BOXES = {
    "All images have the box of the first one: each has its own, compare with first[:, None].": twins.SHARED,
    "The axes are exchanged: centres[:, 0] is of the height, centres[:, 1] of the width.": twins.EXCHANGED,
    "The sides have the share 1 - lam of the image, so the area has its square: the side is sqrt(1 - lam) "
    "of the size.": twins.NO_ROOT,
    "The box has one pixel too many along each axis: it ends before `last`.": twins.INCLUSIVE,
    "The edges are rounded down (int, floor): round them to the nearest pixel.": twins.DOWN,
    "The first edges are rounded down (floor): round both to the nearest pixel.": twins.FIRST_DOWN,
    "The centre and the half of the side are rounded, and then added: round their sum and their "
    "difference.": twins.APART,
    "The box is twice as high and wide: half of its side lies on each side of the centre.": twins.NO_HALF,
    "The box has the share lam of the area: it has 1 - lam, and the rest is the own image.": twins.OF_LAM,
    "The last row and the last column are never in a box: `last` may be the size, because the box ends "
    "before it.": twins.SHORT,
    IMAGES_EXCHANGED: twins.OUTSIDE,
}


"""A message for the student → the mistake in the box."""


def cut(student, t, case: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return results(t, student.cutmix(*case.values()), "cutmix", case)


def boxed(case: dict[str, Any], kind: str = twins.RIGHT) -> Tensor:
    return twins.boxed(case["images"], case["partner"], case["lam"], case["centres"], kind)


def same_boxes(student, t, batch: int, height: int, width: int, dtype: torch.dtype | None = None) -> None:
    """The images of a batch have their boxes."""
    case = pairs(t, batch, height, width)
    if dtype is not None:
        case["images"] = t.integers(0, 255, batch, 3, height, width).to(dtype)
    got, _ = cut(student, t, case)
    mistakes = {message: boxed(case, kind) for message, kind in BOXES.items()}
    same(t, got, boxed(case), "the images of cutmix", mistakes)


@check("cutmix", points=3)
def check_boxes(student, t):
    "Each image has its box, cut off at the border"
    same_boxes(student, t, t.integer(5, 8), t.integer(6, 8), t.integer(10, 13))
    same_boxes(student, t, t.integer(5, 8), t.integer(10, 13), t.integer(6, 8), torch.uint8)


@check("cutmix", points=2)
def check_true_area(student, t):
    "The weight of a label is the share of the pixels that are really kept"
    for dtype in (torch.float32, torch.float64):
        case = pairs(t, t.integer(6, 9), t.integer(6, 8), t.integer(6, 8), dtype)
        for number, image in enumerate(case["images"]):
            image.fill_(number)  # a pixel tells from which image it comes
        got, targets = cut(student, t, case)
        own = torch.stack([(image == number).to(dtype).mean() for number, image in enumerate(got)])
        t.that(bool((own < 1).any()), "not tested yet: cutmix replaces no pixel")
        wrong_if(t, got, boxed(case), {IMAGES_EXCHANGED: boxed(case, twins.OUTSIDE)})
        labels, partner, lam = case["labels"], case["partner"], case["lam"]
        wrong = {
            "The weight is lam, as if the border cut nothing off: use the share of the pixels that the "
            "image keeps.": lam,
            "The weights of the two labels are exchanged: the own label has the share of the pixels that "
            "the image keeps.": 1 - own,
            "The area of the box counts pixels outside of the image: let the border cut `first` and `last` "
            "off, or take the mean of the mask.": twins.kept_beyond_the_border(
                case["images"], lam, case["centres"]
            ),
        }
        mistakes = {
            message: twins.targets_of(labels, partner, share, case["classes"])
            for message, share in wrong.items()
        }
        right = twins.targets_of(labels, partner, own, case["classes"])
        what = "the targets of cutmix, compared with the share of the pixels that each image keeps,"
        same(t, targets, right, what, mistakes)


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
        counts = dict(zip(classes, (t.integer(2, 4), t.integer(6, 9), t.integer(12, 20))))
        labels = torch.tensor(t.shuffled([label for label, count in counts.items() for _ in range(count)]))
        got = student.sample_weights(labels)
        one_each = isinstance(got, Tensor) and got.dim() == 1 and len(got) < len(labels)
        message = "this is a weight for each class: a sampler needs one for each sample, weights[labels]"
        t.that(not one_each, message)
        t.tensor(got, "sample_weights(labels)", shape=(len(labels),), dtype=torch.float64)
        t.that(bool((got > 0).all() and got.isfinite().all()), "a weight is not positive, or not finite")
        share = got / got.sum()
        frequency = torch.tensor([counts[label] for label in labels.tolist()]).double()
        right = 1 / frequency / len(classes)
        grows = "The weights grow with the size of the class: a sample of a rare class needs the larger one."
        equal = "All weights are equal: this is the sampling of the data as they are."
        mistakes = {grows: frequency / frequency.sum(), equal: torch.full_like(right, 1 / len(labels))}
        wrong_if(t, share, right, mistakes)
        message = (
            "the samples of class {label} have {got:.3g} of the weight, expected {want:.3g}: the same for "
            "each class that occurs"
        )
        for label in classes:
            total, want = float(share[labels == label].sum()), 1 / len(classes)
            t.that(bool(abs(total - want) < 1e-9), message, label=label, got=total, want=want)
        t.close(share, right, "the weights, divided by their sum,")


def of_class(predicted: Tensor, labels: Tensor, label: int) -> dict[str, float]:
    """The recall under "", and what other quotients give instead, under a message for the student."""
    true, positive = labels == label, predicted == label
    hits = float((true & positive).sum())
    return {
        "": hits / max(1, int(true.sum())),
        "This is the precision, the share of the predictions of the class that are right: divide by the "
        "samples of the class.": hits / max(1, int(positive.sum())),
        "This is the accuracy, over all classes: look at the samples of one class only.": float(
            (predicted == labels).float().mean()
        ),
        "This is the accuracy of the question whether a sample is of the class: it also counts the samples "
        "of other classes that are not taken for it. Look at the samples of the class only.": float(
            (true == positive).double().mean()
        ),
        "The hits are divided by all samples: divide by the samples of the class.": hits / len(labels),
    }


@check("weights", points=1)
def check_recall(student, t):
    "The recall"

    def draw() -> tuple[Tensor, Tensor, int]:
        labels = t.integers(0, 3, t.integer(20, 40))
        predicted = torch.where(t.integers(0, 2, len(labels)) > 0, labels, t.integers(0, 3, len(labels)))
        return predicted, labels, t.integer(0, 3)

    def tells(case: tuple[Tensor, Tensor, int]) -> bool:
        distinct = {round(value, 3) for value in of_class(*case).values()}
        return len(distinct) == 5 and bool((case[1] == case[2]).any())

    for _ in range(2):
        case = t.draw_until(draw, tells)
        mistakes = of_class(*case)
        right = mistakes.pop("")
        same(t, student.recall(*case), right, "recall(...)", mistakes)


# -- 12 · rand_augment


def rounds_case(student, t) -> tuple[Any, Any, list[list[int]], dict[str, Any]]:
    """Return the images of the student, those that were given, afterwards, the sizes of the groups of each
    operation, and the case."""
    operations, rounds, batch = t.integer(4, 6), t.integer(2, 3), t.integer(8, 12)
    case = {
        "images": t.normal(batch, 1, 2, 2),
        "factors": [t.uniform(0.5, 2.0) for _ in range(operations)],
        "drawn": t.integers(0, operations - 2, rounds, batch),  # no image draws the last operation
        "magnitude": t.uniform(0.5, 1.5),
    }
    sizes: list[list[int]] = [[] for _ in range(operations)]

    def operation_of(number: int) -> Asked:
        def operation(group: Any, strength: Any) -> Tensor:
            t.tensor(group, "what an operation is called with")
            sizes[number].append(len(group))
            return group * case["factors"][number] + strength * number

        return t.asked(operation, calls=20 * batch)

    given = {"operations": [operation_of(number) for number in range(operations)]}
    given |= {name: case[name] for name in ("images", "drawn", "magnitude")}
    result, after = t.items(student.run(augmented, **given), 2, "the result")
    return result, after, sizes, case


@check("rand_augment", points=1)
def check_rounds(student, t):
    "Each image passes its operations, round after round"
    for _ in range(2):
        got, _, _, case = rounds_case(student, t)
        drawn = case["drawn"]
        wrong = {
            "Only the first round is there: each image passes one operation of every row of `drawn`.": drawn[
                :1
            ],
            "The rounds come in the wrong order.": drawn.flip(0),
            "Only the last round is there: each round works on the result of the one before, not on "
            "`images`.": drawn[-1:],
            "The operations come in the order of the list, not of the rounds: loop over the rounds "
            "first.": drawn.sort(0).values,
        }
        mistakes = {text: twins.in_rounds(**case | {"drawn": rows}) for text, rows in wrong.items()}
        same(t, got, twins.in_rounds(**case), "the images of rand_augment", mistakes)


@check("rand_augment", points=1)
def check_groups(student, t):
    "An operation is called once in a round, with all its images, and not without images"
    got, _, sizes, case = rounds_case(student, t)
    t.tensor(got, "the images of rand_augment", shape=case["images"].shape)
    for number, calls in enumerate(sizes):
        want = [int((row == number).sum()) for row in case["drawn"] if (row == number).any()]
        message = (
            "operation {number} was called with {got} images, expected {want}: one call in each round in "
            "which images drew it"
        )
        t.that(calls == want, message, number=number, got=calls, want=want)


@check("rand_augment", points=1)
def check_augment_arguments(student, t):
    "The images that are given are not changed"
    got, after, _, case = rounds_case(student, t)
    t.tensor(got, "the images of rand_augment", shape=case["images"].shape)
    t.that(not near(got, case["images"]), "not tested yet: rand_augment returns the images unchanged")
    unchanged = type(after) is Tensor and torch.equal(after, case["images"])
    t.that(unchanged, "rand_augment has changed the images that it was given: work on a copy (clone)")
