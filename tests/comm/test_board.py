"""The board: what one rank writes, another process reads, whole and in order."""

import multiprocessing
import time

from dlo_lib.comm.board import Board, Row, RowView, State
from dlo_lib.comm.calls import Call, Kind, Site

SITE = Site("/home/ada/lab.py", 12, "train", "all_reduce")


def call(number: int, group: str = "0") -> Call:
    return Call(
        number, Kind.ALL_REDUCE, group, (0, 1, 2), number, -1, 0, "float32", (4, 4), 16, 64, "SUM", False, True, False, (), (), SITE, 99
    )  # fmt: skip


def test_calls_arrive_as_they_were_logged():
    board = Board(2)
    row, view = Row(board, 1), RowView(board, 1)
    for number in range(1, 6):
        row.log(call(number))
    assert view.look()
    assert list(view.calls()) == [call(number) for number in range(1, 6)]
    assert list(view.calls()) == []
    assert not view.look(), "nothing new"
    board.close()


def test_the_log_goes_round_and_a_slow_reader_knows_what_it_lost():
    board = Board(1)
    row, view = Row(board, 0), RowView(board, 0)
    seen = []
    for number in range(1, 20_001):
        row.log(call(number))
        if number % 1000 == 0:
            view.look()
            seen += [one.number for one in view.calls()]
    assert seen == list(range(1, 20_001))
    assert not view.lost
    for number in range(20_000):
        row.log(call(number))
    view.look()
    assert list(view.calls()) == []
    assert view.lost
    board.close()


def test_states_are_read_with_their_call_and_their_time():
    board = Board(1)
    row, view = Row(board, 0), RowView(board, 0)
    before = time.monotonic_ns()
    row.enter(State.WAITING, 7)
    view.look()
    assert (view.state, view.waits_in) == (State.WAITING, 7)
    assert before <= view.since <= time.monotonic_ns()
    board.close()


def test_a_rank_sees_that_the_others_called_something_else():
    board = Board(3)
    rows = [Row(board, rank) for rank in range(3)]
    rows[0].publish("0", 1, 111)
    rows[1].publish("0", 1, 111)
    assert rows[1].differs("0", 1, 111, (0, 1, 2)) is None, "rank 2 has not come yet"
    rows[2].publish("0", 1, 222)
    assert rows[2].differs("0", 1, 222, (0, 1, 2)) == 0
    assert rows[2].differs("0", 1, 222, (2,)) is None
    assert rows[2].differs("0", 2, 222, (0, 1, 2)) is None, "another place in the order"
    assert rows[2].differs("17", 1, 222, (0, 1, 2)) is None, "another group"
    board.close()


def publish_and_look(descriptor: int, rank: int, at, false_alarms, times: int) -> None:
    """In step with the other rank, so that each looks while the other writes."""
    row = Row(Board(2, descriptor), rank)
    for number in range(1, times + 1):
        at[rank] = number
        while at[1 - rank] < number:
            pass
        row.publish(str(number), 1, number)
        if row.differs(str(number), 1, number, (1 - rank,)) is not None:
            false_alarms[rank] += 1


def test_a_signature_that_is_being_written_is_never_taken_for_another():
    fork = multiprocessing.get_context("fork")
    board, at, false_alarms = Board(2), fork.RawArray("q", 2), fork.RawArray("q", 2)
    arguments = [(board.descriptor, rank, at, false_alarms, 60_000) for rank in range(2)]
    ranks = [fork.Process(target=publish_and_look, args=given, daemon=True) for given in arguments]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    assert list(at) == [60_000, 60_000]
    assert list(false_alarms) == [0, 0]
    board.close()
