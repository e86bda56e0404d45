"""Processes of the library import no file of the current folder, the script's folder or ``PYTHONPATH``."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dlo_lib
from dlo_lib.base.interpreter import module_path, trusted_python

ROOT = Path(dlo_lib.__file__).parent
# A name of the standard library that the grader, the launcher and most packages import.
TRAP = "raise SystemExit('a file of the user was imported')\n"


@pytest.fixture
def trapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("html", "json", "random", "typing_extensions", "dlo_lib"):
        (tmp_path / f"{name}.py").write_text(TRAP)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_files_of_the_current_folder_are_not_imported(trapped: Path) -> None:
    code = "import html, json, random, typing_extensions, dlo_lib; print(dlo_lib.__file__, sys.argv[1:])"
    environment = os.environ | {"PYTHONPATH": str(trapped), "PYTHONSTARTUP": str(trapped / "html.py")}
    done = subprocess.run(trusted_python(code, "a b"), env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{dlo_lib.__file__} ['a b']\n", "")


def test_ranks_have_the_hash_seed_of_the_user(trapped: Path) -> None:
    command = trusted_python("import html, json; print(hash('a'))", user_settings=True)
    seeds = [
        subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": "7"}, capture_output=True, text=True)
        for _ in range(2)
    ]
    assert seeds[0].stdout == seeds[1].stdout != ""


def test_the_folder_of_a_script_is_no_part_of_the_path(trapped: Path) -> None:
    (trapped / "script.py").write_text(
        f"import sys; sys.path.append({str(ROOT.parent)!r}); here = sys.path.pop(0)\n"
        "from dlo_lib.base.interpreter import module_path\n"
        "sys.path.insert(0, here)\nprint(here in module_path())\n"
    )
    done = subprocess.run(
        [sys.executable, str(trapped / "script.py")], cwd="/", capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_installed_modules_are_found() -> None:
    assert {entry for entry in sys.path if "packages" in entry} <= set(module_path())


def test_no_other_function_starts_python() -> None:
    """``exec`` of JupyterLab runs with the user's rights on the user's folder: it may import from there."""
    allowed = {"base/interpreter.py", "cli/jupyter.py", "cli/hub_server.py", "grading/sandbox/isolation.py"}
    found = {
        file.relative_to(ROOT).as_posix()
        for file in ROOT.rglob("*.py")
        if re.search(r"[\[(]\s*sys\.executable,", file.read_text(encoding="utf-8"))
    }
    assert found <= allowed
