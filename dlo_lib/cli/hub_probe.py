"""Print what nbgrader finds in this environment, as one line of JSON: ``python -m dlo_lib.cli.hub_probe``.

`dlo doctor --hub` runs it as a user of the Hub, with the variables of the server of that user, so that each
right is tried and not computed. The Assignment List of JupyterLab calls the same functions.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def probe() -> dict[str, Any]:
    """Return the labs of the Assignment List or its error, the settings, and the server extensions."""
    from jupyter_core.paths import jupyter_config_path
    from nbgrader.server_extensions.assignment_list.handlers import AssignmentList

    manager = AssignmentList()
    manager.root_dir = os.getcwd()
    config = manager.load_config()
    found = manager.list_released_assignments()
    value = found["value"]
    return {
        "labs": [[one["course_id"], one["assignment_id"]] for one in value] if found["success"] else None,
        "error": "" if found["success"] else value.strip().splitlines()[-1].strip(),
        "exchange": str(config.Exchange.get("root", "")),
        "plugin": str(config.Authenticator.get("plugin_class", "")),
        "extensions": enabled_extensions(),
        "configurations": [
            str(file) for place in jupyter_config_path() for file in configurations(Path(place))
        ],
    }


def enabled_extensions() -> list[str]:
    """Return the server extensions of nbgrader that a server loads here, such as ["assignment_list"]."""
    from jupyter_core.paths import jupyter_config_path
    from jupyter_server.extension.config import ExtensionConfigManager

    manager = ExtensionConfigManager(read_config_path=jupyter_config_path())
    parts = manager.get("jupyter_server_config").get("ServerApp", {}).get("jpserver_extensions", {})
    prefix = "nbgrader.server_extensions."
    return sorted(name.removeprefix(prefix) for name in parts if parts[name] and name.startswith(prefix))


def configurations(folder: Path) -> list[Path]:
    """Return the nbgrader configurations in a folder."""
    names = ("nbgrader_config.py", "nbgrader_config.json")
    return [folder / name for name in names if (folder / name).is_file()]


if __name__ == "__main__":
    real, sys.stdout = sys.stdout, sys.stderr  # nbgrader prints as well
    answer = probe()
    print(json.dumps(answer), file=real)
