"""What all algorithms share: a rank's place in its group, one exchange with two neighbours, and the reduction of two tensors.

An exchange posts its receive and its send before it waits for either. So no rank waits for a neighbour that waits for it: the dead-lock of
"everyone sends first" cannot happen. A message without elements is not sent; both ends know its size, so both leave it out.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_lib.errors import UserError


class Reduction(enum.Enum):
    """How the ranks' tensors become one, element by element, in the tensors' own dtype."""

    SUM = "sum"
    AVG = "average"
    MAX = "maximum"

    def check(self, tensor: Tensor) -> None:
        """Raises:
        UserError: an average of numbers that cannot hold one."""
        if self is Reduction.AVG and not (tensor.is_floating_point() or tensor.is_complex()):
            raise UserError(f"an average of {tensor.dtype} is not a whole number: use Reduction.SUM and divide, or convert to a float")

    def combine(self, into: Tensor, other: Tensor) -> None:
        """Reduce ``other`` into ``into``; an average is a sum until ``finish``."""
        if self is Reduction.MAX:
            torch.maximum(into, other, out=into)
        else:
            into.add_(other)

    def finish(self, reduced: Tensor, ranks: int) -> None:
        """What is left to do when all ranks are in ``reduced``."""
        if self is Reduction.AVG:
            reduced.div_(ranks)


@dataclass(frozen=True)
class Place:
    """A rank in a group; ranks are counted within the group, from 0."""

    group: dist.ProcessGroup
    rank: int
    ranks: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Place:
        """This process's place in ``group``, None for the world.

        Raises:
            UserError: it is no member.
        """
        chosen = dist.group.WORLD if group is None else group
        rank = dist.get_rank(chosen)
        if chosen is None or rank < 0:
            raise UserError(f"rank {dist.get_rank()} is not in this group: only its members may call")
        return cls(chosen, rank, dist.get_world_size(chosen))

    def check_root(self, root: int) -> None:
        """Raises:
        UserError: the group has no such rank."""
        if not 0 <= root < self.ranks:
            raise UserError(f"root {root} is not in a group of {self.ranks}: use 0 to {self.ranks - 1}, counted within the group")

    def exchange(self, sent: Tensor, to: int, received: Tensor, source: int) -> None:
        """Send ``sent`` to one rank and fill ``received`` from another, both at once. Both contiguous; what is empty does not travel."""
        operations = []
        if received.numel():
            operations.append(dist.P2POp(dist.irecv, received, group=self.group, group_peer=source))
        if sent.numel():
            operations.append(dist.P2POp(dist.isend, sent, group=self.group, group_peer=to))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()

    def send(self, tensor: Tensor, to: int) -> None:
        """Send, and wait until ``tensor`` may be changed."""
        if tensor.numel():
            dist.send(tensor, group=self.group, group_dst=to)

    def receive(self, tensor: Tensor, source: int) -> None:
        """Fill ``tensor``."""
        if tensor.numel():
            dist.recv(tensor, group=self.group, group_src=source)
