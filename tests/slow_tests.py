"""Which tests `make test-fast` leaves out: those that cost much CPU time in the last recorded run.

``make test`` writes the record, ``slow_tests.txt``: each test function of which one case cost ``LIMIT``
seconds or more, with the seconds of that case. The number stays while the cost changes by less than a factor
of ``SAME``, so that the file changes with the tests and not with the load of a machine. A test without a
record is fast. What several tests share is counted for the first of them. Without this one, the next pays:
`make test-fast` adds it to the record.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

SLOW_TESTS = Path(__file__).with_name("slow_tests.txt")
LIMIT = 0.5  # seconds of CPU time
SAME = 1.5  # the cost of a test on a busy machine, divided by that on an idle one
HEADER = "# Seconds of CPU time and test functions: `make test` writes this file (slow_tests.py).\n"


def function_of(test: str) -> str:
    """The function of a test: ``tests/x.py::test_y`` of ``tests/x.py::test_y[case]``."""
    return test.partition("[")[0]


def read_record(file: Path = SLOW_TESTS) -> dict[str, float]:
    """Test function → seconds of CPU time of its dearest case."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    pairs = (line.split(" ", 1) for line in lines if not line.startswith("#"))
    return {function: float(seconds) for seconds, function in pairs}


def new_record(
    before: Mapping[str, float], tests: Mapping[str, float], whole: bool, skipped: Collection[str] = ()
) -> dict[str, float]:
    """Return the record after a run.

    Args:
        before: the record so far.
        tests: test → its seconds of CPU time.
        whole: all tests ran, so that a function that did not run no longer exists, and one that became
            cheaper is fast. Otherwise functions are only added.
        skipped: the tests that could not run on this machine: what is known of them stays.
    """
    dearest: dict[str, float] = {}
    for test, seconds in tests.items():
        function = function_of(test)
        dearest[function] = max(seconds, dearest.get(function, 0.0))
    kept = set(map(function_of, skipped)) if whole else before.keys()
    after = {function: seconds for function, seconds in before.items() if function in kept}
    for function, seconds in dearest.items():
        known = before.get(function)
        if known is not None and (not whole or known / SAME <= seconds <= known * SAME):
            after[function] = known
        elif seconds >= LIMIT:
            after[function] = float(f"{seconds:.2g}")
    return after


def write_record(record: Mapping[str, float], file: Path = SLOW_TESTS) -> None:
    """Write the record, in the order of the functions."""
    lines = (f"{seconds:g} {function}\n" for function, seconds in sorted(record.items()))
    file.write_text(HEADER + "".join(lines), encoding="utf-8")
