"""The all-gather and the reduce-scatter of shards, either as collectives of the backend, or over gloo as
point-to-point messages.

With gloo, the two collectives cost far more CPU time than a copy of the bytes. Its all-gather allocates a new
buffer for each call, receives into it and copies the result. Its reduce-scatter copies the input, all-reduces
the copy (twice the bytes) and discards most of the result. As point-to-point messages, every byte is sent
once, from its source to its destination. With f = (N-1)/N:

    all-gather         every rank sends its shard to each other rank                B f bytes, as in a ring
    reduce-scatter     every rank sends to each other rank the part of that rank,   B f bytes
                       and sums the parts that it receives

Memory: the received data, B f bytes for either. The all-gather of gloo holds B twice; its reduce-scatter
holds a copy of the input.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_lib.base.torch_compat import all_gather_single, backend_name, reduce_scatter_single


class BufferPool:
    """A pool of flat buffers on ``device``. A buffer that is returned with ``give`` is reused by the next
    ``take``.

    On the CPU, the operating system maps a large allocation page by page, with one page fault for each 4 KiB
    at the first access. For a gathered unit, this takes longer than the copy of its data. The caching
    allocator of an accelerator reuses blocks itself, so a pool without ``keep`` allocates each buffer anew.

    Args:
        device: the device of the buffers.
        keep: keep the returned buffers, at most the largest number that was in use at one time.
    """

    def __init__(self, device: torch.device, keep: bool) -> None:
        self._device, self._keep = device, keep
        self.on_take: Callable[[Tensor], None] = lambda tensor: None
        """Called with every tensor that ``take`` returns. A measurement of memory sets it."""
        self._free: list[Tensor] = []

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor, (numel,)."""
        tensor = self._take(numel, dtype)
        self.on_take(tensor)
        return tensor

    def _take(self, numel: int, dtype: torch.dtype) -> Tensor:
        if not self._keep:
            return torch.empty(numel, dtype=dtype, device=self._device)
        size = numel * dtype.itemsize
        self._free.sort(key=Tensor.numel)
        for index, block in enumerate(self._free):
            if block.numel() >= size:
                return self._free.pop(index)[:size].view(dtype)
        if self._free:
            self._free.pop()  # free a block that is too small, because a larger one replaces it
        return torch.empty(size, dtype=torch.uint8, device=self._device).view(dtype)

    def give(self, tensor: Tensor) -> None:
        """Return a tensor of ``take`` to the pool. No other reference to it may be used afterwards."""
        if self._keep:
            whole = torch.empty(0, dtype=torch.uint8, device=self._device)
            self._free.append(whole.set_(tensor.untyped_storage()))

    def release(self) -> None:
        """Free the blocks that are not in use. Call it when other tensors need the memory before the next
        message."""
        self._free.clear()


Wait = Callable[[], object]
"""Waits for the end of an exchange."""


@dataclass(frozen=True)
class AllGatherResult:
    """An all-gather in flight. After ``wait()``, ``rows`` contain the shards in the order of ranks; a tensor
    of ``rows`` contains any number of shards."""

    rows: tuple[Tensor, ...]
    wait: Wait
    buffer: Tensor
    """The buffer of the pool. Return it with ``BufferPool.give`` after copying the rows."""


class Transport(ABC):
    """Asynchronous exchanges of flat tensors. Each method starts an exchange and returns a function that
    waits for it."""

    @abstractmethod
    def all_gather(self, whole: Tensor, mine: Tensor, group: dist.ProcessGroup) -> Wait:
        """Fill ``whole``, (ranks * n,), with ``mine``, (n,), of every rank, in the order of ranks. ``mine``
        may be this rank's part of ``whole``."""

    @abstractmethod
    def all_gather_rows(self, mine: Tensor, group: dist.ProcessGroup, pool: BufferPool) -> AllGatherResult:
        """Gather ``mine``, (n,), of every rank into a buffer of ``pool``, for callers that copy the rows
        elsewhere. The row of this rank may be ``mine`` itself."""

    @abstractmethod
    def reduce_scatter(self, mine: Tensor, whole: Tensor, group: dist.ProcessGroup, pool: BufferPool) -> Wait:
        """Fill ``mine``, (n,), with this rank's part of the sum of ``whole``, (ranks * n,), over the ranks.
        Temporary buffers come from ``pool``."""


class CollectiveTransport(Transport):
    """Uses the collectives of the backend."""

    def all_gather(self, whole: Tensor, mine: Tensor, group: dist.ProcessGroup) -> Wait:
        return all_gather_single(whole, mine, group=group, async_op=True).wait

    def all_gather_rows(self, mine: Tensor, group: dist.ProcessGroup, pool: BufferPool) -> AllGatherResult:
        whole = pool.take(dist.get_world_size(group) * mine.numel(), mine.dtype)
        return AllGatherResult((whole,), self.all_gather(whole, mine, group), whole)

    def reduce_scatter(self, mine: Tensor, whole: Tensor, group: dist.ProcessGroup, pool: BufferPool) -> Wait:
        return reduce_scatter_single(mine, whole, group=group, async_op=True).wait


class P2PTransport(Transport):
    """Uses point-to-point messages, for CPU tensors over gloo."""

    def all_gather(self, whole: Tensor, mine: Tensor, group: dist.ProcessGroup) -> Wait:
        parts = whole.view(dist.get_world_size(group), mine.numel())
        wait = _exchange(lambda target: mine, lambda source: parts[source], group)
        own = parts[dist.get_rank(group)]
        if own.data_ptr() != mine.data_ptr():
            own.copy_(mine)
        return wait

    def all_gather_rows(self, mine: Tensor, group: dist.ProcessGroup, pool: BufferPool) -> AllGatherResult:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        received = pool.take((ranks - 1) * mine.numel(), mine.dtype)
        others = received.view(ranks - 1, mine.numel())
        wait = _exchange(lambda target: mine, lambda source: others[source - (source > rank)], group)
        return AllGatherResult((others[:rank], mine, others[rank:]), wait, received)

    def reduce_scatter(self, mine: Tensor, whole: Tensor, group: dist.ProcessGroup, pool: BufferPool) -> Wait:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        parts = whole.view(ranks, mine.numel())
        received = pool.take((ranks - 1) * mine.numel(), mine.dtype)
        others = received.view(ranks - 1, mine.numel())
        wait_for_parts = _exchange(
            lambda target: parts[target], lambda source: others[source - (source > rank)], group
        )

        def wait() -> None:
            wait_for_parts()
            torch.add(parts[rank], others[0], out=mine)
            for other in others[1:]:
                mine.add_(other)
            pool.give(received)

        return wait


def _exchange(
    sent: Callable[[int], Tensor], received: Callable[[int], Tensor], group: dist.ProcessGroup
) -> Wait:
    """Start to send to, and to receive from, each other rank of ``group``."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    messages = []
    for distance in range(1, ranks):  # at each distance, every rank sends one message and receives one
        target, source = (rank + distance) % ranks, (rank - distance) % ranks
        messages.append(dist.irecv(received(source), group=group, group_src=source))
        messages.append(dist.isend(sent(target), group=group, group_dst=target))

    def wait() -> None:
        for message in messages:
            assert message is not None
            message.wait()

    return wait


def default_transport(group: dist.ProcessGroup, device: torch.device) -> Transport:
    """Return the cheaper transport for tensors on ``device``: point-to-point messages over gloo, otherwise
    collectives."""
    if device.type == "cpu" and dist.get_world_size(group) > 1 and backend_name(group, device) == "gloo":
        return P2PTransport()
    return CollectiveTransport()
