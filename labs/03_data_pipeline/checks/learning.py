"""The visible checks of what the data do to a training: scaling, early stopping, and the resume within an
epoch."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import check
from dlo_lib.labkit.compare import same, wrong_if

from .scenarios import orders, resumed, saved, trained, watched
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
    message = "This is the variance: keep the sum of the squared distances, which can be added."
    for dtype in (torch.float32, torch.float64):
        features = t.integer(2, 4)
        rows = t.normal(t.integer(5, 9), features, dtype=dtype) * 2 + 1
        count, mean, squares = parts(t, student.statistics(rows), "statistics(chunk)", features)
        _, right_mean, right_squares = of_rows(rows)
        t.equal(count, len(rows), "the count")
        t.close(mean, right_mean, "the mean")
        variance = {message: right_squares / len(rows)}
        same(t, squares, right_squares, "the sum of the squared distances", variance)


@check("scaling", points=1)
def check_merged(student, t):
    "The statistics of two parts together"
    equally = "The mean of the two means weights both parts equally: a larger part counts more."
    added = "The squares are only added: the distance between the two means is missing, d² n_a n_b / n."
    for sizes in ((t.integer(3, 5), t.integer(8, 12)), (t.integer(8, 12), 1)):
        features = t.integer(2, 4)
        rows = [t.normal(size, features, dtype=torch.float64) for size in sizes]
        rows[1] += 3
        a, b = map(of_rows, rows)
        count, mean, squares = parts(t, student.merged(a, b), "merged(a, b)", features)
        _, right_mean, right_squares = of_rows(torch.cat(rows))
        t.equal(count, sum(sizes), "the count of both parts")
        same(t, mean, right_mean, "the mean of both parts", {equally: (a[1] + b[1]) / 2})
        what = "the sum of the squared distances of both parts"
        same(t, squares, right_squares, what, {added: a[2] + b[2]})


@check("scaling", points=1)
def check_large_mean(student, t):
    "A mean that is far larger than the differences"
    rows = t.normal(t.integer(40, 60), 3, dtype=torch.float64) + 10.0 ** t.integer(8, 9)
    _, _, squares = parts(t, student.statistics(rows), "statistics(chunk)", 3)
    right = of_rows(rows)[2]
    variance = {"This is the variance, as for the statistics of a chunk.": right / len(rows)}
    wrong_if(t, squares, right, variance, rtol=1e-3)
    off = float((squares / right - 1).abs().max())
    lesson = (
        "with a mean of 1e8 the squares are off by {off:.0%}: the sum of squares minus n times the squared "
        "mean loses its digits. Subtract the mean first"
    )
    t.that(bool(off < 1e-3), lesson, off=off)


def scaled(student, t, chunks: list[Tensor], test: Tensor) -> Tensor:
    got = student.scaled(chunks, test)
    return t.tensor(got, "scaled(train_chunks, test)", shape=test.shape, dtype=test.dtype)


def by(rows: Tensor, test: Tensor, fewer: int = 0, power: float = 0.5) -> Tensor:
    """The test rows, scaled with the statistics of ``rows``; ``fewer`` and ``power`` are mistakes."""
    count, mean, squares = of_rows(rows)
    return ((test.double() - mean) / (squares / (count - fewer)) ** power).to(test.dtype)


@check("scaling", points=2)
def check_training_only(student, t):
    "The test is scaled with the statistics of all training chunks, and of nothing else"
    for dtype in (torch.float32, torch.float64):
        features = t.integer(2, 4)
        chunks = [
            t.normal(t.integer(3, 9), features, dtype=dtype) * t.uniform(0.5, 2) + number
            for number in range(t.integer(3, 4))
        ]
        test = t.normal(t.integer(3, 5), features, dtype=dtype) * 3 + 5
        train = torch.cat(chunks)
        leak, both = by(test, test), by(torch.cat([train, test]), test)
        mistakes = {
            "The statistics are those of the test set. This is a data leak: use the training chunks.": leak,
            "The test set is in the statistics. This is a data leak: use the training chunks only.": both,
            "The statistics are those of the first chunk only.": by(chunks[0], test),
            "The statistics are those of the last chunk only.": by(chunks[-1], test),
            "The variance is divided by n - 1: divide M by n.": by(train, test, fewer=1),
            "The values are divided by the variance: divide by its square root.": by(train, test, power=1),
        }
        got = student.scaled(chunks, test)
        same(t, got, by(train, test), "scaled(train_chunks, test)", mistakes, rtol=1e-5)


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
    lesson = (
        "the constant feature becomes {got:.3g}: its standard deviation is 0, or what rounding leaves of "
        "it, and the division has no meaning"
    )
    t.that(bool((got[:, 1] == 0).all()), lesson, got=float(got[0, 1]))


@check("scaling", points=1)
def check_threshold(student, t):
    "Constant means s <= 1e-10 |m|, in every unit"
    # The mean of seven times 0.1 is not 0.1 in float64: the means of chunks of other lengths differ from it.
    chunks = [t.normal(size, 3, dtype=torch.float64) for size in (7, t.integer(3, 5), 7, 11)]
    test = t.normal(4, 3, dtype=torch.float64)
    for chunk in chunks:
        chunk[:, 1] = 0.1
    for rows in (*chunks, test):
        rows[:, 2] *= 1e-13
    got, right = scaled(student, t, chunks, test), by(torch.cat(chunks), test)
    t.close(got[:, 0], right[:, 0], "a feature that is not constant")
    lesson = (
        "a feature that is 0.1 in every row becomes {got:.3g}: rounding leaves an s that is not 0. Compare "
        "s with 1e-10 |m|, not with 0"
    )
    t.that(bool((got[:, 1] == 0).all()), lesson, got=float(got[0, 1]))
    lesson = (
        "a feature in a unit in which its values are about 1e-13 becomes 0, but it is not constant. Compare "
        "s with 1e-10 |m|, not with a fixed number"
    )
    t.that(bool((got[:, 2] != 0).any()), lesson)
    t.close(got[:, 2], right[:, 2], "a feature of small numbers")


# -- 9 · stopping


Losses = list[float | None]


"""The validation loss of each call, None for NaN."""


def answers(student, t, losses: Losses, patience: int, min_delta: float = 0.0) -> tuple[list[Any], list[Any]]:
    """Return the answers of ``stops``, and what ``restore`` brings back."""
    result = student.run(watched, losses=losses, patience=patience, min_delta=min_delta)
    found, *restored = t.items(result, 4, "the result")
    return t.items(found, len(losses), "the answers of stops"), restored


def same_answers(
    student, t, losses: Losses, patience: int, lesson: str, min_delta: float = 0.0, /, **values: object
) -> None:
    """``stops`` gives the right answer after each loss."""
    got, _ = answers(student, t, losses, patience, min_delta)
    want, _ = stopped(losses, patience, min_delta)
    for number, (mine, right) in enumerate(zip(got, want)):
        shown = ", ".join("NaN" if loss is None else f"{loss:.3g}" for loss in losses[: number + 1])
        message = "after the losses {shown} stops returns {got}, expected {want}. " + lesson
        t.that(mine is right, message, shown=shown, got=mine, want=right, **values)


@check("stopping", points=2)
def check_patience(student, t):
    "Stop after `patience` losses in a row that are not better"
    in_a_row = (
        "With patience {patience}, count the losses in a row that are not below the *best* one; a better "
        "one begins a new count."
    )
    or_more = (
        "The answer stays True until a loss is better: with patience {patience}, that many losses in a row "
        "*or more* were not."
    )
    for _ in range(2):
        patience, low = t.integer(2, 4), t.uniform(1.0, 1.5)
        falling = [low + 1.5 - 0.1 * k for k in range(patience - 1)]  # all above the best
        losses = [low + 2, low + 1, *falling, low, *falling, low + 0.05]
        same_answers(student, t, losses, patience, in_a_row, patience=patience)
        losses = [low, *falling, low + 0.05, low + 0.2, low + 0.1, low - 0.1]
        same_answers(student, t, losses, patience, or_more, patience=patience)


@check("stopping", points=1)
def check_min_delta(student, t):
    "An improvement of min_delta or less does not count"
    patience, delta, low = t.integer(2, 4), t.uniform(0.1, 0.2), t.uniform(1.0, 2.0)
    lesson = (
        "A loss is better if it is below best - min_delta (here {delta:.3g}), and best is the last loss "
        "that was better."
    )
    shares = [0.0, 0.6, *(1.2 + 0.6 * k for k in range(patience))]
    creeping = [low - share * delta for share in shares]
    flat = [low] + [low - 0.5 * delta] * patience
    for losses in (creeping, flat):
        same_answers(student, t, losses, patience, lesson, delta, delta=delta)
    lesson = (
        "A loss is better if it is *below* best - min_delta (here {best:.3g} - {delta:.3g}); one that is "
        "equal to it is not better."
    )
    for delta in (0.0, t.integer(1, 8) / 64):  # multiples of 1/64, so the difference is exact
        low = t.integer(64, 128) / 64
        losses = [low] + [low - delta] * patience
        same_answers(student, t, losses, patience, lesson, delta, best=low, delta=delta)


@check("stopping", points=1)
def check_level(student, t):
    "min_delta is a difference, whatever the level of the losses"
    share = (
        "min_delta is taken as a share of the best loss: a loss is better if it is below best - min_delta, "
        "a difference, and not below best * (1 - min_delta). The two agree for losses near 1 only"
    )
    lesson = (
        "A loss is better if it is below best - min_delta, here {delta:.3g}, whatever the level of losses."
    )
    patience = t.integer(2, 4)
    large, small, negative = t.uniform(20.0, 80.0), t.uniform(0.02, 0.05), -t.uniform(20.0, 80.0)
    delta, tiny = t.uniform(0.1, 0.4), t.uniform(0.005, 0.015)
    for losses, min_delta in (
        ([large, large - 1.5 * delta, *[large] * patience], delta),
        ([small, *[small - 0.5 * tiny] * patience], tiny),
        ([negative, *[negative + 0.5 * delta] * patience], delta),
    ):
        got, _ = answers(student, t, losses, patience, min_delta)
        want, _ = stopped(losses, patience, min_delta)
        for absolute in (False, True):
            mistaken = stopped_by_share(losses, patience, min_delta, absolute)
            t.that(mistaken == want or got != mistaken, share)
        same_answers(student, t, losses, patience, lesson, min_delta, delta=min_delta)


@check("stopping", points=1)
def check_nan(student, t):
    "NaN is never better"
    patience, low = t.integer(2, 3), t.uniform(1.0, 2.0)
    lesson = "NaN counts as not better. Every comparison with NaN is False, also `>=`."
    same_answers(student, t, [low, None, *[low + 0.1] * (patience - 1)], patience, lesson)


@check("stopping", points=2)
def check_best_weights(student, t):
    "restore brings back the weights of the best loss"
    low = t.uniform(1.0, 2.0)
    above = [low + 0.1 * k for k in range(3)]
    losses = [low + 0.5, *above[: t.integer(1, 2)][::-1], low - 0.3, *above[: t.integer(2, 3)]]
    _, (weight, buffer, written) = answers(student, t, losses, 5)
    _, kept = stopped(losses, 5, 0.0)
    last = len(losses) - 1
    t.number(weight, "the weight after restore")
    t.number(buffer, "the buffer after restore")
    message = (
        "restore changes nothing in the model that EarlyStopping was given: an assignment such as "
        "self.model = ... only names another model. Load the kept weights into it, with load_state_dict"
    )
    t.that(written is not False or weight != last, message)
    message = (
        "after restore the weight is right, and the buffer is that of the last call: parameters() has no "
        "buffers. Keep model.state_dict(), which has both"
    )
    t.that(not (weight == kept and buffer == last), message)
    for name, number in (("weight", weight), ("buffer", buffer)):
        message = (
            "after restore the {name} is that of the last call: state_dict() holds references to the "
            "tensors, which the training changes. Keep copies"
        )
        t.that(number != last, message, name=name)
        message = "after restore the {name} is that of call {got:g}, and the best loss came in call {want}"
        t.that(bool(number == kept), message, name=name, got=number, want=kept)


# -- 10 · resume


def run_of(
    student, t, stop_in: int, ahead: int, at_end: bool = False, resumes: bool = True
) -> dict[str, Any]:
    """Run three epochs, and again with a stop in epoch ``stop_in``, ``at_end`` before its last step, and a
    resume in another process; return the steps of both runs, without ``resumes`` of the first one."""
    batch, full = t.integer(3, 5), t.integer(4, 6)
    size, seed = batch * full + t.integer(1, batch - 1), t.integer(1, 10**6)
    per_epoch = full + 1
    stop, steps = stop_in * per_epoch + (full if at_end else t.integer(1, full - 1 - ahead)), 3 * per_epoch
    case, common = {"size": size, "batch": batch, "seed": seed, "ahead": ahead}, t.integer(1, 10**6)
    whole = student.run(trained, **case, steps=steps, common=common)
    message = (
        "three epochs of {size} images in batches of {batch} have {want} steps, not {got}: is there an "
        "epoch after the first one, with an incomplete last batch?"
    )
    got = len(whole) if type(whole) is list else 0
    t.that(got == steps, message, size=size, batch=batch, want=steps, got=got)
    epochs = [images(whole[begin : begin + per_epoch]) for begin in range(0, steps, per_epoch)]
    found = case | {"steps": steps, "stop": stop, "common": common, "whole": whole, "epochs": epochs}
    if not resumes:
        return found
    result = readable(t, student.fresh(saved, **case, steps=stop, common=common + 1))
    before, file = t.items(result, 2, "the result")
    t.tensor(file, "the file", dtype=torch.uint8)
    after = student.fresh(resumed, file=file, **case, steps=steps - stop, common=common + 2)
    return found | {"before": before, "after": after}


def readable(t, found: Any) -> Any:
    """Check that torch.load reads the state."""
    if isinstance(found, dict):
        safe = {"Tensor", "int", "bool", "float", "str", "list", "tuple", "dict"}
        unsafe = ", ".join(f"{key!r} is a {kind}" for key, kind in found.items() if kind not in safe)
        message = (
            "torch.load cannot read the state safely ({unsafe}): it holds integers and tensors only. For a "
            "generator, keep generator.get_state(), which is a tensor"
        )
        t.that(False, message, unsafe=unsafe or "one of its values")
    return found


def images(steps: list[Any]) -> list[list[int]]:
    return [step[0] for step in steps]


def every_image_once(t, found: dict[str, Any], message: str) -> None:
    """Check that each epoch of the uninterrupted run has every image once."""
    size = found["size"]
    for epoch, batches in enumerate(found["epochs"]):
        flat = sorted(itertools.chain(*batches))
        values = {"epoch": epoch, "missing": size - len(set(flat)), "size": size, "ahead": found["ahead"]}
        t.that(flat == list(range(size)), message, **values)


@check("resume", points=2)
def check_epochs(student, t):
    "Each epoch has every image once, in a new order"
    found = run_of(student, t, 1, 0, resumes=False)
    size, batch, epochs = found["size"], found["batch"], found["epochs"]
    every_image_once(t, found, "epoch {epoch} lacks {missing} of {size} images, or has some twice")
    for epoch, batches in enumerate(epochs):
        sizes = [len(indices) for indices in batches]
        message = "the batches of epoch {epoch} have {sizes} images, expected {batch}"
        t.that(set(sizes[:-1]) == {batch}, message, epoch=epoch, sizes=sizes, batch=batch)
    message = "two epochs have the same order: it depends on the number of the epoch"
    t.that(epochs[0] != epochs[1] != epochs[2] != epochs[0], message)
    t.that(list(itertools.chain(*epochs[0])) != list(range(size)), "the order is not random")
    kinds = sorted({kind for step in found["whole"] for kind in step[3]})
    message = (
        "the iterator yields {kinds}: a batch is a list of Python integers, .tolist(). Not every data set "
        "takes a tensor or an array as an index"
    )
    t.that(kinds == ["int", "list"], message, kinds=kinds)
    different_seeds(student, t, found)


OFFSETS = (1, 10, 100, 1000)  # between two seeds


def different_seeds(student, t, found: dict[str, Any]) -> None:
    """Check that no epoch has the order of the first epoch of another seed."""
    seeds = [found["seed"], *(found["seed"] + offset for offset in OFFSETS)]
    rows = student.run(
        orders, size=found["size"], batch=found["batch"], seeds=seeds, epochs=[102, 1, 1, 1, 1]
    )
    own, *others = t.items(rows, len(seeds), "the orders")
    own = t.items(own, 102, "the orders of 102 epochs")
    message = (
        "epoch {epoch} has the order of the first epoch of the seed that is {offset} larger: a sum such as "
        "seed + epoch mixes them. Use, for example, 1_000_003 * seed + epoch"
    )
    for offset, (first,) in zip(OFFSETS, (t.items(other, 1, "the order of an epoch") for other in others)):
        t.that(first != own[0], "two seeds give the same order")
        epoch = own.index(first) if first in own else -1
        t.that(epoch < 0, message, epoch=epoch, offset=offset)


def same_images(t, found: dict[str, Any], lesson: str) -> None:
    """Check that the resumed run sees the images of the uninterrupted one."""
    whole, stop, got = images(found["whole"]), found["stop"], images(found["after"])
    message = "two runs with the same seed see other images: the order depends on more than seed and epoch"
    t.that(images(found["before"]) == whole[:stop], message)
    again = found["epochs"][stop * 3 // found["steps"]][:1]
    message = "the resumed run begins the epoch again: the state lacks the steps, or does not restore them"
    t.that(got[:1] != again, message)
    message = "the resumed run begins with the first epoch: the state lacks the epoch, or does not restore it"
    t.that(got[:1] != whole[:1], message)
    want = whole[stop:]
    same_so_far = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(got, want))))
    t.that(got == want, lesson, stop=stop, step=stop + same_so_far, ahead=found["ahead"])


@check("resume", points=1)
def check_global(student, t):
    "The global random numbers of the training are left alone"
    found = run_of(student, t, 1, 0, resumes=False)
    common = found["common"]
    of_torch = torch.Generator().manual_seed(common)
    of_numpy, of_python = np.random.RandomState(common), random.Random(common)
    lesson = (
        "the order changes the global generator of {name}, from which the training draws too (dropout): it "
        "would draw the same numbers in every epoch, or others than without your class. Use an own "
        "generator: torch.Generator().manual_seed(...)"
    )
    for step in found["whole"]:
        numbers = t.items(step[2], 3, "the numbers")
        want = [torch.rand((), generator=of_torch).item(), float(of_numpy.random()), of_python.random()]
        for name, mine, right in zip(("PyTorch", "NumPy", "Python"), numbers, want):
            t.that(mine == right, lesson, name=name)


@check("resume", points=2)
def check_resumed(student, t):
    "A resumed run sees the images that it would have seen"
    lesson = (
        "a run that stops after step {stop} sees other images from step {step} on: the order depends on "
        "seed and epoch only"
    )
    same_images(t, run_of(student, t, 1, 0), lesson)


@check("resume", points=2)
def check_prefetched(student, t):
    "Batches that were only prefetched are not lost"
    lesson = (
        "with {ahead} batches in the queue of the workers, a run that stops after step {stop} sees other "
        "images from step {step} on. Count the steps of the training (step_done), not the batches that the "
        "sampler has given out"
    )
    for ahead in (1, 2):
        same_images(t, run_of(student, t, 1, ahead), lesson)


@check("resume", points=1)
def check_end_of_epoch(student, t):
    "An epoch ends with its last step, not with its last batch"
    found = run_of(student, t, 1, 2, at_end=True)
    message = (
        "with {ahead} batches in the queue of the workers, epoch {epoch} lacks {missing} of {size} images. "
        "Begin the next epoch in step_done, after the last step"
    )
    every_image_once(t, found, message)
    lesson = (
        "a run that stops after step {stop}, one step before the end of an epoch, sees other images from "
        "step {step} on. The iterator had ended, because {ahead} batches were in the queue of the workers, "
        "and the training had not: begin the next epoch in step_done, after the last step"
    )
    same_images(t, found, lesson)


@check("resume", points=1)
def check_augmentation(student, t):
    "A resumed run draws the random numbers that it would have drawn"
    found = run_of(student, t, 1, 0)
    numbers = [step[1] for step in found["whole"]]
    again = [step[1] for step in found["after"]]
    message = "not tested yet: the generator draws the same numbers in every step"
    t.that(len({str(pair) for pair in numbers}) == len(numbers), message)
    seeded = torch.rand(2, generator=torch.Generator().manual_seed(found["seed"])).tolist()
    message = (
        "the first random numbers are not those of torch.Generator().manual_seed({seed}): the generator has "
        "another seed or none, or the order draws from it"
    )
    t.that(numbers[0] == seeded, message, seed=found["seed"])
    message = (
        "the resumed run draws the random numbers of the first steps again: the state lacks that of the "
        "generator (get_state), or does not restore it"
    )
    t.that(again[:1] != numbers[:1], message)
    message = "the resumed run draws other random numbers than the uninterrupted one"
    t.that(again == numbers[found["stop"] :], message)
