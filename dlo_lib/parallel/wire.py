"""How shards travel: the two exchanges of sharding, over a backend's own collectives, or over gloo as direct messages.

Over gloo the two collectives cost far more CPU time than the bytes themselves: its all-gather receives into a buffer of its own, fresh
memory each time, and copies; its reduce-scatter copies the input, all-reduces that (twice the bytes) and throws most of it away. As
messages from rank to rank every byte goes once from where it is to where it belongs:

    all-gather         every rank sends its shard to each of the others                        (N-1) B/N = B f bytes, as in a ring
    reduce-scatter     every rank sends each of the others the part that is theirs, and sums those that it receives   B f bytes again

Memory: what is received, B f bytes for either; gloo's own all-gather holds B twice, its reduce-scatter a copy of the input.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_lib.parallel.pool import Pool

_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor

Wait = Callable[[], object]
"""Waits until an exchange has ended."""


@dataclass(frozen=True)
class Gathering:
    """Shards on their way. After ``wait()`` they are in ``rows``, in the order of ranks, any number of them to a tensor."""

    rows: tuple[Tensor, ...]
    wait: Wait
    lent: Tensor
    """The pool's; to be given back when the rows have been copied."""


class Wire(ABC):
    """Exchanges of flat tensors; they begin at once, and end in the ``Wait`` that is returned."""

    @abstractmethod
    def all_gather(self, whole: Tensor, mine: Tensor, group: dist.ProcessGroup) -> Wait:
        """Fill ``whole``, (ranks * n,), with everyone's ``mine``, (n,), in the order of ranks."""

    @abstractmethod
    def gather_rows(self, mine: Tensor, group: dist.ProcessGroup, pool: Pool) -> Gathering:
        """The same for who copies them elsewhere: in memory that ``pool`` lends, and this rank's own may be ``mine`` itself."""

    @abstractmethod
    def reduce_scatter(self, mine: Tensor, whole: Tensor, group: dist.ProcessGroup, pool: Pool) -> Wait:
        """Fill ``mine``, (n,), with this rank's part of the sum of everyone's ``whole``, (ranks * n,); ``pool`` lends memory."""


class Collectives(Wire):
    """The backend's own."""

    def all_gather(self, whole: Tensor, mine: Tensor, group: dist.ProcessGroup) -> Wait:
        return _all_gather(whole, mine, group=group, async_op=True).wait

    def gather_rows(self, mine: Tensor, group: dist.ProcessGroup, pool: Pool) -> Gathering:
        whole = pool.take(dist.get_world_size(group) * mine.numel(), mine.dtype)
        return Gathering((whole,), self.all_gather(whole, mine, group), whole)

    def reduce_scatter(self, mine: Tensor, whole: Tensor, group: dist.ProcessGroup, pool: Pool) -> Wait:
        return _reduce_scatter(mine, whole, group=group, async_op=True).wait


class DirectMessages(Wire):
    """For CPU tensors over gloo."""

    def all_gather(self, whole: Tensor, mine: Tensor, group: dist.ProcessGroup) -> Wait:
        parts = whole.view(dist.get_world_size(group), mine.numel())
        wait = _exchange(lambda target: mine, lambda source: parts[source], group)
        own = parts[dist.get_rank(group)]
        if own.data_ptr() != mine.data_ptr():  # it may be sent from its place
            own.copy_(mine)
        return wait

    def gather_rows(self, mine: Tensor, group: dist.ProcessGroup, pool: Pool) -> Gathering:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        received = pool.take((ranks - 1) * mine.numel(), mine.dtype)
        others = received.view(ranks - 1, mine.numel())
        wait = _exchange(lambda target: mine, lambda source: others[source - (source > rank)], group)
        return Gathering((others[:rank], mine, others[rank:]), wait, received)

    def reduce_scatter(self, mine: Tensor, whole: Tensor, group: dist.ProcessGroup, pool: Pool) -> Wait:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        parts = whole.view(ranks, mine.numel())
        received = pool.take((ranks - 1) * mine.numel(), mine.dtype)
        others = received.view(ranks - 1, mine.numel())
        wait_for_parts = _exchange(lambda target: parts[target], lambda source: others[source - (source > rank)], group)

        def wait() -> None:
            wait_for_parts()
            torch.add(parts[rank], others[0], out=mine)
            for other in others[1:]:
                mine.add_(other)
            pool.give(received)

        return wait


def _exchange(sent: Callable[[int], Tensor], received: Callable[[int], Tensor], group: dist.ProcessGroup) -> Wait:
    """Begin to send to and receive from each of the other ranks of ``group``."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    messages = []
    for distance in range(1, ranks):  # at each distance everyone sends to one and receives from one
        target, source = (rank + distance) % ranks, (rank - distance) % ranks
        messages.append(dist.irecv(received(source), group=group, group_src=source))
        messages.append(dist.isend(sent(target), group=group, group_dst=target))

    def wait() -> None:
        for message in messages:
            assert message is not None
            message.wait()

    return wait


def best_wire(group: dist.ProcessGroup, device: torch.device) -> Wire:
    """The cheaper one for tensors on ``device``."""
    if device.type == "cpu" and dist.get_world_size(group) > 1 and group._get_backend(device).name() == "gloo":
        return DirectMessages()
    return Collectives()
