"""The visible checks of what goes by samples: who sees which, a metric over all of them, their mean and variance."""

from __future__ import annotations

import torch
from torch import Tensor

from dlo_lib.grading.contract import check

from .scenarios import accuracies, moments

# -- 6 · sampler


def epoch_of(student, t, length: int, world: int, epoch: int, seed: int) -> list[list[int]]:
    """The samples of every rank, each a list of whole numbers."""
    found = []
    for rank in range(world):
        got = student.rank_samples(length, rank, world, epoch, seed)
        good = type(got) is list and all(type(i) is int and 0 <= i < length for i in got)
        t.that(
            good,
            "rank_samples({length}, {rank}, {world}, ...) should be a list of numbers below {length}",
            length=length,
            rank=rank,
            world=world,
        )
        found.append(got)
    return found


@check("sampler", points=2)
def check_everyone_once(student, t):
    "Every sample is seen, all ranks see equally many, only a few twice"
    for world in (1, 2, 3, 4):
        length = world * t.integer(5, 9) + t.integer(0, world - 1)
        got = epoch_of(student, t, length, world, epoch=t.integer(0, 5), seed=t.integer(0, 9))
        counts = [len(own) for own in got]
        t.that(len(set(counts)) == 1, "the ranks see {counts} samples: those with fewer steps leave the others waiting", counts=counts)
        seen = [i for own in got for i in own]
        missing = sorted(set(range(length)) - set(seen))
        t.that(not missing, "of {length} samples on {world} ranks nobody sees {missing}", length=length, world=world, missing=missing)
        t.that(
            len(seen) - length < world,
            "{extra} samples are seen twice, {length} samples on {world} ranks: do all ranks use the same permutation, and different parts of it?",
            extra=len(seen) - length,
            length=length,
            world=world,
        )


@check("sampler", points=1)
def check_shuffled(student, t):
    "A random order, another one in each epoch and for each seed"
    length, world, seed = t.integer(40, 60), 2, t.integer(0, 9)
    first = epoch_of(student, t, length, world, 0, seed)
    t.that(first == epoch_of(student, t, length, world, 0, seed), "the same epoch asked twice gives two orders: seed your generator")
    t.that(any(own != sorted(own) for own in first), "the samples come in their order: shuffle them")
    t.that(set(first[0]) != set(epoch_of(student, t, length, world, 1, seed)[0]), "rank 0 sees the same samples in epochs 0 and 1")
    t.that(first != epoch_of(student, t, length, world, 0, seed + 1), "another seed gives the same order")


# -- 7 · metrics


def predictions(t, counts: list[int]) -> tuple[list[dict], float]:
    """Logits and labels of each rank, with rates that differ, and the accuracy of all of them."""
    classes, parts, right = t.integer(3, 5), [], 0
    for rank, count in enumerate(counts):
        logits = t.normal(count, classes)
        labels = logits.argmax(1)
        wrong = round(count * (0.2 + 0.5 * (rank % 2)))
        labels[:wrong] = (labels[:wrong] + 1) % classes
        right += count - wrong
        parts.append({"logits": logits, "labels": labels})
    return parts, right / sum(counts)


@check("metrics", points=1, seconds=20)
def check_rate(student, t):
    "The accuracy of all samples, also when ranks have unequal numbers"
    for counts in ([t.integer(5, 9)], [t.integer(20, 30), t.integer(3, 6)], [t.integer(5, 9), t.integer(15, 20), t.integer(1, 3)]):
        parts, want = predictions(t, counts)
        rates = [float((part["logits"].argmax(1) == part["labels"]).double().mean()) for part in parts]
        mean = sum(rates) / len(rates)
        for rank, got in enumerate(student.ranks(accuracies, parts).results):
            same = len(counts) > 1 and type(got) is float and abs(got - mean) < 1e-5 < abs(want - mean)
            t.that(
                not same,
                "that is the mean of the ranks' rates: a rank with {few} samples counts as much as one with {many}",
                few=min(counts),
                many=max(counts),
            )
            t.close(got, want, "the accuracy on rank {rank}, samples on the ranks: {counts},", rank=rank, counts=counts, atol=1e-5)


@check("metrics", points=1, seconds=20)
def check_one_message(student, t):
    "One all-reduce of two numbers"
    parts, want = predictions(t, [t.integer(5, 9)] * 2)
    run = student.ranks(accuracies, parts)
    for rank, got in enumerate(run.results):
        t.close(got, want, "the accuracy on rank {rank}", rank=rank, atol=1e-5)
        calls = run.calls(rank)
        t.that(len(calls) == 1, "{count} messages: put the two counts into one tensor", count=len(calls))
        t.that(run.bytes(rank) <= 16, "{got} bytes were sent: two numbers are enough", got=run.bytes(rank))


# -- 8 · moments


def moments_case(t, counts: list[int], shift: float = 0.0) -> tuple[list[dict], Tensor]:
    """Samples of each rank, whose means differ; and all of them, in fp64."""
    channels = t.integer(2, 4)
    parts = [t.normal(count, channels) * (1 + rank) + 2.0 * rank + shift for rank, count in enumerate(counts)]
    return [{"x": x} for x in parts], torch.cat(parts).double()


def same_moments(t, run, samples: Tensor, counts: list[int], within: float) -> None:
    """Mean and variance of all ranks are those of all samples."""
    for rank, (mean, var) in enumerate(run.results):
        where = {"rank": rank, "counts": counts}
        t.close(mean, samples.mean(0).float(), "the mean on rank {rank}, samples on the ranks: {counts},", rtol=1e-5, **where)
        t.close(
            var, samples.var(0, correction=0).float(), "the variance on rank {rank}, samples on the ranks: {counts},", rtol=within, **where
        )


@check("moments", points=2, seconds=20)
def check_moments(student, t):
    "Mean and variance of all samples, also when ranks have unequal numbers"
    for counts in ([t.integer(4, 9)], [t.integer(4, 9), t.integer(10, 15)], [t.integer(4, 9), 1, t.integer(10, 15)]):
        parts, samples = moments_case(t, counts)
        same_moments(t, student.ranks(moments, parts), samples, counts, within=1e-4)


@check("moments", points=1, seconds=20)
def check_samples_stay(student, t):
    "A few numbers per channel travel, not the samples"
    own, samples = moments_case(t, [60])
    parts, samples = own * 2, samples.repeat(2, 1)
    run = student.ranks(moments, parts)
    same_moments(t, run, samples, [60, 60], within=1e-4)
    most = 8 * 4 * (2 * samples.shape[1] + 1)
    for rank in range(run.world):
        got = run.bytes(rank)
        t.that(got <= most, "rank {rank} passed {got} bytes: sums of each channel are enough", rank=rank, got=got)
