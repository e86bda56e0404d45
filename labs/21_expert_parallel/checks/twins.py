"""The references of the checks: one process that computes every expert for every token, and loops over
choices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.functional import vjp

from dlo_lib.grading.checks.twins import twin

Found = tuple[Tensor, list[Tensor]]  # the result, and the gradients of the arguments


def chosen(x: Tensor, router: Tensor, k: int, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Experts, weights and probabilities, by a sort of all experts."""
    probabilities = (x @ router.T).softmax(1)
    scores = probabilities if bias is None else probabilities + bias
    experts = scores.argsort(dim=1, descending=True)[:, :k]
    return experts, F.normalize(probabilities.gather(1, experts), p=1), probabilities


def within(experts: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Which choices (T, k) stay within the capacity, by a loop over all choices."""
    used = [0] * num_experts
    kept = torch.zeros(experts.shape, dtype=torch.bool)
    for token in range(len(experts)):
        for choice, one in enumerate(experts[token].tolist()):
            kept[token, choice] = used[one] < capacity
            used[one] += 1
    return kept


def output(rows: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """What an expert with these weights computes."""
    return F.silu(rows @ first) @ second


@twin
def moe(
    xs: Sequence[Tensor],
    router: Tensor,
    first: Tensor,
    second: Tensor,
    k: int,
    grads: Sequence[Tensor],
    bias: Tensor | None = None,
    capacity: int | None = None,
) -> list[Found]:
    """Of each rank: its result, and the gradients of its x, of the router by its tokens alone, and of *all*
    experts by the tokens of all ranks. A capacity limits each rank by itself. Computed in float64."""

    def dense(x: Tensor, router: Tensor, first: Tensor, second: Tensor) -> Tensor:
        experts, weights, _ = chosen(x, router, k, None if bias is None else bias.double())
        if capacity is not None:
            weights = weights * within(experts, len(router), capacity)
        shares = [(weights * (experts == one)).sum(1, keepdim=True) for one in range(len(router))]
        return sum(share * output(x, *own) for share, *own in zip(shares, first, second))

    whole = [tensor.double() for tensor in (router, first, second)]
    found = [vjp(dense, (x.double(), *whole), grad.double()) for x, grad in zip(xs, grads)]
    sums = [sum(each) for each in zip(*(own[2:] for _, own in found))]
    return [(out.to(x), [grad.to(x) for grad in (*own[:2], *sums)]) for x, (out, own) in zip(xs, found)]


@twin
def weights_gradient(x: Tensor, router: Tensor, k: int, grad: Tensor) -> Tensor:
    """The gradient of the router through the weights."""
    return vjp(lambda own: chosen(x, own, k)[1], router, grad)[1]


@twin
def balance(probabilities: Sequence[Tensor], experts: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The loss of the whole batch; the gradient of each rank's probabilities, times the number of ranks."""
    size = probabilities[0].shape[1]
    shares = torch.stack([(torch.cat(list(experts)) == one).double().mean() for one in range(size)])
    loss, grads = vjp(lambda *own: size * torch.dot(shares, torch.cat(own).mean(0)), tuple(probabilities))
    return loss, [len(grads) * grad for grad in grads]


@twin
def other_orders(
    xs: Sequence[Tensor], router: Tensor, first: Tensor, second: Tensor, k: int, bias: Tensor, each: int
) -> list[list[Tensor]]:
    """What each rank gets if rows, which arrive sorted by source, are given to the experts as if they were
    sorted by expert; if the results are sent back in the order of the experts; if the order is applied to the
    results once more instead of its inverse; and if the numbers of rows of each source and expert are read
    expert by expert."""
    routed = [chosen(x, router, k, bias) for x in xs]
    rows = [  # sorted by source, then by expert
        (source, one, token, choice)
        for source, (experts, _, _) in enumerate(routed)
        for one in range(len(router))
        for token, choice in (experts == one).nonzero().tolist()
    ]
    outs = [[torch.zeros_like(x) for x in xs] for _ in range(4)]
    for owner in range(len(xs)):
        arrived = [row for row in rows if row[1] // each == owner]
        order = sorted(range(len(arrived)), key=lambda place: arrived[place][1])
        cells = [(source, own) for own in range(each) for source in range(len(xs))]
        counts = [sum(row[:2] == (source, owner * each + own) for row in arrived) for source, own in cells]
        labels = [owner * each + place % each for place, count in enumerate(counts) for _ in range(count)]
        for i, own in enumerate(arrived):
            taken, again = arrived[order[i]], arrived[order[order[i]]]
            used = [(own, taken[1]), (taken, taken[1]), (again, again[1]), (own, labels[i])]
            for out, (row, one) in zip(outs, used):
                computed = output(xs[row[0]][row[2]], first[one], second[one])
                out[own[0]][own[2]] += routed[own[0]][1][own[2], own[3]] * computed
    return outs


@twin
def untransposed(
    xs: Sequence[Tensor], router: Tensor, first: Tensor, second: Tensor, k: int, capacity: int
) -> list[list[Tensor]]:
    """What each rank gets with buffers of a fixed shape if the buffer (source, expert, row) is read as
    (expert, source · row) without a transposition, there and back; and if only the way back has none."""
    world, each = len(xs), len(router) // len(xs)
    routed = [chosen(x, router, k) for x in xs]
    slots, sent = [], torch.zeros(world, len(router), capacity, xs[0].shape[1], dtype=xs[0].dtype)
    for source, (experts, _, _) in enumerate(routed):
        used = [0] * len(router)
        for token, choice in within(experts, len(router), capacity).nonzero().tolist():
            one = int(experts[token, choice])
            slots.append((source, token, choice, one, used[one]))
            sent[source, one, used[one]] = xs[source][token]
            used[one] += 1
    outs = [[torch.zeros_like(x) for x in xs] for _ in range(2)]
    for out, there in zip(outs, (False, True)):
        returned = torch.zeros_like(sent)
        for owner in range(world):
            own = slice(owner * each, (owner + 1) * each)
            arrived = sent[:, own].transpose(0, 1) if there else sent[:, own]
            results = output(arrived.reshape(each, world * capacity, -1), first[own], second[own])
            returned[:, own] = results.reshape(world, each, capacity, -1)
        for source, token, choice, one, slot in slots:
            out[source][token] += routed[source][1][token, choice] * returned[source, one, slot]
    return outs
