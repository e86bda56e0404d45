"""A run of a scenario on ranks, as checks see it: what it returned, what passed between the ranks, what each held; and the nudge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from dlo_lib.comm.calls import Call, Kind
from dlo_lib.grading.wrong import Unmeasured, Wrong
from dlo_lib.text import tr

Value = TypeVar("Value")


@dataclass(frozen=True)
class Nudge:
    """The judge alters one value in flight: what a rank receives in one call differs by ``by`` in one element.

    Work that uses what it receives shows it exactly where the twin predicts, and nowhere else. Right traffic whose data is thrown away
    shows nothing. Ranks cannot see that it happens.

    Attributes:
        kind: of the call.
        rank: whose received copy is altered; those of other ranks stay as they are.
        call: which call of that kind on that rank, counted from 0 in the order of issue.
        element: index into all that the rank receives in that call, flattened in order.
        by: what is added, in the type of the tensor.
    """

    kind: Kind
    rank: int
    call: int = 0
    element: int = 0
    by: float = 1.0

    def hits(self, rank: int, kind: Kind, number: int) -> bool:
        """Whether this is the call."""
        return (rank, kind, number) == (self.rank, self.kind, self.call)

    def applied(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], bool]:
        """``tensors`` with the element altered, in a copy; and whether there is such an element."""
        altered, left = list(tensors), self.element
        for index, tensor in enumerate(altered):
            if left < tensor.numel():
                copy = tensor.clone(memory_format=torch.contiguous_format)
                copy.view(-1)[left] += self.by if tensor.dtype.is_floating_point else int(self.by)
                altered[index] = copy
                return altered, True
            left -= tensor.numel()
        return altered, False


@dataclass(frozen=True)
class Run:
    """What a scenario returned on each rank, and what the switch saw of it: what passed, and the memory at each mark.

    Bytes are those of ``comm.calls``: payload is the size of the full tensor, ring bytes what a ring algorithm sends of it per rank.
    """

    results: list[Any]
    traffic: tuple[tuple[Call, ...], ...] = ()
    """By rank, the calls that were completed, in the order of issue."""
    held: Mapping[str, Mapping[int, int | None]] = field(default_factory=dict)
    """Bytes by mark and rank; None where this machine cannot tell."""
    issued: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    """Calls that a rank had issued when it came to a mark, the last time."""

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.results)

    def calls(self, rank: int, kind: Kind | None = None) -> list[Call]:
        """The calls of ``rank``, of one kind or all."""
        return [call for call in self.traffic[rank] if kind in (None, call.kind)]

    def bytes(self, rank: int, kind: Kind | None = None) -> int:
        """Their payload: the size of the full tensors."""
        return sum(call.payload_bytes for call in self.calls(rank, kind))

    def ring_bytes(self, rank: int, kind: Kind | None = None) -> float:
        """What ring algorithms send for them."""
        return sum(call.ring_bytes for call in self.calls(rank, kind))

    def max_unsharded(self, rank: int, kind: Kind | None = None) -> int:
        """Bytes of the largest full tensor of a single call: of all-gathers, of how much is asked to be whole at once."""
        return max((call.payload_bytes for call in self.calls(rank, kind)), default=0)

    def calls_before(self, rank: int, mark: str) -> int:
        """The calls that ``rank`` had issued when it came to ``mark("...")``, the last time: where the memory of that mark was read.

        A mark in the middle of a scenario may have been sent by a student's cell, before its time.

        Raises:
            Wrong: it did not pass that mark.
        """
        return self._at(self.issued, rank, mark)

    def memory(self, rank: int, mark: str) -> int:
        """Bytes that the process of ``rank`` held at ``mark("...")`` of the scenario beyond a fresh one, read from outside.

        The largest, where it passed the mark several times.

        Raises:
            Wrong: it did not pass that mark.
            Unmeasured: this machine cannot tell (macOS).
        """
        if (held := self._at(self.held, rank, mark)) is None:
            raise Unmeasured(tr("memory cannot be measured on this machine: this counts when the lab is graded"))
        return held

    def _at(self, by_mark: Mapping[str, Mapping[int, Value]], rank: int, mark: str) -> Value:
        by_rank = by_mark.get(mark, {})
        if rank not in by_rank:
            raise Wrong(tr('rank {rank} did not come to "{mark}"', rank=rank, mark=mark), tr("a rank did not come to the end"))
        return by_rank[rank]
