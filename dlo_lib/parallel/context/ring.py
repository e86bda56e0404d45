"""Ring attention: keys and values travel round a ring of ranks; each rank keeps its queries.

Step t of the forward, on rank r of N (indices mod N):

    start to send the block r - t to rank r + 1 and to receive the block r - t - 1 from rank r - 1
    compute attention of the local queries to the block r - t, and merge it (online softmax)
    wait for the messages

The backward repeats the exchange. A block of gradients dk, dv starts on the rank after the owner, which
computes the first contribution of another rank, follows its block, and arrives at its owner after N - 1
messages. The owner adds its own contribution, which never travels. dq stays on its rank. Each message
overlaps with the arithmetic of a block. Blocks that no query sees are forwarded but not computed.

Bytes sent per rank, with KV = 2 * batch * kv_heads * seq * head_dim * bytes of a number, the keys and values
of the whole sequence:

    forward    (N-1)/N KV                in N - 1 messages
    backward   (N-1)/N KV + (N-1)/N KV   in 2 (N - 1) messages

The second term, dk and dv, is twice this size for bf16 and fp16, because the sums are in fp32.

Memory per rank: q, k, v, the output and the LSE are saved for the backward, 1/N of the whole. In addition,
the forward holds two blocks of keys and values that travel, the backward these and two of their gradients.

Paper: H. Liu, M. Zaharia, P. Abbeel, Ring Attention with Blockwise Transformers (arXiv:2310.01889)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_lib.comm.collectives.messages import Communicator
from dlo_lib.parallel.context.kernels import attend_block, attend_block_backward
from dlo_lib.parallel.context.placement import Rectangle
from dlo_lib.parallel.context.softmax import OnlineSoftmax, accumulation_dtype

Blocks = Sequence[Sequence[Rectangle]]
"""For each step of the ring, the rectangles to compute of the block of this step."""
_Term = tuple[slice, Tensor, Tensor]
"""A range of the keys of a block, and the gradients dk and dv of this range."""


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Blocks,
    group: dist.ProcessGroup | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute attention of the local queries to the keys of all ranks; called by every rank of the group.

    Args:
        q: the local queries (batch, heads, local, head_dim).
        k, v: the local keys and values (batch, kv_heads, local, head_dim); ``kv_heads`` divides ``heads``.
        blocks: the rectangles of each ring step (``SequenceLayout.rectangle``, ``document_rectangles``). Step
            t has the keys of the rank t before this one. Every query sees a key in one of them.
        group: the ring, in the order of its ranks; None for all ranks.
        scale: the factor of the scores; None for 1 / sqrt(head_dim).

    Returns the output (batch, heads, local, head_dim).
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    result: Tensor = _RingAttention.apply(q, k, v, blocks, Communicator.of(group), scale)
    return result


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: Blocks, comm: Communicator, scale: float
    ) -> Tensor:
        kv = _packed(k, v, k.dtype) if comm.ranks > 1 else None
        softmax = OnlineSoftmax(q)
        travelling = _Travelling(kv, comm)
        for rectangles in blocks:
            send_on = travelling.start()
            keys, values = (k, v) if travelling.at_home else _unpacked(travelling.block)
            for part in rectangles:
                softmax.add(
                    part.rows,
                    *attend_block(
                        q[:, :, part.rows],
                        keys[:, :, part.columns],
                        values[:, :, part.columns],
                        scale,
                        part.causal,
                        part.bias(q.dtype),
                    ),
                )
            send_on()
        assert softmax.out is not None
        assert softmax.lse is not None
        out = softmax.out.to(q.dtype)
        ctx.blocks, ctx.comm, ctx.scale = blocks, comm, scale
        # With several ranks, the packed block replaces k and v, and is sent again in backward.
        ctx.save_for_backward(q, out, softmax.lse, *((k, v) if kv is None else (kv,)))
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        q, out, lse, *saved = ctx.saved_tensors
        comm: Communicator = ctx.comm
        dtype = accumulation_dtype(q.dtype)
        kv = saved[0] if comm.ranks > 1 else None
        home = tuple(saved) if kv is None else _unpacked(kv)
        dq: Tensor | None = None
        own: list[_Term] = []
        travelling, gradients = _Travelling(kv, comm), _TravellingGradients(home[0], comm, dtype)
        for step, rectangles in enumerate(ctx.blocks):
            send_on = travelling.start()
            keys, values = home if travelling.at_home else _unpacked(travelling.block)
            terms = []
            for part in rectangles:
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
            if step == 0:
                own = terms
            else:
                gradients.add_and_send(terms)
            send_on()
        assert dq is not None  # each query sees itself
        dk, dv = gradients.arrived(own)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None, None, None


class _Travelling:
    """The block of keys and values that is on this rank now.

    Args:
        kv: the packed block of this rank; None if the rank is alone.
    """

    def __init__(self, kv: Tensor | None, comm: Communicator) -> None:
        self._kv, self._comm, self._step = kv, comm, 0
        self._spare: Tensor | None = None

    @property
    def at_home(self) -> bool:
        """Whether the block is that of this rank."""
        return self._step == 0

    @property
    def block(self) -> Tensor:
        assert self._kv is not None
        return self._kv

    def start(self) -> Callable[[], None]:
        """Start to exchange the block for the next one. Return the function that waits for it."""
        comm, sent, step = self._comm, self._kv, self._step
        if sent is None or step == comm.ranks - 1:
            return lambda: None
        # Receive into the block that was sent one step before; that of step 0 is saved for the backward.
        received = torch.empty_like(sent) if self._spare is None else self._spare
        works = comm.start_exchange(
            sent, (comm.rank + 1) % comm.ranks, received, (comm.rank - 1) % comm.ranks
        )

        def finish() -> None:
            for work in works:
                work.wait()
            self._spare = sent if step > 0 else None
            self._kv, self._step = received, step + 1

        return finish


class _TravellingGradients:
    """The gradients dk and dv of the block that is on this rank; they follow it one step later.

    Args:
        keys: the keys of a block, of which the gradients have the shape.
        dtype: of the sums.
    """

    def __init__(self, keys: Tensor, comm: Communicator, dtype: torch.dtype) -> None:
        self._keys, self._comm, self._dtype = keys, comm, dtype
        self._works: list[dist.Work] = []
        self._sent: Tensor | None = None
        self._received: Tensor | None = None

    def add_and_send(self, terms: list[_Term]) -> None:
        """Add the contribution of this rank to the gradients that have arrived. Start to send the sum to the
        next rank and to receive the gradients of the next block."""
        sent, spare, comm = self._sum(terms), self._sent, self._comm
        received = torch.empty_like(sent) if spare is None else spare
        self._works = comm.start_exchange(
            sent, (comm.rank + 1) % comm.ranks, received, (comm.rank - 1) % comm.ranks
        )
        self._sent, self._received = sent, received

    def arrived(self, own: list[_Term]) -> tuple[Tensor, Tensor]:
        """Return the gradients of the block of this rank: the sum of the other ranks, and ``own``."""
        return _unpacked(self._sum(own))

    def _sum(self, terms: list[_Term]) -> Tensor:
        """Return the gradients that have arrived, after the terms were added to them."""
        for work in self._works:
            work.wait()
        if self._received is None and len(terms) == 1 and terms[0][1].shape == self._keys.shape:
            return _packed(terms[0][1], terms[0][2], self._dtype)
        total = self._received
        if total is None:
            total = _empty_message(self._keys, self._dtype).zero_()
        for columns, *grads in terms:
            for place, grad in zip(_unpacked(total), grads):
                place[:, :, columns] += grad
        return total


def _added(total: Tensor | None, rows: slice, term: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return the sum of ``total`` and of ``term`` at ``rows``. Nothing is copied for a first term of all
    rows."""
    if total is None and term.shape == shape:
        return term.to(dtype)
    total = term.new_zeros(shape, dtype=dtype) if total is None else total
    total[:, :, rows] += term
    return total


def _empty_message(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a message for two tensors of the shape of ``keys``, (2, batch, local, heads, head_dim).

    The heads are inside, as in the output of a linear layer, so that a copy reads memory in order.
    """
    batch, heads, local, head_dim = keys.shape
    return keys.new_empty((2, batch, local, heads, head_dim), dtype=dtype)


def _packed(k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy two (batch, heads, local, head_dim) into one message."""
    packed = _empty_message(k, dtype)
    for place, tensor in zip(_unpacked(packed), (k, v)):
        place.copy_(tensor)
    return packed


def _unpacked(packed: Tensor) -> tuple[Tensor, Tensor]:
    k, v = packed.transpose(2, 3)
    return k, v
