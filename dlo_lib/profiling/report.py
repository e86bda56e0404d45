"""The result of a memory measurement: events, and the peaks that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dlo_lib.optim import Phase
from dlo_lib.profiling.tracker import MemoryEvent, Part


@dataclass(frozen=True)
class MemoryReport:
    """The memory of one rank over one training step, in bytes."""

    events: tuple[MemoryEvent, ...]

    @cached_property
    def timeline(self) -> dict[Part, np.ndarray]:
        """The bytes of each part after each event, (events,) int64."""
        change = np.zeros((len(self.events), len(Part)), dtype=np.int64)
        column = {part: index for index, part in enumerate(Part)}
        for row, event in enumerate(self.events):
            change[row, column[event.part]] = event.bytes
        held = change.cumsum(axis=0)
        return {part: held[:, index] for part, index in column.items()}

    @cached_property
    def total(self) -> np.ndarray:
        """The bytes of all parts after each event, (events,) int64."""
        return np.sum(list(self.timeline.values()), axis=0)

    @property
    def peak_bytes(self) -> int:
        """The largest sum of all parts during the step."""
        return max(self.peak_by_phase.values())

    @cached_property
    def peak_by_phase(self) -> dict[Phase, int]:
        """The largest sum of all parts within each phase, including the sum at the start of the phase."""
        peaks: dict[Phase, int] = {}
        held = 0
        for event, after in zip(self.events, self.total.tolist()):
            if event.phase is not None:
                peaks[event.phase] = max(peaks.get(event.phase, held), after)
            held = after
        return peaks

    @cached_property
    def peak_by_part(self) -> dict[Part, int]:
        """The peak of each part during the step. The parts have their peaks at different times, so the sum of
        these peaks may exceed ``peak_bytes``."""
        begin = self.begin
        return {part: int(held[begin:].max()) for part, held in self.timeline.items()}

    @cached_property
    def at_peak(self) -> dict[Part, int]:
        """The bytes of each part when the sum is largest. Their sum is ``peak_bytes``."""
        index = self.begin + int(self.total[self.begin :].argmax())
        return {part: int(held[index]) for part, held in self.timeline.items()}

    @cached_property
    def begin(self) -> int:
        """The index of the last event before the step."""
        first = next(index for index, event in enumerate(self.events) if event.phase is not None)
        return max(first - 1, 0)
