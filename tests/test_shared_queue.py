"""Tests in several processes that share one queue."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.shared_queue import results

ROOT = Path(__file__).parents[1]
FILE = """
import os, pathlib, time
import pytest

LOG = pathlib.Path(os.environ["RUN_LOG"])

@pytest.mark.parametrize("number", range(6))
def test_that_passes(number):
    with LOG.open("a") as file:
        file.write(f"{number}\\n")

def test_that_fails():
    assert 1 == LOG.with_name("right").exists(), "the sum is wrong"

@pytest.mark.skip(reason="no GPU")
def test_that_is_skipped(): ...
"""


def start(folder: Path, tests: Path, *args: str, **environment: str) -> subprocess.Popen[str]:
    """Start the queue over ``tests``, outside of the suite of the project."""
    (tests / "pytest.ini").write_text("[pytest]\n")
    (tests / "conftest.py").write_text("pytest_plugins = ('tests.cpu_time',)\n")
    search_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    few = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": search_path, "RUN_LOG": str(tests / "log")}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.shared_queue", str(folder), *args],
        env={**os.environ, **few, **environment},
        cwd=tests,
        stdout=subprocess.PIPE,
        text=True,
    )


def run(folder: Path, tests: Path, *args: str, **environment: str) -> tuple[int, str]:
    """Return the exit status and the output of the queue over ``tests``."""
    process = start(folder, tests, *args, **environment)
    return process.wait(120), process.stdout.read()


def test_each_test_runs_once_and_a_second_run_repeats_what_failed(tmp_path):
    tests, folder = tmp_path / "tests", tmp_path / "out"
    tests.mkdir()
    (tests / "test_some.py").write_text(FILE)
    status, output = run(folder, tests, "--processes", "2", "test_some.py")
    assert status == 1
    assert output.splitlines() == [
        "FAILED test_some.py::test_that_fails: AssertionError: the sum is wrong",
        "skipped 1: Skipped: no GPU",
        "1 failed, 6 passed, 1 skipped",
    ]
    assert sorted((tests / "log").read_text().split()) == list("012345")
    (tests / "right").touch()
    status, output = run(folder, tests, "--processes", "2", "test_some.py")
    assert (status, output) == (0, "skipped 1: Skipped: no GPU\n7 passed, 1 skipped\n")
    assert len((tests / "log").read_text().split()) == 6  # those that passed are not repeated


def test_a_process_that_crashes_is_replaced(tmp_path):
    tests, folder = tmp_path / "tests", tmp_path / "out"
    tests.mkdir()
    (tests / "test_some.py").write_text(
        "import os\ndef test_first(): pass\ndef test_that_crashes(): os.abort()\ndef test_last(): pass\n"
    )
    status, output = run(folder, tests, "--processes", "1", "test_some.py")
    assert status == 1
    assert output.splitlines() == [
        "CRASHED test_some.py::test_that_crashes: its process ended with status -6",
        "1 crashed, 2 passed",
    ]


def test_a_process_whose_gpu_fails_is_replaced(tmp_path):
    tests, folder = tmp_path / "tests", tmp_path / "out"
    tests.mkdir()
    (tests / "torch.py").write_text(
        "class cuda:\n"
        "    broken = False\n"
        "    is_available = is_initialized = staticmethod(lambda: True)\n"
        "    @classmethod\n"
        "    def synchronize(cls):\n"
        "        if cls.broken:\n"
        "            raise RuntimeError('an illegal memory access was encountered')\n"
    )
    (tests / "test_some.py").write_text(
        "import torch\n"
        "def test_first():\n    torch.cuda.broken = True\n    torch.cuda.synchronize()\n"
        "def test_last():\n    torch.cuda.synchronize()\n"
    )
    status, output = run(
        folder, tests, "--processes", "1", "test_some.py", PYTHONPATH=f"{tests}{os.pathsep}{ROOT}"
    )
    assert status == 1
    outcomes = {each["test"].partition("::")[2]: each["outcome"] for each in results(folder)}
    assert outcomes == {"test_first": "failed", "test_last": "passed"}
    assert "illegal memory access" in output


def test_a_second_run_continues_what_was_stopped(tmp_path):
    tests, folder = tmp_path / "tests", tmp_path / "out"
    tests.mkdir()
    (tests / "test_some.py").write_text(
        "import os, pathlib, time\n"
        "LOG = pathlib.Path(os.environ['RUN_LOG'])\n"
        "def test_first(): pass\n"
        "def test_that_waits():\n"
        "    if not LOG.exists():\n        LOG.touch()\n        time.sleep(600)\n"
    )
    process = start(folder, tests, "--processes", "1", "test_some.py")
    while not (tests / "log").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    assert process.wait(60) == 1
    assert process.stdout.read().splitlines() == [
        "RUNNING test_some.py::test_that_waits",
        "1 passed, 1 running",
        "stopped at a signal: a second run continues",
    ]
    status, output = run(folder, tests, "--processes", "1", "test_some.py")
    assert (status, output) == (0, "2 passed\n")


def test_the_limit_stops_the_processes(tmp_path):
    tests, folder = tmp_path / "tests", tmp_path / "out"
    tests.mkdir()
    (tests / "test_some.py").write_text("import time\ndef test_that_waits(): time.sleep(600)\n")
    status, output = run(folder, tests, "--processes", "1", "--limit", "2", "test_some.py")
    assert status == 1
    assert output.splitlines()[-1] == "stopped at the limit of 2 s: a second run continues"


def test_one_file_may_be_of_one_process(tmp_path):
    tests, folder = tmp_path / "tests", tmp_path / "out"
    tests.mkdir()
    names = "test_small.py", "test_large.py"
    for name in names:
        (tests / name).write_text(
            "import pytest\n@pytest.mark.parametrize('n', range(4))\ndef test_it(n, request):\n"
            "    print(request.config.getoption('--queue-process'))\n"
            f"    assert request.config.getoption('--queue-process') == 0 or {name != names[1]}\n"
        )
    status, output = run(folder, tests, "--processes", "3", "--alone", "test_large", *names)
    assert (status, output) == (0, "8 passed\n"), output


def test_errors_while_collecting_are_reported(tmp_path):
    tests, folder = tmp_path / "tests", tmp_path / "out"
    tests.mkdir()
    (tests / "test_some.py").write_text("import a_module_that_is_absent\n")
    status, output = run(folder, tests, "--processes", "1", "test_some.py")
    assert status == 1
    assert "process 0 ended with status 2: " in output
    assert "a_module_that_is_absent" in output


def test_a_torn_result_is_not_a_result(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "a.json").touch()  # taken, and its process ended before it wrote
    (tmp_path / "tests" / "b.json").write_text(json.dumps({"test": "b", "outcome": "passed"}))
    assert [each["test"] for each in results(tmp_path)] == ["b"]


def test_the_files_with_gpu_tests_are_found():
    sys.path.insert(0, str(ROOT / "deploy"))
    try:
        import gpu
    finally:
        sys.path.remove(str(ROOT / "deploy"))
    found = gpu.gpu_tests()
    assert "tests/profiling/test_gpu.py" in found
    assert all("mark.gpu" in (ROOT / file).read_text() for file in found if file.endswith(".py"))
