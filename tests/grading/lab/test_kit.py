"""The students' archive holds the labs as released, and the library; never a solution. It works
where nothing else is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import dlo_lib
from dlo_lib.base.errors import UserError
from dlo_lib.grading.lab.course import find_lab, source_labs
from dlo_lib.grading.lab.kit import FILES, FOLDERS, kit_files, write_kit
from dlo_lib.grading.lab.release import release_lab, released_files
from dlo_lib.grading.lab.source import LabSource, read_lab, source_folder

CHECKOUT = Path(dlo_lib.__file__).parents[1]
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of the course with one lab, and with what lies around in real ones."""
    root = tmp_path / "checkout"
    shutil.copytree(Path(__file__).parents[1] / "small_course", root)
    for name in FOLDERS:
        shutil.copytree(CHECKOUT / name, root / name, ignore=LEFT_OUT)
    for name in FILES:
        (root / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(CHECKOUT / name, root / name)
    for name in (
        "dlo_lib/secret.db",
        "dlo_lib/.env",
        "dlo_lib/__pycache__/x.py",
        "slurm/run.log",
        "tests/test_x.py",
        "course/secret",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("not for students")
    (root / "dlo_lib" / "link.py").symlink_to(root / "solutions" / "91_small" / "hidden.py")
    monkeypatch.setenv("DLO_COURSE", str(root))
    release_lab(find_lab("91", source_labs()))
    return root


def unpacked(kit: Path, folder: Path) -> dict[str, bytes]:
    with tarfile.open(kit) as archive:
        archive.extractall(folder, filter="data")
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def answers(lab: LabSource) -> list[str]:
    """Lines that are only in solutions."""
    solved = [
        line.strip()
        for cell in lab.cells
        if cell.source != cell.released
        for line in cell.source.splitlines()
    ]
    given = "\n".join(cell.released for cell in lab.cells)
    return [line for line in solved if len(line) > 25 and line not in given]


def test_the_kit_holds_what_is_released_and_nothing_else(checkout: Path, tmp_path: Path) -> None:
    files = unpacked(write_kit(tmp_path / "kit.tar.gz"), tmp_path / "student")
    lab = find_lab("91", source_labs())
    labs = {
        name.removeprefix("dlo-kit/labs/91_small/"): content
        for name, content in files.items()
        if name.startswith("dlo-kit/labs/")
    }
    assert labs == released_files(lab)
    tops = {name.split("/")[1] for name in files}
    assert tops == {*(name.split("/")[0] for name in FILES), *FOLDERS, "labs"}
    assert not [name for name, content in files.items() if content == b"not for students"]
    hidden = (source_folder(lab) / "hidden.py").read_bytes()
    mutants = (source_folder(lab) / "mutants.py").read_bytes()
    assert not {hidden, mutants} & set(files.values())
    found = answers(read_lab(source_folder(lab)))
    assert found
    text = b"\n".join(content for name, content in files.items() if not name.startswith("dlo-kit/dlo_lib/"))
    assert not [line for line in found if line.encode() in text]


def test_the_kit_holds_every_file_of_the_library_that_is_in_the_repository(
    checkout: Path, tmp_path: Path
) -> None:
    files = unpacked(write_kit(tmp_path / "kit.tar.gz"), tmp_path / "student")
    modules = {
        path.relative_to(CHECKOUT).as_posix()
        for path in (CHECKOUT / "dlo_lib").rglob("*.py")
        if "__pycache__" not in path.parts
    }
    assert {f"dlo-kit/{name}" for name in modules} <= files.keys()
    assert "dlo-kit/dlo_lib/py.typed" in files
    assert [name for name in files if name.endswith(".j2")]


def test_the_same_course_gives_the_same_bytes(checkout: Path, tmp_path: Path) -> None:
    first = write_kit(tmp_path / "one.tar.gz").read_bytes()
    for path in checkout.rglob("*.py"):
        os.utime(path)
    assert write_kit(tmp_path / "two.tar.gz").read_bytes() == first


def test_a_lab_out_of_step_a_missing_file_or_no_solutions_makes_no_kit(
    checkout: Path, tmp_path: Path
) -> None:
    (checkout / "labs" / "91_small" / "small.ipynb").write_text("{}")
    with pytest.raises(UserError, match="differs from its source: run `make labs`"):
        write_kit(tmp_path / "kit.tar.gz")
    release_lab(find_lab("91", source_labs()))
    (checkout / "constraints.txt").unlink()
    with pytest.raises(UserError, match=r"no constraints.txt in .*: a kit needs it"):
        write_kit(tmp_path / "kit.tar.gz")
    shutil.rmtree(checkout / "solutions")
    with pytest.raises(UserError, match="a kit is made from an instructor's copy"):
        write_kit(tmp_path / "kit.tar.gz")
    assert not (tmp_path / "kit.tar.gz").exists()


def test_a_kit_for_a_class_can_leave_the_answers_out(checkout: Path) -> None:
    whole, without = kit_files(), kit_files(with_answers=False)
    assert whole.keys() - without.keys() == {
        f"labs/91_small/{name}" for name in ("references.json", "quiz_answers.json")
    }


@pytest.mark.slow
def test_checks_run_from_an_unpacked_kit(checkout: Path, tmp_path: Path) -> None:
    unpacked(write_kit(tmp_path / "kit.tar.gz"), tmp_path / "student")
    root, lab = tmp_path / "student" / "dlo-kit", read_lab(source_folder(find_lab("91", source_labs())))
    shutil.rmtree(checkout)
    own = tmp_path / "small.ipynb"
    notebook = json.loads((root / "labs" / "91_small" / "small.ipynb").read_text())
    for cell in notebook["cells"]:
        if cell["id"] == "scale":
            cell["source"] = lab.solution("scale").source
    own.write_text(json.dumps(notebook))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DLO_")}
    command = [
        sys.executable,
        "-c",
        "from dlo_lib.cli import main; main()",
        "check",
        "91",
        "--notebook",
        str(own),
    ]
    done = subprocess.run(
        command,
        cwd=root,
        env={**environment, "PYTHONPATH": str(root), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stderr  # one question is answered, the others not yet
    assert "✓" in done.stdout
    assert "of 7 points of the visible checks" in done.stdout, done.stdout
