"""The board: another process reads what one rank writes, complete and in order."""

import multiprocessing
import time

from dlo_lib.comm.calls import Call, CallSite, Kind
from dlo_lib.comm.deadlock.board import Activity, Board, RankRow, RowView

SITE = CallSite("/home/ada/lab.py", 12, "train", "all_reduce")


def call(number: int, group: str = "0") -> Call:
    return Call(
        number, Kind.ALL_REDUCE, group, (0, 1, 2), number, -1, 0, "float32", (4, 4), 16, 64, "SUM", False,
        True, False, (), (), SITE, 99
    )  # fmt: skip


def test_calls_arrive_unchanged_in_the_order_of_the_log():
    board = Board(2)
    row, view = RankRow(board, 1), RowView(board, 1)
    for number in range(1, 6):
        row.log(call(number))
    assert view.look()
    assert list(view.calls()) == [call(number) for number in range(1, 6)]
    assert list(view.calls()) == []
    assert not view.look(), "nothing new"
    board.close()


def test_a_slow_reader_of_the_ring_buffer_knows_that_it_lost_calls():
    board = Board(1)
    row, view = RankRow(board, 0), RowView(board, 0)
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
    row, view = RankRow(board, 0), RowView(board, 0)
    before = time.monotonic_ns()
    row.enter(Activity.WAITING, 7)
    view.look()
    assert (view.state, view.waits_in) == (Activity.WAITING, 7)
    assert before <= view.since <= time.monotonic_ns()
    board.close()


def test_a_rank_sees_that_another_rank_issued_another_call():
    board = Board(3)
    rows = [RankRow(board, rank) for rank in range(3)]
    rows[0].publish("0", 1, 111)
    rows[1].publish("0", 1, 111)
    assert rows[1].differs("0", 1, 111, (0, 1, 2)) is None, "rank 2 has not called yet"
    rows[2].publish("0", 1, 222)
    assert rows[2].differs("0", 1, 222, (0, 1, 2)) == 0
    assert rows[2].differs("0", 1, 222, (2,)) is None
    assert rows[2].differs("0", 2, 222, (0, 1, 2)) is None, "another position in the order"
    assert rows[2].differs("17", 1, 222, (0, 1, 2)) is None, "another group"
    board.close()


def publish_and_look(descriptor: int, rank: int, at, false_alarms, times: int) -> None:
    """Run in step with the other rank, so that each reads while the other writes."""
    row = RankRow(Board(2, descriptor), rank)
    for number in range(1, times + 1):
        at[rank] = number
        while at[1 - rank] < number:
            pass
        row.publish(str(number), 1, number)
        if row.differs(str(number), 1, number, (1 - rank,)) is not None:
            false_alarms[rank] += 1


def test_a_partly_written_signature_is_never_read_as_another_one():
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


def test_a_board_on_another_machine_has_the_same_rows():
    here, there = Board(2), Board(2)
    row, local, copy = RankRow(here, 1), RowView(here, 1), RowView(there, 1)
    assert local.changes()[:4] == (1).to_bytes(4, "little"), "the first change says that the rank starts"
    seen = []
    for number in range(1, 30_001):  # more than the log holds at a time
        row.log(call(number))
        if number % 500 == 0:
            row.enter(Activity.WAITING, number, other_threads=number % 1000 == 0)
            there.apply(local.changes())
            assert copy.look()
            assert (copy.state, copy.waits_in, copy.other_threads) == (
                Activity.WAITING,
                number,
                number % 1000 == 0,
            )
            seen += [one.number for one in copy.calls()]
    assert seen == list(range(1, 30_001))
    assert local.changes() == b"", "nothing new"
    for board in (here, there):
        board.close()


def test_a_board_on_another_machine_knows_that_it_lost_calls():
    here, there = Board(1), Board(1)
    row, local, copy = RankRow(here, 0), RowView(here, 0), RowView(there, 0)
    for number in range(40_000):
        row.log(call(number))
    there.apply(local.changes())
    copy.look()
    assert list(copy.calls()) == []
    assert copy.incomplete
    for board in (here, there):
        board.close()
