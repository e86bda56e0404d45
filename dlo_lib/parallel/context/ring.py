"""Ring attention: keys and values travel round a ring of ranks; each rank keeps its queries.

Each step of the forward, on every rank:

    start to send the block of this step to the next rank, and to receive the next block from the previous
    rank compute attention of the local queries to the block, and merge it (online softmax) wait for the
    messages

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
the forward holds two blocks of keys and values that travel, the backward these and two of their gradients.

Paper: H. Liu, M. Zaharia, P. Abbeel, Ring Attention with Blockwise Transformers (arXiv:2310.01889)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_lib.comm.collectives.messages import Communicator
from dlo_lib.parallel.context.kernels import attend_block, attend_block_backward
from dlo_lib.parallel.context.ring_plan import RingPlan, RingStep
from dlo_lib.parallel.context.softmax import OnlineSoftmax, accumulation_dtype

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
    result: Tensor = _RingAttention.apply(q, k, v, plan, _Ring(Communicator.of(group), plan.direction), scale)
    return result


@dataclass(frozen=True)
class _Ring:
    """Exchanges with the two neighbours: blocks are sent ``direction`` places further."""

    comm: Communicator
    direction: int

    def start(self, sent: Tensor, received: Tensor) -> list[dist.Work]:
        rank, ranks = self.comm.rank, self.comm.ranks
        to, source = (rank + self.direction) % ranks, (rank - self.direction) % ranks
        return self.comm.start_exchange(sent, to, received, source)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: RingPlan, ring: _Ring, scale: float
    ) -> Tensor:
        kv = _packed(k, v) if ring.comm.ranks > 1 else None
        softmax = OnlineSoftmax(q)
        travelling = _Travelling(kv, ring)
        for number, step in enumerate(plan.steps):
            wait = travelling.start(step)
            keys, values = (k, v) if number == 0 else _unpacked(travelling.block)
            for part in step.rectangles:
                q_rows = q[:, :, part.rows]
                block_k, block_v = keys[:, :, part.columns], values[:, :, part.columns]
                bias = part.bias(q.dtype)
                softmax.add(part.rows, *attend_block(q_rows, block_k, block_v, scale, part.causal, bias))
            wait()
        assert softmax.out is not None  # each query sees itself
        assert softmax.lse is not None
        out = softmax.out.to(q.dtype)
        ctx.plan, ctx.ring, ctx.scale = plan, ring, scale
        # With several ranks, the packed block replaces k and v, and is sent again in backward.
        ctx.save_for_backward(q, out, softmax.lse, *((k, v) if kv is None else (kv,)))
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        q, out, lse, *saved = ctx.saved_tensors
        dtype = accumulation_dtype(q.dtype)
        kv = None if len(saved) == 2 else saved[0]
        home = tuple(saved) if kv is None else _unpacked(kv)
        dq: Tensor | None = None
        own: list[_Term] = []
        travelling, gradients = _Travelling(kv, ctx.ring), _TravellingGradients(home[0], ctx.ring, dtype)
        for number, step in enumerate(ctx.plan.steps):
            wait = travelling.start(step)
            keys, values = home if number == 0 else _unpacked(travelling.block)
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
                own = terms
            else:
                gradients.add_and_send(terms, step)
            wait()
        assert dq is not None  # each query sees itself
        dk, dv = gradients.arrived(own)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None, None, None


class _Travelling:
    """The block of keys and values that is on this rank now.

    Args:
        kv: the packed block of this rank; None if the rank is alone.
    """

    def __init__(self, kv: Tensor | None, ring: _Ring) -> None:
        self._own, self._kv, self._ring = kv, kv, ring
        self._spare: Tensor | None = None

    @property
    def block(self) -> Tensor:
        assert self._kv is not None
        return self._kv

    def start(self, step: RingStep) -> Callable[[], None]:
        """Start to exchange the block for the next one. Return the function that waits for it."""
        sent = self._kv
        if sent is None:
            return lambda: None
        # Receive into the block that was sent one step before, unless it is saved for the backward.
        received = torch.empty_like(sent) if self._spare is None else self._spare
        works = self._ring.start(sent[: step.keys_sent], received[: step.keys_received])

        def wait() -> None:
            for work in works:
                work.wait()
            self._spare = None if sent is self._own else sent
            self._kv = received

        return wait


class _TravellingGradients:
    """The gradients dk and dv of the block that is on this rank; they follow it one step later.

    Args:
        keys: the keys of a block, of which the gradients have the shape.
        dtype: of the sums.
    """

    def __init__(self, keys: Tensor, ring: _Ring, dtype: torch.dtype) -> None:
        self._keys, self._ring, self._dtype = keys, ring, dtype
        self._works: list[dist.Work] = []
        self._sent: Tensor | None = None
        self._received: Tensor | None = None
        self._arrived = 0  # keys of ``_received`` that have a gradient

    def add_and_send(self, terms: list[_Term], step: RingStep) -> None:
        """Add the contribution of this rank to the gradients that have arrived. Start to send the sum to the
        next rank and to receive the gradients of the next block."""
        total, spare = self._sum(terms, step.grads_sent), self._sent
        received = self._empty() if spare is None else spare
        self._works = self._ring.start(total[: step.grads_sent], received[: step.grads_received])
        self._sent, self._received, self._arrived = total, received, step.grads_received

    def arrived(self, own: list[_Term]) -> tuple[Tensor, Tensor]:
        """Return the gradients of the block of this rank: the sum of the other ranks, and ``own``."""
        return _unpacked(self._sum(own, self._keys.shape[2]))

    def _sum(self, terms: list[_Term], length: int) -> Tensor:
        """Return the gradients that have arrived, with the terms added; zero up to key ``length``."""
        for work in self._works:
            work.wait()
        total = self._empty() if self._received is None else self._received
        places = _unpacked(total)
        if not self._arrived and len(terms) == 1 and terms[0][0] == slice(0, length):
            for place, term in zip(places, terms[0][1:]):
                place[:, :, :length] = term  # the first contribution
            return total
        total[self._arrived : length].zero_()
        for columns, *grads in terms:
            for place, grad in zip(places, grads):
                place[:, :, columns] += grad
        return total

    def _empty(self) -> Tensor:
        return _empty_message(self._keys, self._dtype)


def _added(total: Tensor | None, rows: slice, term: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return the sum of ``total`` and of ``term`` at ``rows``. Nothing is copied for a first term of all
    rows."""
    if total is None and term.shape == shape:
        return term.to(dtype)
    total = term.new_zeros(shape, dtype=dtype) if total is None else total
    total[:, :, rows] += term
    return total


def _empty_message(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a message for two tensors of the shape of ``keys``, (local, 2, batch, heads, head_dim).

    The tokens are outside, so that the first tokens are contiguous and can be sent alone.
    """
    batch, heads, local, head_dim = keys.shape
    return keys.new_empty((local, 2, batch, heads, head_dim), dtype=dtype)


def _packed(k: Tensor, v: Tensor) -> Tensor:
    """Copy two (batch, heads, local, head_dim) into one message."""
    packed = _empty_message(k, k.dtype)
    for place, tensor in zip(_unpacked(packed), (k, v)):
        place.copy_(tensor)
    return packed


def _unpacked(packed: Tensor) -> tuple[Tensor, Tensor]:
    """View a message as two (batch, heads, local, head_dim)."""
    k, v = packed.permute(1, 2, 3, 0, 4)
    return k, v
