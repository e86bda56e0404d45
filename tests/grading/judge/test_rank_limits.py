"""When a run on ranks is over: ranks that wait have time left for as long as the others compute."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from dlo_lib.comm.calls import Call, Kind
from dlo_lib.grading.checks.outcome import Ended, Status
from dlo_lib.grading.judge.judged_ranks import JudgedRanks

SUM = Call(1, Kind.ALL_REDUCE, "", (0, 1), 1)


@dataclass
class RankWorker:
    """A worker with ``left`` seconds."""

    left: float
    channel: Any = field(default_factory=lambda: SimpleNamespace(leftover=lambda: b""))

    def check_memory(self) -> None:
        """It holds nothing."""

    def more_time(self, deadline: float, workers: object) -> float:
        """Return the seconds left."""
        return self.left


def poll(left: tuple[float, float], waiting: tuple[bool, bool]) -> bool:
    """Look at two ranks at their deadline."""
    ranks = JudgedRanks([RankWorker(seconds) for seconds in left], deadline=0.0, files=())  # type: ignore[list-item]
    views = {rank: SimpleNamespace(waits_for=SUM if waits else None) for rank, waits in enumerate(waiting)}
    return ranks.poll(SimpleNamespace(views=views, place=lambda rank: f"rank {rank} is here"))  # type: ignore[arg-type]


def test_a_rank_without_time_ends_the_run_although_the_others_wait_for_it() -> None:
    with pytest.raises(Ended, match="no answer in time from rank 1: rank 0 is here; rank 1 is here") as ended:
        poll(left=(5.0, 0.0), waiting=(True, False))
    assert ended.value.status is Status.TIMEOUT


def test_a_rank_that_waits_beyond_its_time_leaves_the_others_theirs() -> None:
    assert poll(left=(0.0, 5.0), waiting=(True, False))


def test_ranks_that_all_wait_have_the_time_of_the_first_to_end() -> None:
    assert poll(left=(1.0, 5.0), waiting=(True, True))
    with pytest.raises(Ended, match="no answer in time from rank 0, 1"):
        poll(left=(0.0, 5.0), waiting=(True, True))
