"""The run of a scenario on ranks, as checks see it: results, traffic between the ranks, memory; and the
nudge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from dlo_lib.base.text import tr
from dlo_lib.comm.calls import Call, Kind
from dlo_lib.grading.checks.exceptions import Unmeasured, Wrong

Value = TypeVar("Value")
KEPT_NUMBERS = 4096  # of what a rank sends in one call, at most


@dataclass(frozen=True)
class Nudge:
    """An alteration of one value in transit: one element that a rank receives in one call differs by ``by``.

    A result that depends on the received data changes exactly where the twin predicts. If a student sends the
    right traffic but discards its data, nothing changes. Ranks cannot observe the alteration.

    Attributes:
        kind: the kind of the call.
        rank: the rank whose received copy is altered; the copies of other ranks stay unchanged.
        call: the number of the call of that kind on that rank, counted from 0 in the order of issue.
        element: index into everything that the rank receives in that call, flattened in order.
        by: the value to add, in the dtype of the tensor.
    """

    kind: Kind
    rank: int
    call: int = 0
    element: int = 0
    by: float = 1.0

    def hits(self, rank: int, kind: Kind, number: int) -> bool:
        """Return True if this is the call to alter."""
        return (rank, kind, number) == (self.rank, self.kind, self.call)

    def applied(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], bool]:
        """Return a copy of ``tensors`` with the element altered, and whether there is such an element."""
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
    """The results of a scenario on each rank, and the switch's record: the traffic, and the memory at each
    mark.

    Bytes are those of ``comm.calls``: the payload is the size of the full tensor, ring bytes are what a ring
    algorithm sends per rank.
    """

    results: list[Any]
    traffic: tuple[tuple[Call, ...], ...] = ()
    """The calls by rank, in the order of issue, also messages that were never received."""
    held: Mapping[str, Mapping[int, int | None]] = field(default_factory=dict)
    """Memory in bytes by mark and rank; None if this machine cannot measure it."""
    issued: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    """The number of calls that a rank had issued when it last passed a mark, by mark and rank."""
    open: Mapping[str, Mapping[int, tuple[Call, ...]]] = field(default_factory=dict)
    """The calls of a rank that were not complete when it last passed a mark, by mark and rank."""
    unwaited: tuple[tuple[str, ...], ...] = ()
    """By rank, a description of each asynchronous call for which the rank never waited."""
    sent: tuple[tuple[Tensor, ...], ...] = field(default=(), repr=False, compare=False)
    """By rank and call, a vector of the first ``KEPT_NUMBERS`` that the rank sent; empty if it sent
    nothing, or 16 MiB before this call."""
    repeat: Callable[[Nudge], Run] | None = field(default=None, repr=False, compare=False)
    """Runs the same scenario on the same inputs again, with a nudge."""

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.results)

    def calls(self, rank: int, kind: Kind | None = None) -> list[Call]:
        """Return the calls of ``rank``, of one kind or all."""
        return [call for call in self.traffic[rank] if kind in (None, call.kind)]

    def numbers(self, rank: int, kind: Kind) -> list[Tensor]:
        """Return the first numbers that ``rank`` sent in each call of ``kind``."""
        return [sent for call, sent in zip(self.traffic[rank], self.sent[rank]) if call.kind is kind]

    def bytes(self, rank: int, kind: Kind | None = None) -> int:
        """Return the payload of these calls in bytes: the size of the full tensors."""
        return sum(call.payload_bytes for call in self.calls(rank, kind))

    def ring_bytes(self, rank: int, kind: Kind | None = None) -> float:
        """Return the bytes that ring algorithms send for these calls."""
        return sum(call.ring_bytes for call in self.calls(rank, kind))

    def max_unsharded(self, rank: int, kind: Kind | None = None) -> int:
        """Return the bytes of the largest full tensor of one call; of an all-gather, the largest unsharded
        tensor.
        """
        return max((call.payload_bytes for call in self.calls(rank, kind)), default=0)

    def calls_before(self, rank: int, mark: str) -> int:
        """Return the number of calls that ``rank`` had issued when it last passed ``mark("...")`` of the
        scenario.

        Marks in the middle of a scenario are not reliable, because a student's cell can send them early.

        Raises:
            Wrong: the rank did not pass the mark.
        """
        return self._at(self.issued, rank, mark)

    def open_calls(self, rank: int, mark: str) -> tuple[Call, ...]:
        """Return the calls of ``rank`` that were not complete when it last passed ``mark("...")``.

        The switch looks, so it does not matter in which thread the rank calls, and whether it waits later.

        Raises:
            Wrong: the rank did not pass the mark.
        """
        return self._at(self.open, rank, mark)

    def memory(self, rank: int, mark: str) -> int:
        """Return the bytes that ``rank`` held at ``mark("...")`` of the scenario, beyond those of a new
        process.

        The memory is read from outside the process. If the rank passed the mark several times, it is the
        largest value.

        Raises:
            Wrong: the rank did not pass the mark.
            Unmeasured: this machine cannot measure it (macOS).
        """
        if (held := self._at(self.held, rank, mark)) is None:
            raise Unmeasured(
                tr("memory cannot be measured on this machine: this counts when the lab is graded")
            )
        return held

    def forgotten_wait(self) -> str:
        """Return a sentence on the first call for which a rank never waited; empty if there is none."""
        for rank, calls in enumerate(self.unwaited):
            if calls:
                return tr(
                    "Rank {rank} never waits for its {call}: call wait() on the object that it returns.",
                    rank=rank, call=calls[0],
                )  # fmt: skip
        return ""

    def _at(self, by_mark: Mapping[str, Mapping[int, Value]], rank: int, mark: str) -> Value:
        by_rank = by_mark.get(mark, {})
        if rank not in by_rank:
            raise Wrong(
                tr('rank {rank} did not come to "{mark}"', rank=rank, mark=mark),
                tr("a rank did not come to the end"),
            )
        return by_rank[rank]
