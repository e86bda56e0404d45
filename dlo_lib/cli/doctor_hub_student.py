"""`dlo doctor --hub` as a student, in a terminal of the server: why a course, or its labs, do not appear."""

from __future__ import annotations

import os
import urllib.error
from pathlib import Path

from dlo_lib.base.text import tr
from dlo_lib.cli.diagnosis import Diagnosis
from dlo_lib.cli.doctor_hub_lists import override
from dlo_lib.cli.hub_probe import probe
from dlo_lib.hub.membership import HubApi

_COURSE_GROUPS = ("nbgrader-", "formgrade-")


def examine_student() -> list[Diagnosis]:
    """Check the rights of the user of this server, with the token of this server."""
    api = HubApi(os.environ["JUPYTERHUB_API_URL"], os.environ["JUPYTERHUB_API_TOKEN"])
    try:
        me = api("GET", "/user")
    except urllib.error.URLError as error:
        cure = tr("stop your server (File, Hub Control Panel), and start it again")
        return [
            Diagnosis("hub", False, tr("the Hub does not answer ({error})", error=error), cure, required=True)
        ]
    groups = me.get("groups")
    if groups is None:
        cure = tr("administrator: c.Spawner.server_token_scopes must contain read:users!user")
        return [Diagnosis("rights", False, tr("this server may not read your groups"), cure, required=True)]
    courses = [one.partition("-")[2] for one in groups if one.startswith(_COURSE_GROUPS)]
    if not courses:
        text = tr('you ({name}) are in no course: "You do not have access to this course"', name=me["name"])
        cure = tr(
            "ask your instructor to add the id {name} to the roster (dlo roster import)", name=me["name"]
        )
        return [Diagnosis("course", False, text, cure, required=True)]
    found = [Diagnosis("course", True, ", ".join(courses))]
    if missing := [one for one in courses if one not in os.environ.get("DLO_HUB_COURSES", "").split()]:
        text = tr("you joined {course} after your server started", course=missing[0])
        cure = tr("stop your server (File, Hub Control Panel), and start it again")
        found.append(Diagnosis("server", False, text, cure))
    return [*found, *_list(courses)]


def _list(courses: list[str]) -> list[Diagnosis]:
    """Read the Assignment List as JupyterLab does, and try whether a submission would be possible."""
    answer = probe()
    exchange = Path(answer["exchange"] or "/usr/local/share/nbgrader/exchange")
    hub = Path(os.environ["JUPYTER_CONFIG_PATH"].split(os.pathsep)[0])  # the Hub sets it
    of_hub = [one["exchange"] for one in answer["configurations"] if Path(one["file"]).is_relative_to(hub)]
    ask = tr("administrator: dlo doctor --hub hub.toml")
    if (own := override(answer, hub, Path(next(filter(None, of_hub), exchange)))) is not None:
        kind, value, file = own
        text = tr("your {file} has another {kind} than the Hub: {value}", file=file, kind=kind, value=value)
        cure = tr("remove {file}", file=file)
        return [Diagnosis("nbgrader", False, text, cure, required=True)]
    if not os.access(exchange, os.W_OK | os.X_OK):
        text = tr("the exchange {folder} is not there, or you cannot write to it", folder=exchange)
        return [Diagnosis("exchange", False, text, ask, required=True)]
    found = [Diagnosis("exchange", True, str(exchange))]
    if answer["labs"] is None:
        return [*found, Diagnosis("labs", False, answer["error"], ask, required=True)]
    if foreign := sorted({course for course, _ in answer["labs"]} - set(courses)):
        text = tr("you see the course {course} without being in it", course=foreign[0])
        return [*found, Diagnosis("labs", False, text, ask, required=True)]
    for course in courses:
        if not os.access(exchange / course / "inbound", os.W_OK | os.X_OK):
            text = tr("you cannot submit to {folder}", folder=exchange / course / "inbound")
            found.append(Diagnosis("submissions", False, text, ask, required=True))
    text = tr("released to you: {labs}", labs=", ".join(sorted(lab for _, lab in answer["labs"])))
    if not answer["labs"]:
        text = tr("no lab is released yet")
    if "assignment_list" not in answer["extensions"]:
        found.append(Diagnosis("nbgrader", False, tr("the Assignment List is off"), ask, required=True))
    return [*found, Diagnosis("labs", True, text)]
