"""A service of the Hub that keeps its groups equal to the rosters of the courses and to ``hub.toml``.

JupyterHub only adds users to the groups of its configuration: a grader who is removed there keeps the right
to open formgrader. And it adds only users that it knows: a student who is enrolled before the first login
sees an empty Assignment List. This service creates the users of a roster, adds them, and removes the others,
within ``INTERVAL`` seconds after a change.

The Hub starts it with a token: ``python -m dlo_lib.hub.membership hub.toml``.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlo_lib.base.errors import UserError
from dlo_lib.base.lifetime import die_with
from dlo_lib.base.text import tr
from dlo_lib.hub.read_settings import read_settings
from dlo_lib.hub.settings import HubCourse, HubSettings

INTERVAL = 5.0
RECHECK = 60.0
"""The seconds after which the groups are compared although no roster has changed."""
_ANSWER_S = 30


@dataclass(frozen=True)
class HubApi:
    """The Hub's REST API, with the rights of a token.

    Attributes:
        url: such as http://127.0.0.1:8081/hub/api.
    """

    url: str
    token: str

    def __call__(self, method: str, path: str, body: object = None) -> Any:
        """Send a request and return the answer, which is None if the Hub sends none.

        Raises:
            urllib.error.HTTPError: the Hub refuses the request.
            urllib.error.URLError: the Hub does not answer.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"token {self.token}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
            text = answer.read()
        return json.loads(text) if text else None


def roster_of(course: HubCourse) -> set[str]:
    """Return the ids of the students of a course.

    Raises:
        UserError: the roster is that of the gradebook, and there is none, or it is not readable.
    """
    if not isinstance(course.students, str):
        return set(course.students)
    file = course.folder / "gradebook.db"
    try:
        file.stat()
        connection = sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True, timeout=_ANSWER_S)
        try:
            return {name for (name,) in connection.execute("select id from student")}
        finally:
            connection.close()
    except (OSError, sqlite3.Error) as error:
        cure = tr("as root, run: dlo course --hub hub.toml")
        text = "the course {name} has no readable gradebook at {file} ({error}): {cure}"
        raise UserError(tr(text, name=course.name, file=file, error=error, cure=cure)) from error


def wanted(settings: HubSettings) -> tuple[dict[str, set[str]], list[str]]:
    """Return the members of each group, and a line for each course without a roster.

    The Hub has names in lower case. The group of a course without a roster is absent, so it stays unchanged.
    """
    groups, problems = {}, []
    for course in settings.courses:
        groups[course.grader_group] = {name.lower() for name in course.graders}
        try:
            groups[course.student_group] = {name.lower() for name in roster_of(course)}
        except UserError as error:
            problems.append(str(error))
    return groups, problems


def synchronise(api: HubApi, groups: dict[str, set[str]]) -> list[str]:
    """Change the Hub's groups to ``groups`` and return a line for each change."""
    now = {group["name"]: set(group["users"]) for group in api("GET", "/groups")}
    needed = set().union(*groups.values())
    changes = []
    # One by one: the Hub refuses a name without a Unix account, and with it all names of a request.
    if refused := {name for name in sorted(needed - known_users(api)) if not _created(api, name)}:
        groups = {name: members - refused for name, members in groups.items()}
        changes.append(f"the Hub refuses the names {', '.join(sorted(refused))}")
    for name, members in groups.items():
        if name not in now:
            api("POST", f"/groups/{name}", {})
        for method, users in (
            ("POST", members - now.get(name, set())),
            ("DELETE", now.get(name, set()) - members),
        ):
            if users:
                api(method, f"/groups/{name}/users", {"users": sorted(users)})
                word = "added to" if method == "POST" else "removed from"
                changes.append(f"{', '.join(sorted(users))} {word} {name}")
    return changes


def _created(api: HubApi, name: str) -> bool:
    try:
        api("POST", f"/users/{urllib.parse.quote(name)}", {})
    except urllib.error.HTTPError as error:
        if error.code != 400:
            raise
        return False
    return True


def known_users(api: HubApi) -> set[str]:
    """Return the names of all users of the Hub, page by page."""
    found: set[str] = set()
    while page := api("GET", f"/users?limit=200&offset={len(found)}"):
        found |= {user["name"] for user in page}
        if len(page) < 200:
            break
    return found


def main() -> None:
    """Keep the groups of the ``hub.toml`` in ``sys.argv[1]`` in step until the Hub ends this process."""
    die_with(os.getppid())
    settings = read_settings(Path(sys.argv[1]))
    api = HubApi(os.environ["JUPYTERHUB_API_URL"], os.environ["JUPYTERHUB_API_TOKEN"])
    before: object = None
    again = 0.0
    said: set[str] = set()
    while True:
        groups, problems = wanted(settings)
        _say(set(problems) - said)
        said = set(problems)
        if groups != before or time.monotonic() > again:
            try:
                _say(synchronise(api, groups))
                before, again = groups, time.monotonic() + RECHECK
            except urllib.error.URLError as error:  # the Hub starts, or restarts
                _say([f"the Hub does not answer ({error}); trying again"])
        time.sleep(INTERVAL)


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        print(f"dlo-membership: {line}", file=sys.stderr, flush=True)
