"""A job runs the library that it was submitted with, whatever the user pulls while it waits."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dlo_lib
from dlo_lib import cluster
from dlo_lib.base.interpreter import trusted_python
from dlo_lib.cluster.code import library
from dlo_lib.cluster.slurm import commands

HERE = Path(dlo_lib.__file__).resolve().parents[1]
SUBMIT = """
import sys
from dlo_lib import cluster
job = cluster.submit("program.py", after=cluster.job(sys.argv[1]) if sys.argv[1:] else None)
print(job.folder)
"""


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(commands, "is_available", lambda: False)
    monkeypatch.delenv("DLO_SITE", raising=False)
    monkeypatch.setenv("DLO_POLL_S", "0.1")
    monkeypatch.setenv("PYTHONPATH", str(HERE))  # after the copy in the module path of a job
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(
        "import dlo_lib.base.text\nprint(dlo_lib.base.text.__file__, dlo_lib.base.text.WIDTH)\n"
    )
    return tmp_path


def test_the_packages_that_code_imports_are_followed():
    used = library.imported_by(
        [b"from dlo_lib import (\n    hpo,\n    models,\n)\nimport dlo_lib.train as t\n"]
    )
    assert {"hpo", "models", "train", "launch", "parallel", "base"} <= used
    assert not {"cli", "grading", "hub", "cluster", "labkit"} & used
    assert library.imported_by([b"import torch"]) == frozenset()
    assert "train" in library.imported_by([b"#!/bin/sh\nsrun python -m dlo_lib.train --steps 3\n"])
    assert "cli" in library.imported_by([b"dlo doctor"])
    files = {name for name, _ in library.content(used)}
    assert {"base/text.py", "hardware/gpus.toml"} <= files


def test_a_job_runs_the_library_of_its_submission(alone):
    job = cluster.submit("program.py").wait(timeout=600)
    place, width = job.logs().split()
    assert place == str(job.folder / "library" / "dlo_lib" / "base" / "text.py")
    assert int(width) == dlo_lib.base.text.WIDTH
    store = (job.folder / "library").resolve()
    assert {path.name for path in store.iterdir()} == {"dlo_lib", "datasets", "labs", "solutions"}
    compiled = list((store / "dlo_lib" / "base").glob("__pycache__/text.*.pyc"))
    assert compiled, "the first job does not compile the library"
    second = cluster.submit("program.py", ["again"])
    assert (second.folder / "library").resolve() == store, "one copy serves all jobs"
    second.wait(timeout=600)


def test_a_program_beside_the_library_runs_the_copy_too(alone, monkeypatch):
    """The folder of the program comes first in its module path."""
    checkout = alone / "checkout"
    checkout.mkdir()
    (checkout / "dlo_lib").symlink_to(library.ROOT)
    shutil.copy("program.py", checkout / "program.py")
    monkeypatch.chdir(checkout)
    job = cluster.submit("program.py").wait(timeout=600)
    assert Path(job.logs().split()[0]).resolve().is_relative_to(job.folder.parents[1] / "library")


def test_a_pull_makes_another_job_and_leaves_the_first_as_submitted(alone):
    """In separate processes, because a process keeps the library that it has imported."""
    checkout = alone / "checkout"
    shutil.copytree(HERE / "dlo_lib", checkout / "dlo_lib", ignore=shutil.ignore_patterns("*.ipynb"))
    (alone / "work").mkdir()
    shutil.copy("program.py", alone / "work")

    def submitted() -> Path:
        done = subprocess.run(
            [sys.executable, "-c", SUBMIT],
            cwd=alone / "work",
            env={**os.environ, "PYTHONPATH": str(checkout), "DLO_SITE": "local"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return Path(done.stdout.splitlines()[-1])

    first = submitted()
    assert submitted() == first
    text = checkout / "dlo_lib" / "base" / "text.py"
    text.write_text(text.read_text().replace(f"WIDTH = {dlo_lib.base.text.WIDTH}", "WIDTH = 9"))
    second = submitted()
    assert second != first
    checkout.rename(alone / "gone")
    for folder, width in ((first, dlo_lib.base.text.WIDTH), (second, 9)):
        (folder / "lock").unlink(missing_ok=True)
        done = subprocess.run(
            ["bash", str(folder / "job.sh")], cwd=alone / "work", capture_output=True, text=True
        )
        assert int(done.stdout.split()[1]) == width, done.stderr


def test_versions_that_no_job_uses_are_removed(alone, monkeypatch):
    job = cluster.submit("program.py").wait(timeout=600)
    used = (job.folder / "library").resolve()
    (used.parent / "0123456789abcdef").mkdir()
    monkeypatch.setattr(library, "version", lambda: "fedcba9876543210")
    (job.folder.parent / "other").mkdir()
    for _ in range(2):  # the first submission was killed before it recorded the job
        library.link(job.folder.parent / "other")
    assert {path.name for path in used.parent.iterdir()} == {used.name, "fedcba9876543210", "lock"}


def test_without_a_copy_the_job_runs_the_library_of_its_start(alone):
    job = cluster.submit("program.py", copy_code=False).wait(timeout=600)
    assert Path(job.logs().split()[0]).resolve().is_relative_to(library.ROOT)
    assert not (job.folder / "library").exists()


GRADER = """
import subprocess
import dlo_lib
from dlo_lib.base.interpreter import trusted_python
print(dlo_lib.__file__, flush=True)
subprocess.run(trusted_python("import dlo_lib; print(dlo_lib.__file__)"), check=True)
"""


def test_an_isolated_process_of_a_job_runs_the_copy_and_so_do_its_own_processes(alone):
    """The elements of `dlo grade --slurm` ignore PYTHONPATH."""
    job = cluster.submit(trusted_python(GRADER, library_of_job=True), gpus=0).wait(timeout=600)
    copy = (job.folder / "library").resolve() / "dlo_lib" / "__init__.py"
    assert job.logs().split() == [str(copy)] * 2
    outside = subprocess.run(trusted_python(GRADER, library_of_job=True), capture_output=True, text=True)
    assert outside.stdout.split() == [dlo_lib.__file__] * 2
