"""The cause of a failed element is the failure of the rank that failed first, or the deadlock."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlo_lib.base.rank_failures import FailureReport, record_failure, record_verdict
from dlo_lib.cluster.run import causes
from dlo_lib.cluster.slurm.states import ElementStatus, State

FAILED = ElementStatus(0, State.FAILED, exit_code=143)
BROKEN = "raised RuntimeError: [gloo] Connection closed by peer"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "ranks" / "0" / "run"


def report(folder: Path, rank: int, headline: str, at: float, is_consequence: bool = False) -> None:
    record_failure(folder, FailureReport(rank, headline, f"Traceback of {rank}\n", is_consequence, at))


def test_an_earlier_broken_connection_is_not_the_cause(run, tmp_path):
    report(run, 0, BROKEN, 1.0, is_consequence=True)
    report(run, 2, "raised KeyError: 'x'", 3.0)
    report(run, 1, "raised ValueError: a bad batch", 2.0)
    assert causes.with_cause(tmp_path, FAILED).reason == "rank 1 raised ValueError: a bad batch"
    assert causes.account(tmp_path, FAILED).splitlines() == [
        "rank 1 raised ValueError: a bad batch",
        "",
        "Traceback of 1",
        "",
        "rank 2 raised KeyError: 'x'",
        "rank 0 lost the connection as a consequence.",
    ]


def test_a_dead_lock_is_the_cause_of_broken_connections_but_not_of_an_error(run, tmp_path):
    explanation = "DEADLOCK: rank 0 waits.\n\n  rank  what it does"
    record_verdict(run, explanation)
    report(run, 0, BROKEN, 1.0, is_consequence=True)
    assert causes.with_cause(tmp_path, FAILED).reason == "DEADLOCK: rank 0 waits."
    assert causes.account(tmp_path, FAILED) == explanation
    report(run, 1, "raised ValueError: a bad batch", 2.0)
    assert causes.account(tmp_path, FAILED).startswith("rank 1 raised ValueError: a bad batch")


def test_other_states_and_elements_without_a_record_keep_their_reasons(run, tmp_path):
    assert causes.with_cause(tmp_path, FAILED) is FAILED
    assert causes.account(tmp_path, FAILED) == ""
    report(run, 1, "was killed by SIGTERM", 1.0)
    cancelled = ElementStatus(0, State.CANCELLED)
    assert causes.with_cause(tmp_path, cancelled) is cancelled
    assert causes.account(tmp_path, cancelled) == ""


def test_a_damaged_record_does_not_hide_the_others(run, tmp_path):
    report(run, 1, "raised ValueError: a bad batch", 2.0)
    (run / "failure-0.json").write_text('{"rank": 0, ')
    assert causes.with_cause(tmp_path, FAILED).reason == "rank 1 raised ValueError: a bad batch"
