"""The visible checks of this lab: equal replicas, averages, buckets, overlap, accumulation. Those of samples and metrics are in ``samples.py``."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from dlo_lib.grading.contract import Kind, Wrong, check
from dlo_lib.grading.quiz import quiz_complete
from dlo_lib.text import tr

from .hints import HINTS as HINTS
from .quiz import QUIZ
from .samples import check_everyone_once, check_moments, check_one_message, check_rate, check_samples_stay, check_shuffled
from .scenarios import accumulated, averaged, replicated, steps_of
from .twins import buckets_of, mean_gradients, near, whole_gradient

ROWS = 5
WAITED = "rank 1 began backward when rank 0 was through with its own, and never got there: wait() belongs in finish, not in a hook"

# -- 1 · replicate


def replicas(student, t, world: int, frozen: bool = False) -> tuple[list[list[Tensor]], list[dict]]:
    """What each rank holds after ``replicate``, and what each had before."""
    shape = (t.integer(2, 5), t.integer(2, 5))
    before = [{"weight": t.normal(*shape), "mean": t.normal(shape[0]), "frozen": frozen} for _ in range(world)]
    return student.ranks(replicated, before).results, before


@check("replicate", points=1, seconds=20)
def check_parameters(student, t):
    "Every rank has the parameters of rank 0"
    for world in (1, 2, 3):
        after, before = replicas(student, t, world)
        for rank, (weight, _, _) in enumerate(after):
            t.close(weight, before[0]["weight"], "the weight on rank {rank} of {world}", rank=rank, world=world, atol=0, rtol=0)


@check("replicate", points=1, seconds=20)
def check_buffers(student, t):
    "The buffers are replicated too"
    after, before = replicas(student, t, t.integer(2, 3))
    for rank, (_, mean, _) in enumerate(after):
        t.close(mean, before[0]["mean"], "running_mean, a buffer, on rank {rank}", rank=rank, atol=0, rtol=0)


# -- 2 · average

SUMMED = "the gradients are {world} times the average: all_reduce adds, nobody has divided by the number of ranks"


def average_case(t, world: int) -> tuple[list[dict], list[Tensor]]:
    """Gradients of each rank, the second frozen; and the averages of the others."""
    shapes = [(t.integer(1, 6), t.integer(1, 6)) for _ in range(3)]
    grads = [[t.normal(*shape) for shape in shapes] for _ in range(world)]
    means = [sum(one[i] for one in grads) / world for i in range(len(shapes))]
    return [{"grads": [one[0], None, *one[1:]]} for one in grads], means


@check("average", points=2, seconds=20)
def check_mean(student, t):
    "Each gradient becomes the mean over the ranks"
    for world in (1, 2, 3):
        case, means = average_case(t, world)
        for rank, got in enumerate(student.ranks(averaged, case).results):
            t.that(got[1] is None, "a frozen parameter has no gradient: leave it alone")
            for i, mean in enumerate(means):
                t.that(world == 1 or not near(got[i + (i > 0)], world * mean), SUMMED, world=world)
                t.close(got[i + (i > 0)], mean, "gradient {i} on rank {rank} of {world}", i=i, rank=rank, world=world)


@check("average", points=1, seconds=20)
def check_small_traffic(student, t):
    "Every gradient is sent once"
    case, means = average_case(t, 2)
    run = student.ranks(averaged, case)
    size = sum(mean.nbytes for mean in means)
    for rank, got in enumerate(run.results):
        t.close(got[0], means[0], "gradient 0 on rank {rank}", rank=rank)
        kinds = sorted({call.kind.value for call in run.calls(rank)})
        t.that(
            run.bytes(rank) == size,
            "rank {rank} passed {got} bytes ({kinds}), the gradients have {want}: an all-reduce of each gradient is enough",
            rank=rank,
            got=run.bytes(rank),
            kinds=", ".join(kinds),
            want=size,
        )


# -- 3 · buckets


def bucket_case(t, student, nbytes: list[int], limit: int) -> list[list[int]]:
    """The student's buckets, lists of whole numbers."""
    got = student.assign_buckets(list(nbytes), limit)
    t.that(
        type(got) is list and all(type(bucket) is list for bucket in got), "assign_buckets should give a list of lists, not {got}", got=got
    )
    known = all(type(i) is int and 0 <= i < len(nbytes) for bucket in got for i in bucket)
    t.that(known, "assign_buckets gives {got}: whole numbers from 0 to {last}", got=got, last=len(nbytes) - 1)
    return got


def sizes(t, count: int) -> tuple[list[int], int]:
    """Sizes in bytes, none above the limit."""
    limit = 4 * t.integer(20, 40)
    return [4 * t.integer(1, limit // 8) for _ in range(count)], limit


@check("buckets", points=1)
def check_order(student, t):
    "Every gradient once, in the order of arrival"
    nbytes, limit = sizes(t, t.integer(9, 14))
    got = [i for bucket in bucket_case(t, student, nbytes, limit) for i in bucket]
    want = list(reversed(range(len(nbytes))))
    t.that(sorted(got) == sorted(want), "of {count} gradients your buckets hold {got}: each once", count=len(nbytes), got=got)
    t.that(got == want, "your buckets hold {got}, one after the other: the gradient of the last parameter arrives first", got=got)


@check("buckets", points=1)
def check_limit(student, t):
    "No bucket is larger than the limit, except for a single gradient"
    nbytes, limit = sizes(t, t.integer(9, 14))
    nbytes[t.integer(2, 6)] = limit + 4 * t.integer(1, 50)
    for bucket in bucket_case(t, student, nbytes, limit):
        held = sum(nbytes[i] for i in bucket)
        t.that(
            held <= limit or len(bucket) == 1,
            "bucket {bucket} holds {held} bytes, the limit is {limit}: only a gradient that is larger by itself may exceed it",
            bucket=bucket,
            held=held,
            limit=limit,
        )


@check("buckets", points=1)
def check_full(student, t):
    "A new bucket begins only where the gradient does not fit any more"
    nbytes, limit = sizes(t, t.integer(9, 14))
    got = bucket_case(t, student, nbytes, limit)
    for bucket, following in itertools.pairwise(got):
        held = sum(nbytes[i] for i in bucket)
        t.that(
            bool(following) and held + nbytes[following[0]] > limit,
            "bucket {bucket} holds {held} bytes; the next gradient, {following}, would have fitted within {limit}",
            bucket=bucket,
            held=held,
            following=following[:1],
            limit=limit,
        )


# -- 4 · overlap


def branches(t, count: int, same_size: bool = False) -> list[Tensor]:
    """Weights of branches of unequal size, fp64."""
    width = t.integer(3, 6)
    return [t.normal(ROWS, width if same_size else t.integer(2, 7), dtype=torch.float64) for _ in range(count)]


def run_steps(student, t, weights: list[Tensor], world: int, limit: int, steps: int = 2, **options):
    """The run, and the inputs of each step and rank; an option that is a list of ``world`` tuples is each rank's own."""
    batches = [[t.normal(4, ROWS, dtype=torch.float64) for _ in range(world)] for _ in range(steps)]
    inputs = []
    for rank in range(world):
        own = {name: value[rank] if type(value) is list else value for name, value in options.items()}
        start = weights if rank == 0 else [t.normal(*weight.shape, dtype=torch.float64) for weight in weights]
        inputs.append({"weights": start, "batches": [batch[rank] for batch in batches], "limit": limit, **own})
    return student.ranks(steps_of, inputs), batches


def same_gradients(t, run, weights: list[Tensor], batches, unused=None, frozen: tuple[int, ...] = (), hint: str = "") -> None:
    """The gradients of all ranks in all steps are the twin's."""
    for step, inputs in enumerate(batches):
        wanted = mean_gradients(weights, inputs, unused or [()] * run.world)
        for rank, got in enumerate(run.results):
            for i, want in enumerate(wanted):
                if i in frozen:
                    t.that(got[step][i] is None, "a frozen parameter got a gradient")
                    continue
                t.that(
                    got[step][i] is not None,
                    "parameter {i} has no gradient on rank {rank}, step {step}. " + hint,
                    i=i,
                    rank=rank,
                    step=step,
                )
                t.that(run.world == 1 or not near(got[step][i], run.world * want), SUMMED, world=run.world)
                what = "the gradient of parameter {i} on rank {rank} of {world}, step {step},"
                t.close(got[step][i], want, what, i=i, rank=rank, world=run.world, step=step, atol=1e-10)


@check("overlap", points=3, seconds=40)
def check_averaged(student, t):
    "Gradients are the averages over all ranks, step after step"
    for world in (1, 2, 3):
        weights = branches(t, t.integer(4, 6))
        frozen = (t.integer(1, 2),)
        run, batches = run_steps(student, t, weights, world, limit=300, frozen=frozen)
        same_gradients(t, run, weights, batches, frozen=frozen)


@check("overlap", points=1, seconds=20)
def check_bucket_traffic(student, t):
    "One all-reduce for each bucket, of the gradients in it"
    weights, limit = branches(t, t.integer(6, 8)), 500
    run, batches = run_steps(student, t, weights, 2, limit, steps=1)
    same_gradients(t, run, weights, batches)
    want = [sum(weights[i].nbytes for i in bucket) for bucket in buckets_of(weights, list(range(len(weights))), limit)]
    for rank in range(run.world):
        got = [call.payload_bytes for call in run.calls(rank, Kind.ALL_REDUCE)]
        t.that(
            got == want,
            "all-reduces of {got} bytes in one step, the buckets have {want}: cat the gradients of a bucket into one flat tensor",
            got=got,
            want=want,
        )
        others = [call.kind.value for call in run.calls(rank) if call.kind not in (Kind.ALL_REDUCE, Kind.BROADCAST)]
        t.that(not others, "besides the broadcasts at the start and the all-reduces there were: {others}", others=", ".join(others))


@check("overlap", points=2, seconds=20)
def check_during_backward(student, t):
    "Buckets are on their way before backward is over"
    weights, limit = branches(t, t.integer(5, 7)), 300
    run, batches = run_steps(student, t, weights, 2, limit, steps=1, marked=True)
    same_gradients(t, run, weights, batches)
    early = sum(0 not in bucket for bucket in buckets_of(weights, list(range(len(weights))), limit))
    for rank in range(run.world):
        calls = [call for call in run.calls(rank) if call.kind in (Kind.ALL_REDUCE, Kind.BARRIER)]
        last = next(index for index, call in enumerate(calls) if call.kind is Kind.BARRIER)
        t.that(
            last >= early,
            "when the last gradient was computed, {got} of {early} complete buckets had been sent: start them in on_gradient, and give each hook the number of its own parameter",
            got=last,
            early=early,
        )
        blocking = sum(not call.is_async for call in calls if call.kind is Kind.ALL_REDUCE)
        t.that(
            blocking == 0,
            "{blocking} all-reduces were waited for at once, so backward stood still meanwhile: async_op=True, and wait() in finish",
            blocking=blocking,
        )
    try:
        run_steps(student, t, weights, 2, limit, steps=1, relay=True)
    except Wrong as stuck:
        raise Wrong(f"{tr(WAITED)}. {stuck}", WAITED) from None


# -- 5 · accumulate


def accumulation(student, t, world: int, micro_batches: int):
    """The run, the weight, and the micro-batches of each rank."""
    weight = t.normal(t.integer(2, 4), ROWS, dtype=torch.float64)
    batches = [[t.normal(3, ROWS, dtype=torch.float64) for _ in range(micro_batches)] for _ in range(world)]
    return (
        student.ranks(accumulated, [{"weight": weight, "batches": own, "limit": 1000} for own in batches]),
        weight,
        batches,
    )


@check("accumulate", points=2, seconds=30)
def check_accumulated(student, t):
    "The gradient is that of the mean over all micro-batches of all ranks"
    for world, micro_batches in ((1, 3), (2, 1), (2, t.integer(2, 4))):
        run, weight, batches = accumulation(student, t, world, micro_batches)
        want = whole_gradient(weight, [x for own in batches for x in own])
        for rank, got in enumerate(run.results):
            alone = whole_gradient(weight, batches[rank])
            t.that(
                world == 1 or not near(got, alone),
                "rank {rank} has the gradient of its own samples only: finish() brings the average",
                rank=rank,
            )
            size = float((got * want).sum() / want.square().sum())
            what = "with {m} micro-batches on {world} ranks the gradient is {size:.2f} times the true one on rank {rank}"
            good = bool(torch.allclose(got, want, atol=1e-10))
            t.that(good, what, m=micro_batches, world=world, size=size, rank=rank)


@check("accumulate", points=2, seconds=20)
def check_one_communication(student, t):
    "Only the last backward pass communicates"
    run, weight, batches = accumulation(student, t, 2, t.integer(3, 5))
    want = whole_gradient(weight, [x for own in batches for x in own])
    for rank, got in enumerate(run.results):
        t.tensor(got, "the gradient on rank {rank}", shape=want.shape, rank=rank)
        t.close(got * (want.norm() / got.norm()), want, "the direction of the gradient on rank {rank}", rank=rank, atol=1e-10)
        count = len(run.calls(rank, Kind.ALL_REDUCE))
        t.that(count == 1, "{count} all-reduces for one bucket: all passes but the last belong into no_sync()", count=count)


# -- quiz

complete = quiz_complete(QUIZ, points=1)
