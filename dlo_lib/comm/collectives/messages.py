"""Shared by all algorithms: a rank in its group, exchanges with neighbours, the reduction of two tensors.

An exchange posts its receive and its send before it waits for either. Therefore no rank waits for a neighbour
that waits for it, and the deadlock in which every rank sends first cannot happen. A message without elements
is not sent: both ends know its size and skip it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_lib.base.errors import UserError


class Reduction(enum.Enum):
    """How the tensors of the ranks are combined, element by element, in their dtype."""

    SUM = "sum"
    AVG = "average"
    MAX = "maximum"

    def check(self, tensor: Tensor) -> None:
        """Check that ``tensor`` can hold the result.

        Raises:
            UserError: the reduction is an average and the dtype of ``tensor`` is an integer or bool.
        """
        if self is Reduction.AVG and not (tensor.is_floating_point() or tensor.is_complex()):
            raise UserError(
                f"an average of {tensor.dtype} is not a whole number: "
                "use Reduction.SUM and divide, or convert to a floating-point dtype"
            )

    def combine(self, into: Tensor, other: Tensor) -> None:
        """Reduce ``other`` into ``into``, in place; an average is a sum until ``finish``."""
        if self is Reduction.MAX:
            torch.maximum(into, other, out=into)
        else:
            into.add_(other)

    def finish(self, reduced: Tensor, ranks: int) -> None:
        """Complete the reduction in place once the tensors of all ranks are in ``reduced``."""
        if self is Reduction.AVG:
            reduced.div_(ranks)


@dataclass(frozen=True)
class Communicator:
    """This process as a rank of a group; ranks are counted within the group, from 0."""

    group: dist.ProcessGroup
    rank: int
    ranks: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Communicator:
        """Return this process as a rank of ``group``; None is the world.

        Raises:
            UserError: this process is not a member of ``group``.
        """
        chosen = dist.group.WORLD if group is None else group
        rank = dist.get_rank(chosen)
        if chosen is None or rank < 0:
            raise UserError(f"rank {dist.get_rank()} is not in this group: only its members may call")
        return cls(chosen, rank, dist.get_world_size(chosen))

    def check_root(self, root: int) -> None:
        """Check a rank that a caller names as root.

        Raises:
            UserError: the group has no rank ``root``.
        """
        if not 0 <= root < self.ranks:
            raise UserError(
                f"root {root} is not in a group of {self.ranks}: "
                f"use 0 to {self.ranks - 1}, counted within the group"
            )

    def exchange(self, sent: Tensor, to: int, received: Tensor, source: int) -> None:
        """Send ``sent`` to rank ``to`` and fill ``received`` from rank ``source``, both at the same time.

        Both tensors are contiguous. An empty tensor is not sent.
        """
        for work in self.start_exchange(sent, to, received, source):
            work.wait()

    def start_exchange(self, sent: Tensor, to: int, received: Tensor, source: int) -> list[dist.Work]:
        """Start an ``exchange`` and return its messages in flight. Wait for all of them before ``sent`` is
        changed and ``received`` is read."""
        operations = []
        if received.numel():
            operations.append(dist.P2POp(dist.irecv, received, group=self.group, group_peer=source))
        if sent.numel():
            operations.append(dist.P2POp(dist.isend, sent, group=self.group, group_peer=to))
        return dist.batch_isend_irecv(operations) if operations else []

    def send(self, tensor: Tensor, to: int) -> None:
        """Send ``tensor``, and wait until it may be changed."""
        if tensor.numel():
            dist.send(tensor, group=self.group, group_dst=to)

    def receive(self, tensor: Tensor, source: int) -> None:
        """Fill ``tensor`` with the message of rank ``source``."""
        if tensor.numel():
            dist.recv(tensor, group=self.group, group_src=source)
