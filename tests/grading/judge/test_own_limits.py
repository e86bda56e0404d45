"""What a submission sends costs the judge bounded time and memory, and the row says what happened."""

from __future__ import annotations

import ast
import os
import resource
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlo_lib.grading.checks.codec import MAX_TENSORS, NotPlain
from dlo_lib.grading.checks.contract import Check
from dlo_lib.grading.checks.outcome import Status
from dlo_lib.grading.judge import cells, own_limits
from dlo_lib.grading.judge.judge import Judge
from dlo_lib.grading.judge.own_limits import OwnTime
from dlo_lib.grading.judge.report_store import load
from dlo_lib.grading.judge.server import JudgeServer
from dlo_lib.grading.lab import syntax
from dlo_lib.grading.lab.modules import load_checks
from dlo_lib.grading.lab.source import LabSource
from dlo_lib.grading.sandbox.channel import Channel
from dlo_lib.grading.sandbox.isolation import Unsandboxed
from dlo_lib.grading.switch import exchange


class Absent:
    """A student of whom the check asks nothing."""


def outcome_of(small: LabSource, function: Callable[..., Any], own_time: OwnTime) -> Any:
    judge = Judge(small, load_checks(small.given), "secret", None, own_time=own_time)  # type: ignore[arg-type]
    check = Check(function, "scale", 1.0, 10.0, "one", "A check")
    with own_time.limited():
        return judge.outcome(check, Absent(), 1)  # type: ignore[arg-type]


def test_a_check_that_computes_too_long_ends_with_the_reason(small: LabSource) -> None:
    def endless(student: object, t: object) -> None:
        while True:
            sum(range(1000))

    own_time = OwnTime(0.1)
    outcome = outcome_of(small, endless, own_time)
    assert outcome.status is Status.TIMEOUT
    assert outcome.message == "the grader computed for 0 s with what you sent, which is its limit"
    assert own_time.spent
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_a_check_that_needs_too_much_memory_ends_with_the_reason(small: LabSource) -> None:
    def huge(student: object, t: object) -> None:
        bytearray(own_limits.MEMORY + (64 << 20))

    outcome = outcome_of(small, huge, OwnTime())
    assert outcome.status is Status.OOM
    assert "more memory than the grader has" in outcome.message


def test_no_check_runs_after_the_time(small: LabSource, zygote: Any) -> None:
    judge = Judge(small, load_checks(small.given), "secret", zygote)
    judge.own_time.spent = True
    from dlo_lib.grading.judge.judge import reference_submission

    report = judge.judge(reference_submission(small))
    assert judge.computed == 0
    assert judge.own_time.reason in report.warnings
    assert {check.status for question in report.questions.values() for check in question.checks} == {
        Status.TIMEOUT.name
    }


def test_the_kernel_ends_a_judge_in_one_long_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_limits, "MOST_SECONDS", own_limits.SECONDS)
    process = os.fork()
    if process == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with OwnTime(0).limited():
            pow(7, 10**8)
        os._exit(0)
    status = os.waitpid(process, 0)[1]
    assert os.waitstatus_to_exitcode(status) == -signal.SIGXCPU


def test_the_row_of_a_stopped_judge_says_what_happened(small: LabSource, tmp_path: Path) -> None:
    service = object.__new__(JudgeServer)
    service.lab, service.checks, service.isolation = small, load_checks(small.given), Unsandboxed()
    job = {"report": str(tmp_path / "report.json"), "rebuilt": str(tmp_path / "small.ipynb"), "key": "k"}
    service.give_up(job)
    stored = load(tmp_path / "report.json")
    assert stored is not None
    assert "the grader was stopped: it computed for more than 60 s" in stored.report.status
    assert all(question.points == 0 for question in stored.report.questions.values())


@pytest.mark.parametrize("begin", [b'{"$dict": [["id", 7], ', b"[" * 30])
def test_a_long_message_that_is_no_answer_is_not_decoded(
    begin: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million of small values takes seconds to decode, and a worker can send ten thousand such messages."""
    monkeypatch.setattr(
        "dlo_lib.grading.sandbox.channel.unpack", lambda _: pytest.fail("the message is decoded")
    )
    ours, theirs = socket.socketpair()
    channel = Channel(ours, limited=True)
    channel.expected = b'{"$dict": [["id", 12], '
    theirs.sendall((1 << 19).to_bytes(8, "big") + MAX_TENSORS.to_bytes(8, "big") + begin)
    channel.pump()
    with pytest.raises(NotPlain, match="a long message that is no answer"):
        channel.take()
    ours.close()
    theirs.close()


def test_the_text_of_a_submission_is_parsed_within_a_limit(
    small: LabSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 MB of cells, none of them long, took two minutes."""
    read = []
    monkeypatch.setattr(syntax, "parsed", lambda text: read.append(len(text)) or ast.Module([], []))
    monkeypatch.setattr(cells, "parsed", syntax.parsed)
    texts = [f"import a  # {number}\n" + "exec(scale)\n" * 20_000 for number in range(17)]
    found = [{"cell_type": "code", "id": f"c{number}", "source": text} for number, text in enumerate(texts)]
    submission = cells.rebuild_submission({"cells": found}, small)
    assert sum(len(cell.source) for cell in submission.cells if cell.origin is cells.Origin.EXTRA) <= 1 << 20
    assert any("more than 1 MB of code" in warning for warning in submission.warnings)
    read.clear()
    assert syntax.imported_modules(texts) == []
    assert 0 < sum(read) <= syntax.MAX_PARSED


def test_the_switch_refuses_what_it_holds_before_the_judge_has_no_memory() -> None:
    """It holds a message as a frame and as a tensor. An allocation that fails would be the grader's fault."""
    assert 2 * exchange.MAX_HELD < own_limits.MEMORY
