"""Watchers of several machines find a deadlock together, from files. All of them are in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlo_lib.base import rank_failures
from dlo_lib.comm.calls import Call, CallSite, Kind
from dlo_lib.comm.deadlock import exchange, watcher
from dlo_lib.comm.deadlock.board import Activity, Board, RankRow
from dlo_lib.comm.deadlock.exchange import NodeExchange
from dlo_lib.comm.deadlock.watcher import Watcher

SITE = CallSite("train.py", 7, "train", "")


def call(kind: Kind, sequence: int, number: int, peer: int = -1, numel: int = 4) -> Call:
    return Call(
        number, kind, "0", (0, 1), sequence, peer, 0, "float32", (numel,), numel, 4 * numel, "", site=SITE
    )


class Machine:
    """A machine with one rank, and its watcher."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.board, self.rank = Board(2), rank
        self.row = RankRow(self.board, rank)
        self.watcher = Watcher(self.board, str)
        self.exchange = NodeExchange(folder, rank, self.watcher)

    def does(self, state: Activity, *calls: Call) -> None:
        for one in calls:
            self.row.log(one)
        self.row.enter(state, calls[-1].number if calls else 0)

    def turn(self) -> str | None:
        said = self.watcher.look()
        self.exchange.exchange([self.rank])
        return said

    def ends(self) -> None:
        self.does(Activity.FINISHED)
        self.watcher.look()
        self.exchange.write([self.rank], over=True)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits: each row counts as quiet, and each turn reads."""
    monkeypatch.setattr(exchange, "QUIET_S", 0.0)
    monkeypatch.setattr(exchange, "_SOON_S", 0.0)
    monkeypatch.setattr(watcher, "SETTLE_S", 0.0)


@pytest.fixture
def machines(tmp_path: Path) -> list[Machine]:
    return [Machine(tmp_path, rank) for rank in range(2)]


def turns(machines: list[Machine], count: int = 4) -> list[str | None]:
    """Return what each machine says in the end, after turns of all of them."""
    said: list[str | None] = []
    for _ in range(count):
        said = [machine.turn() for machine in machines]
    return said


def test_ranks_of_two_machines_that_wait_for_each_other_are_in_one_table(at_once, machines):
    machines[0].does(Activity.WAITING, call(Kind.ALL_REDUCE, 1, 1))
    machines[1].does(Activity.WAITING, call(Kind.RECV, 1, 1, peer=0))
    first, second = turns(machines)
    assert second is None, "the first machine decides"
    assert first.startswith("DEADLOCK: ranks 0 and 1 wait for something that can no longer happen.")
    assert "waits in all_reduce of float32[4]" in first
    assert "waits in recv from rank 0 of float32[4]" in first
    assert first.count("train.py, line 7") == 2


def test_a_rank_that_computes_on_another_machine_raises_no_alarm(at_once, machines):
    machines[0].does(Activity.WAITING, call(Kind.ALL_REDUCE, 1, 1))
    machines[1].does(Activity.COMPUTING)
    assert turns(machines) == [None, None]
    machines[1].does(Activity.WAITING, call(Kind.ALL_REDUCE, 1, 1))
    assert turns(machines) == [None, None], "both have made the call"


def test_the_next_machine_decides_when_the_first_has_ended(at_once, machines):
    machines[0].ends()
    machines[1].does(Activity.BROKEN, call(Kind.ALL_REDUCE, 1, 1))
    for _ in range(3):
        said = machines[1].turn()
    assert "rank 0 returned after 0 calls on it while the others are at call 1" in said
    assert "lost its connection in all_reduce" in said


def test_calls_of_two_machines_that_do_not_agree_are_found(at_once, machines):
    machines[0].does(Activity.WAITING, call(Kind.ALL_REDUCE, 1, 1))
    machines[1].does(Activity.WAITING, call(Kind.ALL_REDUCE, 1, 1, numel=5))
    first, second = turns(machines)
    assert second is None
    assert first.startswith("MISMATCH in call 1 on world: the ranks pass tensors of different sizes.")
    assert "float32[4]" in first
    assert "float32[5]" in first


def test_ranks_that_move_write_nothing_and_those_that_end_write_at_once(machines, tmp_path):
    for number in (1, 2, 3):
        machines[0].does(Activity.WAITING, call(Kind.ALL_REDUCE, number, number))
        machines[0].turn()
    assert list(tmp_path.iterdir()) == []
    machines[0].does(Activity.LEFT)
    machines[0].turn()
    assert [file.name for file in tmp_path.iterdir()] == ["rows-0.json"]


def test_one_machine_records_the_explanation_and_the_others_see_it(machines, tmp_path):
    assert not machines[1].exchange.verdict()
    assert rank_failures.record_verdict(tmp_path, "DEADLOCK: ...")
    assert not rank_failures.record_verdict(tmp_path, "another one")
    assert machines[1].exchange.verdict()
    assert rank_failures.verdict(tmp_path) == "DEADLOCK: ..."


def test_calls_that_ranks_of_other_machines_never_confirm_are_forgotten(monkeypatch):
    from dlo_lib.comm.deadlock import stuck_ranks

    monkeypatch.setattr(stuck_ranks, "_POSITIONS", 10)
    matcher = stuck_ranks.CallMatcher()
    for number in range(100):
        matcher.add(0, call(Kind.ALL_REDUCE, number, number))
    assert len(matcher._positions) <= 11
