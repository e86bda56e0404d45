"""What the suite costs in CPU time, in total and by test: load on the machine changes wall
time far more than CPU time.

After each test, the process that ran it counts what it and all its descendants have used since the test
before: descendants that have ended and were waited for (as ``getrusage`` counts them), and those that
still live (as ``/proc`` shows them). The set-up of a fixture belongs to the first test that asks for
it, its tear-down to the last. The total has also what is no test: imports, collection, and the process
that hands out the tests.

Not counted: processes whose parent did not wait for them, because it was killed or ignores its children.
What such a process used between the last look and its end is in the figure of the whole machine, as is
everything else that runs there.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.slow_tests import new_record, read_record, write_record

SLOWEST = 20
TICKS = os.sysconf("SC_CLK_TCK")
PROPERTY = "cpu_seconds"
OUTCOMES = ("passed", "skipped", "failed")  # the last one that a report has is that of the test
CHILDREN_ARE_LISTED = Path("/proc/self/task", str(os.getpid()), "children").exists()
CRASH = "???"  # pytest-xdist's only report of a test whose process has died


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-file",
        type=Path,
        metavar="PATH",
        help="--cpu-file=PATH writes the CPU time and the outcome of every test to PATH, as JSON lines",
    )
    parser.addoption(
        "--record-slow", action="store_true", help="record which tests are slow, in tests/slow_tests.txt"
    )


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Counter(), "cpu-counter")
    else:
        if not config.getoption("numprocesses", None):
            config.pluginmanager.register(Counter(), "cpu-counter")
        config.pluginmanager.register(Summary(config.getoption("--cpu-file")), "cpu-summary")


class Counter:
    """Adds to the last report of each test the CPU time since the test before."""

    def __init__(self) -> None:
        self.before = used()

    def pytest_collection_finish(self) -> None:
        self.before = used()  # imports and collection are no test's

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "teardown":
            now = used()
            # Below zero when a process ended that this one did not wait for: what it had
            # used is no longer seen.
            report.user_properties.append((PROPERTY, max(0.0, now - self.before)))
            self.before = now
        return report


class Summary:
    """Collects the times of all tests and prints the total and the slowest."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        if file is not None:
            file.write_text("")
        self.tests: dict[str, float] = {}
        self.outcomes: dict[str, str] = {}
        self.began, self.machine = time.monotonic(), machine()
        # `make test` starts pytest by exec: the shell's earlier children are counted as this process's.
        self.earlier = os.times()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test, earlier = report.nodeid, self.outcomes.get(report.nodeid, "passed")
        self.outcomes[test] = outcome = max(earlier, report.outcome, key=OUTCOMES.index)
        if report.when in ("teardown", CRASH):
            self.tests[test] = seconds = dict(report.user_properties).get(PROPERTY, 0.0)
            if self.file is not None:  # at once: a run that is stopped has not been for nothing
                with self.file.open("a") as lines:
                    line = {"test": test, "cpu": round(seconds, 3), "outcome": outcome}
                    lines.write(json.dumps(line) + "\n")

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if session.config.getoption("--record-slow") and exitstatus in (0, 1):
            skipped = {test for test, outcome in self.outcomes.items() if outcome == "skipped"}
            ran = {test: seconds for test, seconds in self.tests.items() if test not in skipped}
            write_record(new_record(read_record(), ran, runs_all_tests(session.config), skipped))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        times = os.times()
        user = times.user + times.children_user - self.earlier.children_user
        system = times.system + times.children_system - self.earlier.children_system
        wall = time.monotonic() - self.began
        write = terminalreporter.write_line
        terminalreporter.section(f"the {SLOWEST} tests that cost most, in seconds of CPU time")
        for test, seconds in sorted(self.tests.items(), key=lambda item: -item[1])[:SLOWEST]:
            write(f"{seconds:8.1f}  {test}")
        terminalreporter.section("CPU time")
        rooms: dict[str, float] = defaultdict(float)
        for test, seconds in self.tests.items():
            rooms[room_of(test)] += seconds
        write(
            ", ".join(
                f"{room} {seconds:.0f} s"
                for room, seconds in sorted(rooms.items(), key=lambda item: -item[1])
            )
        )
        write(
            f"CPU time {clock(user + system)} (user {clock(user)}, "
            f"system {clock(system)}), wall time {clock(wall)}"
        )
        # more than the total where the processes of a sandbox count, for which no process outside it waits
        write(f"The tests used {clock(sum(self.tests.values()))}, each with its sandboxes.")
        write(f"The whole machine used {clock(machine() - self.machine)} meanwhile, other programs included.")


def runs_all_tests(config: pytest.Config) -> bool:
    """Whether no path and no option selects some of the tests."""
    names = ("keyword", "markexpr", "deselect", "lf", "maxfail", "collectonly")
    selected = any(config.getoption(name, None) for name in names)
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS and not selected


def used() -> float:
    """Seconds of CPU time of this process and its descendants, those that ended and those that live."""
    times = os.times()
    return (
        times.user
        + times.system
        + times.children_user
        + times.children_system
        + sum(descendants(os.getpid()).values())
    )


def machine() -> float:
    """Seconds of CPU time of everything on this machine since it started."""
    user, nice, system, _, _, interrupts, soft = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:8]
    )
    return (user + nice + system + interrupts + soft) / TICKS


def room_of(test: str) -> str:
    """Of ``tests/labs/test_every_lab.py::...`` its ``labs``."""
    folders = test.split("::")[0].split("/")[1:-1]
    return folders[0] if folders else "tests"


def clock(seconds: float) -> str:
    """Such as ``12:07``, in minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def descendants(root: int) -> dict[int, float]:
    """The living descendants of the process ``root``: process id → seconds of CPU time, with those of its
    children that it waited for.

    It looks at no other process, because it is called after each test: to read all of /proc took 5 ms.
    """
    seconds: dict[int, float] = {}
    todo = children(root)
    while todo:
        pid = todo.pop()
        try:
            text = Path("/proc", str(pid), "stat").read_text()
        except OSError:  # it has ended meanwhile
            continue
        fields = text.rpartition(")")[2].split()
        seconds[pid] = sum(map(int, fields[11:15])) / TICKS
        todo += children(pid)
    return seconds


def children(pid: int) -> list[int]:
    """The living children of a process, which any of its threads may have started; none if it has ended."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    except OSError:
        if not CHILDREN_ARE_LISTED:
            raise
    return found
