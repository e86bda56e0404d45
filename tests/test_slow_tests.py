"""The record of slow tests: what a run adds and removes, and when it stays the same."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cpu_time import runs_all_tests
from tests.slow_tests import LIMIT, new_record, read_record, write_record

BEFORE = {"tests/a.py::test_slow": 2.0, "tests/a.py::test_removed": 9.0, "tests/b.py::test_faster": 3.0}


def test_the_dearest_case_of_a_function_counts():
    tests = {"tests/a.py::test_x[1]": 0.1, "tests/a.py::test_x[a[0]]": 1.234, "tests/a.py::test_y": 0.4}
    assert new_record({}, tests, whole=True) == {"tests/a.py::test_x": 1.2}


def test_a_whole_run_removes_what_is_fast_now_or_no_longer_exists():
    tests = {"tests/a.py::test_slow": 2.0, "tests/b.py::test_faster": 0.2}
    assert new_record(BEFORE, tests, whole=True) == {"tests/a.py::test_slow": 2.0}


def test_what_this_machine_skips_stays_in_the_record():
    tests = {"tests/b.py::test_faster": 0.2}
    after = new_record(BEFORE, tests, whole=True, skipped={"tests/a.py::test_slow[gpu]"})
    assert after == {"tests/a.py::test_slow": 2.0}


def test_a_run_of_some_tests_only_adds():
    tests = {"tests/b.py::test_faster": 0.2, "tests/c.py::test_first": 4.0, "tests/c.py::test_second": 0.1}
    assert new_record(BEFORE, tests, whole=False) == BEFORE | {"tests/c.py::test_first": 4.0}


@pytest.mark.parametrize(
    ("seconds", "recorded"), [(2.9, 2.0), (1.4, 2.0), (3.1, 3.1), (1.2, 1.2), (LIMIT / 2, None)]
)
def test_a_number_stays_while_the_cost_is_nearly_the_same(seconds: float, recorded: float | None):
    record = new_record({"tests/a.py::test_slow": 2.0}, {"tests/a.py::test_slow": seconds}, whole=True)
    assert record.get("tests/a.py::test_slow") == recorded


def test_a_test_near_the_limit_does_not_come_and_go():
    tests = {"tests/a.py::test_x": LIMIT * 0.8}
    assert new_record({"tests/a.py::test_x": LIMIT}, tests, whole=True) == {"tests/a.py::test_x": LIMIT}
    assert new_record({}, tests, whole=True) == {}


def test_what_is_written_is_read_back(tmp_path: Path):
    file = tmp_path / "record.txt"
    assert read_record(file) == {}
    write_record(BEFORE, file)
    assert read_record(file) == BEFORE
    assert len(file.read_text().splitlines()) == 1 + len(BEFORE)


@pytest.mark.parametrize(
    ("options", "source", "whole"),
    [
        ({}, "TESTPATHS", True),
        ({"keyword": "one"}, "TESTPATHS", False),
        ({"markexpr": "not slow"}, "TESTPATHS", False),
        ({"maxfail": 1}, "TESTPATHS", False),
        ({"collectonly": True}, "TESTPATHS", False),
        ({}, "ARGS", False),
        ({}, "INVOCATION_DIR", False),
    ],
)
def test_a_run_with_a_selection_is_not_whole(options: dict, source: str, whole: bool):
    config = SimpleNamespace(args_source=pytest.Config.ArgsSource[source], getoption=options.get)
    assert runs_all_tests(config) is whole
