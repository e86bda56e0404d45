"""Ranks with unequal numbers of batches: whoever has no more takes part in the others' collectives until nobody has any.

Before each step's communication the ranks tell each other, in one small all-reduce, who is in it and what for. A rank that is out
follows: it receives running buffers, and adds zeros to the sums of gradients. With losses scaled by the number of *all* tokens that is
exactly what one process would compute, for a rank without data adds nothing to the sum.

Cost: an all-reduce of N integers per backward pass (and per broadcast of buffers), which ranks with data wait for.

After an idea of ``torch.distributed.algorithms.Join``, whose ranks learn at each forward how many others still have data.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
import torch.distributed as dist


class Phase(enum.IntEnum):
    """What a rank is about to do together with the others; ``OUT``: nothing of its own any more."""

    OUT = 0
    BUFFERS = 1
    GRADIENTS = 2


@dataclass(frozen=True)
class Announced:
    """What all ranks of the group said at once, by rank."""

    phases: tuple[Phase, ...]

    @property
    def active(self) -> tuple[int, ...]:
        """Ranks of the group that are not out."""
        return tuple(rank for rank, phase in enumerate(self.phases) if phase is not Phase.OUT)

    @property
    def phase(self) -> Phase:
        """What happens next; ``OUT`` when nobody has a batch left."""
        return max(self.phases)


class Joining:
    """The conversation of one ``DDP.join``.

    Args:
        group: the ranks.
        device: where small tensors are communicated from.
        divide_by_initial_world_size: False: averages are over the ranks that still have data.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, divide_by_initial_world_size: bool) -> None:
        self._group, self._device = group, device
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._of_all = divide_by_initial_world_size
        self.last: Announced | None = None
        """The latest in which somebody was active."""

    def announce(self, phase: Phase) -> Announced:
        """Tell the others what this rank is about to do, and hear it from them."""
        phases = torch.zeros(self._world_size, dtype=torch.int32, device=self._device)
        phases[self._rank] = phase
        dist.all_reduce(phases, group=self._group)
        announced = Announced(tuple(Phase(value) for value in phases.tolist()))
        if announced.phase is not Phase.OUT:
            self.last = announced
        return announced

    def divisor(self, announced: Announced) -> int:
        """By how much the sum of gradients is to be divided."""
        return self._world_size if self._of_all else len(announced.active)
