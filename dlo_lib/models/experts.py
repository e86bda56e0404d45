"""The experts of a mixture: E SwiGLU networks whose weights are stored as stacked matrices.

    out = (silu(rows @ gate[e]) * (rows @ up[e])) @ down[e]        for the rows of expert e

Each product is a *grouped* matmul: one product for each expert, written into one output. An expert without
rows costs nothing, and its gradient is zero. The rows of an expert come from several sources; they are copied
to one matrix first, because a product for each source would read the weights, and add to their gradient, once
for each source. Two autograd functions contain all of it. They save the rows and the two products before the
activation, (R, 2 ffn), and compute the activation again in backward; autograd would save four tensors of
(R, ffn). With two functions, the gradient of ``down`` is complete, and can be added to ``.grad`` and freed,
before that of ``gate_up`` exists. The gradient of stacked weights is written expert by expert into one
tensor, without the zeros and the sum that indexing creates. Temporary tensors have the rows of one expert.

On the CPU the loop over experts is as fast as ``torch._grouped_mm`` and supports float64. On a GPU with bf16
rows, ``torch._grouped_mm`` computes all experts in one kernel, where the installed PyTorch has it.

Paper: MegaBlocks (arXiv:2211.15841), section 4; SwiGLU (arXiv:2002.05202).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Segments = Sequence[Sequence[int]]
"""The number of rows of each expert, for each source of rows. Rows are sorted by source, then by expert. A
model in one process has one source; with expert parallelism each rank is a source."""


class Experts(nn.Module):
    """``num_experts`` SwiGLU networks.

    Args:
        num_experts: the number of experts. With expert parallelism, a rank stores fewer
            (``parallel.expert``).
        hidden, intermediate: the width of the input and output, and that inside an expert.

    Parameters: ``gate_up`` (num_experts, hidden, 2 * intermediate), the gate first, and ``down``
    (num_experts, intermediate, hidden).
    """

    def __init__(self, num_experts: int, hidden: int, intermediate: int, **factory: Any) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(num_experts, hidden, 2 * intermediate, **factory))
        self.down = nn.Parameter(torch.empty(num_experts, intermediate, hidden, **factory))
        self.init_weights(0.02)

    def init_weights(self, std: float) -> None:
        """Initialise all matrices normal with standard deviation ``std``."""
        nn.init.normal_(self.gate_up, std=std)
        nn.init.normal_(self.down, std=std)

    def forward(self, rows: Tensor, segments: Segments) -> Tensor:
        """Process ``rows`` (R, hidden), which are sorted as ``segments`` describes; returns (R, hidden).

        The products have the dtype of ``rows``.
        """
        gate_up, down = self.gate_up.to(rows.dtype), self.down.to(rows.dtype)
        if rows.is_cuda and rows.dtype is torch.bfloat16 and hasattr(torch, "_grouped_mm"):
            return on_gpu(rows, gate_up, down, segments)
        places = _places(segments)
        return _Outer.apply(_Inner.apply(rows, gate_up, places), down, places)


def on_gpu(rows: Tensor, gate_up: Tensor, down: Tensor, segments: Segments) -> Tensor:
    """Compute the experts with ``torch._grouped_mm``, which needs rows that are sorted by expert alone."""
    counts = torch.tensor(segments, device=rows.device)  # (sources, experts)
    offsets = counts.sum(0).cumsum(0).int()
    back = None
    if len(segments) > 1:
        experts = torch.arange(counts.shape[1], device=rows.device).repeat(len(segments))
        order = torch.argsort(experts.repeat_interleave(counts.flatten()), stable=True)
        back = torch.argsort(order)
        rows = rows.index_select(0, order)
    gate, up = torch._grouped_mm(rows, gate_up, offs=offsets).chunk(2, dim=-1)
    out = torch._grouped_mm(F.silu(gate) * up, down, offs=offsets)
    return out if back is None else out.index_select(0, back)


def _places(segments: Segments) -> list[list[slice]]:
    """Return the rows of each expert, one slice for each source that has some. Slices that follow each other
    are one."""
    places: list[list[slice]] = [[] for _ in segments[0]]
    start = 0
    for counts in segments:
        for expert, count in enumerate(counts):
            of_expert = places[expert]
            if count and of_expert and of_expert[-1].stop == start:
                of_expert[-1] = slice(of_expert[-1].start, start + count)
            elif count:
                of_expert.append(slice(start, start + count))
            start += count
    return places


def _by_expert(places: list[list[slice]]) -> Iterator[tuple[int, list[slice], slice]]:
    """Yield each expert that has rows, its rows, and its rows if rows are sorted by expert alone."""
    start = 0
    for expert, of_expert in enumerate(places):
        count = sum(part.stop - part.start for part in of_expert)
        if count:
            yield expert, of_expert, slice(start, start + count)
        start += count


def _taken(rows: Tensor, parts: list[slice]) -> Tensor:
    """Return the rows of an expert, consecutive: a view if one source has them all."""
    return rows[parts[0]] if len(parts) == 1 else torch.cat([rows[part] for part in parts])


def _put_product(out: Tensor, parts: list[slice], a: Tensor, b: Tensor) -> None:
    """Write a @ b to the rows of an expert."""
    if len(parts) == 1:
        torch.mm(a, b, out=out[parts[0]])
        return
    product = torch.mm(a, b, out=out.new_empty(len(a), out.shape[1]))
    for part, rows in zip(parts, product.split([part.stop - part.start for part in parts])):
        out[part] = rows


def _weight_grad(like: Tensor, places: list[list[slice]]) -> Tensor:
    """Return memory for the gradient of ``like``, (E, ., .), with zeros for the experts without rows."""
    out = torch.empty_like(like)
    for expert, of_expert in enumerate(places):
        if not of_expert:
            out[expert].zero_()
    return out


class _Inner(torch.autograd.Function):
    """rows @ gate_up[e]: rows (R, hidden) as ``segments`` describes; the result (R, 2 ffn) is sorted by
    expert alone."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gate_up: Tensor, places: list[list[slice]]) -> Tensor:
        inner = rows.new_empty(len(rows), gate_up.shape[2])
        for expert, parts, span in _by_expert(places):
            torch.mm(_taken(rows, parts), gate_up[expert], out=inner[span])
        ctx.places = places
        ctx.save_for_backward(rows, gate_up)
        return inner

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, gate_up = ctx.saved_tensors
        grad_rows = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        grad_gate_up = _weight_grad(gate_up, ctx.places) if ctx.needs_input_grad[1] else None
        for expert, parts, span in _by_expert(ctx.places):
            if grad_gate_up is not None:
                torch.mm(_taken(rows, parts).t(), grad[span], out=grad_gate_up[expert])
            if grad_rows is not None:
                _put_product(grad_rows, parts, grad[span], gate_up[expert].t())
        return grad_rows, grad_gate_up, None


class _Outer(torch.autograd.Function):
    """(silu(gate) * up) @ down[e]: inner (R, 2 ffn) is sorted by expert alone; the result (R, hidden) as
    ``segments`` describes."""

    @staticmethod
    def forward(ctx: Any, inner: Tensor, down: Tensor, places: list[list[slice]]) -> Tensor:
        out = inner.new_empty(len(inner), down.shape[2])
        for expert, parts, span in _by_expert(places):
            gate, up = inner[span].chunk(2, dim=1)
            _put_product(out, parts, F.silu(gate).mul_(up), down[expert])
        ctx.places = places
        ctx.save_for_backward(inner, down)
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inner, down = ctx.saved_tensors
        grad_inner = torch.empty_like(inner) if ctx.needs_input_grad[0] else None
        grad_down = _weight_grad(down, ctx.places) if ctx.needs_input_grad[1] else None
        for expert, parts, span in _by_expert(ctx.places):
            gate, up = inner[span].chunk(2, dim=1)
            silu, grad_out = F.silu(gate), _taken(grad, parts)
            if grad_down is not None:
                torch.mm((silu * up).t(), grad_out, out=grad_down[expert])
            if grad_inner is not None:
                grad_gate, grad_up = grad_inner[span].chunk(2, dim=1)
                grad_activated = torch.mm(grad_out, down[expert].t(), out=torch.empty_like(silu))
                torch.mul(grad_activated, silu, out=grad_up)
                grad_gate.copy_(torch.ops.aten.silu_backward(grad_activated.mul_(up), gate))
        return grad_inner, grad_down, None
