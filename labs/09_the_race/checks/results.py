"""The visible checks of a fair comparison and of the record of a run."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import check
from dlo_lib.labkit.compare import explaining, wrong_if

from .scenarios import printed
from .twins import T95, half_width, is_shown

# -- fair


def drawn_scores(t, count: int, middle: float, spread: float) -> list[float]:
    return [middle + spread * float(z) for z in t.normal(count)]


@check("fair", points=1)
def check_interval(student, t):
    "The 95 % interval of a mean, by Student's t"
    for count in t.shuffled([2, 3, t.integer(5, 9)]):
        scores = drawn_scores(t, count, 0.8, t.uniform(0.01, 0.04))
        found = t.items(student.interval(scores), 2, "interval(...)")
        low, high = (t.number(value, "an end of the interval") for value in found)
        mean, half = sum(scores) / count, half_width(scores)
        error = spread_of(scores)
        wrong = {
            "Few runs need a longer interval than 1.96: take T95[n - 1].": 1.96 * error,
            "This is the spread of single runs. That of their mean is smaller by the root of n.": half
            * math.sqrt(count),
            "stdev divides by n - 1, because the mean is estimated from the same runs.": half
            * math.sqrt(1 - 1 / count),
        }
        doubled = {message: 2 * value for message, value in wrong.items()}
        wrong_if(t, high - low, 2 * half, doubled, 1e-4)
        t.close(low, mean - half, "the lower end for {n} runs", rtol=1e-4, n=count)
        t.close(high, mean + half, "the upper end for {n} runs", rtol=1e-4, n=count)


def spread_of(scores: list[float]) -> float:
    """Return the standard error of the mean."""
    n, mean = len(scores), sum(scores) / len(scores)
    return math.sqrt(sum((score - mean) ** 2 for score in scores) / (n - 1) / n)


def paired_case(
    t, gap: float, noise: float, spread: float, count: int = 0
) -> tuple[list[float], list[float]]:
    """Scores on common seeds; theirs vary by ``spread``, and the differences by ``noise`` around ``gap``."""
    count = count or t.integer(4, 7)
    theirs, extra = drawn_scores(t, count, 0.8, spread), drawn_scores(t, count, 0.0, 1.0)
    mean = sum(extra) / count
    size = spread_of(extra) * math.sqrt(count)
    return [score + gap + noise * (x - mean) / size for score, x in zip(theirs, extra)], theirs


def decided(student, t, cases: list[tuple[tuple[list[float], list[float]], bool, str]]) -> None:
    for (ours, theirs), want, why in t.shuffled(cases):
        got = student.shown(ours, theirs)
        t.that(got in (True, False), "shown(...) is {got}: return True or False", got=str(got)[:30])
        text = "the difference of both runs of a seed " + why + ": shown(...) should be {want}"
        t.that(bool(got) == want, text, want=want)


@check("fair", points=1)
def check_paired(student, t):
    "The runs of one seed are compared with each other"
    small, large = t.uniform(0.004, 0.01), t.uniform(0.05, 0.1)

    def apart() -> tuple[list[float], list[float]]:
        """Theirs in another order, each a little higher: only sorted runs seem to differ by as much."""
        theirs = drawn_scores(t, 5, 0.8, large)
        return [score + small for score in t.shuffled(theirs)], theirs

    cases = [
        (paired_case(t, small, small / 4, large), True, "is above 0 on each seed, by about as much"),
        (paired_case(t, small, 8 * small, small / 2), False, "is above 0 in the mean, and varies far more"),
        (paired_case(t, -small, small / 4, large), False, "is below 0"),
        (t.draw_until(apart, lambda case: not is_shown(*case)), False, "varies far more than its mean"),
    ]
    decided(student, t, cases)


@check("fair", points=1)
def check_decides(student, t):
    "The interval of the differences decides, and not the number of seeds that are better"
    middle, count = t.uniform(0.6, 0.9), t.integer(4, 5)

    def above(ratio: float) -> tuple[list[float], list[float]]:
        """Differences whose mean is ``ratio`` times its standard error; theirs are all the same."""
        gap = t.uniform(0.01, 0.03)
        ours, _ = paired_case(t, gap, gap * math.sqrt(count) / ratio, 0.0, count)
        return [score - 0.8 + middle for score in ours], [middle] * count

    one = t.uniform(0.1, 0.15)
    lifts = t.shuffled([one] + [one / 20 * t.uniform(0.8, 1.2) for _ in range(count - 1)])
    limit = T95[count - 1]
    cases = [
        (above(t.uniform(1.15, 1.3) * limit), True, "has an interval that is just above 0"),
        (above((limit + 2) / 2), False, "has an interval that reaches just below 0"),
        (([middle + lift for lift in lifts], [middle] * count), False, "is far larger on one seed"),
        (([middle] * count, [middle] * count), False, "is 0 on each seed"),
    ]
    decided(student, t, cases)


@check("fair", points=1)
def check_places(student, t):
    "An entry stands behind those that are shown to be better, and no others"
    count = t.integer(4, 6)
    seeds = drawn_scores(t, count, 0.7, 0.04)
    lifts = [0.0, -0.001, -0.04, -0.041, -0.1]
    names = t.shuffled(["Ada", "Grace", "Alan", "Emmy", "Karl"])
    rows = {
        name: [seed + lift + 0.004 * float(z) for seed, z in zip(seeds, t.normal(count))]
        for name, lift in zip(names, lifts)
    }
    board = {name: rows[name] for name in t.shuffled(names)}
    got = student.places(board)
    t.that(type(got) is dict and set(got) == set(board), "places(...) should have the names of the board")
    for name in names:
        better = [other for other in names if is_shown(board[other], board[name])]
        text = "{name} has place {got}: {count} entries are shown to be better, so it is {want}"
        values = {"name": name, "got": got[name], "count": len(better), "want": 1 + len(better)}
        t.that(type(got[name]) is int and got[name] == 1 + len(better), text, **values)


# -- track

LIBRARY = ["dlo_lib.base.provenance.digest"]
COPIED = {"LibraryUsed": "Write it with hashlib; the library's form comes at the end"}


def print_of(student, t, images: Tensor, labels: Tensor) -> str:
    refused = LIBRARY if student.is_own("fingerprint") else []
    with explaining(COPIED):
        got = student.run(printed, images=images, labels=labels, refused=refused)
    digits = type(got) is str and len(got) == 64 and set(got) <= set("0123456789abcdef")
    t.that(
        digits, "fingerprint(...) should be a SHA-256, 64 hexadecimal digits, not {got}", got=str(got)[:70]
    )
    return got


def small_data(t) -> tuple[Tensor, Tensor]:
    count = t.integer(5, 8)
    images = t.normal(count, 3, 4, 6, dtype=t.choice([torch.float32, torch.float64]))
    return images, t.integers(0, 9, count)


def all_differ(student, t, first: tuple[Tensor, Tensor], cases: dict[str, tuple[Tensor, Tensor]]) -> None:
    same = print_of(student, t, *first)
    for what, case in cases.items():
        t.that(print_of(student, t, *case) != same, "{what}: the fingerprint is the same", what=what)


@check("track", points=1)
def check_fingerprint(student, t):
    "Every change of a value or of the order changes the fingerprint"
    images, labels = small_data(t)
    pixel, label, swapped = images.clone(), labels.clone(), torch.arange(len(images))
    row = t.integer(0, len(images) - 1)
    pixel[row, t.integer(0, 2), t.integer(0, 3), t.integer(0, 5)] += 1e-3
    label[row] += 1
    swapped[0], swapped[-1] = len(images) - 1, 0
    cases = {
        "one pixel has changed": (pixel, labels),
        "one label has changed": (images, label),
        "two images have changed places": (images[swapped], labels[swapped]),
    }
    all_differ(student, t, (images, labels), cases)
    many, classes = t.normal(4, 3, 24, 24), t.integers(0, 9, 4)
    other = many.clone()
    other[t.integer(1, 2), 1, t.integer(8, 16), t.integer(8, 16)] += 1e-5
    case = {"one of 6912 values has changed by 0.00001": (other, classes)}
    all_differ(student, t, (many, classes), case)


@check("track", points=1)
def check_dtype(student, t):
    "The same bytes with another shape or dtype have another fingerprint"
    images, labels = small_data(t)
    whole = torch.int32 if images.dtype == torch.float32 else torch.int64
    cases = {
        "the same bytes are images of another shape": (images.reshape(-1, 3, 6, 4), labels),
        "the same bytes are images of another dtype": (images.view(whole), labels),
        "the same bytes are labels of another shape": (images, labels[:, None]),
        "the same bytes are labels of another dtype": (images, labels.view(torch.float64)),
    }
    all_differ(student, t, (images, labels), cases)


@check("track", points=1)
def check_layout(student, t):
    "The order of the bytes in memory does not count"
    images, labels = small_data(t)
    other = images.contiguous(memory_format=torch.channels_last)
    first = print_of(student, t, images, labels)
    text = "equal images, stored channels-last, have another fingerprint: hash the values in their order"
    t.that(print_of(student, t, other, labels) == first, text)
    t.that(print_of(student, t, images + 1, labels) != first, "the fingerprint does not depend on the images")


def complete(t) -> dict[str, Any]:
    digits = "".join(str(digit) for digit in t.integers(0, 9, 64).tolist())
    config = {"rate": t.uniform(0.01, 0.2), "batch": t.integer(8, 64)}
    return {"commit": digits[:40], "seed": t.choice([0, t.integer(1, 99)]), "config": config, "data": digits}


def same_missing(student, t, record: dict[str, Any], want: list[str]) -> None:
    got = student.missing(record)
    t.that(type(got) is list, "missing(...) should be a list of names, not {got}", got=got)
    text = "missing({record}) is {got}, expected {want}"
    t.that(sorted(map(str, got)) == sorted(want), text, record=str(record), got=str(got), want=str(want))


@check("track", points=1)
def check_missing(student, t):
    "A field that is absent, None or empty is missing"
    for name in t.shuffled(["commit", "seed", "config", "data"]):
        record = complete(t) | {"seed": t.integer(1, 99)}
        absent = {key: value for key, value in record.items() if key != name}
        same_missing(student, t, absent, [name])
        same_missing(student, t, record | {name: None}, [name])
    same_missing(student, t, {}, ["commit", "config", "data", "seed"])
    same_missing(student, t, complete(t) | {"seed": 3, "config": {}, "data": ""}, ["config", "data"])


@check("track", points=1)
def check_zero(student, t):
    "A seed of 0 is a seed, and changed files have no commit"
    lost = t.choice(["commit", "config", "data"])
    tested = {name: value for name, value in (complete(t) | {"seed": 7}).items() if name != lost}
    message = "not tested yet: missing(...) does not find what is missing, see the check of it"
    t.that(student.missing(tested) == [lost], message)
    same_missing(student, t, complete(t) | {"seed": 0}, [])
    dirty = complete(t) | {"seed": t.integer(1, 99)}
    dirty["commit"] += "-changed"
    same_missing(student, t, dirty, ["commit"])
