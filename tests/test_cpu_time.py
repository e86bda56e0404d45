"""The CPU time of the suite has that of the processes that tests start, while they
live and after their end."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

from tests.cpu_time import CRASH, Summary, clock, machine, room_of, used

SECONDS = 0.3
BUSY = f"""
import sys, time
while time.process_time() < {SECONDS}:
    pass
print("done", flush=True)
sys.stdin.read()
"""


def test_a_process_counts_while_it_lives_and_after_its_end():
    before, of_machine = used(), machine()
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout.readline() == b"done\n"
    living = used() - before
    child.communicate()
    ended = used() - before
    tick = 0.02  # /proc counts in ticks of 10 ms, user and system apart
    assert living >= SECONDS - tick
    assert ended >= living - tick
    assert machine() - of_machine >= SECONDS - 2 * tick


def test_a_test_belongs_to_the_folder_that_its_file_is_in():
    assert room_of("tests/labs/test_every_lab.py::test_x[a/b]") == "labs"
    assert room_of("tests/parallel/pipeline/test_draw.py::test_x") == "parallel"
    assert room_of("tests/test_ground.py::test_x") == "tests"
    assert clock(727.9) == "12:07"


def test_the_file_has_the_worst_outcome_of_each_test_and_those_whose_process_died(tmp_path):
    file = tmp_path / "cpu.jsonl"
    summary = Summary(file)
    reports = [
        ("good", "setup", "passed"), ("good", "call", "passed"), ("good", "teardown", "passed"),
        ("left out", "setup", "skipped"), ("left out", "teardown", "passed"),
        ("wrong", "call", "failed"), ("wrong", "teardown", "passed"),
        ("untidy", "call", "passed"), ("untidy", "teardown", "failed"),
        ("dead", CRASH, "failed"),
    ]  # fmt: skip
    for test, when, outcome in reports:
        summary.pytest_runtest_logreport(
            SimpleNamespace(nodeid=test, when=when, outcome=outcome, user_properties=[])
        )
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert {line["test"]: line["outcome"] for line in lines} == {
        "good": "passed", "left out": "skipped", "wrong": "failed", "untidy": "failed", "dead": "failed"
    }  # fmt: skip
