"""The visible checks of the gradients of experts and of shared parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import Kind, Run, check
from dlo_lib.labkit.compare import explained, wrong_if
from dlo_lib.labkit.traffic import uses_what_arrives

from .parallel import layer_inputs
from .routing import EXACT, double, members_of
from .scenarios import reduced, whole_step
from .twins import moe

REPLICAS = [[0, 2], [1, 3]]
UNCHANGED = "the gradients of {what} on rank {rank} are unchanged: change parameter.grad in place"


def reduced_case(student, t) -> tuple[Run, list[list[Tensor]]]:
    """Gradients on a grid of 2 × 2 ranks after ``reduce_gradients``: shared ones, and those of experts."""
    shape = t.integer(1, 4), 2
    held = [[double(t, *shape) for _ in range(4)] for _ in range(2)]
    inputs = [
        {"shared": [held[0][rank], None], "experts": [held[1][rank], None], "groups": REPLICAS}
        for rank in range(4)
    ]
    return explained(
        student,
        reduced,
        inputs,
        {"Expected parameter `tensor`": "A parameter without gradient has None: skip it"},
    ), held


@check("gradients", points=1, seconds=30)
def check_shared(student, t):
    "Shared parameters: the mean over all ranks"
    run, (shared, _) = reduced_case(student, t)
    right = sum(shared) / 4
    for rank, got in enumerate(run.results):
        mine, none = t.items(t.items(got, 2, "the gradients")[0], 2, "the gradients")
        of_replicas = sum(shared[other] for other in members_of(REPLICAS, rank, 4))
        mistakes = {
            UNCHANGED: shared[rank],
            "shared gradients on rank {rank} are summed: they should be the mean over all ranks": sum(shared),
            "shared gradients on rank {rank} are averaged over its replicas only": of_replicas / 2,
            "shared gradients on rank {rank} are added over its replicas, not over all ranks": of_replicas
            / 4,
            "shared gradients on rank {rank} are not added over all ranks": shared[rank] / 4,
        }
        wrong_if(t, mine, right, mistakes, rank=rank, what="shared parameters")
        t.close(mine, right, "the shared gradient on rank {rank} of 4", rank=rank, **EXACT)
        t.that(none is None, "a parameter without gradient has one on rank {rank}: skip None", rank=rank)
    uses_what_arrives(t, run, Kind.ALL_REDUCE, t.integer(0, 1), call=0)


@check("gradients", points=2, seconds=30)
def check_expert_gradients(student, t):
    "Experts: the sum over their replicas, divided by all ranks"
    run, (_, experts) = reduced_case(student, t)
    for rank, got in enumerate(run.results):
        mine, none = t.items(t.items(got, 2, "the gradients")[1], 2, "the gradients")
        of_replicas = sum(experts[other] for other in members_of(REPLICAS, rank, 4))
        right = of_replicas / 4
        divided = (
            "gradients of experts on rank {rank} are divided by the number of replicas: divide by the "
            "number of all ranks, because "
        )
        mistakes = {
            UNCHANGED: experts[rank],
            "gradients of experts on rank {rank} are not added over its replicas": experts[rank] / 4,
            "gradients of experts on rank {rank} are averaged over all ranks: its neighbours store other "
            "experts": sum(experts) / 4,
            "gradients of experts on rank {rank} are added over its replicas, and not divided: divide by "
            "the number of all ranks": of_replicas,
            divided + "the tokens of all ranks of an expert group are in them": of_replicas / 2,
        }
        wrong_if(t, mine, right, mistakes, rank=rank, what="experts")
        t.close(mine, right, "the gradient of experts on rank {rank} of 4", rank=rank, **EXACT)
        t.that(none is None, "a parameter without gradient has one on rank {rank}: skip None", rank=rank)


@check("gradients", points=2, seconds=60)
def check_grid(student, t):
    "Two expert groups have the gradients of one process with the whole batch"
    ep, k = 2, 2  # with k = 1, the router has no gradient
    xs, router, first, second, _, grads = layer_inputs(t, 4, 4, torch.float64)
    inputs = [
        {
            "ep": ep,
            "x": xs[rank],
            "router": router,
            "first": first.chunk(ep)[rank % ep].clone(),
            "second": second.chunk(ep)[rank % ep].clone(),
            "k": k,
            "grad": grads[rank],
        }
        for rank in range(4)
    ]
    run = student.ranks(whole_step, inputs)
    rows = [moe(xs[row : row + 2], router, first, second, k, grads[row : row + 2]) for row in (0, 2)]
    of_router = sum(right[1] for found in rows for _, right in found) / 4
    for rank, got in enumerate(run.results):
        mine = t.items(got, 3, "the gradients")
        alone = (
            "the gradient of {what} on rank {rank} has the tokens of its expert group only: add those of "
            "its replicas"
        )
        of_rows = [[each.chunk(ep)[rank % ep] / 4 for each in found[0][1][2:]] for found in rows]
        wants = of_router, *(sum(both) for both in zip(*of_rows))
        for what, grad, right, group in zip(
            ("the router", "first", "second"), mine, wants, (of_router, *of_rows[rank // ep])
        ):
            wrong_if(t, grad, right, {alone: group}, what=what, rank=rank)
            t.close(
                grad,
                right,
                "the gradient of {what} on rank {rank} of 2 × 2",
                what=what,
                rank=rank,
                rtol=1e-9,
                atol=1e-10,
            )
