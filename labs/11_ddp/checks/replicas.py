"""The visible checks of equal replicas, averages and buckets.

Those of the wrapper are in ``overlap.py``, those of samples and metrics in ``samples.py``.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import Run, check
from dlo_lib.labkit.compare import every_rank, explained, same
from dlo_lib.labkit.traffic import passes_exactly, uses_what_arrives

from .scenarios import averaged, replicated

# -- 1 · replicate


def replicas(student, t, world: int, frozen: bool = False) -> tuple[Run, list[dict]]:
    """The run of ``replicate``, whose results are the state of each rank, and the state before it."""
    shape = (t.integer(2, 5), t.integer(2, 5))
    before = [
        {"weight": t.normal(*shape), "mean": t.normal(shape[0]), "frozen": frozen} for _ in range(world)
    ]
    return student.ranks(replicated, before), before


STILL = "the weight on rank {rank} is still its own: broadcast it from rank 0, in place"
MEAN = "the weight on rank {rank} is the mean over the ranks: every rank should get the values of rank 0"
SUM = "the weight on rank {rank} is the sum over the ranks: every rank should get the values of rank 0"


@check("replicate", points=1, seconds=20)
def check_parameters(student, t):
    "Every rank has the parameters of rank 0"
    for world in (1, 2, t.integer(3, 5)):
        run, before = replicas(student, t, world)
        weights = [own["weight"] for own in before]
        for rank, (weight, *_) in enumerate(run.results):
            mistakes = {STILL: weights[rank], MEAN: sum(weights) / world, SUM: sum(weights)}
            what = "the weight on rank {rank} of {world}"
            same(t, weight, weights[0], what, mistakes, rank=rank, world=world, atol=0, rtol=0)
    uses_what_arrives(t, run, rank=t.integer(1, 2), call=0)  # the parameter comes first


@check("replicate", points=1, seconds=20)
def check_buffers(student, t):
    "The buffers are replicated too"
    run, before = replicas(student, t, t.integer(2, 3))
    for rank, (_, mean, steps, mask) in enumerate(run.results):
        message = (
            "running_mean, a buffer, is still its own on rank {rank}: module.parameters() has no buffers, "
            "go through module.buffers() too"
        )
        want, own = before[0]["mean"], before[rank]["mean"]
        what = "running_mean, a buffer, on rank {rank}"
        same(t, mean, want, what, {message: own}, rank=rank, atol=0, rtol=0)
        message = "num_batches_tracked, a buffer of integers, on rank {rank}"
        t.that(bool(torch.equal(steps, run.results[0][2])), message, rank=rank)
        message = (
            "a buffer with persistent=False is still its own on rank {rank}: state_dict() leaves it out, "
            "module.buffers() does not"
        )
        what = "a buffer with persistent=False on rank {rank}"
        same(t, mask, want, what, {message: own}, rank=rank, atol=0, rtol=0)


@check("replicate", points=1, seconds=20)
def check_frozen(student, t):
    "Frozen parameters are replicated as well"
    run, before = replicas(student, t, 3, frozen=True)
    for rank, (weight, *_) in enumerate(run.results):
        message = (
            "a frozen parameter still has another value on rank {rank}: it belongs to the state of the "
            "model, although no optimiser trains it"
        )
        t.that(bool(torch.equal(weight, before[0]["weight"])), message, rank=rank)


# -- 2 · average

SUMMED = (
    "the gradients are {world} times too large: all_reduce adds the gradients of the ranks, "
    "and your code does not divide by the number of ranks"
)
DIVIDED_TWICE = "the gradients are {world} times too small: your code divides by the number of ranks twice"
OVERFLOW = "the sum of fp16 gradients is infinite, although their average fits: divide before the all-reduce"
AVG = (
    "ReduceOp.AVG, which gloo has since PyTorch 2.8, adds first and divides then: the sum of fp16 gradients "
    "is infinite, although their average fits. Divide before the all-reduce"
)
NO_GRADIENT = {
    "NoneType": "a parameter without a gradient stops your code: skip parameters whose .grad is None"
}


def overflow(run) -> str:
    """Why a sum of fp16 gradients is infinite."""
    return AVG if any(call.reduction == "AVG" for call in run.calls(0)) else OVERFLOW


def average_case(t, world: int) -> tuple[list[dict], list[Tensor]]:
    """Gradients of each rank, the second frozen; and the averages of the others."""
    shapes = [(t.integer(1, 6), t.integer(1, 6)) for _ in range(3)]
    grads = [[t.normal(*shape) for shape in shapes] for _ in range(world)]
    means = [sum(one[i] for one in grads) / world for i in range(len(shapes))]
    return [{"grads": [one[0], None, *one[1:]]} for one in grads], means


@check("average", points=2, seconds=20)
def check_mean(student, t):
    "Each gradient becomes the mean over the ranks"
    for world in (1, 2, t.integer(3, 5)):
        case, means = average_case(t, world)
        run = explained(student, averaged, case, NO_GRADIENT)
        for rank, got in enumerate(run.results):
            message = "a frozen parameter has a gradient now: skip parameters whose .grad is None"
            t.that(got[1] is None, message)
            own, got = (
                [grad for i, grad in enumerate(grads) if i != 1] for grads in (case[rank]["grads"], got)
            )
            still = "gradient {i} on rank {rank} is still its own: write the average into .grad, in place"
            mistakes = {
                SUMMED: [world * mean for mean in means],
                DIVIDED_TWICE: [mean / world for mean in means],
            }
            mistakes[still] = own
            what = "gradient {i} on rank {rank} of {world}"
            same(t, got, means, what, mistakes, rtol=1e-5, rank=rank, world=world)


@check("average", points=1, seconds=20)
def check_small_traffic(student, t):
    "Every gradient is sent once"
    world = t.integer(3, 5)
    case, means = average_case(t, world)
    run = explained(student, averaged, case, NO_GRADIENT)
    size = sum(mean.nbytes for mean in means)
    every_rank(t, run, means[0], "gradient 0 on rank {rank}", of=lambda grads: grads[0])
    message = (
        "rank {rank} passed {got} bytes ({kinds}), the gradients have {want}: one all-reduce each is enough"
    )
    passes_exactly(t, run, size, message)
    uses_what_arrives(t, run, rank=t.integer(0, world - 1))


@check("average", points=1, seconds=20)
def check_half_precision(student, t):
    "The sum of large fp16 gradients does not overflow"
    world = 2
    grads = [t.uniform(35000, 50000) + t.normal(6) for _ in range(world)]
    run = explained(student, averaged, [{"grads": [grad.half()]} for grad in grads], NO_GRADIENT)
    for (got,) in run.results:
        got = t.tensor(got, "the average of fp16 gradients")
        t.that(bool(torch.isfinite(got).all()), overflow(run))
        t.close(got.float(), sum(grads) / world, "the average of fp16 gradients", rtol=2e-3)


# -- 3 · buckets


def bucket_case(t, student, nbytes: list[int], limit: int) -> list[list[int]]:
    """The student's buckets, lists of whole numbers."""
    got = student.assign_buckets(list(nbytes), limit)
    message = "assign_buckets should return a list of lists, not {got}"
    t.that(type(got) is list and all(type(bucket) is list for bucket in got), message, got=got)
    known = all(type(i) is int and 0 <= i < len(nbytes) for bucket in got for i in bucket)
    message = "assign_buckets returns {got}: use only integers from 0 to {last}"
    t.that(known, message, got=got, last=len(nbytes) - 1)
    return got


def sizes(t, count: int) -> tuple[list[int], int]:
    """Sizes in bytes, none above the limit."""
    limit = 4 * t.integer(20, 40)
    return [4 * t.integer(1, limit // 8) for _ in range(count)], limit


@check("buckets", points=1)
def check_order(student, t):
    "Every gradient once, in the order of arrival"
    nbytes, limit = sizes(t, t.integer(9, 40))
    got = [i for bucket in bucket_case(t, student, nbytes, limit) for i in bucket]
    want = list(reversed(range(len(nbytes))))
    message = "your buckets hold {got}: each of the {count} gradients belongs in exactly one bucket"
    t.that(sorted(got) == sorted(want), message, count=len(nbytes), got=got)
    message = "your buckets hold the gradients in the order {got}: that of the last parameter arrives first"
    t.that(got == want, message, got=got)


@check("buckets", points=1)
def check_limit(student, t):
    "No bucket is larger than the limit, except for a single gradient"
    nbytes, limit = sizes(t, t.integer(9, 14))
    limit += 2  # no sum of sizes is exactly the limit
    nbytes[t.integer(2, 6)] = limit + 4 * t.integer(1, 50)
    nbytes[-1] = limit + 4 * t.integer(1, 50)  # arrives first
    got = bucket_case(t, student, nbytes, limit)
    message = (
        "a bucket is empty: {got}. A gradient that is larger than the limit goes into the current bucket if "
        "that is still empty"
    )
    t.that(all(got), message, got=got)
    for bucket in got:
        held = sum(nbytes[i] for i in bucket)
        message = (
            "bucket {bucket} holds {held} bytes, the limit is {limit}: only a single gradient may exceed it"
        )
        t.that(held <= limit or len(bucket) == 1, message, bucket=bucket, held=held, limit=limit)


@check("buckets", points=1)
def check_full(student, t):
    "A new bucket begins only when the next gradient does not fit"
    nbytes, limit = sizes(t, t.integer(9, 14))
    limit += 2  # no sum of sizes is exactly the limit: another check tests that
    nbytes[-5:] = [4 * t.integer(1, 2) for _ in range(5)]  # many gradients fit into the first bucket
    got = bucket_case(t, student, nbytes, limit)
    for bucket, following in itertools.pairwise(got):
        held = sum(nbytes[i] for i in bucket)
        message = "bucket {bucket} holds {held} bytes; the next gradient, {next}, still fits within {limit}"
        good = bool(following) and held + nbytes[following[0]] > limit
        t.that(good, message, bucket=bucket, held=held, next=following[:1], limit=limit)


@check("buckets", points=1)
def check_exact_fit(student, t):
    "A bucket may be filled to the last byte"
    size, members = 4 * t.integer(2, 9), t.integer(2, 3)
    got = bucket_case(t, student, [size] * (3 * members), members * size)
    message = "gradients of {size} bytes fill the limit of {limit} and still fit, but your buckets are {got}"
    full = [len(bucket) for bucket in got] == [members] * 3
    t.that(full, message, size=size, limit=members * size, got=got)
