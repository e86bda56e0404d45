"""Print what nbgrader finds in this environment, as one line of JSON: ``python -m dlo_lib.cli.hub_probe``.

`dlo doctor --hub` runs it as a user of the Hub, with the variables of the server of that user, so that each
right is tried and not computed. The Assignment List of JupyterLab calls the same functions.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from dlo_lib.cli.workspace import work_dir
from dlo_lib.hub.extensions import part_of


def probe() -> dict[str, Any]:
    """Return the labs of the Assignment List or its error, the settings, and the server extensions.

    A user's server runs in the folder of the labs, whose nbgrader configuration has the last word.
    """
    from jupyter_core.paths import jupyter_config_path
    from nbgrader.server_extensions.assignment_list.handlers import AssignmentList

    with contextlib.chdir(work_dir() if work_dir().is_dir() else Path.cwd()):
        manager = AssignmentList()
        manager.root_dir = os.getcwd()
        config = manager.load_config()
        found = manager.list_released_assignments()
        places = [os.getcwd(), *jupyter_config_path()]
        value = found["value"]
        labs = [[one["course_id"], one["assignment_id"]] for one in value] if found["success"] else None
        exchange = Path(str(config.Exchange.get("root", "")))
        return {
            "labs": labs,
            "closed": [one for one in labs or [] if not _can_read(exchange / one[0] / "outbound" / one[1])],
            "error": "" if found["success"] else value.strip().splitlines()[-1].strip(),
            "exchange": str(config.Exchange.get("root", "")),
            "plugin": str(config.Authenticator.get("plugin_class", "")),
            "extensions": enabled_extensions(),
            "configurations": [read_configuration(file) for place in places for file in _files(Path(place))],
        }


def enabled_extensions() -> list[str]:
    """Return the server extensions of nbgrader that a server loads here, such as ["assignment_list"]."""
    from jupyter_core.paths import jupyter_config_path
    from jupyter_server.extension.config import ExtensionConfigManager

    manager = ExtensionConfigManager(read_config_path=jupyter_config_path())
    parts = manager.get("jupyter_server_config").get("ServerApp", {}).get("jpserver_extensions", {})
    return sorted({part for name, on in parts.items() if on and (part := part_of(name))})


def read_configuration(file: Path) -> dict[str, str]:
    """Return what a configuration of nbgrader sets, "" for what it does not set, and why it does not load."""
    from traitlets.config.loader import JSONFileConfigLoader, PyFileConfigLoader

    loader = PyFileConfigLoader if file.suffix == ".py" else JSONFileConfigLoader
    set_here = {"file": str(file), "exchange": "", "plugin": "", "error": ""}
    try:
        config = loader(file.name, path=str(file.parent)).load_config()
    except Exception as error:  # noqa: BLE001  # the file is a program of a user
        return set_here | {"error": f"{type(error).__name__}: {error}"}
    set_here["exchange"] = str(config.Exchange.get("root", ""))
    return set_here | {"plugin": str(config.Authenticator.get("plugin_class", ""))}


def _can_read(folder: Path) -> bool:
    """Return whether this user can fetch a released lab. nbgrader lists it if its name is readable."""
    if not os.access(folder, os.R_OK | os.X_OK):
        return False
    return all(os.access(one, os.R_OK | os.X_OK * one.is_dir()) for one in folder.rglob("*"))


def _files(folder: Path) -> list[Path]:
    names = ("nbgrader_config.py", "nbgrader_config.json")
    return [folder / name for name in names if (folder / name).is_file()]


if __name__ == "__main__":
    real, sys.stdout = sys.stdout, sys.stderr  # nbgrader prints as well
    answer = probe()
    print(json.dumps(answer), file=real)
