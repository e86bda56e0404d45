"""`dlo doctor --hub`: try each right of a class on a JupyterHub, and name the line to change.

As an administrator (root, with ``hub.toml``), the rights of accounts, students and graders are tried in their
names: files as Unix users, pages of the Hub with a token of each, which is removed afterwards. As a student,
in a terminal of the server, the doctor looks for the reason why a course or its labs do not appear.

Reference: the questions of classes in nbgrader's issues 733 (other courses appear), 1034 (formgrader in the
servers of users), 1378 (a student sees no assignment), 1396, 1663 and 1936 (groups, and names of The Littlest
JupyterHub), 1293 and 1533 (no Collect button).
"""

from __future__ import annotations

import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dlo_lib.base.errors import UserError, nearest
from dlo_lib.base.text import tr
from dlo_lib.cli.diagnosis import Diagnosis, fault, passed
from dlo_lib.cli.doctor_hub_files import examine_files, students_with_account
from dlo_lib.cli.doctor_hub_lists import PLUGIN, file_that_sets, judge_list
from dlo_lib.cli.doctor_hub_terminal import examine_terminal
from dlo_lib.hub.folders import as_account, as_user
from dlo_lib.hub.membership import HubApi, known_users, roster_of, wanted
from dlo_lib.hub.read_settings import read_settings
from dlo_lib.hub.rights import MEMBERSHIP, STUDENT_SCOPES, doctor_token, user_environment
from dlo_lib.hub.settings import HubCourse, HubSettings

TLJH_PREFIX = "jupyter-"  # of Unix accounts; the Hub's users have none
_ANSWER_S = 60
_CONFIG = "deploy/hub/jupyterhub_config.py"


def examine_hub(file: Path | None) -> list[Diagnosis]:
    """Check the Hub of ``file`` as its administrator; without a file, the rights of this user of a Hub.

    Raises:
        UserError: the file is wrong, the caller is not root, or this is no server of a Hub.
    """
    if file is None:
        if "JUPYTERHUB_API_TOKEN" not in os.environ:
            text = "no server of a JupyterHub: its administrator names the file: dlo doctor --hub hub.toml"
            raise UserError(tr(text))
        from dlo_lib.cli.doctor_hub_student import examine_student

        return examine_student()
    settings = read_settings(file)
    if settings.kind == "kubernetes":
        raise UserError(
            tr("on Kubernetes, run `dlo doctor --hub` in a terminal of a server, as each kind of user")
        )
    if os.geteuid() != 0:
        raise UserError(tr("trying the rights of users needs root: sudo dlo doctor --hub {file}", file=file))
    return [*examine_files(settings), *_examine_pages(settings)]


def _examine_pages(settings: HubSettings) -> list[Diagnosis]:
    api = HubApi(f"{settings.address}/hub/api", doctor_token(settings))
    try:
        groups = {group["name"]: set(group["users"]) for group in api("GET", "/groups")}
        users = known_users(api)
    except urllib.error.URLError as error:
        if isinstance(error, urllib.error.HTTPError) and error.code < 500:  # 503: the proxy, without a Hub
            cure = tr("restart the Hub with {config}", config=_CONFIG)
            return [fault("hub", cure, "the Hub refuses the doctor's token ({status})", status=error.code)]
        cure = "systemctl start dlo-hub, or DLO_HUB={file} jupyterhub --config {config}; read its log"
        cure, text = tr(cure, file=settings.file, config=_CONFIG), "no Hub answers at {url} ({reason})"
        return [fault("hub", cure, text, url=settings.address, reason=error.reason)]
    found = [passed("hub", "{number} users", number=len(users)), *_groups(settings, groups)]
    found += _strangers(settings, users)
    for course in settings.courses:
        found += [*_formgrader(settings, api, course), *_lists(settings, api, course)]
    return found


def _groups(settings: HubSettings, groups: dict[str, set[str]]) -> Iterator[Diagnosis]:
    """Compare the Hub's groups with rosters and graders."""
    cure = "the service {service} does this within seconds: look for it in the Hub's log"
    cure = tr(cure, service=MEMBERSHIP)
    for name, members in wanted(settings)[0].items():
        now = groups.get(name, set())
        if absent := sorted(members - now):
            yield fault(name, cure, "{user} should be in the group and is not", user=absent[0])
        elif extra := sorted(now - members):
            yield fault(name, cure, "{user} is in the group and should not be", user=extra[0])
        else:
            yield passed(name, "{number} members", number=len(now))


def _strangers(settings: HubSettings, users: set[str]) -> Iterator[Diagnosis]:
    """Find users of the Hub that no course knows: they see an empty Assignment List."""
    known = set(settings.admins) | {course.account for course in settings.courses}
    ids = set().union(*wanted(settings)[0].values())
    for user in sorted(users - known - ids):
        near = nearest(user, ids)
        text = tr("{user} is on no roster and sees no labs", user=user)
        cure = tr("add the id {user} to the file of dlo roster import", user=user)
        if (account := f"{TLJH_PREFIX}{user}") in ids:
            text = (
                '{user} is on no roster and sees no labs: "You do not have access to this course". '
                "The roster has {account}, which is the user's Unix account on The Littlest JupyterHub"
            )
            text = tr(text, user=user, account=account)
            cure = tr("write {user} in place of {account}: the Hub has this name", user=user, account=account)
        elif near:
            cure += tr("; or is it {near}, in another spelling?", near=near[0])
        yield Diagnosis("user", False, text, cure)


@contextmanager
def token_of(api: HubApi, user: str, scopes: tuple[str, ...] = ()) -> Iterator[str]:
    """A token of ``user`` for the duration of the context; with ``scopes``, only those of a server."""
    asked: dict[str, Any] = {"note": "dlo doctor", "expires_in": 600}
    made = api("POST", f"/users/{user}/tokens", asked | ({"scopes": list(scopes)} if scopes else {}))
    try:
        yield made["token"]
    finally:
        api("DELETE", f"/users/{user}/tokens/{made['id']}")


def status_of(url: str, token: str) -> tuple[int, bytes]:
    """Return the status and the body of a page; 0 if it does not answer."""
    request = urllib.request.Request(url, headers={"Authorization": f"token {token}"})
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, b""
    except OSError:
        return 0, b""


def _formgrader(settings: HubSettings, api: HubApi, course: HubCourse) -> list[Diagnosis]:
    """Open formgrader as a grader, and try to open it as a student."""
    name = f"formgrader of {course.name}"
    base = f"{settings.address}/services/{course.name}/formgrader"
    if not course.graders:
        cure = tr("write graders in [[course]] {name} of {file}", name=course.name, file=settings.file)
        return [Diagnosis(name, False, tr("the course has no graders"), cure)]
    with token_of(api, course.graders[0].lower()) as token:
        status, _ = status_of(f"{base}/", token)
        if status != 200:
            return [Diagnosis(name, False, *_reason(settings, course, status), required=True)]
        listed, body = status_of(f"{base}/api/assignments", token)
        terminal = examine_terminal(settings, course, token)
    found = [_collect_button(settings, course, name, listed, body), terminal]
    for student in _hub_students(course)[:1]:
        with token_of(api, student) as token:
            if status_of(f"{base}/", token)[0] == 200:
                cure = tr("remove {user} from admins, graders and from other roles", user=student)
                found.append(fault(name, cure, "the student {user} can open it", user=student))
    return found


def _reason(settings: HubSettings, course: HubCourse, status: int) -> tuple[str, str]:
    """Return why formgrader does not open, and the cure."""
    if status == 403:
        cure = "restart the Hub: {config} gives the group {group} its role"
        text = tr("{user} may not open it", user=course.graders[0])
        return text, tr(cure, config=_CONFIG, group=course.grader_group)
    if status == 404:
        file = settings.jupyter_folder("course") / "jupyter_server_config.json"
        text = tr("404: the account {account} runs without formgrader", account=course.account)
        return text, tr("set nbgrader.server_extensions.formgrader to true in {file}", file=file)
    return tr("it does not answer (status {status})", status=status), _cure_of_service(settings, course)


def _cure_of_service(settings: HubSettings, course: HubCourse) -> str:
    """Return the line to remove if the account of the course asks the Hub for the groups of students, and
    otherwise where to read on.
    """
    done = as_account(settings, course, "-m", "dlo_lib.cli.hub_probe")
    answer = _probed(done) if done.returncode == 0 else {"plugin": ""}
    if PLUGIN not in answer["plugin"]:
        return tr('look for "Service {name}" in the log of the Hub', name=course.name)
    cure = (
        "remove c.Authenticator.plugin_class from {file}: the token of {account} has no right to read groups"
    )
    return tr(cure, file=file_that_sets(answer, "plugin") or "nbgrader_config.py", account=course.account)


def _probed(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return what ``hub_probe`` printed."""
    return json.loads(done.stdout.strip().splitlines()[-1])


def _collect_button(
    settings: HubSettings, course: HubCourse, name: str, status: int, body: bytes
) -> Diagnosis:
    """Compare the state of each lab in formgrader with the exchange: a draft has no Collect button."""
    released = settings.released(course.name)
    if status != 200:
        text, cure = "its list of labs gives status {status}", _cure_of_service(settings, course)
        return fault(name, cure, text, status=status)
    states = {one["name"]: one["status"] for one in json.loads(body)}
    if lost := sorted(lab for lab in released if states.get(lab) != "released"):
        text, cure = "{lab} is released, and has no Collect button here", _cure_of_service(settings, course)
        return fault(name, cure, text, lab=lost[0])
    return passed(name, "open to its graders only; {number} labs released", number=len(released))


def _hub_students(course: HubCourse) -> list[str]:
    try:
        return sorted(name.lower() for name in roster_of(course))
    except UserError:
        return []


def _lists(settings: HubSettings, api: HubApi, course: HubCourse) -> list[Diagnosis]:
    """Open the Assignment List as a student of the course, with the rights of the student's server."""
    people = students_with_account(course)
    if not people:
        return []
    person = people[0]
    user, name = person.pw_name, f"list of {course.name}"
    groups = set(api("GET", f"/users/{user}")["groups"])
    variables = user_environment(settings, user, groups) | {"HOME": person.pw_dir, "USER": user}
    variables |= {"JUPYTERHUB_USER": user, "JUPYTERHUB_API_URL": api.url}
    with token_of(api, user, STUDENT_SCOPES) as token:
        command = [str(settings.environment / "bin" / "python"), "-m", "dlo_lib.cli.hub_probe"]
        home = Path(person.pw_dir) if Path(person.pw_dir).is_dir() else Path("/")
        done = as_user(person, command, home, variables | {"JUPYTERHUB_API_TOKEN": token})
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [tr("no output")])[-1]
        cure = tr("let all users enter {folder} and the folders above it", folder=settings.environment)
        return [fault(name, cure, "{student} cannot run the environment: {said}", student=user, said=said)]
    return [judge_list(settings, user, settings.courses_of(groups), _probed(done), name)]
