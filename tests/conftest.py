"""Each test has a separate state folder; the `gpu` tests run only on a machine with a GPU."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.slow_tests import LIMIT, function_of, read_record
from tests.triton_interpreter import request_interpreter

pytest_plugins = ("tests.cpu_time", "tests.frozen_heap", "tests.warm")

# Before torch is imported, because this process and all that tests start read them then. Tensors in tests are
# small: a second thread only spins, and takes the core from another test.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# where more threads are asked for, they sleep between two operators
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
request_interpreter()  # before a test module imports Triton

# nothing is timed: other programs may use the cores
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")
# Begin with these, so that none of them is alone at the end.
LONG = ("tests/grading/judge/test_hostile.py", "tests/labs/", "tests/cluster/")
ONE_BY_ONE = {"test_notebooks_run.py"}  # files whose tests share nothing and take long
EVERY_LAB = "test_every_lab.py"
STATES = itertools.count()
GRADED_CLASSES = {"undisturbed", "graded", "box", "judges"}  # fixtures: the first test to ask pays for all


@pytest.fixture(autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Progress, gradebooks and the student's copies of this test alone; the text corpora
    are made once a session."""
    # not mktemp(): it reads the names of the folders of all tests, and tmp_path would read these too
    home = tmp_path_factory.getbasetemp() / "states" / str(next(STATES))
    home.mkdir(mode=0o700, parents=True)
    monkeypatch.setenv("DLO_HOME", str(home))
    monkeypatch.setenv("DLO_WORK", str(home / "work"))
    # one for all workers of pytest-xdist
    monkeypatch.setenv("DLO_CACHE", str(tmp_path_factory.getbasetemp().parent / "dlo-cache"))
    for name in ("DLO_LANG", "DLO_HIDDEN", "DLO_COURSE"):
        monkeypatch.delenv(name, raising=False)
    yield
    shutil.rmtree(home / "library", ignore_errors=True)  # 11 MB: the copies for the jobs of this test


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """An empty file system of 1 MiB, to run out of space on."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if (
        os.geteuid() != 0
        or shutil.which("mount") is None
        or subprocess.run(mount, capture_output=True).returncode
    ):
        pytest.skip("NOT TESTED HERE: a full disk (mounting a small tmpfs needs root)")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full-size", action="store_true", help="run the reference labs at full size")
    parser.addoption(
        "--every-combination", action="store_true", help="run all combinations of parallel dimensions"
    )
    parser.addoption("--every-fault", action="store_true", help="spoil each command of SLURM in each way")
    parser.addoption(
        "--every-check",
        action="store_true",
        help="judge each mutant by all checks of its question, and run graded checks in notebooks too",
    )


class WholeFiles(LoadScopeScheduling):
    """The tests of a file go to one process, so that what they share (a graded class, a cluster, a zygote) is
    made once. The proofs of all labs are one file: there the tests of a lab go to one process."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        if Path(file).name == EVERY_LAB:
            return f"{file}::{lab_of(test)}"
        return nodeid if Path(file).name in ONE_BY_ONE else file

    def remove_node(self, node: Any) -> str | None:
        """Return the test that ran when the process of ``node`` died, and give the rest to other processes.

        pytest-xdist runs that test again in each new process, until there have been too many of them, and
        never the tests after it.
        """
        units = self.assigned_work.pop(node)
        crashed = next((test for unit in units.values() for test, ended in unit.items() if not ended), None)
        for scope, unit in units.items():
            if crashed in unit:
                unit[crashed] = True
            if not all(unit.values()):
                self.workqueue[scope] = unit
        if crashed is not None:
            for other in self.assigned_work:
                self._reschedule(other)
        return crashed

    def _reschedule(self, node: Any) -> None:
        if node in self.registered_collections:  # a process that replaces one has not collected yet
            super()._reschedule(node)


LABS = {file.parent.name for file in Path(__file__).parents[1].glob("labs/*/lab.toml")}


def lab_of(test: str) -> str:
    """Of ``test_...[15_fsdp-name]`` its 15_fsdp; "" where there is none."""
    return next((part for part in re.split(r"[\[\]-]", test) if part in LABS), "")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> WholeFiles | None:
    if config.getvalue("dist") != "load":
        return None
    config.option.loadscopereorder = False  # the order is that of pytest_collection_modifyitems
    return WholeFiles(config, log)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))
    slow = {function for function, seconds in read_record().items() if seconds >= LIMIT}
    for item in items:
        if function_of(item.nodeid) in slow or not GRADED_CLASSES.isdisjoint(
            getattr(item, "fixturenames", ())
        ):
            item.add_marker(pytest.mark.slow)
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="NOT TESTED HERE: needs a CUDA GPU"))


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """pytest-xdist sends reports as UTF-8, and the log of a hostile class has names that are none."""
    return encodable((yield))


def encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {encodable(key): encodable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(encodable(each) for each in value)
    return value
