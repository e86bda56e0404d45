"""The order in which the tokens of a mixture of experts are processed: one row for each choice of a token,
sorted by expert.

Each of T tokens chooses k experts. ``plan_dispatch`` sorts the T k choices by expert, so that the rows of an
expert are consecutive. ``scatter_tokens`` copies the tokens into this order and ``combine_rows`` sums the
rows of a token with its weights. The two are transposes of each other:
    rows = P tokens        out = P^T diag(weights) rows
so that the backward of each is the operation of the other. Neither adds at random addresses: the sums are
deterministic.

Without a capacity every choice is processed (drop-less, MegaBlocks). With a capacity C, an expert processes
its first C rows and drops the others. Rows are in the order of choices, then of tokens, so that a second
choice never displaces a first one (GShard). A token whose choices are all dropped gives zeros, so that the
residual connection alone remains.

Cost: a copy of k T hidden elements in each direction, in forward and in backward.

Papers: GShard (arXiv:2006.16668), Switch Transformer (arXiv:2101.03961), MegaBlocks (arXiv:2211.15841).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, eq=False)
class DispatchPlan:
    """The rows of the experts.

    Attributes:
        token: (R,) int64, the token of each row. R is T k without drops.
        choice: (R,) int64, the index of each row in the (T, k) choices, flattened.
        row: (T, k) int64, the row of each choice; 0 for a dropped choice.
        kept: (T, k) bool, False for a dropped choice; None if there are no drops.
        counts: (num_experts,) int64, the number of rows of each expert.
    """

    token: Tensor
    choice: Tensor
    row: Tensor
    kept: Tensor | None
    counts: Tensor

    @property
    def dropped(self) -> Tensor:
        """The number of dropped choices, () int64."""
        if self.kept is None:
            return self.row.new_zeros(())
        return (~self.kept).sum()


def capacity_of(factor: float, tokens: int, top_k: int, num_experts: int) -> int:
    """Return the capacity of an expert, ceil(factor * tokens * top_k / num_experts), at least 1."""
    return max(1, math.ceil(factor * tokens * top_k / num_experts))


def plan_dispatch(experts: Tensor, num_experts: int, capacity: int | None = None) -> DispatchPlan:
    """Sort the choices by expert.

    Args:
        experts: (T, k) int64, the experts that each token has chosen.
        capacity: the largest number of rows of an expert; None for no limit.
    """
    tokens, top_k = experts.shape
    by_choice = experts.t().reshape(-1)  # (k T,) first choices of all tokens, then second choices
    counts = torch.bincount(by_choice, minlength=num_experts)
    order = torch.argsort(by_choice, stable=True)
    kept = None
    if capacity is not None:
        first = (counts.cumsum(0) - counts)[by_choice[order]]  # the first row of the expert of each row
        order = order[torch.arange(len(order), device=order.device) - first < capacity]
        counts = counts.clamp(max=capacity)
        kept = by_choice.new_zeros(tokens * top_k, dtype=torch.bool)
        kept[order] = True
        kept = kept.view(top_k, tokens).t()
    row = torch.zeros_like(by_choice)
    row[order] = torch.arange(len(order), device=order.device)
    token = order % max(tokens, 1)
    choice = token * top_k + order // max(tokens, 1)
    return DispatchPlan(token, choice, row.view(top_k, tokens).t(), kept, counts)


def scatter_tokens(tokens: Tensor, plan: DispatchPlan) -> Tensor:
    """Copy ``tokens`` (T, hidden) to the rows of the experts, (R, hidden)."""
    return _Scatter.apply(tokens, plan)


def combine_rows(rows: Tensor, weights: Tensor, plan: DispatchPlan) -> Tensor:
    """Sum the ``rows`` (R, hidden) of each token with its ``weights`` (T, k); returns (T, hidden) in the
    dtype of the rows. A dropped choice counts as zeros."""
    weights = weights.to(rows.dtype)
    return _Combine.apply(rows, weights if plan.kept is None else weights * plan.kept, plan)


def _sum_of_rows(rows: Tensor, weights: Tensor | None, plan: DispatchPlan) -> Tensor:
    """Return the sum over the choices of each token, (T, hidden). ``weights`` None means 1."""
    out = rows.index_select(0, plan.row[:, 0])
    if weights is not None:
        out.mul_(weights[:, :1])
    for choice in range(1, plan.row.shape[1]):
        part = rows.index_select(0, plan.row[:, choice])
        out.add_(part) if weights is None else out.addcmul_(part, weights[:, choice : choice + 1])
    return out


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, plan: DispatchPlan) -> Tensor:
        ctx.plan = plan
        return tokens.index_select(0, plan.token)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        kept = ctx.plan.kept
        return _sum_of_rows(grad, None if kept is None else kept.to(grad.dtype), ctx.plan), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, plan: DispatchPlan) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(rows, weights)
        return _sum_of_rows(rows, weights, plan)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weights = ctx.saved_tensors
        grad_rows = grad.index_select(0, ctx.plan.token)  # (R, hidden), times the weight of the row below
        grad_weights = torch.zeros_like(weights)
        grad_weights.view(-1)[ctx.plan.choice] = torch.linalg.vecdot(rows, grad_rows)
        grad_rows.mul_(weights.reshape(-1)[ctx.plan.choice, None])
        return grad_rows, grad_weights, None
