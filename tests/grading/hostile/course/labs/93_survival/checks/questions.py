"""The visible checks. Most limits of time are small, so that what hangs costs the tests little."""

from __future__ import annotations

import torch

from dlo_lib.grading.checks.contract import Kind, check, scenario


@check("scale", points=1, seconds=0.5)
def check_one_row(student, t):
    """One row has one scale"""
    x = t.normal(1, t.integer(8, 20))
    t.close(student.absmax_scale(x), x.abs().amax(dim=1) / 127, "absmax_scale(x)")


@check("scale", points=1, seconds=0.5)
def check_largest(student, t):
    """The largest element becomes 127"""
    x = t.normal(4, 30)
    t.close(student.absmax_scale(x), x.abs().amax(dim=1) / 127, "absmax_scale(x)")


# On a new virtual machine it takes 6 s to fill 2 GiB, because their pages come from the host.
@check("quantise", points=1, seconds=20)
def check_round_trip(student, t):
    """Nothing is further away than half a step"""
    x = t.normal(t.integer(2, 6), t.integer(8, 20))
    q, scale = t.items(student.quantise(x), 2, "quantise(x)")
    t.tensor(q, "q", shape=x.shape, dtype=torch.int8)
    t.tensor(scale, "scale", shape=x.shape[:1], dtype=torch.float32)
    gap = (q.float() * scale[:, None] - x).abs()
    t.that(
        bool((gap <= 0.51 * scale[:, None]).all()),
        "q * scale is up to {gap:.3g} away from x",
        gap=float(gap.max()),
    )


@scenario
def mean(student, rank, world, x):
    return student.all_reduce_mean(x)


@check("mean", points=1, seconds=2)
def check_mean(student, t):
    """Every rank gets the mean, by one all-reduce"""
    size = t.integer(4, 9)
    xs = [t.normal(size) for _ in range(2)]
    run = student.ranks(mean, [{"x": x} for x in xs])
    for rank, got in enumerate(run.results):
        t.close(got, sum(xs) / 2, "the mean on rank {rank}", rank=rank)
        kinds = [call.kind for call in run.calls(rank)]
        t.that(
            kinds == [Kind.ALL_REDUCE],
            "rank {rank} made {count} calls: one all-reduce is enough",
            rank=rank,
            count=len(kinds),
        )


@scenario
def train(student, rank, world, weight, batches, lr):
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    with torch.no_grad():
        linear.weight.copy_(weight)
    module = student.fully_sharded(linear)
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = module(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def twin(weight, batches_of_ranks, lr):
    """The losses of each rank when one process trains on the mean of the ranks' gradients."""
    weight = weight.clone().requires_grad_()
    losses = []
    for batches in zip(*batches_of_ranks):
        each = [(batch @ weight.T).square().mean() for batch in batches]
        (gradient,) = torch.autograd.grad(sum(each) / len(each), weight)
        weight = (weight.detach() - lr * gradient).requires_grad_()
        losses.append([loss.detach() for loss in each])
    return [list(of_a_rank) for of_a_rank in zip(*losses)]


def fsdp_case(t, world):
    """Inputs for each rank: the same weight, and different batches."""
    rows, columns = world * t.integer(2, 4), t.integer(3, 6)
    weight, lr = t.normal(rows, columns), t.uniform(0.1, 0.3)
    return [
        {"weight": weight, "batches": [t.normal(5, columns) for _ in range(2)], "lr": lr}
        for _ in range(world)
    ]


def trained_sharded(t, run, inputs):
    """The losses are the twin's, and the weight was gathered, its gradient reduce-scattered."""
    want = twin(inputs[0]["weight"], [rank["batches"] for rank in inputs], inputs[0]["lr"])
    for rank in range(run.world):
        for step, got in enumerate(
            t.items(run.results[rank], len(want[rank]), "the losses of rank {rank}", rank=rank)
        ):
            t.close(got, want[rank][step], "the loss of step {step} on rank {rank}", step=step, rank=rank)
        kinds = {call.kind for call in run.calls(rank)}
        t.that(
            Kind.REDUCE_SCATTER in kinds,
            "rank {rank} never reduce-scattered: gradients go to their owners",
            rank=rank,
        )
        t.that(Kind.ALL_GATHER in kinds, "rank {rank} never gathered", rank=rank)


@check("fsdp", points=1, seconds=5)
def check_training(student, t):
    """Two steps on two ranks, gathered and reduce-scattered"""
    inputs = fsdp_case(t, 2)
    trained_sharded(t, student.ranks(train, inputs), inputs)
