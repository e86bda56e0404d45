"""The library is compiled before a zygote imports it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from dlo_lib.grading.sandbox import worker
from dlo_lib.grading.sandbox.compiled import compile_library, compile_modules
from dlo_lib.grading.sandbox.host import Zygote


def test_missing_and_old_files_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    (tmp_path / "inner").mkdir()
    sources = [tmp_path / "one.py", tmp_path / "inner" / "two.py"]
    for source in sources:
        source.write_text("value = 1\n")
    (tmp_path / "wrong.py").write_text("value = \n")  # is left out
    compile_library(tmp_path)
    compiled = [Path(cache_from_source(str(source))) for source in sources]
    assert all(file.exists() for file in compiled)

    before = compiled[0].read_bytes()
    sources[0].write_text("value = 22\n")
    os.utime(sources[0], (0, 10))  # compared to the second
    compile_library.cache_clear()
    compile_library(tmp_path)
    assert compiled[0].read_bytes() != before


def test_a_folder_that_cannot_be_written_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one.py").write_text("value = 1\n")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    compile_library(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.py"]


def test_a_copy_of_a_module_is_imported_from_its_compiled_file(tmp_path: Path) -> None:
    lab, worker = tmp_path / "lab", tmp_path / "worker"
    lab.mkdir()
    (lab / "steps.py").write_text("value = 1\n")
    (lab / "wrong.py").write_text("value = \n")  # is left out
    (lab / "other.py").write_text("value = 1\n")
    compile_modules(lab, ["steps", "wrong", "torch"])
    assert [path.name.split(".")[0] for path in (lab / "__pycache__").iterdir()] == ["steps"]
    shutil.copytree(lab, worker, copy_function=shutil.copyfile)
    (worker / "steps.py").write_text("value = 2\n")
    program = "import steps; print(steps.value, steps.__file__)"
    done = subprocess.run([sys.executable, "-c", program], cwd=worker, capture_output=True, text=True)
    assert done.stdout.split() == ["1", str(worker / "steps.py")]


def test_a_zygote_finds_the_library_compiled() -> None:
    compiled = Path(cache_from_source(worker.__file__))
    compiled.unlink(missing_ok=True)
    compile_library.cache_clear()
    with Zygote():
        assert compiled.exists()
