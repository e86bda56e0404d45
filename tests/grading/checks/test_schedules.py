"""Read a student's table: the message names the first wrong cell, and nothing is trusted before it is
checked.
"""

from __future__ import annotations

from typing import Any

import pytest

from dlo_lib.grading.checks.exceptions import Wrong
from dlo_lib.grading.checks.schedules import (
    carried_out,
    complete,
    holds_no_more,
    most_held,
    mostly_there,
    no_slower,
    read_rows,
    read_table,
)
from dlo_lib.grading.checks.trial import Trial
from dlo_lib.parallel.pipeline.schedules import afab, interleaved, one_f_one_b, zb_h1
from dlo_lib.parallel.pipeline.simulate import Costs, simulate
from dlo_lib.parallel.pipeline.table import ActionKind, Schedule, in_a_loop

GOOD = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]


def cells(schedule: Schedule) -> list[list[str]]:
    return [[str(action) for action in row] for row in schedule.rows]


def changed(rank: int, row: Any) -> list[Any]:
    rows: list[Any] = list(GOOD)
    rows[rank] = row
    return rows


@pytest.mark.parametrize(
    "schedule", [afab(3, 4), one_f_one_b(4, 6), zb_h1(3, 5), interleaved(2, 4, 2)], ids=lambda one: one.name
)
def test_a_right_table_is_read_complete_and_simulated(schedule: Schedule) -> None:
    t = Trial(0)
    read = read_table(t, cells(schedule), schedule.placement, schedule.micro_batches, "rows()")
    assert read.rows == schedule.rows
    complete(t, read, "rows()", "FIW" if schedule.splits_backward else "FB")
    run = carried_out(t, read, Costs(), "rows()")
    no_slower(t, run, simulate(schedule), "rows()", "")
    in_a_rank = schedule.ranks / schedule.stages
    assert most_held(read, 0.5) == pytest.approx([peak * in_a_rank for peak in run.peak_memory(1.0, 0.5)])
    holds_no_more(t, read, most_held(schedule), "rows()", "")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (None, "2 lists of cells"),
        (GOOD[:1], "2 lists of cells"),
        (changed(1, "1F0"), "rank 1: a row is a list"),
        (changed(1, [7]), "rank 1, cell 0 is 7: write stage"),
        (changed(1, ["1F0", "1X0"]), "rank 1, cell 1 is 1X0: write stage"),
        (changed(1, ["1F" + "0" * 100]), "rank 1, cell 0 is 1F0"),
        (changed(1, ["1SEND_B0"]), "write stage, kind (F, B, I, W)"),
        (changed(0, ["0F0"] * 30_000), "more cells than any"),
        (changed(0, ["0F2"]), "rank 0, cell 0 (0F2): there are 2 stages and 2 micro-batches"),
        (changed(0, ["1F0"]), "stage 1 lies on rank 1, not here"),
    ],
)
def test_an_invalid_table_is_refused_with_the_position(rows: Any, words: str) -> None:
    with pytest.raises(Wrong) as wrong:
        read_table(Trial(0), rows, in_a_loop(2), 2, "rows()")
    assert words in str(wrong.value)


def test_send_and_receive_cells_are_read_if_the_check_allows_them() -> None:
    ((send,), _) = read_rows(Trial(0), [["0SEND_F1"], []], 2, "rows()", frozenset(ActionKind))
    assert send.kind is ActionKind.SEND_FORWARD


@pytest.mark.parametrize(
    ("rows", "kinds", "words"),
    [
        (changed(0, GOOD[0][:-1]), "FB", "0B1 is missing on rank 0. Without its backward"),
        (changed(1, ["1B0", "1F1", "1B1"]), "FB", "1F0 is missing on rank 1. Every micro-batch goes"),
        (changed(0, [*GOOD[0], "0F0"]), "FB", "0F0 is there 2 times"),
        (GOOD, "FIW", "0B0 has a kind that this schedule does not use"),
    ],
)
def test_missing_and_extra_cells_are_named(rows: Any, kinds: str, words: str) -> None:
    with pytest.raises(Wrong) as wrong:
        complete(Trial(0), read_table(Trial(0), rows, in_a_loop(2), 2, "rows()"), "rows()", kinds)
    assert words in str(wrong.value)


def test_a_table_of_forwards_only_is_not_timed() -> None:
    forwards = [["0F0", "0F1"], ["1F0", "1F1"]]
    with pytest.raises(Wrong, match="has 4 of its 8 cells: complete it first"):
        mostly_there(Trial(0), read_table(Trial(0), forwards, in_a_loop(2), 2, "rows()"), "rows()", "FB")
    without_flush = read_table(Trial(0), changed(0, GOOD[0][:-1]), in_a_loop(2), 2, "rows()")
    mostly_there(Trial(0), without_flush, "rows()", "FB")


def test_a_table_that_deadlocks_is_explained() -> None:
    bad = changed(0, ["0F0", "0B0", "0F1", "0B1"])
    bad[1] = ["1F0", "1F1", "1B0", "1B1"]
    with pytest.raises(Wrong, match="cannot be carried out. deadlock: rank 0, cell 1") as wrong:
        carried_out(Trial(0), read_table(Trial(0), bad, in_a_loop(2), 2, "rows()"), Costs(), "rows()")
    assert wrong.value.words.startswith("A rank does its row")  # a hidden check shows only this


def test_the_message_on_a_slow_table_names_its_longest_wait() -> None:
    slow = simulate(
        Schedule(
            "naive",
            in_a_loop(2),
            2,
            tuple(row for row in read_rows(Trial(0), changed(0, ["0F0", "0B0", "0F1", "0B1"]), 2, "")),
        )
    )
    with pytest.raises(
        Wrong, match=r"takes 12, and 9 is possible: rank 0 waits 3 before cell 1 \(0B0\). Think"
    ):
        no_slower(Trial(0), slow, simulate(one_f_one_b(2, 2)), "rows()", "Think")


def test_a_rank_that_holds_too_much_is_named() -> None:
    with pytest.raises(Wrong, match="rank 1 holds up to 5 micro-batches, 2 is the most allowed. Less"):
        holds_no_more(Trial(0), afab(3, 5), [5, 2, 1], "rows()", "Less")
