"""The settings of JupyterLab, and which parts of nbgrader each role has: student, grader, course.

``dlo lab`` uses those of a student as well.
"""

from __future__ import annotations

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
_EXTENSIONS = {
    "assignment-list": ("student", "grader"),
    "course-list": ("grader",),
    "formgrader": ("course",),
    "create-assignment": (),
    "validate-assignment": (),
}
"""Part of nbgrader → the roles that have it. Labs are edited as text and validated by their checks."""


def disabled_in_lab(role: str) -> dict[str, bool]:
    """Return the parts of nbgrader in JupyterLab that ``role`` does not have, for page_config.json."""
    return {f"@jupyter/nbgrader:{name}": True for name, roles in _EXTENSIONS.items() if role not in roles}


def server_extensions(role: str) -> dict[str, bool]:
    """Return which server extensions of nbgrader ``role`` has, for ServerApp.jpserver_extensions."""
    return {
        f"nbgrader.server_extensions.{name.replace('-', '_')}": role in roles
        for name, roles in _EXTENSIONS.items()
        if name != "create-assignment"  # it has no server extension
    }
