"""Events of a trace: nesting, unions of intervals, and the file of a real step."""

from __future__ import annotations

import gzip

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from dlo_lib.base.errors import UserError
from dlo_lib.profiling import TraceEvent, covered, overlap, phase_times, read_trace, self_times
from dlo_lib.profiling.trace_events import main_track, union

MAIN, LOADER = ("1", "1"), ("1", "2")


def event(name: str, begin: float, end: float, track: tuple[str, str] = MAIN) -> TraceEvent:
    return TraceEvent(name, "cpu_op", begin, end - begin, track)


def test_the_self_time_leaves_out_only_the_events_directly_within():
    events = [
        event("linear", 0, 10),
        event("elsewhere", 0, 9, LOADER),  # another thread runs at the same time
        event("addmm", 1, 7),
        event("copy", 2, 4),
        event("view", 7, 8),  # begins where its neighbour ends
        event("relu", 10, 12),
    ]
    assert self_times(events) == [10 - 6 - 1, 9, 6 - 2, 2, 1, 2]


def test_the_self_times_of_a_thread_add_up_to_the_time_that_it_is_busy():
    events = [event("a", 0, 5), event("b", 1, 3), event("c", 1, 2), event("d", 8, 9)]
    assert sum(self_times(events)) == covered(each.interval for each in events) == 6


def test_time_on_two_tracks_counts_once():
    compute, communication = [(0, 4), (3, 6), (10, 12)], [(5, 11), (5, 7)]
    assert union(compute) == [(0, 6), (10, 12)]
    assert covered(compute) == 8
    assert overlap(compute, communication) == 1 + 1
    assert overlap(compute, []) == 0


def test_phases_outside_of_a_step_do_not_count():
    events = [
        event("load", 0, 3),
        event("ProfilerStep#1", 3, 13),
        event("load", 3, 5),
        event("forward", 5, 9),
        event("ProfilerStep#2", 13, 23),
        event("forward", 14, 20),
        event("load", 15, 16, LOADER),
    ]
    assert phase_times(events, ["load", "forward"]) == {"load": 1, "forward": 5, "other": 4}
    with pytest.raises(UserError, match=r"no steps: call profiler.step\(\)"):
        main_track(events[:1])


def test_the_trace_of_a_real_step_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    layer = torch.nn.Linear(8, 8)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=2, repeat=1),
        acc_events=True,
    ) as profiler:
        for _ in range(3):
            with record_function("forward"):
                layer(torch.ones(4, 8))
            profiler.step()
    file = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(file))
    events = read_trace(file)
    assert events[0].begin == 0
    assert [each.begin for each in events] == sorted(each.begin for each in events)
    assert {"ProfilerStep#1", "ProfilerStep#2", "forward", "aten::addmm"} <= {each.name for each in events}
    assert 0 < phase_times(events, ["forward"])["forward"] < events[-1].end
    compressed = tmp_path / "trace.json.gz"
    compressed.write_bytes(gzip.compress(file.read_bytes()))
    assert read_trace(compressed) == events


@pytest.mark.parametrize("content", ["{", "{}", "[1]", '{"traceEvents": [{"ph": "X"}]}'])
def test_a_file_that_is_no_trace_is_refused(tmp_path, content):
    file = tmp_path / "trace.json"
    file.write_text(content)
    with pytest.raises(UserError, match="is not a trace of torch.profiler"):
        read_trace(file)
    with pytest.raises(UserError, match="there is no trace"):
        read_trace(tmp_path / "missing.json")
