"""The visible checks of the gradients of experts and of shared parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dlo_lib.grading.checks.contract import Kind, Run, check
from dlo_lib.labkit.compare import EXACT, double, each_rank, explained, same
from dlo_lib.labkit.traffic import uses_what_arrives

from .parallel import layer_inputs
from .routing import members_of
from .scenarios import reduced, whole_step
from .twins import moe

REPLICAS = [[0, 2], [1, 3]]
NO_GRADIENT = {"Expected parameter `tensor`": "A parameter without gradient has None: skip it"}
UNCHANGED = "{what} on rank {rank} are unchanged: change parameter.grad in place"
Share = tuple[str, int]
"""A sum of gradients ("own", "replicas" or "all"), and the number that divides it."""


def reduced_case(student, t, kind: str, what: str, right: Share, mistakes: Mapping[str, Share]) -> Run:
    """Gradients on a grid of 2 × 2 ranks after ``reduce_gradients``: those of ``kind``, shared parameters or
    experts, are right."""
    shape = t.integer(1, 4), 2
    held = {name: [double(t, *shape) for _ in range(4)] for name in ("shared", "experts")}
    inputs = [{name: [grads[rank], None] for name, grads in held.items()} for rank in range(4)]
    run = explained(student, reduced, [{**own, "groups": REPLICAS} for own in inputs], NO_GRADIENT)
    grads = held[kind]
    for rank, got in each_rank(t, run, 2, "the gradients"):
        mine, none = t.items(got[list(held).index(kind)], 2, "the gradients")
        of_replicas = sum(grads[other] for other in members_of(REPLICAS, rank, 4))
        sums = {"own": grads[rank], "replicas": of_replicas, "all": sum(grads)}
        shares = {UNCHANGED: ("own", 1), **mistakes}
        known = {message: sums[which] / by for message, (which, by) in shares.items()}
        same(
            t,
            mine,
            sums[right[0]] / right[1],
            "{what} on rank {rank} of 4",
            known,
            rank=rank,
            what=what,
            **EXACT,
        )
        t.that(none is None, "a parameter without gradient has one on rank {rank}: skip None", rank=rank)
    return run


@check("gradients", points=1, seconds=30)
def check_shared(student, t):
    "Shared parameters: the mean over all ranks"
    mistakes = {
        "{what} on rank {rank} are summed: they should be the mean over all ranks": ("all", 1),
        "{what} on rank {rank} are averaged over its replicas only": ("replicas", 2),
        "{what} on rank {rank} are added over its replicas, not over all ranks": ("replicas", 4),
        "{what} on rank {rank} are not added over all ranks": ("own", 4),
    }
    run = reduced_case(student, t, "shared", "the gradients of shared parameters", ("all", 4), mistakes)
    uses_what_arrives(t, run, Kind.ALL_REDUCE, t.integer(0, 1), call=0)


@check("gradients", points=2, seconds=30)
def check_expert_gradients(student, t):
    "Experts: the sum over their replicas, divided by all ranks"
    mistakes = {
        "{what} on rank {rank} are not added over its replicas": ("own", 4),
        "{what} on rank {rank} are averaged over all ranks: its neighbours store other experts": ("all", 4),
        "{what} on rank {rank} are added over its replicas, and not divided: divide by the number of all "
        "ranks": ("replicas", 1),
        "{what} on rank {rank} are divided by the number of replicas: divide by the number of all ranks, "
        "because the tokens of all ranks of an expert group are in them": ("replicas", 2),
    }
    reduced_case(student, t, "experts", "the gradients of experts", ("replicas", 4), mistakes)


@check("gradients", points=2, seconds=60)
def check_grid(student, t):
    "Two expert groups have the gradients of one process with the whole batch"
    k = 2  # with k = 1, the router has no gradient
    xs, router, *experts, grads = layer_inputs(t, 4, 4, torch.float64)
    inputs = []
    for rank, (x, grad) in enumerate(zip(xs, grads)):
        first, second = (each.chunk(2)[rank % 2].clone() for each in experts)
        inputs.append({"x": x, "router": router, "first": first, "second": second, "k": k, "grad": grad})
    run = student.ranks(whole_step, [{"ep": 2, **own} for own in inputs])
    rows = [moe(xs[row : row + 2], router, *experts, k, grads[row : row + 2]) for row in (0, 2)]
    of_router = sum(right[1] for found in rows for _, right in found) / 4
    alone = (
        "the gradient of {what} on rank {rank} has the tokens of its expert group only: add those of its "
        "replicas"
    )
    for rank, got in each_rank(t, run, 3, "the gradients"):
        of_rows = [[each.chunk(2)[rank % 2] / 4 for each in found[0][1][2:]] for found in rows]
        wants = [(of_router, of_router), *zip(map(sum, zip(*of_rows)), of_rows[rank // 2])]
        for what, mine, (right, of_group) in zip(("the router", "first", "second"), got, wants):
            message = "the gradient of {what} on rank {rank} of 2 × 2"
            same(t, mine, right, message, {alone: of_group}, what=what, rank=rank, **EXACT)
