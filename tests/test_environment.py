"""The three files that say what is installed agree: pyproject.toml, constraints.txt, environment.yml."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
GROUPS = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
NEEDS = [Requirement(text) for group in GROUPS for text in group]


def pins() -> dict[str, Version]:
    lines = (line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if line and not line.startswith("#"))
    return {normal(name): Version(version) for name, version in (line.split("==") for line in lines)}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def conda_file() -> dict:
    return yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("need", NEEDS, ids=lambda need: need.name)
def test_every_requirement_is_pinned_at_a_version_it_allows(need):
    assert need.specifier.contains(pins()[normal(need.name)], prereleases=True)


def test_conda_installs_what_pyproject_asks_for():
    (from_pip,) = (entry["pip"] for entry in conda_file()["dependencies"] if isinstance(entry, dict))
    assert from_pip[0] == "-c constraints.txt"
    assert sorted(str(Requirement(text)) for text in from_pip[1:]) == sorted(str(need) for need in NEEDS)


def test_conda_has_the_python_of_pyproject():
    (python,) = (entry for entry in conda_file()["dependencies"] if isinstance(entry, str) and entry.startswith("python"))
    assert Requirement(python).specifier == Requirement(f"python{PROJECT['requires-python']}").specifier


def test_what_is_installed_here_is_what_is_pinned():
    from importlib.metadata import version

    wrong = {need.name: version(need.name) for need in NEEDS if Version(Version(version(need.name)).public) != pins()[normal(need.name)]}
    assert not wrong, "run `make test`, which brings .venv up to date"


def test_setup_names_the_cure_for_a_wrong_torch():
    command = [sys.executable, str(ROOT / "deploy" / "setup_env.py")]
    done = subprocess.run(command, env={"PATH": "/usr/bin:/bin", "TORCH": "rocm"}, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.strip() == 'setup: TORCH is "rocm": use TORCH=cpu or TORCH=cuda'


def test_setup_names_the_cure_for_a_wrong_python():
    setup = ROOT / "deploy" / "setup_env.py"
    code = f"import runpy; module = runpy.run_path({str(setup)!r}); module['find_python']()"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={"PATH": "/usr/bin:/bin", "PYTHON": "/bin/false"}, capture_output=True, text=True)
    assert "needs Python 3.11, 3.12 or 3.13 (none found): install one, or set PYTHON=/path/to/python" in done.stderr
