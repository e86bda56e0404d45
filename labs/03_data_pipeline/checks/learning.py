"""The visible checks of what the data do to a training: scaling, early stopping, and the resume within an epoch."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import check
from dlo_lib.labkit.compare import wrong_if

from .scenarios import trained, watched
from .twins import stopped, stopped_by_share

# -- 8 · scaling


def parts(t, found: object, what: str, features: int) -> tuple[int, Tensor, Tensor]:
    """Return the statistics that a function returned."""
    count, mean, squares = t.items(found, 3, what)
    t.number(count, what + "[0], the count,")
    t.tensor(mean, what + "[1], the mean,", shape=(features,), dtype=torch.float64)
    t.tensor(squares, what + "[2], the squares,", shape=(features,), dtype=torch.float64)
    return count, mean, squares


def of_rows(rows: Tensor) -> tuple[int, Tensor, Tensor]:
    """The statistics of all rows at once."""
    values = rows.double()
    return len(values), values.mean(0), values.var(0, correction=0) * len(values)


@check("scaling", points=1)
def check_statistics(student, t):
    "The statistics of a chunk"
    for dtype in (torch.float32, torch.float64):
        features = t.integer(2, 4)
        rows = t.normal(t.integer(5, 9), features, dtype=dtype) * 2 + 1
        count, mean, squares = parts(t, student.statistics(rows), "statistics(chunk)", features)
        want = of_rows(rows)
        t.equal(count, len(rows), "the count")
        t.close(mean, want[1], "the mean")
        wrong_if(
            t, squares, want[2], {"This is the variance: keep the sum of the squared distances, which can be added.": want[2] / len(rows)}
        )
        t.close(squares, want[2], "the sum of the squared distances")


@check("scaling", points=1)
def check_merged(student, t):
    "The statistics of two parts together"
    for sizes in ((t.integer(3, 5), t.integer(8, 12)), (t.integer(8, 12), 1)):
        features = t.integer(2, 4)
        rows = [t.normal(size, features, dtype=torch.float64) + shift for size, shift in zip(sizes, (0.0, 3.0))]
        a, b = map(of_rows, rows)
        got = parts(t, student.merged(a, b), "merged(a, b)", features)
        want = of_rows(torch.cat(rows))
        t.equal(got[0], sum(sizes), "the count of both parts")
        wrong_if(
            t, got[1], want[1], {"The mean of the two means weights both parts equally: a larger part counts more.": (a[1] + b[1]) / 2}
        )
        t.close(got[1], want[1], "the mean of both parts")
        lesson = "The squares are only added: the distance between the two means is missing, d² n_a n_b / n."
        wrong_if(t, got[2], want[2], {lesson: a[2] + b[2]})
        t.close(got[2], want[2], "the sum of the squared distances of both parts")


@check("scaling", points=1)
def check_large_mean(student, t):
    "A mean that is far larger than the differences"
    features = 3
    rows = t.normal(t.integer(40, 60), features, dtype=torch.float64) + 10.0 ** t.integer(8, 9)
    _, _, squares = parts(t, student.statistics(rows), "statistics(chunk)", features)
    wrong_if(
        t, squares, of_rows(rows)[2], {"This is the variance, as for the statistics of a chunk.": of_rows(rows)[2] / len(rows)}, rtol=1e-3
    )
    off = float((squares / of_rows(rows)[2] - 1).abs().max())
    lesson = "with a mean of 1e8 the squares are off by {off:.0%}: the sum of squares minus n times the squared mean loses its digits. Subtract the mean first"
    t.that(bool(off < 1e-3), lesson, off=off)


def scaled(student, t, chunks: list[Tensor], test: Tensor) -> Tensor:
    return t.tensor(student.scaled(chunks, test), "scaled(train_chunks, test)", shape=test.shape, dtype=test.dtype)


def by(rows: Tensor, test: Tensor, fewer: int = 0) -> Tensor:
    """The test rows, scaled with the statistics of ``rows``."""
    count, mean, squares = of_rows(rows)
    return ((test.double() - mean) / (squares / (count - fewer)).sqrt()).to(test.dtype)


@check("scaling", points=2)
def check_training_only(student, t):
    "The test is scaled with the statistics of all training chunks, and of nothing else"
    for dtype in (torch.float32, torch.float64):
        features = t.integer(2, 4)
        chunks = [t.normal(t.integer(3, 9), features, dtype=dtype) * t.uniform(0.5, 2) + number for number in range(t.integer(3, 4))]
        test = t.normal(t.integer(3, 5), features, dtype=dtype) * 3 + 5
        train, got = torch.cat(chunks), scaled(student, t, chunks, test)
        mistakes = {
            "The statistics are those of the test set. This is a data leak: use those of the training chunks.": by(test, test),
            "The test set is in the statistics. This is a data leak: use the training chunks only.": by(torch.cat([train, test]), test),
            "The statistics are those of the first chunk only.": by(chunks[0], test),
            "The statistics are those of the last chunk only.": by(chunks[-1], test),
            "The variance is divided by n - 1: divide M by n.": by(train, test, 1),
            "The values are divided by the variance: divide by its square root.": (
                (test.double() - of_rows(train)[1]) / (of_rows(train)[2] / len(train))
            ).to(dtype),
        }
        wrong_if(t, got, by(train, test), mistakes, rtol=1e-5, atol=1e-6)
        t.close(got, by(train, test), "scaled(train_chunks, test)")


@check("scaling", points=1)
def check_constant(student, t):
    "A feature that is constant in the training data becomes 0"
    chunks = [t.normal(t.integer(3, 6), 3) for _ in range(3)]
    constant = t.choice([0.0, 0.1, 0.7])
    for chunk in chunks:
        chunk[:, 1] = constant
    test = t.normal(4, 3)
    got = scaled(student, t, chunks, test)
    t.close(got[:, 0], by(torch.cat(chunks), test)[:, 0], "a feature that is not constant")
    lesson = "the constant feature becomes {got:.3g}: its standard deviation is 0, or what rounding leaves of it, and the division has no meaning"
    t.that(bool((got[:, 1] == 0).all()), lesson, got=float(got[0, 1]))


@check("scaling", points=1)
def check_threshold(student, t):
    "Constant means s <= 1e-10 |m|, in every unit"
    # the mean of seven times 0.1 is not 0.1 in float64, and then the means of chunks of other lengths differ from it
    chunks = [t.normal(size, 3, dtype=torch.float64) for size in (7, t.integer(3, 5), 7, 11)]
    for chunk in chunks:
        chunk[:, 1] = 0.1
        chunk[:, 2] *= 1e-13
    test = t.normal(4, 3, dtype=torch.float64)
    test[:, 2] *= 1e-13
    got, right = scaled(student, t, chunks, test), by(torch.cat(chunks), test)
    t.close(got[:, 0], right[:, 0], "a feature that is not constant")
    lesson = (
        "a feature that is 0.1 in every row becomes {got:.3g}: rounding leaves an s that is not 0. Compare s with 1e-10 |m|, not with 0"
    )
    t.that(bool((got[:, 1] == 0).all()), lesson, got=float(got[0, 1]))
    lesson = "a feature in a unit in which its values are about 1e-13 becomes 0, but it is not constant. Compare s with 1e-10 |m|, not with a fixed number"
    t.that(bool((got[:, 2] != 0).any()), lesson)
    t.close(got[:, 2], right[:, 2], "a feature of small numbers")


# -- 9 · stopping


def answers(student, t, losses: list[float | None], patience: int, min_delta: float) -> tuple[list[Any], Any, Any, Any, list[bool], int]:
    found, *restored = t.items(student.run(watched, losses=losses, patience=patience, min_delta=min_delta), 4, "the result")
    want, kept = stopped(losses, patience, min_delta)
    return t.items(found, len(losses), "the answers of stops"), *restored, want, kept


def same_answers(t, losses: list[float | None], got: list[Any], want: list[bool], lesson: str, **values: object) -> None:
    for number, (mine, right) in enumerate(zip(got, want)):
        shown = ", ".join("NaN" if loss is None else f"{loss:.3g}" for loss in losses[: number + 1])
        t.that(
            mine is right,
            "after the losses {shown} stops returns {got}, expected {want}. " + lesson,
            shown=shown,
            got=mine,
            want=right,
            **values,
        )


@check("stopping", points=2)
def check_patience(student, t):
    "Stop after `patience` losses in a row that are not better"
    for _ in range(2):
        patience, low = t.integer(2, 4), t.uniform(1.0, 1.5)
        rising = [low + 1.5 - 0.1 * k for k in range(patience - 1)]  # below each other, and all above the best
        losses: list[float | None] = [low + 2, low + 1, *rising, low, *rising, low + 0.05]
        got, *_, want, _ = answers(student, t, losses, patience, 0.0)
        same_answers(
            t, losses, got, want,
            "With patience {patience}, count the losses in a row that are not below the *best* one; a better one begins a new count.", patience=patience,
        )  # fmt: skip
        losses = [low, *rising, low + 0.05, low + 0.2, low + 0.1, low - 0.1]
        got, *_, want, _ = answers(student, t, losses, patience, 0.0)
        same_answers(
            t, losses, got, want,
            "The answer stays True until a loss is better: with patience {patience}, that many losses in a row *or more* were not.", patience=patience,
        )  # fmt: skip


@check("stopping", points=1)
def check_min_delta(student, t):
    "An improvement of min_delta or less does not count"
    patience, delta, low = t.integer(2, 4), t.uniform(0.1, 0.2), t.uniform(1.0, 2.0)
    creeping: list[float | None] = [low - 0.6 * delta * k for k in range(2)] + [
        low - 1.2 * delta - 0.6 * delta * k for k in range(patience)
    ]
    lesson = "A loss is better if it is below best - min_delta (here {delta:.3g}), and best is the last loss that was better."
    got, *_, want, _ = answers(student, t, creeping, patience, delta)
    same_answers(t, creeping, got, want, lesson, delta=delta)
    flat: list[float | None] = [low] + [low - 0.5 * delta] * patience
    got, *_, want, _ = answers(student, t, flat, patience, delta)
    same_answers(t, flat, got, want, lesson, delta=delta)
    equal = "A loss is better if it is *below* best - min_delta (here {best:.3g} - {delta:.3g}); one that is equal to it is not better."
    for delta in (0.0, t.integer(1, 8) / 64):  # multiples of 1/64, so the difference is exact
        low = t.integer(64, 128) / 64
        losses: list[float | None] = [low] + [low - delta] * patience
        got, *_, want, _ = answers(student, t, losses, patience, delta)
        same_answers(t, losses, got, want, equal, best=low, delta=delta)


@check("stopping", points=1)
def check_level(student, t):
    "min_delta is a difference, whatever the level of the losses"
    share = (
        "min_delta is taken as a share of the best loss: a loss is better if it is below best - min_delta, a difference, "
        "and not below best * (1 - min_delta). The two agree for losses near 1 only"
    )
    lesson = "A loss is better if it is below best - min_delta, here {delta:.3g}, whatever the level of the losses."
    patience = t.integer(2, 4)
    large, small, negative = t.uniform(20.0, 80.0), t.uniform(0.02, 0.05), -t.uniform(20.0, 80.0)
    delta, tiny = t.uniform(0.1, 0.4), t.uniform(0.005, 0.015)
    for losses, min_delta in (
        ([large, large - 1.5 * delta, *[large] * patience], delta),
        ([small, *[small - 0.5 * tiny] * patience], tiny),
        ([negative, *[negative + 0.5 * delta] * patience], delta),
    ):
        got, *_, want, _ = answers(student, t, losses, patience, min_delta)
        for absolute in (False, True):
            mistaken = stopped_by_share(losses, patience, min_delta, absolute)
            t.that(mistaken == want or got != mistaken, share)
        same_answers(t, losses, got, want, lesson, delta=min_delta)


@check("stopping", points=1)
def check_nan(student, t):
    "NaN is never better"
    patience, low = t.integer(2, 3), t.uniform(1.0, 2.0)
    losses: list[float | None] = [low, None, *[low + 0.1] * (patience - 1)]
    got, *_, want, _ = answers(student, t, losses, patience, 0.0)
    same_answers(t, losses, got, want, "NaN counts as not better. Every comparison with NaN is False, also `>=`.")


@check("stopping", points=2)
def check_best_weights(student, t):
    "restore brings back the weights of the best loss"
    low = t.uniform(1.0, 2.0)
    losses: list[float | None] = [
        low + 0.5,
        *[low + 0.1 * k for k in range(t.integer(1, 2))][::-1],
        low - 0.3,
        *[low + 0.1 * k for k in range(t.integer(2, 3))],
    ]
    _, weight, buffer, written, _, kept = answers(student, t, losses, 5, 0.0)
    last = len(losses) - 1
    numbers = {name: t.number(value, "the {name} after restore", name=name) for name, value in (("weight", weight), ("buffer", buffer))}
    other = (
        "restore changes nothing in the model that EarlyStopping was given: an assignment such as self.model = ... only names another model. "
        "Load the kept weights into it, with load_state_dict"
    )
    t.that(written is not False or numbers["weight"] != last, other)
    no_buffers = "after restore the weight is right, and the buffer is that of the last call: parameters() has no buffers. Keep model.state_dict(), which has both"
    t.that(not (numbers["weight"] == kept and numbers["buffer"] == last), no_buffers)
    for name, number in numbers.items():
        t.that(
            number != last,
            "after restore the {name} is that of the last call: state_dict() holds references to the tensors, which the training changes. Keep copies",
            name=name,
        )
        message = "after restore the {name} is that of call {got:g}, and the best loss came in call {want}"
        t.that(bool(number == kept), message, name=name, got=number, want=kept)


# -- 10 · resume


def run_of(student, t, stop_in: int, ahead: int, at_end: bool = False) -> dict[str, Any]:
    """Run three epochs, and again with a stop in epoch ``stop_in``, ``at_end`` before its last step; return the steps of both runs."""
    batch, full = t.integer(3, 5), t.integer(4, 6)
    size, seed = batch * full + t.integer(1, batch - 1), t.integer(1, 10**6)
    per_epoch = full + 1
    stop = (stop_in + 1) * per_epoch - 1 if at_end else stop_in * per_epoch + t.integer(1, per_epoch - 2 - ahead)
    case = {"size": size, "batch": batch, "seed": seed, "steps": 3 * per_epoch, "stop": stop, "ahead": ahead, "common": t.integer(1, 10**6)}
    whole, before, after = t.items(readable(t, student.run(trained, **case)), 3, "the result")
    message = "three epochs of {size} images in batches of {batch} have {want} steps, not {got}: is there an epoch after the first one, with an incomplete last batch?"
    t.that(len(whole) == case["steps"], message, size=size, batch=batch, want=case["steps"], got=len(whole))
    return case | {"whole": whole, "before": before, "after": after, "per_epoch": per_epoch}


def readable(t, found: Any) -> Any:
    """Check that torch.load reads the state."""
    if isinstance(found, dict):
        safe = {"Tensor", "int", "bool", "float", "str", "list", "tuple", "dict"}
        unsafe = ", ".join(f"{key!r} is a {kind}" for key, kind in found.items() if kind not in safe) or "one of its values"
        message = "torch.load cannot read the state safely ({unsafe}): it holds integers and tensors only. For a generator, keep generator.get_state(), which is a tensor"
        t.that(False, message, unsafe=unsafe)
    return found


def images(steps: list[Any]) -> list[list[int]]:
    return [step[0] for step in steps]


@check("resume", points=2)
def check_epochs(student, t):
    "Each epoch has every image once, in a new order"
    found = run_of(student, t, 1, 0)
    size, batch, per_epoch = found["size"], found["batch"], found["per_epoch"]
    orders = [images(found["whole"][k * per_epoch : (k + 1) * per_epoch]) for k in range(3)]
    for epoch, batches in enumerate(orders):
        flat = list(itertools.chain(*batches))
        missing = size - len(set(flat))
        t.that(
            sorted(flat) == list(range(size)),
            "epoch {epoch} lacks {missing} of {size} images, or has some twice",
            epoch=epoch,
            missing=missing,
            size=size,
        )
        sizes = [len(indices) for indices in batches]
        t.that(
            all(each == batch for each in sizes[:-1]),
            "the batches of epoch {epoch} have {sizes} images, expected {batch}",
            epoch=epoch,
            sizes=sizes,
            batch=batch,
        )
    t.that(orders[0] != orders[1] != orders[2] != orders[0], "two epochs have the same order: it depends on the number of the epoch")
    t.that(list(itertools.chain(*orders[0])) != list(range(size)), "the order is not random")
    kinds = sorted({kind for step in found["whole"] for kind in step[3]})
    arrays = "the iterator yields {kinds}: a batch is a list of Python integers, .tolist(). Not every data set takes a tensor or an array as an index"
    t.that(kinds == ["int", "list"], arrays, kinds=kinds)
    next_seed = {"size": size, "batch": batch, "seed": found["seed"] + 1, "steps": per_epoch, "stop": 1, "ahead": 0, "common": 1}
    other = t.items(student.run(trained, **next_seed), 3, "the result")[0]
    t.that(images(other) != orders[0], "two seeds give the same order")
    t.that(
        images(other) not in orders,
        "an epoch has the order of the next seed's first one: seed + epoch mixes them. Use, for example, 1_000_003 * seed + epoch",
    )


def same_images(t, found: dict[str, Any], lesson: str) -> None:
    """Check that the resumed run sees the images of the uninterrupted one."""
    stop, per_epoch = found["stop"], found["per_epoch"]
    want, got = images(found["whole"][stop:]), images(found["after"])
    t.that(
        images(found["before"]) == images(found["whole"][:stop]),
        "two runs with the same seed see other images: the order depends on more than seed and epoch",
    )
    begin = stop // per_epoch * per_epoch
    again, first = images(found["whole"][begin : begin + 1]), images(found["whole"][:1])
    t.that(got[:1] != again, "the resumed run begins the epoch again: the state lacks the number of steps, or does not restore it")
    t.that(got[:1] != first, "the resumed run begins with the first epoch: the state lacks the epoch, or does not restore it")
    where = next((k for k, (mine, right) in enumerate(zip(got, want)) if mine != right), min(len(got), len(want)))
    t.that(got == want, lesson, stop=stop, step=stop + where, ahead=found["ahead"])


@check("resume", points=1)
def check_global(student, t):
    "The global random numbers of the training are left alone"
    found = run_of(student, t, 1, 0)
    common = found["common"]
    of_torch, of_numpy, of_python = torch.Generator().manual_seed(common), np.random.RandomState(common), random.Random(common)
    lesson = (
        "the order changes the global generator of {name}, from which the training draws too (dropout): it would draw the same numbers in "
        "every epoch, or others than without your class. Use an own generator: torch.Generator().manual_seed(...)"
    )
    for step in found["whole"]:
        want = [torch.rand((), generator=of_torch).item(), float(of_numpy.random()), of_python.random()]
        for name, mine, right in zip(("PyTorch", "NumPy", "Python"), t.items(step[2], 3, "the numbers"), want):
            t.that(mine == right, lesson, name=name)


@check("resume", points=2)
def check_resumed(student, t):
    "A resumed run sees the images that it would have seen"
    same_images(
        t,
        run_of(student, t, 1, 0),
        "a run that stops after step {stop} sees other images from step {step} on: the order depends on seed and epoch only",
    )


@check("resume", points=2)
def check_prefetched(student, t):
    "Batches that were only prefetched are not lost"
    for ahead in (1, 2):
        lesson = (
            "with {ahead} batches in the queue of the workers, a run that stops after step {stop} sees other images from step {step} on. "
            "Count the steps of the training (step_done), not the batches that the sampler has given out"
        )
        same_images(t, run_of(student, t, 1, ahead), lesson)


@check("resume", points=1)
def check_end_of_epoch(student, t):
    "An epoch ends with its last step, not with its last batch"
    found = run_of(student, t, 1, 2, at_end=True)
    lesson = (
        "a run that stops after step {stop}, one step before the end of an epoch, sees other images from step {step} on. The iterator had ended, because {ahead} batches "
        "were in the queue of the workers, and the training had not: begin the next epoch in step_done, after the last step"
    )
    want, size, per_epoch = found["whole"], found["size"], found["per_epoch"]
    for epoch in range(3):
        flat = list(itertools.chain(*images(want[epoch * per_epoch : (epoch + 1) * per_epoch])))
        message = "with {ahead} batches in the queue of the workers, epoch {epoch} lacks {missing} of {size} images. Begin the next epoch in step_done, after the last step"
        missing = size - len(set(flat))
        t.that(sorted(flat) == list(range(size)), message, ahead=2, epoch=epoch, missing=missing, size=size)
    same_images(t, found, lesson)


@check("resume", points=1)
def check_augmentation(student, t):
    "A resumed run draws the random numbers that it would have drawn"
    found = run_of(student, t, 1, 0)
    numbers = [step[1] for step in found["whole"]]
    again = [step[1] for step in found["after"]]
    t.that(len({str(pair) for pair in numbers}) == len(numbers), "not tested yet: the generator draws the same numbers in every step")
    seeded = torch.rand(2, generator=torch.Generator().manual_seed(found["seed"])).tolist()
    message = "the first random numbers are not those of torch.Generator().manual_seed({seed}): the generator has another seed or none, or the order draws from it"
    t.that(numbers[0] == seeded, message, seed=found["seed"])
    message = "the resumed run draws the random numbers of the first steps again: the state lacks that of the generator (get_state), or does not restore it"
    t.that(again[:1] != numbers[:1], message)
    t.that(again == numbers[found["stop"] :], "the resumed run draws other random numbers than the uninterrupted one")
