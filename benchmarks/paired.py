"""Comparing two ways of doing the same work on a noisy machine: take turns, many times, and report the ratio of each pair.

The two run one after the other in the same processes, the order swapped from pair to pair (A B, B A, ...), so that what drifts, drifts
for both; a pair's ratio is ours / peer, and a row gives the median of the ratios with their quartiles. CPU time is that of the process
with all its threads. Memory is the peak of resident memory (VmHWM, reset before each turn) above what was resident before it;
``ru_maxrss`` is no use: it is inherited from the parent.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles, over ``pairs`` pairs."""

    median: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True)
class Row:
    """One comparison. Ratios are ours / peer, below 1 where ours needs less; ``floor_ratio`` is ours / the least the work can cost:
    the CPU time of the same arithmetic in one process, shared by the ranks. None: not measured, and ``note`` says why."""

    name: str
    peer: str
    world_size: int
    time_ratio: Spread | None = None
    cpu_ratio: Spread | None = None
    memory_ratio: Spread | None = None
    floor_ratio: Spread | None = None
    note: str = ""

    def ratios(self) -> dict[str, Spread | None]:
        """By what is compared, in the order of a table's columns."""
        return {"time": self.time_ratio, "CPU": self.cpu_ratio, "memory": self.memory_ratio, "floor": self.floor_ratio}

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Turn:
    """What one turn cost one process: seconds of wall and of CPU time, bytes of peak memory above the start."""

    wall: float
    cpu: float
    memory: int


@dataclass(frozen=True)
class Turns:
    """The turns of both, pair by pair."""

    ours: list[Turn]
    peer: list[Turn]


def measure(action: Callable[[], object]) -> Turn:
    """Run ``action`` once and say what it cost this process."""
    gc.collect()
    before = _reset_peak()
    cpu, wall = time.process_time(), time.perf_counter()
    action()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Turn(wall, cpu, max(0, _memory("VmHWM") - before))


def take_turns(
    ours: Callable[[], object],
    peer: Callable[[], object],
    pairs: int,
    warm_up: int = 2,
    between: Callable[[], object] = lambda: None,
) -> Turns:
    """Measure ``ours`` and ``peer`` alternately. ``between`` runs, unmeasured, before every turn (a barrier, when there are ranks)."""
    for _ in range(warm_up):
        for action in (ours, peer):
            between()
            action()
    turns = Turns([], [])
    for pair in range(pairs):
        order = [(ours, turns.ours), (peer, turns.peer)]
        for action, noted in order if pair % 2 == 0 else order[::-1]:
            between()
            noted.append(measure(action))
    return turns


def over_ranks(per_rank: Sequence[Turns]) -> Turns:
    """The turns of a job from those of its ranks: the slowest rank's wall time, everybody's CPU time, the largest peak."""

    def joined(turns: Sequence[Turn]) -> Turn:
        return Turn(max(turn.wall for turn in turns), sum(turn.cpu for turn in turns), max(turn.memory for turn in turns))

    ours = [joined(turns) for turns in zip(*(rank.ours for rank in per_rank))]
    peer = [joined(turns) for turns in zip(*(rank.peer for rank in per_rank))]
    return Turns(ours, peer)


def ratios(ours: Sequence[float], peer: Sequence[float]) -> Spread:
    """The spread of ours / peer, pair by pair."""
    return spread([mine / max(theirs, 1e-12) for mine, theirs in zip(ours, peer)])


def spread(values: Sequence[float]) -> Spread:
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    return Spread(statistics.median(values), low, high, len(values))


def compare(name: str, peer: str, world_size: int, turns: Turns, floor_cpu: float | None = None, note: str = "") -> Row:
    """The row of a comparison. ``floor_cpu``: seconds of CPU time that the arithmetic alone takes, all ranks together."""
    ours_cpu = [turn.cpu for turn in turns.ours]
    memory = None
    if min(turn.memory for turn in turns.ours + turns.peer) > 1 << 20:  # below 1 MiB it is the allocator's noise
        memory = ratios([turn.memory for turn in turns.ours], [turn.memory for turn in turns.peer])
    return Row(
        name,
        peer,
        world_size,
        time_ratio=ratios([turn.wall for turn in turns.ours], [turn.wall for turn in turns.peer]),
        cpu_ratio=ratios(ours_cpu, [turn.cpu for turn in turns.peer]),
        memory_ratio=memory,
        floor_ratio=None if floor_cpu is None else spread([cpu / floor_cpu for cpu in ours_cpu]),
        note=note,
    )


def _reset_peak() -> int:
    """Make the kernel forget the peak of resident memory; the bytes resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _memory("VmRSS")


def _memory(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: memory is measured on Linux only")
