"""Ring attention: keys and values travel round a ring of ranks; each rank keeps its queries.

Each step of the forward, on every rank:

    1. Start to send the block of this step to the next rank, and to receive the block of the next step
       from the previous rank.
    2. Compute the attention of the local queries to the block, and merge it (online softmax).
    3. Wait for the messages.

The backward repeats the exchange. A block of gradients dk, dv starts on the rank after the owner, which
computes the first contribution of another rank, follows its block, and arrives at its owner after N - 1
messages. The owner adds its own contribution, which never travels. dq stays on its rank. Each message
overlaps with the arithmetic of a block. Blocks that no query sees are not computed, and keys that no later
rank uses are not sent (``ring_plan``).

Bytes sent per rank, the mean of N ranks, with KV = 2 * batch * kv_heads * seq * head_dim * bytes of a number,
the keys and values of the whole sequence, for causal attention in the zig-zag and f = (N-1)/N:

    forward    3/4 f KV                          in N - 1 messages
    backward   3/4 f KV + (1 - 1/(2N)) f KV      in 2 (N - 1) messages

The last term, dk and dv, is twice this size for bf16 and fp16, because the sums are in fp32. Without a causal
mask, each term is f KV; ``ring_plan`` has the terms of the other placements.

Memory per rank: q, k, v, the output and the LSE are saved for the backward, 1/N of the whole. In addition,
the forward holds the blocks of keys and values that travel, two to four (``comm.collectives.travelling``),
the backward these and as many of their gradients.

Paper: H. Liu, M. Zaharia, P. Abbeel, Ring Attention with Blockwise Transformers (arXiv:2310.01889)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_lib.comm.collectives.messages import Communicator
from dlo_lib.comm.collectives.travelling import Ring, Travelling
from dlo_lib.parallel.context.kernels import attend_block, attend_block_backward
from dlo_lib.parallel.context.ring_plan import RingPlan
from dlo_lib.parallel.context.softmax import OnlineSoftmax, accumulation_dtype

KEYS, GRADIENTS = 0, 1
"""The tags of the two kinds of messages."""

_Term = tuple[slice, Tensor, Tensor]
"""A range of the keys of a block, and the gradients dk and dv of this range."""


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: RingPlan,
    group: dist.ProcessGroup | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute attention of the local queries to the keys of all ranks; called by every rank of the group.

    Args:
        q: the local queries (batch, heads, local, head_dim).
        k, v: the local keys and values (batch, kv_heads, local, head_dim); ``kv_heads`` divides ``heads``.
        plan: the steps of this rank (``ring_plan``). Every query sees a key in one of them.
        group: the ring, in the order of its ranks; None for all ranks.
        scale: the factor of the scores; None for 1 / sqrt(head_dim).

    Returns the output (batch, heads, local, head_dim).
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    result: Tensor = _RingAttention.apply(q, k, v, plan, Ring(Communicator.of(group), plan.direction), scale)
    return result


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: RingPlan, ring: Ring, scale: float
    ) -> Tensor:
        # With several ranks, the packed block replaces k and v, and is sent again in backward.
        own = (k, v) if ring.comm.ranks == 1 else (torch.stack((k, v)),)
        softmax = OnlineSoftmax(q)
        blocks = _Blocks(own, plan, ring)
        for step in plan.steps:
            blocks.send(step.keys_sent)
            keys, values = blocks.here
            for part in step.rectangles:
                q_rows = q[:, :, part.rows]
                block_k, block_v = keys[:, :, part.columns], values[:, :, part.columns]
                bias = part.bias(q.dtype)
                softmax.add(part.rows, *attend_block(q_rows, block_k, block_v, scale, part.causal, bias))
            blocks.receive()
        assert softmax.out is not None  # each query sees itself
        assert softmax.lse is not None
        out = softmax.out.to(q.dtype)
        ctx.plan, ctx.ring, ctx.scale = plan, ring, scale
        ctx.save_for_backward(q, out, softmax.lse, *own)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        q, out, lse, *own = ctx.saved_tensors
        dtype = accumulation_dtype(q.dtype)
        dq: Tensor | None = None
        blocks = _Blocks(own, ctx.plan, ctx.ring)
        gradients = _Gradients(blocks.here[0], ctx.plan, ctx.ring, dtype)
        for number, step in enumerate(ctx.plan.steps):
            blocks.send(step.keys_sent)
            keys, values = blocks.here
            terms: list[_Term] = []
            for part in step.rectangles:
                rows, columns = part.rows, part.columns
                dq_part, dk, dv = attend_block_backward(
                    grad_out[:, :, rows],
                    q[:, :, rows],
                    keys[:, :, columns],
                    values[:, :, columns],
                    out[:, :, rows],
                    lse[:, :, rows],
                    ctx.scale,
                    part.causal,
                    part.bias(q.dtype),
                )
                dq = _added(dq, rows, dq_part, q.shape, dtype)
                terms.append((columns, dk, dv))
            if number == 0:
                gradients.keep(terms)
            else:
                gradients.add_and_send(terms, step.grads_sent)
            blocks.receive()
        assert dq is not None  # each query sees itself
        dk, dv = gradients.arrived()
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None, None, None


class _Blocks:
    """The block of keys and values that is on this rank now.

    Args:
        own: the keys and the values of this rank, or both in one message.
    """

    def __init__(self, own: Sequence[Tensor], plan: RingPlan, ring: Ring) -> None:
        self._block = own if len(own) == 2 else own[0]
        self._alone = ring.comm.ranks == 1
        if not self._alone:
            _, batch, heads, _, head_dim = own[0].shape
            # The order in which the kernel reads keys.
            shapes = [(2, batch, heads, step.keys_received, head_dim) for step in plan.steps]
            self._travelling = Travelling(ring, KEYS, shapes, own[0])

    @property
    def here(self) -> tuple[Tensor, Tensor]:
        """The keys and the values, each (batch, kv_heads, tokens, head_dim)."""
        keys, values = self._block
        return keys, values

    def send(self, tokens: int) -> None:
        """Start to send the first tokens of the block, and to receive the next block."""
        if not self._alone:
            # Only the zig-zag shortens a block, once: between the ranks before its own and those after it.
            assert isinstance(self._block, Tensor)
            self._travelling.exchange(self._block[:, :, :, :tokens].contiguous())

    def receive(self) -> None:
        """Wait for the next block."""
        if not self._alone:
            self._block = self._travelling.wait()


class _Gradients:
    """The gradients dk and dv of the block that is on this rank; they follow it one step later.

    Args:
        keys: the keys of this rank, of which the gradients have the shape.
        dtype: of the sums.
    """

    def __init__(self, keys: Tensor, plan: RingPlan, ring: Ring, dtype: torch.dtype) -> None:
        self._keys, self._dtype = keys, dtype
        self._own: tuple[Tensor, Tensor] | None = None
        shapes = [self._shape(step.grads_received) for step in plan.steps[1:]]
        self._travelling = Travelling(ring, GRADIENTS, shapes, keys, dtype)
        self._is_first = True

    def _shape(self, tokens: int) -> tuple[int, ...]:
        """Return the shape of a message. The kernel writes gradients in this order."""
        batch, heads, _, head_dim = self._keys.shape
        return 2, batch, tokens, heads, head_dim

    def keep(self, terms: list[_Term]) -> None:
        """Keep the gradients of the block of this rank, which do not travel."""
        tokens = self._keys.shape[2]
        if _is_whole(terms, tokens):
            _, dk, dv = terms[0]
            self._own = dk.to(self._dtype), dv.to(self._dtype)
        else:
            self._own = _unpacked(self._sum(None, terms, tokens))

    def add_and_send(self, terms: list[_Term], tokens: int) -> None:
        """Add the contribution of this rank to the gradients that have arrived. Start to send the sum, of the
        first tokens, to the next rank, and to receive the gradients of the next block."""
        arrived = None if self._is_first else self._travelling.wait()
        self._is_first = False
        self._travelling.exchange(self._sum(arrived, terms, tokens))

    def arrived(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of the block of this rank: its own, and the sum of the other ranks."""
        assert self._own is not None
        if not self._is_first:
            others = self._travelling.wait()
            for total, other in zip(self._own, _unpacked(others)):
                total[:, :, : other.shape[2]] += other
        return self._own

    def _sum(self, arrived: Tensor | None, terms: list[_Term], tokens: int) -> Tensor:
        """Return a message with the gradients that have arrived and the terms; zero where there are none."""
        known = 0 if arrived is None else arrived.shape[2]
        if arrived is not None and known == tokens:
            total = arrived
        else:
            total = self._keys.new_empty(self._shape(tokens), dtype=self._dtype)
            if not known and _is_whole(terms, tokens):  # the first contribution
                for place, term in zip(_unpacked(total), terms[0][1:]):
                    place.copy_(term)
                return total
            total[:, :, known:].zero_()
            if arrived is not None:
                total[:, :, :known] = arrived
        for columns, *grads in terms:
            for place, grad in zip(_unpacked(total), grads):
                place[:, :, columns] += grad
        return total


def _is_whole(terms: list[_Term], tokens: int) -> bool:
    return len(terms) == 1 and terms[0][0] == slice(0, tokens)


def _added(total: Tensor | None, rows: slice, term: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return the sum of ``total`` and of ``term`` at ``rows``. Nothing is copied for a first term of all
    rows."""
    if total is None and term.shape == shape:
        return term.to(dtype)
    total = term.new_zeros(shape, dtype=dtype) if total is None else total
    total[:, :, rows] += term
    return total


def _unpacked(gradients: Tensor) -> tuple[Tensor, Tensor]:
    """View a message as dk and dv, each (batch, kv_heads, tokens, head_dim)."""
    dk, dv = gradients.transpose(2, 3)
    return dk, dv
