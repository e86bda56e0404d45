"""`dlo doctor --hub` as a student, in a terminal of the server: why a course, or its labs, do not appear."""

from __future__ import annotations

import os
import urllib.error
from pathlib import Path

from dlo_lib.base.text import tr
from dlo_lib.cli.diagnosis import Diagnosis, fault, passed
from dlo_lib.cli.doctor_hub_lists import override
from dlo_lib.cli.hub_probe import probe
from dlo_lib.hub.membership import HubApi

_COURSE_GROUPS = ("nbgrader-", "formgrade-")
_RESTART = "stop your server (File, Hub Control Panel), and start it again"


def examine_student() -> list[Diagnosis]:
    """Check the rights of the user of this server, with the token of this server."""
    api = HubApi(os.environ["JUPYTERHUB_API_URL"], os.environ["JUPYTERHUB_API_TOKEN"])
    try:
        me = api("GET", "/user")
    except urllib.error.URLError as error:
        return [fault("hub", tr(_RESTART), "the Hub does not answer ({error})", error=error)]
    groups = me.get("groups")
    if groups is None:
        cure = tr("administrator: c.Spawner.server_token_scopes must contain read:users!user")
        return [fault("rights", cure, "this server may not read your groups")]
    courses = [one.partition("-")[2] for one in groups if one.startswith(_COURSE_GROUPS)]
    if not courses:
        name, text = me["name"], 'you ({name}) are in no course: "You do not have access to this course"'
        cure = "ask your instructor to add the id {name} to the roster (dlo roster import)"
        return [fault("course", tr(cure, name=name), text, name=name)]
    found = [Diagnosis("course", True, ", ".join(courses))]
    if missing := [one for one in courses if one not in os.environ.get("DLO_HUB_COURSES", "").split()]:
        text = tr("you joined {course} after your server started", course=missing[0])
        found.append(Diagnosis("server", False, text, tr(_RESTART)))
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
        text = "your {file} has another {kind} than the Hub: {value}"
        return [fault("nbgrader", tr("remove {file}", file=file), text, file=file, kind=kind, value=value)]
    if not os.access(exchange, os.W_OK | os.X_OK):
        text = "the exchange {folder} is not there, or you cannot write to it"
        return [fault("exchange", ask, text, folder=exchange)]
    found = [Diagnosis("exchange", True, str(exchange))]
    if answer["labs"] is None:
        return [*found, fault("labs", ask, "{error}", error=answer["error"])]
    if foreign := sorted({course for course, _ in answer["labs"]} - set(courses)):
        return [
            *found,
            fault("labs", ask, "you see the course {course} without being in it", course=foreign[0]),
        ]
    boxes = [exchange / course / "inbound" for course in courses]
    closed = [box for box in boxes if not os.access(box, os.W_OK | os.X_OK)]
    found += [fault("submissions", ask, "you cannot submit to {folder}", folder=box) for box in closed]
    if "assignment_list" not in answer["extensions"]:
        found.append(fault("nbgrader", ask, "the Assignment List is off"))
    if not answer["labs"]:
        return [*found, passed("labs", "no lab is released yet")]
    labs = ", ".join(sorted(lab for _, lab in answer["labs"]))
    return [*found, passed("labs", "released to you: {labs}", labs=labs)]
