"""The part of `dlo doctor --hub` for the Assignment List: compare what a user sees with what the user should
see, and name the reason of a difference.

``hub_probe`` runs as the user and returns what nbgrader finds. The Hub's settings come first in Jupyter's
search path, so a file in the user's home overrides them only outside the Hub: in a shell by ssh, or in a job.
A file in the folder of the labs overrides them in JupyterLab too, because nbgrader reads its current folder
last.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dlo_lib.base.text import tr
from dlo_lib.cli.diagnosis import Diagnosis, passed
from dlo_lib.hub.extensions import server_extensions
from dlo_lib.hub.settings import HubSettings

PLUGIN = "JupyterHubAuthPlugin"
_CONFIG = "deploy/hub/jupyterhub_config.py"


def file_that_sets(answer: dict[str, Any], key: str) -> str:
    """Return the file with the last word on ``exchange`` or ``plugin``; "" if no file sets it."""
    return next((one["file"] for one in answer["configurations"] if one[key]), "")


def override(answer: dict[str, Any], hub: Path, exchange: Path) -> tuple[str, str, str] | None:
    """Return the first file outside the Hub's folder ``hub`` that contradicts its settings: what it changes
    (exchange, plugin or error), the value, and the file.
    """
    for one in answer["configurations"]:
        if Path(one["file"]).is_relative_to(hub):
            continue
        if one["error"]:
            return "error", one["error"], one["file"]
        if one["exchange"] and Path(one["exchange"]) != exchange:
            return "exchange", one["exchange"], one["file"]
        if one["plugin"] and PLUGIN not in one["plugin"]:
            return "plugin", one["plugin"], one["file"]
    return None


def judge_list(
    settings: HubSettings, user: str, courses: list[str], answer: dict[str, Any], name: str
) -> Diagnosis:
    """Compare what the Assignment List shows with the exchange, and name the reason of a difference.

    Args:
        courses: those of the user's groups.
        answer: that of ``hub_probe``, as the user.
    """
    problem = _settings_problem(settings, user, answer) or _list_problem(settings, user, courses, answer)
    if problem is not None:
        return Diagnosis(name, False, *problem, required=True)
    return passed(name, "{user} sees {number} labs", user=user, number=len(answer["labs"]))


def _settings_problem(settings: HubSettings, user: str, answer: dict[str, Any]) -> tuple[str, str] | None:
    """Return what is wrong in the settings of the user, and the line to change."""
    role = "grader" if user in settings.graders else "student"
    own = settings.jupyter_folder(role)
    if Path(answer["exchange"]) != settings.exchange:
        text = tr('{user} has the exchange "{found}"', user=user, found=answer["exchange"])
        file = file_that_sets(answer, "exchange") or own / "nbgrader_config.py"
        return text, tr("remove c.Exchange.root from {file}, or repeat dlo course --hub", file=file)
    if PLUGIN not in answer["plugin"]:
        text = tr("{user} would see the labs of all courses", user=user)
        file = file_that_sets(answer, "plugin") or own / "nbgrader_config.py"
        cure = 'set c.Authenticator.plugin_class to "nbgrader.auth.JupyterHubAuthPlugin" in {file}'
        return text, tr(cure, file=file)
    if (found := override(answer, own, settings.exchange)) is not None:
        kind, value, file = found
        if kind == "exchange":
            text = tr('{user} has the exchange "{found}" in a shell outside the Hub', user=user, found=value)
            return text, tr("remove c.Exchange.root from {file}", file=file)
        if kind == "plugin":
            text = tr("{user} would see the labs of all courses in a shell outside the Hub", user=user)
            return text, tr(
                "remove c.Authenticator.plugin_class from {file}: the Hub sets " + PLUGIN, file=file
            )
        text = tr("nbgrader cannot read {file} of {user}: {error}", file=file, user=user, error=value)
        return text, tr("remove {file}", file=file)
    expected = {one.rsplit(".")[-1] for one, on in server_extensions(role).items() if on}
    if extra := sorted(set(answer["extensions"]) ^ expected):
        text = tr("{user} has the wrong parts of nbgrader: {parts}", user=user, parts=", ".join(extra))
        cure = "repeat dlo course --hub; check jpserver_extensions in ~/.jupyter of {user}"
        return text, tr(cure, user=user)
    return None


def _list_problem(
    settings: HubSettings, user: str, courses: list[str], answer: dict[str, Any]
) -> tuple[str, str] | None:
    """Return what is wrong in the list of labs, and the cure."""
    if answer["labs"] is None:
        text = tr("the list of {user} fails: {error}", user=user, error=answer["error"])
        cure = "c.Spawner.server_token_scopes in {config} must contain read:users!user"
        return text, tr(cure, config=_CONFIG)
    shown = {(course, lab) for course, lab in answer["labs"]}
    if foreign := sorted(course for course, _ in shown if course not in courses):
        text = tr("{user} sees the course {course} without being in it", user=user, course=foreign[0])
        return text, tr("remove {user} from the group nbgrader-{course}", user=user, course=foreign[0])
    for course in courses:
        seen = {lab for of_course, lab in shown if of_course == course}
        readable = f"chmod -R o+rX {settings.outbound(course)}"
        if absent := sorted(settings.released(course) - seen):
            text = "{user} does not see {lab} of {course}"
            return tr(text, user=user, lab=absent[0], course=course), readable
        if closed := sorted(lab for of_course, lab in answer["closed"] if of_course == course):
            text = "{user} sees {lab} of {course} and cannot read it"
            return tr(text, user=user, lab=closed[0], course=course), readable
    if not courses:
        text = tr('{user} is in no course: "You do not have access to this course"', user=user)
        return text, tr("add {user} to a roster: dlo roster import", user=user)
    return None
