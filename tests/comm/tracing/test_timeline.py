"""Questions to a trace, and its timeline: hidden and exposed communication, waits, and unsharded bytes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgba

from dlo_lib.comm.calls import Call, Kind
from dlo_lib.comm.tracing.events import Event
from dlo_lib.comm.tracing.timeline import COMPUTING, FURTHER, KINDS, LANES, WAITING, lanes, waits
from dlo_lib.comm.tracing.trace import NotTraced, Trace
from dlo_lib.launch import run_ranks


def event(
    issued: float,
    done: float | None = None,
    wait: tuple[float, float] | None = None,
    kind: Kind = Kind.ALL_GATHER,
    size: int = 1000,
    rank: int = 0,
) -> Event:
    """Times in milliseconds."""
    call = Call(1, kind, "0", (0, 1), 1, payload_bytes=size, is_async=True)
    moments = [None if moment is None else moment / 1e3 for moment in (done, *(wait or (None, None)))]
    return Event(rank, call, issued / 1e3, *moments)


def test_max_unsharded_is_the_largest_gather_and_max_in_flight_the_largest_sum():
    trace = Trace(
        [
            event(0, 4, (3, 4), size=100),
            event(2, 6, (6, 6), size=300),  # in flight together with the first
            event(6, 9, (8, 9), size=250),  # starts when the second is over
            event(1, 2, (1, 2), Kind.ALL_REDUCE, size=5000),
            event(1, None, None, size=50, rank=1),  # never over
            event(5, 6, None, size=70, rank=1),
        ],
        seconds=0.01,
    )
    assert trace.max_unsharded("all_gather") == 300
    assert trace.max_unsharded() == 5000
    assert trace.max_unsharded("all_gather", rank=1) == 70
    assert trace.max_unsharded("scatter") == 0
    assert trace.max_in_flight("all_gather") == 400
    assert trace.max_in_flight("all_gather", rank=1) == 120


def test_hidden_is_the_share_in_which_the_process_did_not_wait():
    assert Trace([event(0, 4, (3, 4))]).hidden() == pytest.approx(0.75)
    assert Trace([event(0, 4, (0, 4))]).hidden() == 0
    assert Trace([event(0, 4, (5, 6))]).hidden() == 1
    assert Trace([event(0, 4)]).hidden() == 1, "no wait"
    assert Trace([event(0)]).hidden() is None
    mixed = Trace([event(0, 4, (0, 4)), event(0, 4, (4, 4), Kind.SEND), event(0, 4, (4, 4), rank=1)])
    assert mixed.hidden("all_gather") == 0.5
    assert mixed.hidden("all_gather", rank=1) == 1


def test_questions_raise_when_nothing_was_traced():
    trace = Trace(unavailable="torch is another one")
    for question in (trace.max_unsharded, trace.max_in_flight, trace.hidden, trace.plot):
        with pytest.raises(NotTraced, match="torch is another one"):
            question()


def test_overlapping_waits_are_joined_and_a_call_without_a_wait_has_none():
    events = [
        event(0, 3, (1, 3)),
        event(0, 4, (2, 4)),
        event(0, 9, (8, 9)),
        event(5, 6),
        event(5, 6, (8.5, 8.7)),
    ]
    assert waits(events) == [(0.001, 0.004), (0.008, 0.009)]


def test_calls_in_flight_together_get_different_lanes():
    assert lanes([(0, 5), (1, 3), (3, 4), (5, 6)]) == [0, 1, 1, 0]
    assert lanes([(0, 9)] * 4, most=2) == [0, 1, 2, 2], "no line is left for the last two"
    assert lanes([(0, 9), (0, 5), (1, 2), (5, 6)], most=2) == [0, 1, 2, 1]
    assert lanes([]) == []


def spans_of(axes, colour: str) -> list[tuple[float, float]]:
    """Return the bars of a colour: start and end, in milliseconds."""
    found = []
    for bars in axes.collections:
        assert isinstance(bars, PolyCollection)
        if tuple(bars.get_facecolor()[0]) == to_rgba(colour):
            found += [(path.vertices[:, 0].min(), path.vertices[:, 0].max()) for path in bars.get_paths()]
    return found


def test_the_picture_has_a_row_for_each_rank_with_its_computing_and_its_waits():
    trace = Trace([event(1, 6, (2, 6)), event(7, 9, (9.5, 9.5)), event(2, 4, (3, 4), rank=2)], seconds=0.01)
    figure = trace.plot()
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 2"]
    assert spans_of(axes, COMPUTING) == [(0, 10)] * 2
    assert spans_of(axes, WAITING) == [
        pytest.approx((2, 6)),
        pytest.approx((9.5, 9.5)),
        pytest.approx((3, 4)),
    ]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "computing",
        "waiting",
        "all-gather",
    ]
    assert axes.get_title(loc="left") == "3 calls in 10.0 ms, 44% of the communication hidden"
    assert axes.get_xlim() == (0, 10)
    assert trace.plot(start=0.002, end=0.005, title="a part").axes[0].get_xlim() == pytest.approx((2, 5))


def test_an_upper_bound_of_an_end_is_hatched():
    figure = Trace([event(1, None, (2, 6), Kind.SEND)], seconds=0.01).plot()
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()][
        -1
    ] == "upper bound of the end"
    assert "at most 20%" in figure.axes[0].get_title(loc="left")


def test_an_empty_interval_is_refused():
    with pytest.raises(ValueError, match="end must be after start"):
        Trace(seconds=1.0).plot(start=2.0)


def exchange() -> None:
    for _ in range(3):
        dist.all_reduce(torch.ones(1000))


def test_a_real_run_of_three_ranks_is_drawn():
    trace = run_ranks(exchange, 3, trace=True).trace
    assert trace.max_unsharded("all_reduce") == 4000
    assert trace.max_in_flight() == 4000, "each was waited for before the next"
    (axes,) = trace.plot().axes
    assert len(axes.get_yticklabels()) == 3
    assert len(spans_of(axes, WAITING)) == 9


def test_a_call_is_a_thin_line_until_all_have_called():
    calls = [Call(1, Kind.ALL_REDUCE, "0", (0, 1), 1)] * 2
    ranks = [
        Trace([Event(rank, calls[rank], issued, 0.008, issued, 0.008)], 0.01)
        for rank, issued in enumerate((0.001, 0.005))
    ]
    (axes,) = Trace.merged(ranks).plot().axes
    assert spans_of(axes, KINDS[Kind.ALL_REDUCE]) == [
        pytest.approx(span) for span in ((1, 5), (5, 8), (5, 5), (5, 8))
    ]
    assert "not yet called by all" in [text.get_text() for text in axes.get_legend().get_texts()]


def test_a_rank_without_calls_has_a_row():
    quiet = Trace(seconds=0.01)
    quiet.spans = {1: (0.0, 0.01)}
    (axes,) = Trace.merged([Trace([event(1, 6, (2, 6))], seconds=0.01), quiet]).plot().axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"]


def test_thousands_of_calls_are_drawn_as_distinguishable_bars():
    many = [
        event(0.01 * number, 0.01 * number + 0.005, (0.01 * number, 0.01 * number + 0.005))
        for number in range(10_000)
    ]
    (axes,) = Trace([*many, event(200, 300, (250, 300))], seconds=0.3).plot().axes
    assert spans_of(axes, KINDS[Kind.ALL_GATHER])[-2:] == [
        pytest.approx((0, 99.995), abs=0.3),
        pytest.approx((200, 300)),
    ]
    assert spans_of(axes, WAITING) == [pytest.approx((0, 99.995)), pytest.approx((250, 300))]


def test_very_short_calls_are_drawn_with_a_visible_length():
    (axes,) = Trace([event(10, 10.001, (10, 10.001))], seconds=1.0).plot().axes
    ((start, end),) = [span for span in spans_of(axes, KINDS[Kind.ALL_GATHER]) if span[1] > span[0]]
    assert end - start == pytest.approx(1000 / 1500)


def test_calls_beyond_the_lanes_share_one():
    (axes,) = (
        Trace([event(number, 50 + number, (50, 51)) for number in range(LANES + 3)], seconds=0.1).plot().axes
    )
    assert [span for span in spans_of(axes, FURTHER) if span[1] > span[0]] == [
        pytest.approx((LANES, 50 + LANES + 2))
    ]
    assert "further calls" in [text.get_text() for text in axes.get_legend().get_texts()]
