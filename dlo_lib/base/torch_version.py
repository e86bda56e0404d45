"""The supported releases of PyTorch, checked without importing PyTorch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
from pathlib import Path

from dlo_lib.base.errors import EXIT_BAD_INPUT, UserError

OLDEST = (2, 8)
"""The oldest supported release, as in ``pyproject.toml``. ``make compat`` tests it and the newest."""


def release(version: str) -> tuple[int, int]:
    """Return the major and the minor number of a version.

    >>> release("2.10.0a0+git1234")
    (2, 10)
    """
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def check_torch(version: str | None = None) -> None:
    """Check that PyTorch is new enough.

    Args:
        version: None checks the installed one. If PyTorch is not installed nothing happens, because its
            import raises an error.

    Raises:
        UserError: the version is older than ``OLDEST``.
    """
    if version is None:
        try:
            version = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            return
    if release(version) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UserError(f"PyTorch {version} is too old, the oldest supported release is {oldest}: {cure()}")


def cure() -> str:
    """Return how to get a newer PyTorch.

    An upgrade is advised only where PyTorch belongs to this environment and can be written: pip would break
    the module of a computing centre, or put another PyTorch beside it.
    """
    spec = importlib.util.find_spec("torch")
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    if folder is not None and folder.is_relative_to(sys.prefix) and os.access(folder, os.W_OK):
        return "pip install -U torch"
    return "load a module with a newer PyTorch, or make an environment that has one (`TORCH=auto make lab`)"


def exit_if_torch_too_old(program: str) -> None:
    """Exit with one line and status 2 if PyTorch is too old.

    A command calls this before its other imports, which may fail with an old release.
    """
    try:
        check_torch()
    except UserError as error:
        print(f"{program}: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
