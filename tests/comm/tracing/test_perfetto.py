"""The exported file holds every call and every wait, on the row of its rank."""

import json
from itertools import pairwise

import torch
import torch.distributed as dist

from dlo_lib.comm.calls import Call, Kind
from dlo_lib.comm.tracing.events import Event
from dlo_lib.comm.tracing.trace import Trace
from dlo_lib.launch import run_ranks


def call(kind: Kind) -> Call:
    return Call(1, kind, "0", (0, 1), 1, payload_bytes=2048, is_async=True)


def test_calls_and_waits_are_written(tmp_path):
    trace = Trace(
        [
            Event(0, call(Kind.ALL_REDUCE), 0.0, 0.004, 0.003, 0.0041, all_called=0.001),
            Event(1, call(Kind.ALL_REDUCE), 0.001, 0.004),
            Event(1, call(Kind.SEND), 0.005),  # its end is not known
        ],
        seconds=0.010,
    )
    entries = json.loads(trace.to_perfetto(tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in entries if e["name"] == "process_name"] == ["rank 0", "rank 1"]
    spans = {
        (e["pid"], e["id"]): [
            e["ts"],
            *(end["ts"] for end in entries if end["ph"] == "e" and end["id"] == e["id"]),
        ]
        for e in entries
        if e["ph"] == "b"
    }
    assert spans == {(0, 0): [1000.0, 4000.0], (1, 1): [1000.0, 4000.0], (1, 2): [5000.0, 10000.0]}
    (wait,) = [e for e in entries if e["ph"] == "X"]
    assert (wait["pid"], wait["ts"], round(wait["dur"])) == (0, 3000.0, 1100)


def some_calls() -> None:
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(3)]
    for work in works:
        work.wait()
    dist.barrier()


def test_a_viewer_can_read_the_file_of_a_run(tmp_path):
    trace = run_ranks(some_calls, 2, trace=True).trace
    entries = json.loads(trace.to_perfetto(tmp_path / "trace.json").read_text())["traceEvents"]
    order = {e["pid"]: e["args"]["sort_index"] for e in entries if e["name"] == "process_sort_index"}
    assert order == {0: 0, 1: 1}
    events = [e for e in entries if e["ph"] != "M"]
    assert all({"ph", "ts", "pid", "tid", "name", "cat"} <= set(e) and e["ts"] >= 0 for e in events)
    begins, ends = ({(e["cat"], e["id"]): e for e in events if e["ph"] == ph} for ph in "be")
    assert begins.keys() == ends.keys()
    assert len(begins) == 8
    assert all(
        begins[key]["ts"] <= end["ts"] and begins[key]["pid"] == end["pid"] for key, end in ends.items()
    )
    for rank in range(2):
        waits = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == rank)
        assert waits
        assert all(begin <= end for begin, end in waits)
        assert all(
            end <= begin for (_, end), (begin, _) in pairwise(waits)
        )  # a process waits for one call at a time
