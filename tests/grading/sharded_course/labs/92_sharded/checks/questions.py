"""The visible checks: the twin is plain AdamW on the mean gradient, in one process."""

from __future__ import annotations

import torch

from dlo_lib.grading.checks.contract import Kind, check, scenario


@scenario
def train(student, rank, world, parameter, gradients, lr):
    optimizer = student.ShardedAdamW(parameter.clone(), lr)
    for gradient in gradients:
        optimizer.step(gradient.clone())
    del gradient
    mark("after the steps")  # noqa: F821
    return optimizer.parameter


def case(t, world: int, elements: int, steps: int = 2):
    """One input per rank: the same parameter, and different gradients."""
    parameter, lr = t.normal(elements), 10.0 ** -t.integer(1, 3)
    return [
        {"parameter": parameter, "gradients": [t.normal(elements) for _ in range(steps)], "lr": lr}
        for _ in range(world)
    ]


def twin(inputs, shift: dict[tuple[int, int], float] | None = None):
    """Plain AdamW on the mean of the ranks' gradients; ``shift``: (step, element) → what
    is added to that mean."""
    parameter = torch.nn.Parameter(inputs[0]["parameter"].clone())
    optimizer = torch.optim.AdamW([parameter], lr=inputs[0]["lr"])
    for step, gradients in enumerate(zip(*(rank["gradients"] for rank in inputs))):
        parameter.grad = torch.stack(gradients).mean(0)
        for (at, element), by in (shift or {}).items():
            parameter.grad[element] += by if at == step else 0.0
        optimizer.step()
    return parameter.detach()


def same_everywhere(t, run, want):
    for rank, got in enumerate(run.results):
        t.close(got, want, "the parameter on rank {rank}", rank=rank)


@check("sharded", points=1)
def check_same(student, t):
    "Every rank has what AdamW on the mean gradient gives"
    for world in (2, 3):
        inputs = case(t, world, world * t.integer(5, 20))
        same_everywhere(t, student.ranks(train, inputs), twin(inputs))


@check("sharded", points=1)
def check_traffic(student, t):
    "One reduce-scatter and one all-gather a step"
    inputs = case(t, 2, 2 * t.integer(5, 20), steps=t.integer(2, 3))
    run = student.ranks(train, inputs)
    same_everywhere(t, run, twin(inputs))
    size, steps = inputs[0]["parameter"].nbytes, len(inputs[0]["gradients"])
    for rank in range(run.world):
        kinds = sorted({call.kind.value for call in run.calls(rank)})
        t.that(
            kinds == ["all_gather", "reduce_scatter"],
            "rank {rank} used {kinds}: gradients are reduce-scattered to their owners, "
            "parameters all-gathered",
            rank=rank, kinds=", ".join(kinds),
        )  # fmt: skip
        for kind in (Kind.REDUCE_SCATTER, Kind.ALL_GATHER):
            t.that(
                run.bytes(rank, kind) == steps * size,
                "rank {rank} passed {got} bytes in {kind}, "
                "and {want} are the whole parameter in {steps} steps",
                rank=rank, got=run.bytes(rank, kind), kind=kind.value, want=steps * size, steps=steps,
            )  # fmt: skip


@check("sharded", points=1, seconds=60)
def check_memory(student, t):
    "The moments are spread over the ranks"
    world, elements = 2, 1 << 21
    inputs = case(t, world, elements, steps=1)
    run = student.ranks(train, inputs)
    same_everywhere(t, run, twin(inputs))
    size = inputs[0]["parameter"].nbytes
    # The input and its gradient, the parameter and its shard, a shard of each moment; and a third of a
    # parameter for what a process needs, which is less than the half that whole moments add.
    most = 3 * size + 3 * size // world + size // 3
    for rank in range(world):
        held = run.memory(rank, "after the steps")
        t.that(
            held <= most,
            "rank {rank} holds {held} MB after the step, {most} MB are enough: "
            "keep only the moments of your shard",
            rank=rank, held=held >> 20, most=most >> 20,
        )  # fmt: skip
