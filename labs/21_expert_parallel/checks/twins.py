"""The references of the checks: one process that computes every expert for every token, and loops over
choices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dlo_lib.grading.checks.twins import twin

Found = tuple[Tensor, list[Tensor]]  # the result, and the gradients of the arguments


def chosen(x: Tensor, router: Tensor, k: int, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Experts, weights and probabilities, by a sort of all experts."""
    powers = torch.exp(x @ router.T - (x @ router.T).amax(1, keepdim=True))
    probabilities = powers / powers.sum(1, keepdim=True)
    experts = torch.argsort(probabilities if bias is None else probabilities + bias, dim=1, descending=True)[
        :, :k
    ]
    weights = torch.stack(
        [probabilities[token, own] / probabilities[token, own].sum() for token, own in enumerate(experts)]
    )
    return experts, weights, probabilities


def within(experts: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Which choices (T, k) stay within the capacity, by a loop over all choices."""
    used = [0] * num_experts
    kept = torch.zeros(experts.shape, dtype=torch.bool)
    for token in range(len(experts)):
        for choice, one in enumerate(experts[token].tolist()):
            kept[token, choice] = used[one] < capacity
            used[one] += 1
    return kept


def _dense(
    x: Tensor,
    router: Tensor,
    first: Tensor,
    second: Tensor,
    k: int,
    bias: Tensor | None,
    capacity: int | None,
) -> Tensor:
    experts, weights, _ = chosen(x, router, k, bias)
    if capacity is not None:
        weights = weights * within(experts, len(router), capacity)
    out = torch.zeros_like(x)
    for one in range(len(router)):
        inner = x @ first[one]
        out = out + ((inner * torch.sigmoid(inner)) @ second[one]) * (weights * (experts == one)).sum(
            1, keepdim=True
        )
    return out


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
    wide = [tensor.detach().double().requires_grad_() for tensor in (first, second)]
    found, sums = [], [torch.zeros_like(tensor) for tensor in wide]
    for x, grad in zip(xs, grads):
        own = [tensor.detach().double().requires_grad_() for tensor in (x, router)]
        out = _dense(own[0], own[1], *wide, k, None if bias is None else bias.double(), capacity)
        of_x, of_router, *of_experts = torch.autograd.grad(out, [*own, *wide], grad.double())
        sums = [total + each for total, each in zip(sums, of_experts)]
        found.append((out.detach(), [of_x, of_router]))
    return [(out.to(x), [each.to(x) for each in (*local, *sums)]) for x, (out, local) in zip(xs, found)]


@twin
def weights_gradient(x: Tensor, router: Tensor, k: int, grad: Tensor) -> Tensor:
    """The gradient of the router through the weights."""
    own = router.clone().requires_grad_()
    (found,) = torch.autograd.grad(chosen(x, own, k)[1], [own], grad)
    return found


@twin
def balance(probabilities: Sequence[Tensor], experts: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The loss of the whole batch; the gradient of each rank's probabilities, times the number of ranks."""
    own = [tensor.clone().requires_grad_() for tensor in probabilities]
    size = own[0].shape[1]
    everything = torch.cat(own).mean(0)
    shares = torch.stack([(torch.cat(list(experts)) == one).double().mean() for one in range(size)])
    loss = size * torch.dot(shares, everything)
    return loss.detach(), [len(own) * each for each in torch.autograd.grad(loss, own)]


@twin
def other_orders(
    xs: Sequence[Tensor], router: Tensor, first: Tensor, second: Tensor, k: int, bias: Tensor, each: int
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """What each rank gets if rows, which arrive sorted by source, are given to the experts as if they were
    sorted by expert; if the results are sent back in the order of the experts; if the order is applied to the
    results once more instead of its inverse; and if the numbers of rows of each source and expert are read
    expert by expert."""
    arrival, not_back, twice, by_column = ([torch.zeros_like(x) for x in xs] for _ in range(4))
    routed = [chosen(x, router, k, bias) for x in xs]

    def add(outs: list[Tensor], place: tuple[int, ...], row: Tensor, one: int) -> None:
        source, _, token, choice = place
        inner = row @ first[one]
        outs[source][token] += routed[source][1][token, choice] * (
            (inner * torch.sigmoid(inner)) @ second[one]
        )

    for owner in range(len(xs)):
        arrived = []
        for source, (experts, _, _) in enumerate(routed):
            held = [
                (one, token, choice)
                for token, own in enumerate(experts.tolist())
                for choice, one in enumerate(own)
            ]
            arrived += [(source, *row) for row in sorted(held) if row[0] // each == owner]
        order = sorted(range(len(arrived)), key=lambda place: arrived[place][1])
        cells = [
            (source, one) for one in range(owner * each, (owner + 1) * each) for source in range(len(xs))
        ]
        counts = [sum(row[:2] == cell for row in arrived) for cell in cells]
        labels = [owner * each + place % each for place, count in enumerate(counts) for _ in range(count)]
        for i, place in enumerate(arrived):
            taken, again = arrived[order[i]], arrived[order[order[i]]]
            add(arrival, place, xs[place[0]][place[2]], taken[1])
            add(not_back, place, xs[taken[0]][taken[2]], taken[1])
            add(twice, place, xs[again[0]][again[2]], again[1])
            mine = arrived[i]
            add(by_column, mine, xs[mine[0]][mine[2]], labels[i])
    return arrival, not_back, twice, by_column


@twin
def untransposed(
    xs: Sequence[Tensor], router: Tensor, first: Tensor, second: Tensor, k: int, capacity: int
) -> tuple[list[Tensor], list[Tensor]]:
    """What each rank gets with buffers of a fixed shape if the buffer (source, expert, row) is read as
    (expert, source · row) without a transposition, there and back; and if only the way back has none."""
    world, each = len(xs), len(router) // len(xs)
    routed = [chosen(x, router, k) for x in xs]
    slots, sent = [], torch.zeros(world, len(router), capacity, xs[0].shape[1], dtype=xs[0].dtype)
    for source, (experts, _, _) in enumerate(routed):
        kept, used = within(experts, len(router), capacity), [0] * len(router)
        for token, choice in kept.nonzero().tolist():
            one = int(experts[token, choice])
            slots.append((source, token, choice, one, used[one]))
            sent[source, one, used[one]] = xs[source][token]
            used[one] += 1
    outs = []
    for there in (False, True):
        returned = torch.zeros_like(sent)
        for owner in range(world):
            own = slice(owner * each, (owner + 1) * each)
            arrived = sent[:, own].transpose(0, 1) if there else sent[:, own]
            inner = arrived.reshape(each, world * capacity, -1) @ first[own]
            returned[:, own] = ((inner * torch.sigmoid(inner)) @ second[own]).reshape(
                world, each, capacity, -1
            )
        out = [torch.zeros_like(x) for x in xs]
        for source, token, choice, one, slot in slots:
            out[source][token] += routed[source][1][token, choice] * returned[source, one, slot]
        outs.append(out)
    return outs[0], outs[1]
