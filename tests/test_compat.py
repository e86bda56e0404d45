"""`make compat`: the promised pairs, their environments, and the page of what was run."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dlo_lib.base.torch_version import OLDEST
from dlo_lib.cli.doctor_packages import NEWEST_PYTHON, NEWEST_TORCH, OLDEST_PYTHON

ROOT = Path(__file__).resolve().parents[1]
PROOFS, NOTEBOOKS = "tests/labs/test_every_lab.py", "tests/labs/test_notebooks_run.py"


@pytest.fixture
def compat(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return loaded("compat", monkeypatch)


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return loaded("compat_env", monkeypatch)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return loaded("compat_table", monkeypatch)


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "deploy"))
    return importlib.import_module(name)


# -- the pairs


def test_the_oldest_the_pinned_and_the_newest_release_are_tried_on_all_promised_pythons(env):
    pairs = env.promised_pairs()
    assert pairs[0].release == f"{OLDEST[0]}.{OLDEST[1]}.0"
    assert pairs[-1].release == env.NEWEST
    assert min(pair.python for pair in pairs) == OLDEST_PYTHON
    assert max(pair.python for pair in pairs) == NEWEST_PYTHON
    of_pinned = {pair.python[1] for pair in pairs if pair.release == env.pinned_release()}
    others = {pair.python[1] for pair in pairs} - of_pinned
    assert of_pinned | others == set(range(OLDEST_PYTHON[1], NEWEST_PYTHON[1] + 1))


@pytest.mark.parametrize(
    ("release", "requirement"), [("2.8.0", "torch==2.8.0"), ("2.9", "torch==2.9.*"), ("newest", "torch")]
)
def test_uv_is_asked_for_a_release(env, release, requirement):
    assert env.Pair(release, (3, 12)).requirement == requirement


def test_an_argument_selects_pairs(compat, env, monkeypatch):
    monkeypatch.setattr(compat, "interpreter", lambda pair: "python")
    pinned = env.pinned_release()
    assert [pair.python for pair, _ in compat.chosen_pairs([pinned])] == [(3, 11), (3, 13), (3, 14)]
    assert [pair.name for pair, _ in compat.chosen_pairs([f"{pinned}/3.13", "newest"])] == [
        f"{pinned}/3.13",
        "newest/3.12",
    ]
    with pytest.raises(
        env.CompatError, match='^"2.1" is none of the promised pairs: use one of .*newest/3.12$'
    ):
        compat.chosen_pairs(["2.1"])


def test_a_python_that_is_not_here_is_named(compat, env, monkeypatch, capsys):
    monkeypatch.setattr(compat, "interpreter", lambda pair: None if pair.python == (3, 14) else "python")
    pinned = env.pinned_release()
    assert len(compat.chosen_pairs([])) == len(env.promised_pairs()) - 1
    assert capsys.readouterr().out == f"compat: {pinned}/3.14 is left out, because no Python 3.14 is here\n"
    with pytest.raises(env.CompatError, match="no Python 3.14 is here for .*: install it, or set PYTHON"):
        compat.chosen_pairs([f"{pinned.rpartition('.')[0]}/3.14"])
    monkeypatch.setattr(compat, "interpreter", lambda pair: None)
    with pytest.raises(env.CompatError, match="none of the Pythons is here"):
        compat.chosen_pairs([])


def test_a_lab_is_chosen_by_its_number_or_name(compat, env):
    assert compat.chosen_labs(["15", "1", "04_compile"])[::2] == ["15_fsdp", "04_compile"]
    with pytest.raises(env.CompatError, match='no lab is called "99": use one of 00_'):
        compat.chosen_labs(["99"])
    tests = compat.tests_of([compat.LABS], ["15_fsdp", "04_compile"])
    assert tests == [compat.PROOFS, compat.NOTEBOOKS, "-k", "15_fsdp or 04_compile"]


def test_every_file_of_the_rooms_exists(compat, table):
    files = [file for files in compat.ROOMS.values() for file in files]
    assert [file for file in files if not (ROOT / file).exists()] == []
    assert (compat.PROOFS, compat.NOTEBOOKS.partition("::")[0]) == table.OF_LABS


# -- the environments


def test_only_pins_that_this_pytorch_contradicts_are_left_out(env):
    """2.11 to 2.12.1 require setuptools<82, so that the environment could not be created."""
    torch: Any = SimpleNamespace(
        requires=[
            "setuptools<82",
            "sympy>=1.13.3",
            "Typing_Extensions>=4.10",
            'numpy<2; python_version < "3.12"',
            'networkx<3; extra == "more"',
        ]
    )
    pins = [
        "setuptools==84.2.1",
        "sympy==1.14.0",
        "typing_extensions==4.16.0",
        "numpy==2.4.6",
        "networkx==3.6.1",
    ]
    kept, left_out = env.split_pins([*pins, "torch==2.13.0"], torch, env.Pair("2.11", (3, 12)))
    assert (kept, left_out) == (pins[1:], pins[:1])
    _, left_out = env.split_pins(pins, torch, env.Pair("2.11", (3, 11)))
    assert left_out == ["setuptools==84.2.1", "numpy==2.4.6"]


def test_pytorch_comes_first_and_its_metadata_decides_the_rest(env, monkeypatch, tmp_path):
    calls: list[tuple[str, ...]] = []

    def run_uv(uv: str, *arguments: str, **settings: str) -> None:
        calls.append(arguments)
        if "--torch-backend" in arguments:
            raise env.CompatError("no such index")

    monkeypatch.setattr(env, "CACHE", tmp_path)
    monkeypatch.setattr(env, "run_uv", run_uv)
    torch = SimpleNamespace(version="2.9.1+cu128", requires=["setuptools<82"])
    monkeypatch.setattr(env, "torch_of", lambda folder: torch)
    pair = env.Pair("2.9", (3, 12))
    folder = tmp_path / "2.9-py3.12"
    folder.mkdir()  # what uv does
    assert env.environment("uv", pair, "python3.12") == folder / "bin" / "python"
    assert [call[-1] for call in calls] == [str(folder), "cpu", "torch==2.9.*", f"{ROOT}[labs,dev]"]
    constraints = (folder / "constraints.txt").read_text().splitlines()
    assert "torch==2.9.1+cu128" in constraints
    assert not [pin for pin in constraints if pin.startswith("setuptools")]
    assert [pin for pin in constraints if pin.startswith("numpy==")]
    calls.clear()
    env.environment("uv", pair, "python3.12")
    assert calls == [], "it is kept"
    env.environment("uv", pair, "/another/python3.12")
    assert calls, "it is created from another Python"


def test_two_environments_are_kept_those_used_last(env, monkeypatch, tmp_path):
    monkeypatch.setattr(env, "CACHE", tmp_path)
    for age, name in enumerate(["new", "older", "oldest"]):
        (tmp_path / name).mkdir()
        (tmp_path / name / env.STAMP).touch()
        os.utime(tmp_path / name / env.STAMP, (1e9 - age, 1e9 - age))
    (tmp_path / "interrupted").mkdir()
    env.make_room(tmp_path / "next")
    assert [path.name for path in tmp_path.glob("*") if path.is_dir()] == ["new"]
    env.make_room(tmp_path / "new")
    assert [path.name for path in tmp_path.glob("*") if path.is_dir()] == ["new"]


def test_an_environment_that_another_run_uses_is_neither_removed_nor_shared(env, monkeypatch, tmp_path):
    monkeypatch.setattr(env, "CACHE", tmp_path)
    for name, used in (("2.8.0-py3.12", 1e9), ("2.9-py3.12", 2e9)):
        (tmp_path / name).mkdir()
        (tmp_path / name / env.STAMP).touch()
        os.utime(tmp_path / name / env.STAMP, (used, used))
    with env.in_use(tmp_path / "2.8.0-py3.12"):
        env.make_room(tmp_path / "2.11-py3.12")
        kept = sorted(path.name for path in tmp_path.glob("*") if path.is_dir())
        assert kept == ["2.8.0-py3.12", "2.9-py3.12"]
        with (
            pytest.raises(env.CompatError, match="another `make compat` uses .*2.8.0-py3.12"),
            env.in_use(tmp_path / "2.8.0-py3.12"),
        ):
            pass
    env.make_room(tmp_path / "2.11-py3.12")
    assert [path.name for path in tmp_path.glob("*") if path.is_dir()] == ["2.9-py3.12"]


def test_a_run_that_takes_too_long_is_stopped_with_its_processes(compat, monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {tmp_path}/pid\nwait\n")
    python.chmod(0o755)
    pid = tmp_path / "pid"
    real = compat.subprocess.Popen

    def started(*arguments: Any, **options: Any) -> Any:
        process = real(*arguments, **options)
        wait_until(lambda: pid.exists() and bool(pid.read_text().strip()))
        return process

    monkeypatch.setattr(compat.subprocess, "Popen", started)
    assert compat.run_tests(python, [], tmp_path / "results", 1, time.monotonic()) is None
    state = Path(f"/proc/{pid.read_text().strip()}/stat")
    wait_until(lambda: not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z")


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("the process is not in the awaited state")


@pytest.mark.parametrize("status", [2, 3, 5])
def test_a_run_that_cannot_begin_is_an_error_and_changes_nothing(compat, env, monkeypatch, tmp_path, status):
    monkeypatch.setattr(compat, "folder_of", lambda _: tmp_path / "environment")
    monkeypatch.setattr(compat, "environment", lambda *_: Path(sys.executable))
    monkeypatch.setattr(compat, "torch_of", lambda _: SimpleNamespace(version="2.8.0"))
    monkeypatch.setattr(compat, "run_tests", lambda *_: status)
    monkeypatch.setattr(compat.compat_table, "write", lambda *_: pytest.fail("written"))
    asked = SimpleNamespace(jobs=1, minutes=1, lab=None, room=None, without_mutants=False)
    with pytest.raises(env.CompatError, match=f"pytest ended with status {status} on 2.8.0/3.12"):
        compat.try_pair("uv", env.Pair("2.8.0", (3, 12)), "python", [], asked)


def test_the_suite_of_this_environment_is_a_pair_of_the_table(compat, env, table, monkeypatch, tmp_path):
    """`make test` runs all labs and rooms on the pinned pair; compat need not run them once more."""
    lab = sorted(path.parent.name for path in (ROOT / "labs").glob("*/lab.toml"))[0]
    rows = [*of_lab(lab), result(f"{NOTEBOOKS}::test_what_the_text_says[x]")]
    (tmp_path / "suite").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "other").write_text(json.dumps(result("tests/test_house.py::test_x")) + "\n")
    written: list[Any] = []
    monkeypatch.setattr(compat, "is_venv", lambda pair: pair == env.Pair("2.13.0", (3, 11)))
    monkeypatch.setattr(compat, "torch_of", lambda _: SimpleNamespace(version="2.13.0+cpu"))
    monkeypatch.setattr(compat, "version_text", lambda _: "3.11.7")
    monkeypatch.setattr(compat.compat_table, "read_record", dict)
    monkeypatch.setattr(compat.compat_table, "write", written.append)
    compat.add_suite(tmp_path / "suite")
    (column,) = written[0].values()
    assert column["labs"].keys() == {lab}
    assert column["labs"][lab]["notebook"] == "passed"
    assert column["whole"] is None
    for name, says in (("other", "has no test of a lab"), ("absent", "No such file or directory")):
        with pytest.raises(env.CompatError, match=says):
            compat.add_suite(tmp_path / name)


# -- the page


def result(test: str, outcome: str = "passed", cpu: float = 30.0) -> dict[str, Any]:
    return {"test": test, "outcome": outcome, "cpu": cpu}


def of_lab(lab: str, *, judge: str = "passed", mutant: str = "passed", notebook: str = "passed") -> list[Any]:
    return [
        result(f"{PROOFS}::test_the_reference_scores_full_marks[{lab}]", judge),
        result(f"{PROOFS}::test_each_mutant_loses_its_points[{lab}-it_is_late]", mutant),
        result(f"{NOTEBOOKS}::test_reference_notebook_runs[{lab}]", notebook),
    ]


def run(table: ModuleType, *tests: dict[str, Any], pair: str = "2.8.0/3.12", **what: Any) -> Any:
    known = {"torch": "2.8.0+cpu", "python": "3.12.1", "packages": "pinned", "wall_s": 600.0, "whole": False}
    return table.Run(pair=pair, tests=list(tests), **known | what)


ROOMS = {"launch": ("tests/launch",), "ddp": ("tests/parallel/ddp/test_ddp_parity.py",)}


@pytest.fixture
def record(table: ModuleType, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two pairs: one with faults of each kind, one that passed."""
    monkeypatch.setattr(table, "points_of", lambda lab: 20.0)
    made: dict[str, Any] = {}
    tests = [
        *of_lab("00_start"),
        *of_lab("01_refused", judge="failed", mutant="failed"),
        *of_lab("02_notebook", notebook="failed"),
        *of_lab("03_mutant", mutant="failed"),
        result("tests/launch/test_peers.py::test_a", "failed"),
        result("tests/launch/test_peers.py::test_b"),
        result("tests/launch/test_place.py::test_c", "skipped"),
    ]
    table.add(made, run(table, *tests, whole=True), ROOMS)
    newer = {"torch": "2.10.0", "pair": "newest/3.12", "packages": "newest"}
    table.add(made, run(table, *of_lab("00_start"), **newer), ROOMS)
    return made


def test_the_page_shows_what_was_run_lab_by_lab(table, record):
    rows = [row.strip("| ").split(" | ") for row in table.page(record).splitlines() if row.startswith("|")]
    today = record["2.8.0/3.12"]["labs"]["00_start"]["date"]
    assert rows[0] == ["lab", "2.8.0+cpu, Python 3.12.1", "2.10.0, Python 3.12.1, newest packages"]
    assert rows[2:] == [
        ["run on", today, today],
        ["00_start", "20 of 20, 1 proofs, ✓", "20 of 20, 1 proofs, ✓"],
        ["01_refused", "refused, 1 of 1 proofs fail, ✓", "–"],
        ["02_notebook", "20 of 20, 1 proofs, notebook fails", "–"],
        ["03_mutant", "20 of 20, 1 of 1 proofs fail, ✓", "–"],
        ["tests", *rows[0][1:]],
        rows[1],
        ["run on", today, "–"],
        ["launch", "**1 failed**, 1 passed, 1 skipped", "–"],
    ]
    assert f"- {rows[0][1]}: `tests/launch/test_peers.py::test_a`" in table.page(record).splitlines()


def test_a_run_replaces_only_what_it_ran(table, record):
    table.add(record, run(table, *of_lab("02_notebook")), ROOMS)
    column = record["2.8.0/3.12"]
    assert column["labs"]["02_notebook"]["notebook"] == "passed"
    assert column["labs"]["01_refused"]["reference"] == "failed"
    assert column["rooms"]["launch"]["failed"] == 1
    assert column["whole"]["failed"] == 5


def test_results_of_another_release_do_not_stay_in_a_column(table, record):
    tests = of_lab("02_notebook")
    table.add(record, run(table, *tests, pair="newest/3.12", torch="2.11.0", packages="newest"), ROOMS)
    assert list(record["newest/3.12"]["labs"]) == ["02_notebook"]


def test_the_results_and_the_readme_have_their_part(table, record):
    text = "# Results\n\n## launch\n\nA.\n\n## trace\n\nB.\n"
    with_it = table.with_section(text, table.section(record))
    assert with_it.startswith(text)
    assert "| 2.8.0+cpu | 3.12.1 | pinned |" in with_it
    assert "1 of 4 | **1 failed**, 1 passed, 1 skipped | 8 min | 10 min, " in with_it
    between = with_it.replace("## compat", "## compat\n\nold\n\n## last\n\n## compat", 1).split(
        "\n## compat", 2
    )
    moved = "\n## compat".join(between[:2])
    assert table.with_section(moved, "\n## compat\n\nnew\n".lstrip()).endswith(
        "\n## compat\n\nnew\n\n## last\n"
    )
    line = table.summary(record)
    assert "1 of 4 on 2.8/3.12; 1 of 1 (3 still to run) on 2.10/3.12; see" in line
    assert table.README_LINE.sub("x", f"before\n{line}\nafter") == "before\nx\nafter"


def test_the_files_are_written_from_the_record(table, record, tmp_path):
    (tmp_path / "deploy").mkdir()
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "RESULTS.md").write_text("# Results\n")
    (tmp_path / "README.md").write_text("before\n" + table.summary({}) + "\nafter\n")
    table.write(record, tmp_path)
    assert table.read_record(tmp_path) == record
    assert (tmp_path / "README.md").read_text() == f"before\n{table.summary(record)}\nafter\n"
    assert (tmp_path / "COMPATIBILITY.md").read_text() == table.page(record)
    assert not list(tmp_path.glob(".*"))


def test_what_the_repository_shows_is_what_was_run(table):
    record = table.read_record()
    assert (ROOT / table.PAGE).read_text(encoding="utf-8") == table.page(record)
    results = (ROOT / table.RESULTS).read_text(encoding="utf-8")
    assert table.with_section(results, table.section(record)) == results
    assert table.summary(record) in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()


def test_the_doctor_calls_the_newest_release_that_was_run_the_newest_one(table):
    run_on = [table.numbers(column["torch"])[:2] for column in table.read_record().values()]
    assert max(run_on) == list(NEWEST_TORCH)
