"""Groups, roles and services of the Hub, from ``hub.toml``: who may open what, as plain data.

A course has two groups, whose names nbgrader prescribes: ``nbgrader-NAME`` for students, which opens its labs
in the Assignment List, and ``formgrade-NAME`` for graders, which also opens its formgrader. ``membership``
keeps the groups equal to the rosters and the lists of graders.
"""

from __future__ import annotations

import os
import secrets
from typing import Any

from dlo_lib.base.interpreter import trusted_python
from dlo_lib.hub.settings import HubCourse, HubSettings

MEMBERSHIP = "dlo-membership"
IDLE = "dlo-idle"
DOCTOR = "dlo-doctor"
SERVICE_START_S = 300
"""The Hub ends itself if the service of a course does not answer within this time; its default is 30 s."""
STUDENT_SCOPES = (
    "users:activity!user",
    "access:servers!user",
    "read:users!user",  # nbgrader asks for the groups of the user
)
SERVER_SCOPES = (*STUDENT_SCOPES, "list:services", "read:services")  # for the Course List of graders
"""The scopes of a user's server. The Hub removes those that the user does not hold."""


def groups(settings: HubSettings) -> dict[str, dict[str, list[str]]]:
    """Return the groups with the members that ``hub.toml`` names; those of a roster are added later."""
    found = {}
    for course in settings.courses:
        shared = [course.account] if settings.kind == "kubernetes" else []  # there it is a user with a server
        found[course.grader_group] = {"users": [*course.graders, *shared]}
        students = [] if isinstance(course.students, str) else list(course.students)
        found[course.student_group] = {"users": students}
    return found


def roles(settings: HubSettings) -> list[dict[str, Any]]:
    """Return the roles of graders, of formgraders, and of the Hub's services."""
    shared = settings.kind == "kubernetes"
    made = [role for course in settings.courses for role in _roles_of_course(course, shared)]
    if not shared:
        scopes = ["admin:users", "groups", "list:users"]
        made.append({"name": MEMBERSHIP, "services": [MEMBERSHIP], "scopes": scopes})
        scopes = ["list:users", "read:users:activity", "read:servers", "delete:servers"]
        made.append({"name": IDLE, "services": [IDLE], "scopes": scopes})
        scopes = ["admin:users", "admin:servers", "tokens", "list:groups", "read:groups"]
        made.append({"name": DOCTOR, "services": [DOCTOR], "scopes": scopes})
    return made


def _roles_of_course(course: HubCourse, shared: bool) -> list[dict[str, Any]]:
    name, account = course.name, course.account
    if shared:  # formgrader runs in the server of the course's account, which its graders share
        scopes = [f"access:servers!user={account}", f"servers!user={account}", f"list:users!user={account}"]
        return [{"name": course.grader_group, "groups": [course.grader_group], "scopes": scopes}]
    scopes = [f"access:services!service={name}", "list:services", f"read:services!service={name}"]
    return [{"name": course.grader_group, "groups": [course.grader_group], "scopes": scopes}]


def services(settings: HubSettings) -> list[dict[str, Any]]:
    """Return the formgrader of each course, and the services that keep groups and stop idle servers."""
    made: list[dict[str, Any]] = [
        {
            "name": course.name,
            "url": f"http://127.0.0.1:{course.port}",
            "command": [str(settings.environment / "bin" / "dlo-hub-server"), "course"],
            "user": course.account,
            "cwd": str(course.folder),
            "environment": course_environment(settings, course),
            "oauth_no_confirm": True,
            "timeout": SERVICE_START_S,
        }
        for course in settings.courses
    ]
    made.append({"name": DOCTOR, "api_token": doctor_token(settings)})
    # These run as the account of the Hub, root: nothing of the current folder is imported.
    own = "from dlo_lib.hub.membership import main; main()"
    made.append({"name": MEMBERSHIP, "command": trusted_python(own, str(settings.file.resolve()))})
    seconds = int(settings.limits.idle.total_seconds())
    culler = "import runpy; runpy.run_module('jupyterhub_idle_culler', run_name='__main__', alter_sys=True)"
    made.append({"name": IDLE, "command": trusted_python(culler, f"--timeout={seconds}")})
    return made


def doctor_token(settings: HubSettings) -> str:
    """Return the token of ``dlo doctor --hub``; create it if there is none. Only root can read its file.

    Raises:
        OSError: this user cannot read or create it.
    """
    file = settings.folder / "state" / "doctor_token"
    if not file.exists():
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as new:
            new.write(secrets.token_hex(32))
    return file.read_text(encoding="ascii")


def course_environment(settings: HubSettings, course: HubCourse) -> dict[str, str]:
    """Return the variables of processes of a course's account."""
    return {
        "DLO_COURSE": str(course.checkout),
        "JUPYTERHUB_USER": course.account,
        "JUPYTER_CONFIG_PATH": str(settings.jupyter_folder("course")),
        "PATH": settings.path,
    }


def user_environment(settings: HubSettings, name: str, member_of: set[str]) -> dict[str, str]:
    """Return the variables of the server of the user ``name``, who is in the groups ``member_of``."""
    role = "grader" if name in settings.graders else "student"
    return settings.server_variables | {
        "DLO_COURSE": str(settings.labs),
        "DLO_HUB_COURSES": " ".join(settings.courses_of(member_of)),
        "JUPYTER_CONFIG_PATH": str(settings.jupyter_folder(role)),
        "PATH": settings.path,
    }
