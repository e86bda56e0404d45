"""The part of `dlo doctor` for releases: packages outside the bounds of pyproject.toml, and a PyTorch or
Python that is newer than those tried.

The bounds are those of the installed library, as pip reads them; PyTorch has a separate line in the report.
The releases that were tried are in COMPATIBILITY.md, which ``make compat`` writes.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys

from dlo_lib.base.text import tr
from dlo_lib.base.torch_version import release
from dlo_lib.cli.diagnosis import Diagnosis

NEWEST_TORCH = (2, 15)
"""The newest release that ``make compat`` has run, as in COMPATIBILITY.md."""

OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 14)
"""The promised releases, as in ``pyproject.toml``."""

LIBRARY = "dlo-lib"
NEEDED = ("", "labs")
"""The groups of requirements that the labs need; a package of another group counts if it is installed."""


def examine_packages() -> list[Diagnosis]:
    """Check the bounds of all packages; one more line each if PyTorch or Python is newer than those tried."""
    return [_bounds(), *_newer_than_tried()]


def dotted(numbers: tuple[int, ...]) -> str:
    """Return a release as text.

    >>> dotted((2, 15))
    '2.15'
    """
    return ".".join(map(str, numbers))


def _newer_than_tried() -> list[Diagnosis]:
    found = {"Python": (tuple(sys.version_info[:2]), platform.python_version(), NEWEST_PYTHON)}
    try:
        torch = importlib.metadata.version("torch")
        found["PyTorch"] = (release(torch), torch, NEWEST_TORCH)
    except importlib.metadata.PackageNotFoundError:
        pass  # the line of torch reports it
    return [
        Diagnosis(
            "tried",
            False,
            tr(
                "{name} {version} is newer than {newest}, the newest one that was tried",
                name=name,
                version=version,
                newest=dotted(newest),
            ),
            tr("if a lab fails that should pass, use {name} {newest}", name=name, newest=dotted(newest)),
        )
        for name, (numbers, version, newest) in found.items()
        if numbers > newest
    ]


def _bounds() -> Diagnosis:
    try:
        from packaging.requirements import Requirement
    except ImportError:
        cure = tr("pip install packaging, or run `make lab`")
        return Diagnosis("packages", False, tr("packaging is missing: the bounds are not checked"), cure)
    try:
        texts = importlib.metadata.requires(LIBRARY) or []
    except importlib.metadata.PackageNotFoundError:
        found = tr("dlo-lib is not installed in this Python: the bounds are not checked")
        return Diagnosis("packages", False, found, tr("run `make lab`, or pip install -e ."))
    outside: dict[str, str] = {}
    checked = set()
    for need in map(Requirement, texts):
        marker = need.marker
        groups = [extra for extra in _groups() if marker is None or marker.evaluate({"extra": extra})]
        if not groups or need.name == "torch":
            continue  # for another system or Python
        wanted = f"{need.name}{need.specifier}"
        try:
            version = importlib.metadata.version(need.name)
        except importlib.metadata.PackageNotFoundError:
            if set(groups) & set(NEEDED):
                outside[wanted] = tr("{name} is missing", name=need.name)
            continue
        checked.add(need.name)
        if not need.specifier.contains(version, prereleases=True):
            bound = str(need.specifier)
            outside[wanted] = tr(
                "{name} {version} is not {bound}", name=need.name, version=version, bound=bound
            )
    if outside:
        names = " ".join(f'"{wanted}"' for wanted in outside)
        cure = tr("pip install -c constraints.txt {names}", names=names)
        return Diagnosis("packages", False, "; ".join(outside.values()), cure)
    return Diagnosis("packages", True, tr("{number} packages are within their bounds", number=len(checked)))


def _groups() -> list[str]:
    """Return the groups of requirements: "", which everyone needs, and the extras."""
    return ["", *(importlib.metadata.metadata(LIBRARY).get_all("Provides-Extra") or [])]
