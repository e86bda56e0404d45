"""The visible checks of the wrapper and of gradient accumulation, and their twins: one process with the
samples of all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import Kind, Run, Wrong, check
from dlo_lib.grading.checks.twins import twin
from dlo_lib.labkit import tr
from dlo_lib.labkit.compare import explained, same, wrong_if
from dlo_lib.labkit.traffic import passes_only, uses_what_arrives

from .replicas import DIVIDED_TWICE, SUMMED, overflow
from .scenarios import accumulated, half_step, held_back, steps_of

ROWS = 5
UNUSED = {"NoneType": "a parameter that this rank did not use has no gradient: put zeros into its bucket"}
ARRIVED = "(does finish() also reset which gradients have arrived?)"
EARLY = {"NoneType": f"a bucket is sent before all of its gradients have arrived {ARRIVED}"}
FEWER = (
    "one rank starts fewer all-reduces than the others, because it leaves a parameter out: finish() should "
    "start the buckets that have not started"
)
WAITED = "backward on rank 0 waits for an all-reduce that rank 1 starts later: wait() belongs in finish"
TWICE = (
    "the gradients are {world} times too large, and rank {rank} starts {count} all-reduces, not {buckets}: "
    "a bucket is reduced more than once"
)

# -- twins


@twin
def mean_gradients(
    weights: list[Tensor], inputs: list[Tensor], unused: list[tuple[int, ...]]
) -> list[Tensor]:
    """One process with the inputs of all ranks; ``unused`` are the branches that each rank leaves out."""
    weights = [weight.clone().requires_grad_() for weight in weights]
    losses = []
    for x, without in zip(inputs, unused):
        out = sum(torch.tanh(x @ weight).sum(1) for i, weight in enumerate(weights) if i not in without)
        losses.append(out.square().mean())
    mean = torch.stack(losses).mean()
    return list(torch.autograd.grad(mean, weights, allow_unused=True, materialize_grads=True))


@twin
def whole_gradient(weight: Tensor, batches: list[Tensor]) -> Tensor:
    """The gradient of the mean loss over all micro-batches, in one process."""
    weight = weight.clone().requires_grad_()
    loss = torch.stack([torch.tanh(x @ weight.T).square().mean() for x in batches]).mean()
    return torch.autograd.grad(loss, weight)[0]


def buckets_of(weights: list[Tensor], trained: list[int], limit: int) -> list[list[int]]:
    """The parameters of each bucket."""
    found: list[list[int]] = []
    for i in reversed(trained):
        if found and sum(weights[j].nbytes for j in found[-1]) + weights[i].nbytes <= limit:
            found[-1].append(i)
        else:
            found.append([i])
    return found


# -- 4 · overlap


def branches(t, count: int, same_size: bool = False) -> list[Tensor]:
    """Weights of branches of unequal size, fp64."""
    width = t.integer(3, 6)
    widths = [width if same_size else t.integer(2, 7) for _ in range(count)]
    return [t.normal(ROWS, width, dtype=torch.float64) for width in widths]


def refused(student) -> dict[str, list[str]]:
    """The class of PyTorch that students write themselves, unless it stands in for theirs."""
    own = student.is_own("DataParallel")
    return {"refused": ["torch.nn.parallel.DistributedDataParallel"] if own else []}


def run_steps(student, t, weights: list[Tensor], world: int, limit: int, steps=2, causes=UNUSED, **options):
    """The run, and the inputs of each step and rank; an option that is a list has one value for each rank.
    ``causes`` of errors."""
    batches = [[t.normal(4, ROWS, dtype=torch.float64) for _ in range(world)] for _ in range(steps)]
    inputs = []
    for rank in range(world):
        own = {name: value[rank] if type(value) is list else value for name, value in options.items()}
        start = weights if rank == 0 else [t.normal(*weight.shape, dtype=torch.float64) for weight in weights]
        own |= {"weights": start, "batches": [batch[rank] for batch in batches], "limit": limit}
        own |= refused(student)
        inputs.append(own)
    return explained(student, steps_of, inputs, causes), batches


OWN = (
    "the gradient of parameter {i} on rank {rank} is its own, not the average: finish() should write the "
    "averages into .grad"
)
STALE = (
    "in step {step} the gradient of parameter {i} is the average of step {before}: finish() should reset the "
    "state"
)
SENT_EARLY = (
    "in step {step} the gradient of parameter {i} is zero: its bucket was sent before it arrived " + ARRIVED
)
AFTER_UNUSED = (
    "the gradient of parameter {i} on rank {rank}, in the step after one in which a rank left a parameter "
    f"out {ARRIVED},"
)


def same_gradients(t, run: Run, weights: list[Tensor], batches, limit: int, unused=None, frozen=(), **also):
    """The replicas are equal, and the gradients of all ranks in all steps are the twin's. ``also``: the
    arguments of ``same_step``."""
    message = "the weights on rank {rank} differ from those of rank 0 after DataParallel(...), see exercise 1"
    for rank, result in enumerate(run.results):
        started = t.items(result, 2, "the result of rank {rank}", rank=rank)[1]
        equal = all(bool(torch.equal(mine, first)) for mine, first in zip(started, weights))
        t.that(equal, message, rank=rank)
    trained = [i for i in range(len(weights)) if i not in frozen]
    calls = len(batches) * len(buckets_of(weights, trained, limit))
    before: list[Tensor] = []
    for step, inputs in enumerate(batches):
        each = unused[step] if unused else [()] * run.world
        wanted = mean_gradients(weights, inputs, each)
        alone = [mean_gradients(weights, [x], [without]) for x, without in zip(inputs, each)]
        what = "the gradient of parameter {i} on rank {rank} of {world}, step {step},"
        what = AFTER_UNUSED if unused and step else what
        for rank, (got, _) in enumerate(run.results):
            message = "a frozen parameter got a gradient: leave frozen parameters out"
            t.that(all(got[step][i] is None for i in frozen), message)
            same_step(t, run, rank, step, trained, wanted, alone[rank], before, calls, what, **also)
        before = wanted


def same_step(t, run, rank, step, trained, wanted, alone, before, calls, what, hint="", known=None) -> None:
    """The gradients of a rank in a step are ``wanted``. ``hint`` follows on a missing gradient; ``known``:
    message → the values of a mistake in step 0, by rank and parameter."""
    world, count = run.world, len(run.calls(rank, Kind.ALL_REDUCE))
    got = run.results[rank][0][step]
    for i in trained:
        want, where = wanted[i], {"i": i, "rank": rank, "world": world, "step": step}
        missing = "parameter {i} has no gradient on rank {rank} in step {step}. " + hint
        t.that(got[i] is not None, missing, **where)
        mistakes = {(TWICE if count > calls else SUMMED): world * want, DIVIDED_TWICE: want / world}
        mistakes[OWN] = alone[i]
        if step > 0:
            mistakes |= {STALE: before[i], SENT_EARLY: torch.zeros_like(want)}
        elif known is not None:
            mistakes |= {message: values[rank][i] for message, values in known.items()}
        values = {"count": count, "buckets": calls, "before": step - 1}
        wrong_if(t, got[i], want, mistakes, rtol=1e-5, atol=1e-10, **values, **where)
        t.close(got[i], want, what, atol=1e-10, **where)


@check("overlap", points=3, seconds=40)
def check_averaged(student, t):
    "Gradients are the averages over all ranks, in every step, also in fp16"
    for world in (1, t.integer(3, 4)):
        weights = branches(t, t.integer(4, 6))
        frozen = (t.integer(1, 2),)
        run, batches = run_steps(student, t, weights, world, limit=300, steps=3, causes=EARLY, frozen=frozen)
        same_gradients(t, run, weights, batches, 300, frozen=frozen)
    slopes = [[t.uniform(35000, 50000) + t.normal(4) for _ in range(2)] for _ in range(t.integer(3, 4))]
    fixed = {"limit": 1000, **refused(student)}
    inputs = [{"slopes": [slope.half() for slope in own], **fixed} for own in slopes]
    run = explained(student, half_step, inputs, UNUSED)
    for rank, result in enumerate(run.results):
        for i, got in enumerate(t.items(result, 2, "the gradients of rank {rank}", rank=rank)):
            got = t.tensor(got, "the gradient of parameter {i}, in fp16,", i=i)
            t.that(bool(torch.isfinite(got).all()), overflow(run))
            want = sum(own[i] for own in slopes) / len(slopes)
            what = "the gradient of parameter {i} on rank {rank}, in fp16,"
            t.close(got.float(), want, what, rtol=2e-3, i=i, rank=rank)


@check("overlap", points=1, seconds=20)
def check_bucket_traffic(student, t):
    "One all-reduce for each bucket, of the gradients in it"
    weights, limit, world = branches(t, t.integer(6, 8)), 4 * t.integer(100, 150), t.integer(3, 4)
    run, batches = run_steps(student, t, weights, world, limit, steps=1)
    same_gradients(t, run, weights, batches, limit)
    buckets = buckets_of(weights, list(range(len(weights))), limit)
    want = [sum(weights[i].nbytes for i in bucket) for bucket in buckets]
    message = "only all-reduces and the broadcasts at the start are needed, but your code also calls: {kinds}"
    passes_only(t, run, [Kind.ALL_REDUCE, Kind.BROADCAST], message)
    for rank in range(run.world):
        got = [call.payload_bytes for call in run.calls(rank, Kind.ALL_REDUCE)]
        message = (
            "every bucket is sent twice ({got} bytes for buckets of {want}): remember which have been sent"
        )
        t.that(sorted(got) != sorted(2 * want), message, got=got, want=want)
        message = (
            "the all-reduces of one step have {got} bytes, the buckets {want}: concatenate the gradients of "
            "a bucket into one tensor"
        )
        t.that(got == want, message, got=got, want=want)
        started = len(run.calls(rank, Kind.BROADCAST))
        message = "rank {rank} makes {got} broadcasts, the start needs {want}: averages travel by all-reduce"
        t.that(started <= len(weights), message, rank=rank, got=started, want=len(weights))
    uses_what_arrives(t, run, Kind.ALL_REDUCE, t.integer(0, world - 1))


@check("overlap", points=2, seconds=20)
def check_during_backward(student, t):
    "Buckets are sent before backward ends"
    weights, limit = branches(t, t.integer(5, 7)), 300
    run, batches = run_steps(student, t, weights, t.integer(3, 4), limit, steps=1, marked=True)
    same_gradients(t, run, weights, batches, limit)
    early = sum(0 not in bucket for bucket in buckets_of(weights, list(range(len(weights))), limit))
    for rank in range(run.world):
        calls = [call for call in run.calls(rank) if call.kind in (Kind.ALL_REDUCE, Kind.BARRIER)]
        last = next(index for index, call in enumerate(calls) if call.kind is Kind.BARRIER)
        message = (
            "when the last gradient was computed, {got} of {early} complete buckets had been sent: start "
            "them in on_gradient"
        )
        t.that(last >= early, message, got=last, early=early)
        blocking = sum(not call.is_async for call in calls if call.kind is Kind.ALL_REDUCE)
        message = (
            "backward is blocked by {blocking} all-reduces: use async_op=True, and call wait() in finish"
        )
        t.that(blocking == 0, message, blocking=blocking)
    try:
        run_steps(student, t, weights, 2, limit, steps=1, relay=True)
    except Wrong as stuck:
        raise Wrong(f"{tr(WAITED)}. {stuck}", WAITED) from None


@check("overlap", points=2, seconds=20)
def check_same_order(student, t):
    "All ranks send their buckets in the same order, even if gradients arrive in different orders"
    count, world = t.integer(4, 6), t.integer(3, 4)
    weights = branches(t, count, same_size=True)
    shuffled = [t.shuffled(range(count)) for _ in range(world - 2)]
    orders = [tuple(order) for order in (range(count), *shuffled, reversed(range(count)))]  # of forward
    run, batches = run_steps(student, t, weights, world, limit=weights[0].nbytes, steps=1, order=orders)
    alone = [mean_gradients(weights, [batches[0][rank]], [()]) for rank in range(world)]
    together = [sum(own[order[place]] for own, order in zip(alone, orders)) / world for place in range(count)]
    mixed = [[together[order.index(i)] for i in range(count)] for order in orders]
    message = (
        "the gradient of parameter {i} on rank {rank} was added to that of another parameter: gradients "
        "arrive in another order on each rank here. Start a bucket only when all buckets before it in "
        "self.buckets have started"
    )
    same_gradients(t, run, weights, batches, weights[0].nbytes, known={message: mixed})


@check("overlap", points=2, seconds=20)
def check_unused(student, t):
    "A parameter that one rank leaves out in the first step is averaged with zeros, on every rank"
    weights, world = branches(t, t.integer(4, 6)), t.integer(3, 4)
    unused = t.shuffled([(0,), *[()] * (world - 1)])
    causes = {**UNUSED, "MISMATCH": FEWER, "DEADLOCK": FEWER}
    of_steps = [(each, ()) for each in unused]
    run, batches = run_steps(student, t, weights, world, limit=300, causes=causes, unused=of_steps)
    hint = "Another rank used it, so this rank needs the average too: write into .grad even where it was None"
    same_gradients(t, run, weights, batches, 300, unused=[unused, [()] * world], hint=hint)


@check("overlap", points=2, seconds=20)
def check_no_sync(student, t):
    "Inside no_sync nothing is sent, and the next pass adds its gradients, also if it uses fewer parameters"
    after_no_sync(student, t, [()] * 2)
    after_no_sync(student, t, [(t.integer(0, 3),)] * t.integer(3, 4))


FIRST_ONLY = (
    "parameter {i} on rank {rank} has only the gradient of the pass inside no_sync(): its bucket was sent "
    "before the gradient of the next pass had arrived. Record no arrival while self.sync is False"
)
SECOND_ONLY = (
    "parameter {i} on rank {rank} has only the gradient of the pass after no_sync(): gradients accumulate"
)
LOST = (
    "rank {missing} sends zeros for parameter {i}, which its last pass did not use: its .grad still holds "
    "the gradient of the pass inside no_sync(). Only a .grad that is None counts as zeros"
)
UNSENT = (
    "parameter {i} on rank {rank} has its own gradient, not the average: its bucket has not started when "
    "backward ends, because the last pass does not use the parameter. finish() should start it"
)


def after_no_sync(student, t, without: list[tuple[int, ...]]) -> None:
    """A pass inside ``no_sync`` and one outside, in which each rank leaves out the branches ``without``."""
    weights, world = branches(t, t.integer(4, 6)), len(without)
    passes = [[t.normal(4, ROWS, dtype=torch.float64) for _ in range(world)] for _ in range(2)]
    fixed = {"weights": weights, "limit": 700, **refused(student)}
    inputs = [{"batches": list(xs), "without": own, **fixed} for xs, own in zip(zip(*passes), without)]
    run = explained(student, held_back, inputs, UNUSED)
    message = "your hooks start {early} calls inside no_sync(): while self.sync is False, return at once"
    for rank in range(world):
        calls = [call.kind for call in run.calls(rank)]
        early = calls.index(Kind.BARRIER) - len(weights)  # without the broadcasts at the start
        t.that(early <= 0, message, early=early)
    first, second = (mean_gradients(weights, xs, out) for xs, out in zip(passes, ([()] * world, without)))
    kept = [mean_gradients(weights, [x], [()]) for x in passes[0]]
    last = [mean_gradients(weights, [x], [out]) for x, out in zip(passes[1], without)]
    for rank, result in enumerate(run.results):
        silent, after = t.items(result, 2, "the result of rank {rank}", rank=rank)
        what = "the gradient of parameter {i} on rank {rank} inside no_sync,"
        same(t, silent, kept[rank], what, atol=1e-10, rank=rank)
        for i in range(len(weights)):
            missing = [other for other in range(world) if i in without[other]]
            where = {"i": i, "rank": rank, "missing": missing[0] if missing else -1}
            want, mistakes = first[i] + second[i], {FIRST_ONLY: first[i], SECOND_ONLY: second[i]}
            if missing:
                zeros = want - sum(kept[other][i] for other in missing) / world
                mistakes = {LOST: zeros, UNSENT: kept[rank][i] + last[rank][i]}
            message = "parameter {i} has no gradient on rank {rank} after passes inside no_sync() and outside"
            t.that(after[i] is not None, message, **where)
            wrong_if(t, after[i], want, mistakes, rtol=1e-5, atol=1e-10, **where)
            what = "the gradient of parameter {i} on rank {rank}, after passes inside no_sync() and outside,"
            t.close(after[i], want, what, atol=1e-10, **where)


# -- 5 · accumulate

OUTSIDE = (
    "{loud} of the first {m} backward passes run outside no_sync(): the bucket is sent with the first one, "
    "and the others are lost"
)
IGNORED = (
    "the gradient is that of the first micro-batch only, although accumulate uses no_sync(): your hooks "
    "ignore self.sync (exercise 4)"
)
FINISH = "rank {rank} has only the gradient of its samples: call finish(), which averages"
NOT_DIVIDED = (
    "the gradient is {m} times too large: the gradients of {m} micro-batches are added, so divide each loss "
    "by their number"
)


@check("accumulate", points=3, seconds=40)
def check_accumulated(student, t):
    "The gradient is that of the mean over all micro-batches and ranks, and only the last pass communicates"
    for world, m in ((1, 3), (2, 1), (t.integer(3, 4), t.integer(3, 5))):
        weight = t.normal(t.integer(2, 4), ROWS, dtype=torch.float64)
        batches = [[t.normal(3, ROWS, dtype=torch.float64) for _ in range(m)] for _ in range(world)]
        inputs = [{"weight": weight, "batches": own, "limit": 1000} for own in batches]
        run = student.ranks(accumulated, inputs)
        want = whole_gradient(weight, [x for own in batches for x in own])
        first = whole_gradient(weight, [own[0] for own in batches])
        for rank, result in enumerate(run.results):
            got, loud = t.items(result, 2, "the result of rank {rank}", rank=rank)
            t.tensor(got, "the gradient on rank {rank}", shape=want.shape, rank=rank)
            alone = whole_gradient(weight, batches[rank])
            only_first = IGNORED if f"{loud}" == "0" else OUTSIDE
            mistakes = {
                FINISH: alone,
                NOT_DIVIDED: m * want,
                only_first: first / m,
                only_first + ". Each loss also lacks the division by their number": first,
            }
            where = {"m": m, "world": world, "rank": rank, "loud": loud}
            wrong_if(t, got, want, mistakes, rtol=1e-5, atol=1e-10, **where)
            size = float((got * want).sum() / want.square().sum())
            what = (
                "the gradient on rank {rank} of {world} is {size:.2f} times the true one ({m} micro-batches)"
            )
            t.that(bool(torch.allclose(got, want, atol=1e-10)), what, size=size, **where)
            count = len(run.calls(rank, Kind.ALL_REDUCE))
            message = (
                "the number of all-reduces for the one bucket is {count}, not 1: all backward passes except "
                "the last run inside no_sync()"
            )
            t.that(count == 1, message, count=count)
        message = "one all-reduce of the bucket is enough, but your code also calls: {kinds}"
        passes_only(t, run, [Kind.ALL_REDUCE, Kind.BROADCAST], message)
    uses_what_arrives(t, run, Kind.ALL_REDUCE, t.integer(0, world - 1))


@check("accumulate", points=1, seconds=20)
def check_last_pass(student, t):
    "The last backward pass communicates while it runs"
    weight = t.normal(t.integer(2, 4), ROWS, dtype=torch.float64)
    batches = [[t.normal(3, ROWS, dtype=torch.float64) for _ in range(3)] for _ in range(2)]
    run = student.ranks(accumulated, [{"weight": weight, "batches": own, "limit": 1000} for own in batches])
    want = whole_gradient(weight, [x for own in batches for x in own])
    for rank, result in enumerate(run.results):
        got, _ = t.items(result, 2, "the result of rank {rank}", rank=rank)
        message = "the gradient on rank {rank} is wrong, see the first check"
        t.that(bool(torch.allclose(got, want, atol=1e-10)), message, rank=rank)
        calls = run.calls(rank, Kind.ALL_REDUCE)
        t.that(bool(calls), "rank {rank} starts no all-reduce, see the first check", rank=rank)
        message = (
            "the all-reduce starts in finish(), after backward: run the last backward pass outside "
            "no_sync(), so that its hooks start the all-reduce"
        )
        t.that(any(call.in_backward for call in calls), message)
