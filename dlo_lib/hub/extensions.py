"""The settings of JupyterLab, and which parts of nbgrader each role has: student, grader, course.

``dlo lab`` uses those of a student as well.
"""

from __future__ import annotations

import json
from pathlib import Path

from dlo_lib.base.files import write_text

ROLES = ("student", "grader", "course")
NOT_FOR_STUDENTS = {
    # It compares visible points with all points, so it says of a right solution that it fails.
    "@jupyter/nbgrader:validate-assignment": True,
    "@jupyter/nbgrader:create-assignment": True,
}
SETTINGS = {
    # JupyterLab asks for consent to fetch news, and a class may have no network.
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
    # The browser shows the folder of the open lab, its notebook before its modules, and whole names.
    "@jupyterlab/filebrowser-extension:browser": {
        "navigateToCurrentDirectory": True,
        "sortNotebooksFirst": True,
        "showLastModifiedColumn": False,
    },
}
STYLE = """\
/* JupyterLab breaks printed lines within words. */
.jp-OutputArea-output pre, .jp-RenderedText pre { word-break: normal !important; overflow-wrap: anywhere; }
"""
"""What ``write_style`` adds to the style of JupyterLab."""
OWN_LIST = "dlo_lib.hub.assignment_list"
NBGRADERS_LIST = "nbgrader.server_extensions.assignment_list"
"""In its place, :data:`OWN_LIST` answers the same requests, without nbgrader in the memory of the server."""
_EXTENSIONS = {
    "assignment-list": ("student", "grader"),
    "course-list": ("grader",),
    "formgrader": ("course",),
    "create-assignment": (),
    "validate-assignment": (),
}
"""Part of nbgrader → the roles that have it. Labs are edited as text and validated by their checks."""


def write_style(folder: Path) -> dict[str, list[str]]:
    """Write the style, and that JupyterLab loads it, into a folder of Jupyter's search path for
    configurations. Return what ``ServerApp.tornado_settings`` needs for it: the place is no option, and by
    default the user's ~/.jupyter.
    """
    write_text(folder / "custom" / "custom.css", STYLE)
    write_text(folder / "jupyter_lab_config.json", json.dumps({"LabApp": {"custom_css": True}}, indent=1))
    return {"static_custom_path": [str(folder / "custom")]}


def disabled_in_lab(role: str) -> dict[str, bool]:
    """Return the parts of nbgrader in JupyterLab that ``role`` does not have, for page_config.json."""
    return {f"@jupyter/nbgrader:{name}": True for name, roles in _EXTENSIONS.items() if role not in roles}


def server_extensions(role: str) -> dict[str, bool]:
    """Return which server extensions of nbgrader ``role`` has, for ServerApp.jpserver_extensions."""
    found = {
        f"nbgrader.server_extensions.{name.replace('-', '_')}": role in roles
        for name, roles in _EXTENSIONS.items()
        if name != "create-assignment"  # it has no server extension
    }
    found[OWN_LIST] = found[NBGRADERS_LIST]
    found[NBGRADERS_LIST] = False
    return found


def part_of(extension: str) -> str | None:
    """Return the part of nbgrader of a server extension, such as "assignment_list"; None if it is another.

    >>> part_of("dlo_lib.hub.assignment_list"), part_of("jupyterlab")
    ('assignment_list', None)
    """
    package, _, name = extension.rpartition(".")
    return name if extension == OWN_LIST or package == NBGRADERS_LIST.rpartition(".")[0] else None
