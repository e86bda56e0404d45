"""Ranks with unequal numbers of batches. A rank that has no batch left takes part in the collectives of the
other ranks until all ranks are finished.

Before each collective, the ranks exchange what they are about to do, in one small all-reduce. A rank without
a batch follows the others: it receives the running buffers, and contributes zeros to the sums of gradients.
If the loss is scaled by the number of tokens of *all* ranks, the result is that of one process, because a
rank without data adds nothing to the sum.

Cost: an all-reduce of N integers for each backward pass and for each broadcast of buffers. The ranks with
data wait for it.

The idea is that of ``torch.distributed.algorithms.Join``, whose ranks exchange in each forward how many of
them have data.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
import torch.distributed as dist


class JoinPhase(enum.IntEnum):
    """The collective that a rank is about to start; ``OUT``: the rank has no batch left."""

    OUT = 0
    BUFFERS = 1
    GRADIENTS = 2


@dataclass(frozen=True)
class JoinState:
    """The phases that the ranks of the group have announced, by rank."""

    phases: tuple[JoinPhase, ...]

    @property
    def active(self) -> tuple[int, ...]:
        """The ranks of the group that have data."""
        return tuple(rank for rank, phase in enumerate(self.phases) if phase is not JoinPhase.OUT)

    @property
    def phase(self) -> JoinPhase:
        """The next collective; ``OUT`` when no rank has a batch left."""
        return max(self.phases)


class JoinContext:
    """The communication of one ``DDP.join``.

    Args:
        group: the ranks.
        device: the device of the small tensors that are communicated.
        divide_by_initial_world_size: False averages over the ranks that have data.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, divide_by_initial_world_size: bool
    ) -> None:
        self._group, self._device = group, device
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._divide_by_all = divide_by_initial_world_size
        self.last: JoinState | None = None
        """The latest state in which a rank was active."""

    def announce(self, phase: JoinPhase) -> JoinState:
        """Exchange the phases of all ranks; called by every rank."""
        phases = torch.zeros(self._world_size, dtype=torch.int32, device=self._device)
        phases[self._rank] = phase
        dist.all_reduce(phases, group=self._group)
        state = JoinState(tuple(JoinPhase(value) for value in phases.tolist()))
        if state.phase is not JoinPhase.OUT:
            self.last = state
        return state

    def divisor(self, state: JoinState) -> int:
        """Return the divisor of the sum of gradients."""
        return self._world_size if self._divide_by_all else len(state.active)
