"""Compares two implementations of the same work on a noisy machine: they run alternately, many times, and the
result is the ratio of each pair.

The two run one after the other in the same processes, with alternating order (A B, B A, ...), so that a drift
of the machine affects both. The ratio of a pair is ours / peer. A row contains the median of the ratios and
their quartiles. CPU time is that of the process with all its threads. Memory is the peak of resident memory
(VmHWM, reset before each turn) minus the resident memory before the turn. ``ru_maxrss`` is not suitable,
because it is inherited from the parent.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Spread:
    """The median and the quartiles of ``pairs`` pairs."""

    median: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True)
class Row:
    """One comparison. Ratios are ours / peer, so that a ratio below 1 means that ours needs less.

    ``floor_ratio`` is ours / the CPU time of the same arithmetic in one process, divided by the ranks. None
    means not measured; ``note`` gives the reason.
    """

    name: str
    peer: str
    world_size: int
    time_ratio: Spread | None = None
    cpu_ratio: Spread | None = None
    memory_ratio: Spread | None = None
    floor_ratio: Spread | None = None
    note: str = ""

    def ratios(self) -> dict[str, Spread | None]:
        """Return the ratios in the order of the columns of the table."""
        return {
            "time": self.time_ratio,
            "CPU": self.cpu_ratio,
            "memory": self.memory_ratio,
            "floor": self.floor_ratio,
        }

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Turn:
    """The cost of one turn in one process: seconds of wall time and of CPU time, and peak memory above the
    start in bytes."""

    wall: float
    cpu: float
    memory: int


@dataclass(frozen=True)
class Turns:
    """The turns of both implementations, in the order of the pairs."""

    ours: list[Turn]
    peer: list[Turn]


def measure(action: Callable[[], object]) -> Turn:
    """Run ``action`` once and return its cost in this process."""
    gc.collect()
    before = _reset_peak()
    cpu, wall = time.process_time(), time.perf_counter()
    action()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Turn(wall, cpu, max(0, _memory("VmHWM") - before))


def take_rounds(
    actions: Mapping[str, Callable[[], object]],
    rounds: int,
    warm_up: int = 2,
    between: Callable[[], object] = lambda: None,
) -> dict[str, list[Turn]]:
    """Measure all ``actions`` once in each round, in alternating order, and return their turns by name.

    Args:
        rounds: the number of measured rounds.
        warm_up: the number of rounds that run first without a measurement.
        between: runs before every turn without a measurement, for example a barrier.
    """
    for _ in range(warm_up):
        for action in actions.values():
            between()
            action()
    taken: dict[str, list[Turn]] = {name: [] for name in actions}
    for number in range(rounds):
        for name in list(actions)[:: 1 if number % 2 == 0 else -1]:
            between()
            taken[name].append(measure(actions[name]))
    return taken


def take_turns(
    ours: Callable[[], object],
    peer: Callable[[], object],
    pairs: int,
    warm_up: int = 2,
    between: Callable[[], object] = lambda: None,
) -> Turns:
    """Measure ``ours`` and ``peer`` alternately, as ``take_rounds`` does."""
    return Turns(**take_rounds({"ours": ours, "peer": peer}, pairs, warm_up, between))


def rounds_over_ranks(per_rank: Sequence[Mapping[str, Sequence[Turn]]]) -> dict[str, list[Turn]]:
    """Combine the rounds of the ranks: the wall time of the slowest rank, the sum of the CPU times, and the
    largest peak."""
    return {
        name: [
            Turn(
                max(turn.wall for turn in turns),
                sum(turn.cpu for turn in turns),
                max(turn.memory for turn in turns),
            )
            for turns in zip(*(rank[name] for rank in per_rank), strict=True)
        ]
        for name in per_rank[0]
    }


def of_limit(rounds: Mapping[str, Sequence[Turn]], *parts: str) -> Spread:
    """Return the CPU time of ours / the sum of those of ``parts`` in the same round."""
    sums = [sum(turn.cpu for turn in turns) for turns in zip(*(rounds[part] for part in parts), strict=True)]
    return ratios([turn.cpu for turn in rounds["ours"]], sums)


def median_cpu(turns: Sequence[Turn]) -> float:
    """Return the median of the CPU times, in seconds."""
    return statistics.median(turn.cpu for turn in turns)


def over_ranks(per_rank: Sequence[Turns]) -> Turns:
    """Combine the turns of the ranks (``rounds_over_ranks``)."""
    return Turns(**rounds_over_ranks([{"ours": turns.ours, "peer": turns.peer} for turns in per_rank]))


def ratios(ours: Sequence[float], peer: Sequence[float]) -> Spread:
    """Return the spread of ours / peer over the pairs."""
    return spread([mine / max(theirs, 1e-12) for mine, theirs in zip(ours, peer)])


def spread(values: Sequence[float]) -> Spread:
    low, _, high = (
        statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    )
    return Spread(statistics.median(values), low, high, len(values))


def compare(
    name: str, peer: str, world_size: int, turns: Turns, floor_cpu: float | None = None, note: str = ""
) -> Row:
    """Return the row of a comparison. ``floor_cpu`` is the CPU time of the arithmetic alone, in seconds,
    summed over the ranks."""
    ours_cpu = [turn.cpu for turn in turns.ours]
    memory = None
    if min(turn.memory for turn in turns.ours + turns.peer) > 1 << 20:  # smaller values are noise
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
    """Reset the peak of resident memory, and return the resident memory in bytes."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _memory("VmRSS")


def _memory(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: memory is measured on Linux only")
