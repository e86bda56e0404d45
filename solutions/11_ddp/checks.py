"""The visible checks of this lab, and their twins: one process with the samples of all ranks."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_lib.grading.contract import Kind, check, scenario
from dlo_lib.grading.quiz import Question, quiz_complete
from dlo_lib.grading.twins import twin

ROWS = 5

# -- 1 · replicate


@scenario
def replicated(student, rank, world, weight, mean, frozen):
    """A module with this rank's values: what it holds after ``replicate``."""
    module = torch.nn.Sequential(torch.nn.Linear(*reversed(weight.shape), bias=False), torch.nn.BatchNorm1d(weight.shape[0]))
    module[0].weight.data.copy_(weight)
    module[0].weight.requires_grad_(not frozen)
    module[1].running_mean.copy_(mean)
    module[1].num_batches_tracked.fill_(rank + 3)
    student.replicate(module)
    return [module[0].weight.data, module[1].running_mean, module[1].num_batches_tracked]


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


def near(got: object, want: Tensor) -> bool:
    """Whether it is a tensor with these values."""
    return type(got) is Tensor and got.shape == want.shape and bool(torch.allclose(got.to(want.dtype), want, rtol=1e-5))


@scenario
def averaged(student, rank, world, grads):
    """A module whose gradients are ``grads``, None for a frozen parameter: what ``average_gradients`` makes of them."""
    module = torch.nn.ParameterList()
    for grad in grads:
        parameter = torch.nn.Parameter(torch.zeros(3) if grad is None else torch.zeros_like(grad), requires_grad=grad is not None)
        parameter.grad = grad
        module.append(parameter)
    student.average_gradients(module)
    return [parameter.grad for parameter in module]


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


@scenario
def steps_of(student, rank, world, weights, batches, limit, order=None, unused=(), frozen=(), marked=False):
    """Steps of a sum of branches, one for each weight, in ``order``: the gradients after each. ``marked``: a barrier before the last one."""

    class Branches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            made = [torch.nn.Parameter(weight.clone(), requires_grad=i not in frozen) for i, weight in enumerate(weights)]
            self.weights = torch.nn.ParameterList(made)

        def forward(self, x):
            used = [i for i in (order or range(len(weights))) if i not in unused]
            return sum(torch.tanh(x @ self.weights[i]).sum(1) for i in used)

    net = Branches()
    model = student.DataParallel(net, limit)
    if marked:
        net.weights[0].register_hook(lambda grad: dist.barrier())
    found = []
    for x in batches:
        for parameter in net.parameters():
            parameter.grad = None
        model(x).square().mean().backward()
        model.finish()
        found.append([None if parameter.grad is None else parameter.grad.clone() for parameter in net.parameters()])
    return found


@twin
def mean_gradients(weights: list[Tensor], inputs: list[Tensor], unused: list[tuple[int, ...]]) -> list[Tensor]:
    """One process with the inputs of all ranks; ``unused`` are the branches that each rank leaves out."""
    weights = [weight.clone().requires_grad_() for weight in weights]
    losses = []
    for x, without in zip(inputs, unused):
        out = sum(torch.tanh(x @ weight).sum(1) for i, weight in enumerate(weights) if i not in without)
        losses.append(out.square().mean())
    return list(torch.autograd.grad(torch.stack(losses).mean(), weights))


def branches(t, count: int, same_size: bool = False) -> list[Tensor]:
    """Weights of branches of unequal size, fp64."""
    width = t.integer(3, 6)
    return [t.normal(ROWS, width if same_size else t.integer(2, 7), dtype=torch.float64) for _ in range(count)]


def buckets_of(weights: list[Tensor], trained: list[int], limit: int) -> list[list[int]]:
    """Which parameters go together."""
    found: list[list[int]] = []
    for i in reversed(trained):
        if found and sum(weights[j].nbytes for j in found[-1]) + weights[i].nbytes <= limit:
            found[-1].append(i)
        else:
            found.append([i])
    return found


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
            "when the last gradient was computed, {got} of {early} complete buckets had been sent: start them in on_gradient",
            got=last,
            early=early,
        )
        blocking = sum(not call.is_async for call in calls if call.kind is Kind.ALL_REDUCE)
        t.that(
            blocking == 0,
            "{blocking} all-reduces were waited for at once, so backward stood still meanwhile: async_op=True, and wait() in finish",
            blocking=blocking,
        )


# -- 5 · accumulate


@scenario
def accumulated(student, rank, world, weight, batches, limit):
    """The gradient after ``accumulate`` over micro-batches."""
    net = torch.nn.Linear(*reversed(weight.shape), bias=False, dtype=weight.dtype)
    net.weight.data.copy_(weight)
    model = student.DataParallel(net, limit)
    student.accumulate(model, [lambda x=x: torch.tanh(model(x)).square().mean() for x in batches])
    return net.weight.grad


@twin
def whole_gradient(weight: Tensor, batches: list[Tensor]) -> Tensor:
    """The gradient of the mean loss over all micro-batches, in one process."""
    weight = weight.clone().requires_grad_()
    loss = torch.stack([torch.tanh(x @ weight.T).square().mean() for x in batches]).mean()
    return torch.autograd.grad(loss, weight)[0]


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


@scenario
def accuracies(student, rank, world, logits, labels):
    """The metric on this rank."""
    return student.global_accuracy(logits, labels)


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
        for rank, got in enumerate(student.ranks(accuracies, parts).results):
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


@scenario
def moments(student, rank, world, x):
    """The statistics on this rank."""
    mean, var = student.global_moments(x)
    return [mean, var]


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


# -- quiz

QUIZ = {
    "q1": Question(
        "Eight ranks with DDP, Adam on each. What keeps the replicas equal?",
        {
            "a": "the weights are broadcast after every step",
            "b": "equal start, the same average of gradients, the same step",
            "c": "the weights are averaged after every step",
            "d": "the same random seed",
        },
    ),
    "q2": Question(
        "The model has 1 GB of gradients. What does a rank send in a step, with a ring over N = 8 ranks?",
        {"a": "1 GB", "b": "8 GB", "c": "7 GB", "d": "1.75 GB"},
    ),
    "q3": Question(
        "Why are buckets sent in one fixed order, and not in the order in which they become complete?",
        {
            "a": "all-reduces of the ranks find each other by their order alone",
            "b": "a ring needs messages of equal size",
            "c": "the optimiser needs the first layers first",
            "d": "it saves memory",
        },
    ),
    "q4": Question(
        "Global batch 64 on 4 ranks, then on 8 ranks with the same number of samples on each rank. What has changed for the optimiser?",
        {
            "a": "nothing",
            "b": "the gradient is twice as large",
            "c": "the global batch is 128: fewer, less noisy steps an epoch",
            "d": "the learning rate is divided by two",
        },
    ),
    "q5": Question(
        "One of 4 ranks has one batch more than the others in its epoch. What happens in plain DDP?",
        {
            "a": "the others repeat their last batch",
            "b": "it waits for ever in its last all-reduce",
            "c": "its last gradients are divided by 4",
            "d": "its last batch is skipped",
        },
    ),
}
complete = quiz_complete(QUIZ, points=1)

# -- hints

HINTS = {
    "replicate": [
        "One collective sends the tensor of one rank to all others.",
        "dist.broadcast(tensor, 0) works in place. Go through parameters and buffers; both are iterators.",
        "for tensor in [*module.parameters(), *module.buffers()]: dist.broadcast(tensor.detach(), 0)",
    ],
    "average": [
        "dist.all_reduce adds, in place. What is left to do for a mean?",
        "Divide before the sum: then no partial sum is larger than the largest gradient. Skip what has no gradient.",
        "For each parameter whose .grad is not None: .grad /= dist.get_world_size(), then dist.all_reduce(.grad).",
    ],
    "buckets": [
        "Go through the parameters from the last to the first, with one open bucket.",
        "Before you add a gradient, ask: does what the bucket holds, plus this one, exceed the limit? An empty bucket takes anything.",
        "if not buckets or held + nbytes[i] > limit: begin a new one, held = 0. Then append i and add its bytes.",
    ],
    "overlap": [
        "Three things to remember between calls: which gradients are there, which buckets are on their way, and their works with the flat tensors.",
        "on_gradient: note i; then, as long as the NEXT bucket in order is complete, start it. finish: start the rest with zeros for missing "
        "gradients, wait for all, cut the flat tensors into gradients, forget everything.",
        "flat = torch.cat([gradients of the bucket, flattened]) / world; work = dist.all_reduce(flat, async_op=True); later flat.split(numels) and "
        "view_as(parameter) go into .grad. In the hook's lambda write i=i.",
    ],
    "accumulate": [
        "backward of a sum is the sum of the backwards. What makes a sum of means the mean of all?",
        "Divide each loss by the number of micro-batches. All backward passes but the last one stay inside model.no_sync().",
        "with model.no_sync(): for loss in losses[:-1]: (loss() / len(losses)).backward(). Then the last one outside, and model.finish().",
    ],
    "sampler": [
        "All ranks make the same permutation; only the last line depends on the rank.",
        "Seed a torch.Generator with a number made of seed and epoch. Lengthen the permutation with its own beginning until world divides it.",
        "order = torch.randperm(length, generator=g).tolist(); each = ceil(length / world); repeat from the front up to each * world; order[rank::world].",
    ],
    "metrics": [
        "Rates cannot be averaged, counts can be added.",
        "Put the number of right answers and the number of samples into one tensor, and all-reduce it.",
        "counts = torch.tensor([(logits.argmax(1) == labels).sum(), len(labels)]); all_reduce; divide; .item().",
    ],
    "moments": [
        "Two passes: first everybody learns the mean, then squared deviations from it are added.",
        "All-reduce the sum over the samples and their number: that gives the mean. Then all-reduce the sum of (x - mean)².",
        "x.sum(0) of an empty rank is zeros: it needs no special case. Divide both sums by the number of all samples.",
    ],
    "quiz": [
        "Questions 1 and 4: what is the same on all ranks, and what grows with their number?",
        "Question 2: the bytes of a ring all-reduce, lab 10. Question 3: the warning in step 4.",
        "Question 5: what does a collective do when a rank does not come?",
    ],
}
