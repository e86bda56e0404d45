"""`dlo doctor` and releases: packages outside the bounds, and a PyTorch or Python newer than those tried."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest

from dlo_lib.cli import doctor_packages
from dlo_lib.cli.diagnosis import Diagnosis
from dlo_lib.cli.doctor_packages import LIBRARY, NEWEST_PYTHON, NEWEST_TORCH, OLDEST_PYTHON, examine_packages

ROOT = Path(__file__).resolve().parents[2]
NEEDS = [
    "torch>=2.8",
    "cloudpickle<3.1.3",
    'jsonschema<4.25; extra == "labs"',
    'nbgrader>=0.9.5; extra == "labs"',
    'pytest>=9; extra == "dev"',
    'triton>=3.4; sys_platform == "none" and extra == "kernels"',
]
GOOD = {"torch": "2.13.0", "cloudpickle": "3.1.2", "jsonschema": "4.24.1", "nbgrader": "0.9.6"}


def examined(monkeypatch: pytest.MonkeyPatch, **installed: str) -> list[Diagnosis]:
    """The findings where these packages are installed beside, or instead of, the good ones; "": missing."""
    packages = {name: version for name, version in (GOOD | installed).items() if version}

    def version(name: str) -> str:
        if name not in packages:
            raise importlib.metadata.PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr(importlib.metadata, "requires", {LIBRARY: NEEDS}.__getitem__)
    monkeypatch.setattr(importlib.metadata, "version", version)
    return examine_packages()


def test_packages_within_their_bounds_are_one_line(monkeypatch):
    (found,) = examined(monkeypatch)
    assert (found.ok, found.found) == (True, "3 packages are within their bounds")


@pytest.mark.parametrize(
    ("installed", "says", "cure"),
    [
        ({"cloudpickle": "3.1.3"}, "cloudpickle 3.1.3 is not <3.1.3", '"cloudpickle<3.1.3"'),
        ({"jsonschema": "4.25.0"}, "jsonschema 4.25.0 is not <4.25", '"jsonschema<4.25"'),
        ({"nbgrader": ""}, "nbgrader is missing", '"nbgrader>=0.9.5"'),
        ({"pytest": "8.4"}, "pytest 8.4 is not >=9", '"pytest>=9"'),
    ],
)
def test_a_package_outside_its_bounds_is_named_with_the_cure(monkeypatch, installed, says, cure):
    (found,) = examined(monkeypatch, **installed)
    assert (found.ok, found.required, found.found) == (False, False, says)
    assert found.cure == f"pip install -c constraints.txt {cure}"


def test_a_newer_torch_than_those_tried_is_one_line(monkeypatch):
    newest = f"{NEWEST_TORCH[0]}.{NEWEST_TORCH[1]}"
    assert len(examined(monkeypatch, torch=f"{newest}.9+cu130")) == 1
    _, found = examined(monkeypatch, torch="99.0.0a1+git12")
    assert found.found == f"PyTorch 99.0.0a1+git12 is newer than {newest}, the newest one that was tried"
    assert (found.ok, found.required) == (False, False), "the labs may run all right"
    assert found.cure.endswith(f"use PyTorch {newest}")


def test_a_newer_python_than_those_tried_is_one_line(monkeypatch):
    monkeypatch.setattr(doctor_packages, "NEWEST_PYTHON", (sys.version_info[0], sys.version_info[1] - 1))
    _, found = examined(monkeypatch)
    assert re.match(r"Python 3\.\d+\.\S+ is newer than 3\.\d+, the newest one that was tried", found.found)


def test_without_an_installed_library_the_bounds_are_not_checked(monkeypatch):
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    (found,) = examine_packages()
    assert (found.ok, found.found) == (
        False,
        "dlo-lib is not installed in this Python: the bounds are not checked",
    )


def test_the_bounds_here_are_those_of_pyproject():
    assert examine_packages() == [Diagnosis("packages", True, examine_packages()[0].found)]


def test_the_promised_pythons_are_those_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest, newest = (".".join(map(str, version)) for version in (OLDEST_PYTHON, NEWEST_PYTHON))
    first_refused = f"{NEWEST_PYTHON[0]}.{NEWEST_PYTHON[1] + 1}"
    assert project["requires-python"] == f">={oldest},<{first_refused}", newest
