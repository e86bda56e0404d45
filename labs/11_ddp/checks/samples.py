"""The visible checks of the sampler, of the metric, and of mean and variance over all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import check
from dlo_lib.labkit.compare import every_rank, wrong_if
from dlo_lib.labkit.traffic import passes_at_most, uses_what_arrives

from .scenarios import accuracies, moments, random_numbers, samples

# -- 6 · sampler


def epoch_of(student, t, length: int, world: int, epoch: int, seed: int) -> list[list[int]]:
    """The samples of every rank, each a list of integers."""
    own, found = student.is_own("rank_samples"), []
    refused = ["torch.utils.data.DistributedSampler"] if own else []
    case = {"length": length, "world": world, "epoch": epoch, "seed": seed}
    of_ranks = student.run(samples, **case, refused=refused)
    for rank, got in enumerate(t.items(of_ranks, world, "the samples of all ranks")):
        good = type(got) is list and all(type(i) is int and 0 <= i < length for i in got)
        message = (
            "rank_samples({length}, {rank}, {world}, ...) should be a list of integers from 0 to {length} - 1"
        )
        t.that(good, message, length=length, rank=rank, world=world)
        found.append(got)
    return found


@check("sampler", points=2)
def check_everyone_once(student, t):
    "Every sample is seen, all ranks see the same number, few are repeated"
    for world in (1, 2, 3, t.integer(4, 12)):
        length = world * t.integer(15, 25) + t.integer(0, world - 1)
        got = epoch_of(student, t, length, world, epoch=t.integer(0, 5), seed=t.integer(0, 9))
        counts = [len(own) for own in got]
        message = "the ranks see {counts} samples: ranks with more steps wait forever for the others"
        t.that(len(set(counts)) == 1, message, counts=counts)
        seen, where = [i for own in got for i in own], {"length": length, "world": world}
        message = "all ranks see the same samples: a rank's part depends on rank"
        t.that(world == 1 or any(own != got[0] for own in got), message)
        missing = sorted(set(range(length)) - set(seen))
        message = (
            "with length={length} and world={world}, {twice} samples are seen by two ranks or more, and "
            "others by none: do all ranks draw the same permutation? Its seed depends on seed and epoch, "
            "not on rank"
        )
        twice = len(seen) - len(set(seen))
        t.that(not missing or twice < world, message, **where, twice=twice)
        message = "no rank sees the samples {missing}, with length={length} and world={world}"
        t.that(not missing, message, **where, missing=missing)
        message = (
            "repeated samples: {extra}, with length={length} and world={world}: do all ranks use the same "
            "permutation, and different parts of it?"
        )
        extra = len(seen) - length
        t.that(extra < world, message, **where, extra=extra)


def two_ranks_share(student, t) -> None:
    """In two ordinary cases each of two ranks gets half of the samples."""
    message = "not tested yet: two ranks do not get half of the samples each, see the first check"
    for length in (2 * t.integer(5, 8), 2 * t.integer(9, 12)):
        got = epoch_of(student, t, length, 2, epoch=t.integer(0, 5), seed=t.integer(0, 9))
        t.that([2 * len(own) for own in got] == [length, length], message)


@check("sampler", points=1)
def check_fewer_than_ranks(student, t):
    "Fewer samples than ranks: each rank has one"
    two_ranks_share(student, t)
    length, world = t.integer(2, 3), t.integer(7, 8)
    counts = [len(own) for own in epoch_of(student, t, length, world, 0, t.integer(0, 9))]
    message = (
        "with length={length} and world={world} the ranks see {counts} samples: every rank needs one, so "
        "repeat the samples as often as needed"
    )
    t.that(all(count == 1 for count in counts), message, length=length, world=world, counts=counts)


@check("sampler", points=1)
def check_shuffled(student, t):
    "The order is random and changes with the epoch and the seed"
    length, world, seed = t.integer(40, 60), 2, t.integer(0, 9)
    first = epoch_of(student, t, length, world, 0, seed)
    message = "two calls for the same epoch return different orders: seed your generator"
    t.that(first == epoch_of(student, t, length, world, 0, seed), message)
    t.that(any(own != sorted(own) for own in first), "the samples are in ascending order: shuffle them")
    message = "rank 0 sees the same samples in epochs 0 and 1"
    t.that(set(first[0]) != set(epoch_of(student, t, length, world, 1, seed)[0]), message)
    t.that(first != epoch_of(student, t, length, world, 0, seed + 1), "a different seed gives the same order")


@check("sampler", points=1, seconds=20)
def check_own_generator(student, t):
    "The global random generator is unchanged"
    two_ranks_share(student, t)
    inputs = {"length": t.integer(5, 20), "seed": t.integer(0, 999)}
    for want, got in student.ranks(random_numbers, [inputs]).results:
        message = "after rank_samples, torch.rand returns other numbers: use a separate torch.Generator"
        t.that(bool(torch.equal(got, want)), message)


# -- 7 · metrics


def predictions(t, counts: list[int]) -> tuple[list[dict], float]:
    """Logits and labels of each rank, with different accuracies, and the accuracy over all of them."""
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
    "The accuracy over all samples, also when ranks have unequal numbers"
    many = [t.integer(5, 9), t.integer(15, 20), t.integer(1, 3), t.integer(8, 12), t.integer(4, 7)]
    many = many[: t.integer(3, 5)]
    for counts in ([t.integer(5, 9)], [t.integer(20, 30), t.integer(3, 6)], many):
        parts, want = predictions(t, counts)
        rates = [float((part["logits"].argmax(1) == part["labels"]).double().mean()) for part in parts]
        mean = sum(rates) / len(rates)
        for rank, got in enumerate(student.ranks(accuracies, parts).results):
            same = len(counts) > 1 and type(got) is float and abs(got - mean) < 1e-5 < abs(want - mean)
            message = (
                "the result is the mean of the ranks' accuracies: a rank with few samples ({few}) counts as "
                "much as one with {many}"
            )
            t.that(not same, message, few=min(counts), many=max(counts))
            what = "the accuracy on rank {rank}, samples on the ranks: {counts},"
            t.close(got, want, what, rank=rank, counts=counts, atol=1e-5)


@check("metrics", points=1, seconds=20)
def check_one_message(student, t):
    "One all-reduce of two numbers"
    counts = [t.integer(5, 9)] * t.integer(3, 5)
    parts, want = predictions(t, counts)
    run = student.ranks(accuracies, parts)
    every_rank(t, run, want, "the accuracy on rank {rank}", atol=1e-5)
    message = "calls: {count}, bytes: {got}. Put the two counts into one tensor and all-reduce it once"
    passes_at_most(t, run, 16, message, calls=1)
    uses_what_arrives(t, run, rank=t.integer(0, len(counts) - 1))


@check("metrics", points=1, seconds=20)
def check_empty_rank(student, t):
    "A rank without samples"
    count = t.integer(6, 11)
    parts, want = predictions(t, t.shuffled([0, count, count]))
    for rank, got in enumerate(student.ranks(accuracies, parts).results):
        message = (
            "the accuracy is not a number where one rank has no sample: its own accuracy is 0 / 0. Sum the "
            "counts over the ranks, then divide"
        )
        t.that(type(got) is not float or got == got, message)
        t.close(got, want, "the accuracy on rank {rank} where one rank has no sample", rank=rank, atol=1e-5)


# -- 10 · moments


def moments_case(t, counts: list[int], shift: float = 0.0) -> tuple[list[dict], Tensor]:
    """Samples of each rank, whose means differ; and all of them, in fp64."""
    channels = t.integer(2, 4)
    parts = [t.normal(count, channels) * (1 + rank) + 2.0 * rank + shift for rank, count in enumerate(counts)]
    return [{"x": x} for x in parts], torch.cat(parts).double()


OF_MEANS = "the mean on rank {rank} is the mean of the ranks' means: weight each rank by its samples"
WITHOUT_DISTANCES = (
    "the variance on rank {rank} is the mean of the ranks' variances: it lacks the distances between the "
    "ranks' means"
)
ONE_LESS = "the variance on rank {rank} divides by the number of samples - 1: divide by that of samples"


def same_moments(t, run, samples: Tensor, counts: list[int], within: float) -> None:
    """Mean and variance of all ranks are those of all samples."""
    parts, size = samples.split(counts), len(samples)
    means = [part.mean(0) if len(part) else torch.zeros_like(samples[0]) for part in parts]
    inside = [(part - mean).square().sum(0) for part, mean in zip(parts, means)]
    for rank, (mean, var) in enumerate(run.results):
        where = {"rank": rank, "counts": counts}
        for name, value in (("mean", mean), ("variance", var)):
            what, shape = "the {name} on rank {rank}", samples[0].shape
            t.tensor(value, what, shape=shape, dtype=torch.float32, name=name, rank=rank)
            message = (
                "the {name} on rank {rank} is not a number: a rank has no sample, and 0 / 0 there spreads "
                "to all ranks (samples: {counts})"
            )
            t.that(bool(0 not in counts or torch.isfinite(value).all()), message, name=name, **where)
        wrong_if(t, mean.double(), samples.mean(0), {OF_MEANS: sum(means) / len(means)}, rtol=1e-4, **where)
        mistakes = {WITHOUT_DISTANCES: sum(inside) / size, ONE_LESS: samples.var(0)}
        wrong_if(t, var.double(), samples.var(0, correction=0), mistakes, rtol=1e-4, **where)
        what = "the mean on rank {rank}, samples on the ranks: {counts},"
        t.close(mean, samples.mean(0).float(), what, rtol=1e-5, **where)
        what = "the variance on rank {rank}, samples on the ranks: {counts},"
        t.close(var, samples.var(0, correction=0).float(), what, rtol=within, **where)


@check("moments", points=2, seconds=20)
def check_moments(student, t):
    "Mean and variance of all samples, also when ranks have unequal numbers"
    many = [t.integer(4, 9), 1, t.integer(10, 15), t.integer(2, 5), t.integer(3, 6)][: t.integer(3, 5)]
    for counts in ([t.integer(4, 9)], [t.integer(4, 9), t.integer(10, 15)], many):
        parts, samples = moments_case(t, counts)
        same_moments(t, student.ranks(moments, parts), samples, counts, within=1e-4)


@check("moments", points=1, seconds=20)
def check_samples_stay(student, t):
    "Only a few numbers per channel are sent, not the samples"
    own, samples = moments_case(t, [60])
    world = t.integer(3, 4)
    parts, samples = own * world, samples.repeat(world, 1)
    run = student.ranks(moments, parts)
    same_moments(t, run, samples, [60] * world, within=1e-4)
    most = 8 * 4 * (2 * samples.shape[1] + 1)
    passes_at_most(t, run, most, "rank {rank} passed {got} bytes: sums of each channel are enough")
    uses_what_arrives(t, run, rank=t.integer(0, world - 1))


@check("moments", points=1, seconds=20)
def check_large_mean(student, t):
    "A mean that is much larger than the deviation"
    counts = [t.integer(20, 30)]
    parts, samples = moments_case(t, counts, shift=1e4)
    run = student.ranks(moments, parts)
    want = samples.var(0, correction=0)
    for rank, (_, var) in enumerate(run.results):
        var = t.tensor(var, "the variance on rank {rank}", shape=want.shape, rank=rank)
        error = float((var.double() - want).abs().max())
        message = (
            "mean 10,000, deviation 1: the variance on rank {rank} is off by {error:.2g}. E[x²] - E[x]² "
            "loses its digits in fp32: sum the squares of x - mean"
        )
        t.that(error < 0.05 or error > 1e3, message, error=error, rank=rank)
    same_moments(t, run, samples, counts, within=1e-2)


@check("moments", points=1, seconds=20)
def check_rank_without_samples(student, t):
    "A rank without samples does not change the result"
    counts = t.shuffled([0, 0, t.integer(5, 8)])
    parts, samples = moments_case(t, counts)
    same_moments(t, student.ranks(moments, parts), samples, counts, within=1e-4)
