"""Write ``slow_tests.txt``: the tests that `make test-fast` leaves out because they cost much CPU time.

::

    make test ARGS="--cpu-file=cpu.jsonl"
    .venv/bin/python tests/slow_tests.py cpu.jsonl

A test that is new is not in the list, so `make test-fast` runs it. What several tests share is counted
for the first of them; ``--add`` keeps the present list, so that a measurement of `make test-fast` finds
the next one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

SLOW_TESTS = Path(__file__).with_name("slow_tests.txt")
SECONDS = 0.5


def slow_tests(measured: Path, seconds: float) -> set[str]:
    """Return the tests in a file of ``--cpu-file`` that cost ``seconds`` of CPU time or more."""
    lines = [json.loads(line) for line in measured.read_text(encoding="utf-8").splitlines()]
    return {line["test"] for line in lines if line["cpu"] >= seconds}


def main() -> None:
    """Read the measurement and write the list."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("measured", type=Path, help="the file that --cpu-file wrote")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="CPU time from which a test is slow")
    parser.add_argument("--add", action="store_true", help="keep the tests that are in the list")
    arguments = parser.parse_args()
    slow = slow_tests(arguments.measured, arguments.seconds)
    if arguments.add:
        slow |= set(SLOW_TESTS.read_text(encoding="utf-8").splitlines())
    SLOW_TESTS.write_text("".join(f"{test}\n" for test in sorted(slow)), encoding="utf-8")
    print(f"{len(slow)} tests in {SLOW_TESTS}")


if __name__ == "__main__":
    main()
