"""Close what the programs of a notebook keep of a student's work outside of the workspace."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dlo_lib.base.files import own_folder


def close_copies(environment: Mapping[str, str]) -> None:
    """Close the folders in which nbgrader keeps a copy of each submission and IPython the cells that ran.

    A missing one is created, because both programs would create it with the rights that the umask leaves.

    Args:
        environment: of these programs.

    Raises:
        UserError: a folder cannot be created.
    """
    for folder, variable in (
        (nbgrader_cache(environment), "JUPYTER_DATA_DIR"),
        (ipython_folder(environment), "IPYTHONDIR"),
    ):
        own_folder(folder, variable, ours=True)


def nbgrader_cache(environment: Mapping[str, str]) -> Path:
    """Return the folder of nbgrader's copies of submissions."""
    from jupyter_core.paths import jupyter_data_dir

    return Path(environment.get("JUPYTER_DATA_DIR") or jupyter_data_dir()) / "nbgrader_cache"


def ipython_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder of IPython's history of cells."""
    return Path(environment.get("IPYTHONDIR") or Path.home() / ".ipython").expanduser()
