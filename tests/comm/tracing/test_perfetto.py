"""The exported file holds every call and every wait, on the row of its rank."""

import json

from dlo_lib.comm.calls import Call, Kind
from dlo_lib.comm.tracing.events import Event
from dlo_lib.comm.tracing.trace import Trace


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
