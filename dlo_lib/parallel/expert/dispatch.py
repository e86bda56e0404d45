"""Sends each row to the rank that stores its expert, and each result back, with all-to-alls.

Rank r of the ``ep`` ranks of a group stores the experts r E/ep to (r+1) E/ep - 1. Rows are sorted by expert,
so the rows for one rank are consecutive, and no rank copies them before they are sent.

    forward    counts -> | rows -> (the shared expert computes) | experts | <- results
    backward             | grads of results -> | experts | <- grads of rows (the shared expert computes) |

1. The ranks exchange the number of rows for each expert, E integers, because the other messages are uneven.
2. The rows are sent. Between start and wait, the caller computes what needs no rows: the shared expert.
3. The results return on the mirrored path. Each backward is the mirrored exchange of its forward: the
   gradients of results travel as the rows did, and those of rows as the results did. Autograd computes the
   backward of the shared expert between the start and the wait of the last exchange, because it was called
   between those of the first.

Bytes sent per rank and layer: 2 exchanges in forward and 2 in backward, each of the rows that leave the rank,
    top_k * tokens * hidden * itemsize * (share of the choices whose expert is on another rank)
where the share is (ep-1)/ep with equal loads. With unequal loads, this counts the rows that the rank sends in
one exchange of forward and one of backward; in the two others it sends the rows that it has received.
Activation checkpointing repeats the 2 of forward. In addition, E int64 counts in forward, and an all-reduce
of E int64 with a balance loss.

The received rows are sorted by source, then by expert. ``Experts`` copies the rows of one expert at a time,
and needs no copy that sorts all of them by expert.

Papers: GShard (arXiv:2006.16668), section 3.2; Tutel (arXiv:2206.03382); DeepSeek-V3 (arXiv:2412.19437),
section 3.2, for the overlap.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dlo_lib.models.experts import Segments
from dlo_lib.models.moe import PendingRows


class AllToAllExchange:
    """The ``TokenExchange`` of an ``MoELayer`` whose experts are on the ranks of ``group``.

    Args:
        group: the ranks that together store all experts, each the same number.
        batch: the ranks with different parts of the batch, over which gradients are averaged. ``group`` is a
            part of them.
        tokens: the ranks that compute different tokens, for the losses and the balance bias; None for
            ``batch``.
    """

    def __init__(
        self, group: dist.ProcessGroup, batch: dist.ProcessGroup, tokens: dist.ProcessGroup | None = None
    ) -> None:
        self.group, self.batch, self.tokens = group, batch, batch if tokens is None else tokens
        self.averaged_ranks = dist.get_world_size(batch)
        self.token_ranks = dist.get_world_size(self.tokens)

    def dispatch(self, rows: Tensor, counts: Tensor) -> SentRows:
        """Start to send ``rows`` (R, hidden), sorted by expert, to the ranks of their experts.

        Args:
            counts: (num_experts,) int64, the number of rows of each expert.
        """
        ranks = dist.get_world_size(self.group)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.group)
        # The CPU waits here, because the sizes of the messages are those numbers.
        to_each, from_each = torch.stack([counts, received]).view(2, ranks, -1).tolist()
        route = _Route(self.group, [sum(part) for part in to_each], [sum(part) for part in from_each])
        return SentRows(_start(rows, route), route, from_each)

    def combine(self, rows: Tensor, sent: PendingRows) -> Tensor:
        """Return the results of the rows that ``sent`` dispatched, (R, hidden), in their order.

        Args:
            rows: the results of the received rows, in the order in which they were received.
        """
        assert isinstance(sent, SentRows)
        back = sent.route.reversed()
        return _Wait.apply(_start(rows, back), back)

    def sum_over_batch(self, tensor: Tensor) -> None:
        """Sum ``tensor`` in place over the ranks that compute different tokens of the batch."""
        dist.all_reduce(tensor, group=self.tokens)


class SentRows:
    """Rows on their way to the ranks of their experts."""

    def __init__(self, buffer: Tensor, route: _Route, segments: Segments) -> None:
        self._buffer, self.route, self._segments = buffer, route, segments

    def wait(self) -> tuple[Tensor, Segments]:
        """Return the rows for the experts of this rank, (received, hidden), and the number of rows from each
        rank for each expert."""
        return _Wait.apply(self._buffer, self.route), self._segments


class _Route:
    """One all-to-all of rows, and that of their gradients on the way back.

    Args:
        send, receive: the number of rows to and from each rank.
    """

    def __init__(self, group: dist.ProcessGroup, send: list[int], receive: list[int]) -> None:
        self._group, self._send, self._receive = group, send, receive
        self._work: dist.Work | None = None
        self._in_flight: Tensor | None = None  # the memory that is being sent
        self._grad: Tensor | None = None

    def reversed(self) -> _Route:
        return _Route(self._group, self._receive, self._send)

    def start(self, rows: Tensor) -> Tensor:
        """Start to send ``rows``; returns the memory that is filled until ``wait``."""
        return self._exchange(rows, self._send, self._receive)

    def start_backward(self, grad: Tensor) -> None:
        """Start to send the gradients of the received rows back."""
        self._grad = self._exchange(grad, self._receive, self._send)

    def wait(self) -> None:
        assert self._work is not None
        self._work.wait()
        self._work = self._in_flight = None

    def wait_backward(self) -> Tensor:
        self.wait()
        grad, self._grad = self._grad, None
        assert grad is not None
        return grad

    def _exchange(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        rows = rows.contiguous()
        out = rows.new_empty(sum(receive), rows.shape[1])
        work = dist.all_to_all_single(out, rows, receive, send, group=self._group, async_op=True)
        self._work, self._in_flight = work, rows
        return out


def _start(rows: Tensor, route: _Route) -> Tensor:
    return _Start.apply(rows, route)


class _Start(torch.autograd.Function):
    """Starts the exchange. The result has no content before ``_Wait``. Its backward ends the mirrored
    exchange, which the backward of ``_Wait`` has started."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: _Route) -> Tensor:
        ctx.route = route
        return route.start(rows)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.route.wait_backward(), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: Tensor, route: _Route) -> Tensor:
        ctx.route = route
        route.wait()
        ctx.mark_dirty(buffer)  # the exchange has filled it
        return buffer

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.route.start_backward(grad)
        return grad, None  # of the right shape; ``_Start`` returns the received gradients
