"""Runs tests in several processes that take them from one queue, and keeps each result in a file.

::

    python -m tests.shared_queue FOLDER --processes 8 --limit 100 [ARGUMENTS OF PYTEST]

Each process collects all tests and takes the next test that no process has taken, so that all processes end
at about the same time. A test is taken by creating its file in FOLDER/tests; its outcome is written there
when it ends. A second run with the same FOLDER runs the tests that have not passed.

A CUDA error such as an illegal memory access makes every later call of its process fail. After a failed test
the process therefore synchronises the GPU, and if that fails too, it ends and a new one replaces it. So
does a process that crashed. The test that it ran is reported as crashed.

This does what pytest-xdist does for a suite on a CPU; it is separate because of the GPU, the time limit and
the second run.

Exit status: 0 if every test passed or was skipped, 1 otherwise.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

GPU_FAILED = 70
"""The exit status of a process whose GPU answers no more calls."""
ENDED = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
RUNNING = "running"


class Queue:
    """The plugin of one process.

    Args:
        folder: the folder of the results.
        number: the number of the process, from 0.
        alone: files whose tests only process 0 takes, because they need most of the memory.
    """

    def __init__(self, folder: Path, number: int, alone: list[str]) -> None:
        self.folder, self.number, self.alone = folder / "tests", number, alone
        self.reports: list[pytest.TestReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run the tests that this process takes."""
        if session.testsfailed or session.config.option.collectonly:
            return None  # pytest reports the errors of the collection
        own = [item for item in session.items if item.nodeid.startswith(tuple(self.alone))]
        others = [item for item in session.items if item not in own]
        for item in (own if self.number == 0 else []) + others:
            path = self.take(item.nodeid)
            if path is None:
                continue
            self.reports = []
            # Without a next item all fixtures end after the test: the next test here may be in any file.
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            write(path, result(item.nodeid, self.reports))
            if any(report.failed for report in self.reports) and not gpu_answers():
                pytest.exit(f"the GPU answers no more calls after {item.nodeid}", returncode=GPU_FAILED)
        return True

    def take(self, test: str) -> Path | None:
        """Return the file of ``test``, which is created, or None if another process has taken it."""
        path = self.folder / f"{hashlib.sha256(test.encode()).hexdigest()[:16]}.json"
        try:
            path.open("x").close()
        except FileExistsError:
            return None
        write(path, {"test": test, "outcome": RUNNING, "process": self.number})
        return path


def result(test: str, reports: list[pytest.TestReport]) -> dict[str, Any]:
    """Return the outcome of a test from its reports of set-up, call and tear-down."""
    failed = [report for report in reports if report.failed]
    skipped = [report for report in reports if report.skipped]
    outcome = "failed" if failed else "skipped" if skipped else "passed"
    reason = ""
    if failed:
        reason = str(failed[0].longrepr)[-4000:]
    elif skipped and isinstance(skipped[0].longrepr, tuple):
        reason = skipped[0].longrepr[2]
    seconds = sum(report.duration for report in reports)
    return {"test": test, "outcome": outcome, "seconds": round(seconds, 2), "reason": reason}


def write(path: Path, value: dict[str, Any]) -> None:
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(value), encoding="utf-8")
    temporary.replace(path)


def gpu_answers() -> bool:
    """Return whether the GPU of this process can still be used; True without a GPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("shared queue")
    group.addoption("--queue", type=Path, help="the folder of the results")
    group.addoption("--queue-process", type=int, default=0, help="the number of this process")
    group.addoption("--queue-alone", nargs="*", default=[], help="files of which process 0 runs all tests")


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--queue")
    if folder is not None:
        number, alone = config.getoption("--queue-process"), config.getoption("--queue-alone")
        config.pluginmanager.register(Queue(folder, number, alone), "shared-queue")


def results(folder: Path) -> list[dict[str, Any]]:
    """Return the results in ``folder``, sorted by the name of the test."""
    texts = (path.read_text(encoding="utf-8") for path in (folder / "tests").glob("*.json"))
    return sorted((json.loads(text) for text in texts if text), key=lambda found: found["test"])


def summary(found: list[dict[str, Any]]) -> str:
    """Return the failures with their first error, the reasons of skips, the slowest tests, and the counts."""
    lines = []
    for each in found:
        if each["outcome"] in ("failed", "crashed", RUNNING):
            reason = each.get("reason", "").strip().splitlines() or [""]
            first = next((line[1:] for line in reason if line.startswith("E ")), reason[-1]).strip()
            lines.append(f"{each['outcome'].upper()} {each['test']}" + (f": {first[:300]}" if first else ""))
    skipped = Counter(each["reason"] for each in found if each["outcome"] == "skipped")
    lines += [f"skipped {count}: {reason}" for reason, count in sorted(skipped.items())]
    slowest = sorted(found, key=lambda each: -each.get("seconds", 0.0))[:5]
    lines += [f"{each['seconds']:.1f} s: {each['test']}" for each in slowest if each.get("seconds", 0) >= 1]
    counts = Counter(each["outcome"] for each in found)
    lines.append(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) or "no tests")
    return "\n".join(lines)


def start(folder: Path, number: int, alone: list[str], arguments: list[str]) -> subprocess.Popen[bytes]:
    """Start process ``number``, whose output is added to a file in ``folder``."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.shared_queue", "-p", "no:cacheprovider", "-q"]
    command += ["--tb=short", "--cpu-file=/dev/null", f"--queue={folder}", f"--queue-process={number}"]
    command += [f"--basetemp={folder / f'temporary-{number}'}", *arguments]
    command += ["--queue-alone", *alone] if alone else []
    with open(folder / f"process-{number}.txt", "ab") as output:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)


def run(folder: Path, processes: int, limit: float, alone: list[str], arguments: list[str]) -> int:
    """Run the tests; print the summary; return the exit status.

    Raises:
        OSError: ``folder`` cannot be written.
    """
    (folder / "tests").mkdir(parents=True, exist_ok=True)
    for path in (folder / "tests").iterdir():
        text = path.read_text(encoding="utf-8") if path.suffix == ".json" else ""
        if not text or json.loads(text)["outcome"] not in ("passed", "skipped"):
            path.unlink()
    end = time.monotonic() + limit
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    running = {number: start(folder, number, alone, arguments) for number in range(processes)}
    broken = []
    replacements = 2 * processes
    while running and not stopped and time.monotonic() < end:
        time.sleep(0.1)
        for number, process in list(running.items()):
            status = process.poll()
            if status is None:
                continue
            del running[number]
            _mark_crashed(folder, number, status)
            if (status < 0 or status == GPU_FAILED) and replacements and not stopped:
                replacements -= 1
                running[number] = start(folder, number, alone, arguments)
            elif status not in ENDED:
                broken.append(f"process {number} ended with status {status}: {_last_line(folder, number)}")
    for process in running.values():
        process.kill()
        process.wait()
    found = results(folder)
    print("\n".join([*sorted(set(broken)), summary(found)]))
    if running:
        print(
            f"stopped at {'a signal' if stopped else f'the limit of {limit:.0f} s'}: a second run continues"
        )
    complete = found and all(each["outcome"] in ("passed", "skipped") for each in found)
    return int(not complete or bool(running) or bool(broken))


def _mark_crashed(folder: Path, number: int, status: int) -> None:
    """Report what process ``number`` was running when it ended."""
    for path in (folder / "tests").glob("*.json"):
        text = path.read_text(encoding="utf-8")
        each = json.loads(text) if text else {"outcome": ""}
        if each["outcome"] == RUNNING and each["process"] == number:
            write(path, {**each, "outcome": "crashed", "reason": f"its process ended with status {status}"})


def _last_line(folder: Path, number: int) -> str:
    text = (folder / f"process-{number}.txt").read_text(encoding="utf-8", errors="replace")
    lines = [line for line in text.splitlines() if "Error" in line]
    return (lines or text.strip().splitlines() or ["no output"])[-1].strip()


def main() -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(description="Run tests in several processes that share one queue.")
    parser.add_argument("folder", type=Path, help="the folder of the results")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument(
        "--alone", action="append", default=[], metavar="FILE", help="only process 0 runs its tests"
    )
    arguments, others = parser.parse_known_args()
    return run(arguments.folder.resolve(), arguments.processes, arguments.limit, arguments.alone, others)


if __name__ == "__main__":
    sys.exit(main())
