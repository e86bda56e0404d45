"""What ``dlo course --hub`` writes: the settings of Jupyter of each role, the exchange, and the courses.

The command can be repeated: it restores owners and modes, and it changes no grade and no submission.
"""

from __future__ import annotations

import json
import os
import pwd
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dlo_lib.base.errors import UserError
from dlo_lib.base.files import write_text
from dlo_lib.base.text import tr
from dlo_lib.hub import kubernetes
from dlo_lib.hub.accounts import require_accounts
from dlo_lib.hub.dashboards import proxied
from dlo_lib.hub.extensions import ROLES, SETTINGS, disabled_in_lab, server_extensions, write_style
from dlo_lib.hub.lti import frame_ancestors
from dlo_lib.hub.rights import course_environment
from dlo_lib.hub.settings import HubCourse, HubSettings

KERNEL_START_S = 300
"""A kernel imports PyTorch before it answers, and a class opens its notebooks in the same minute."""
EXCHANGE_MODE = 0o1777
"""nbgrader requires that all users can write the exchange; the sticky bit protects the folders of others."""
COURSE_MODES = {"": 0o755, "outbound": 0o755, "inbound": 0o3733, "feedback": 0o711}
"""Students enter and write ``inbound``, and cannot list it; with the sticky bit, none removes another's
submission. The owner of all is the account of the course, so no student can create them first."""
CANNOT_RUN = 126
"""The status of a shell that may not execute a program."""
TERMINAL = """\
case "${{SHELL:-}}" in */nologin | */false | "") export SHELL=/bin/bash ;; esac
[ -x "$SHELL" ] || export SHELL=/bin/bash
export PATH={bin}:"$PATH"
exec "$SHELL"
"""
FOR_USERS = """\
# Written by `dlo course --hub`: nbgrader in the server of a user.
import os
from pathlib import Path

c = get_config()
c.Exchange.root = {exchange!r}
c.Authenticator.plugin_class = "nbgrader.auth.JupyterHubAuthPlugin"
c.CourseDirectory.root = os.environ.get("DLO_WORK") or str(Path.home() / "dlo-labs")
courses = os.environ.get("DLO_HUB_COURSES", "").split()
if len(courses) == 1:  # otherwise the Assignment List offers a choice
    c.CourseDirectory.course_id = courses[0]
"""
FOR_COURSES = """\
# Written by `dlo course --hub`: the folder of the course has the other settings of nbgrader.
c = get_config()
c.Exchange.root = {exchange!r}
"""


def prepare(settings: HubSettings) -> Iterator[str]:
    """Create or update everything, and yield a line for each step.

    Raises:
        UserError: the caller is not root, an account of a course or of a person is missing, or an account
            cannot create its course.
    """
    write_jupyter_folders(settings)
    yield tr("settings of Jupyter: {folder}", folder=settings.folder / "jupyter")
    if settings.kind == "kubernetes":
        file = settings.folder / "values.json"
        write_text(file, kubernetes.values_text(settings))
        yield tr("values of Zero to JupyterHub: {file}", file=file)
        return
    if os.geteuid() != 0:
        raise UserError(
            tr(
                "only root can give courses to their accounts: sudo dlo course --hub {file}",
                file=settings.file,
            )
        )
    require_accounts(settings)
    accounts = {course.name: account_of(course) for course in settings.courses}
    make_exchange(settings, accounts)
    yield tr("exchange: {folder}", folder=settings.exchange)
    for course in settings.courses:
        make_course(settings, course, accounts[course.name])
        yield tr(
            "course {name} of {account}: {folder}",
            name=course.name,
            account=course.account,
            folder=course.folder,
        )


def write_jupyter_folders(settings: HubSettings) -> None:
    """Write the settings of Jupyter of each role; all users can read them."""
    python = settings.environment / "bin" / "python"
    for role in ROLES:
        folder = settings.jupyter_folder(role)
        server: dict[str, Any] = {
            "ServerApp": {
                "jpserver_extensions": server_extensions(role),
                "terminado_settings": {"shell_command": terminal_command(settings)},
                "tornado_settings": write_style(folder),
            }
        }
        if role == "course" or settings.lti is not None:  # formgrader is a frame in JupyterLab
            headers = {"Content-Security-Policy": frame_ancestors(settings)}
            server["ServerApp"]["tornado_settings"]["headers"] = headers
        if role != "course":
            server["ServerProxy"] = {"servers": proxied(python)}
            seconds = int(settings.limits.notebook_idle.total_seconds())
            server["MappingKernelManager"] = {
                "cull_idle_timeout": seconds,
                "cull_interval": 60,
                "kernel_info_timeout": KERNEL_START_S,
            }
        write_text(folder / "jupyter_server_config.json", json.dumps(server, indent=1))
        write_text(folder / "labconfig" / "default_setting_overrides.json", json.dumps(SETTINGS, indent=1))
        page = {"disabledExtensions": disabled_in_lab(role)}
        write_text(folder / "labconfig" / "page_config.json", json.dumps(page, indent=1))
        text = FOR_COURSES if role == "course" else FOR_USERS
        write_text(folder / "nbgrader_config.py", text.format(exchange=str(settings.exchange)))
    # It has the name of the kernel that notebooks ask for, and comes before that of the environment.
    kernel = {
        "argv": [str(python), "-m", "dlo_lib.hub.kernel", "-f", "{connection_file}"],
        "display_name": "Python 3",
        "language": "python",
        "metadata": {"debugger": True},
    }
    write_text(settings.data_folder / "kernels" / "python3" / "kernel.json", json.dumps(kernel, indent=1))
    for path in (settings.folder, *(settings.folder / "jupyter").rglob("*"), settings.folder / "jupyter"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def terminal_command(settings: HubSettings) -> list[str]:
    """Return the command of a terminal in JupyterLab: the user's shell after the profile of the system.

    The account of a course has ``nologin`` as its shell, which refuses su and ssh, and would end the terminal
    as well: bash takes its place. On Debian the profile sets ``PATH`` anew, without the environment of the
    servers, in which `dlo` is.
    """
    return ["/bin/bash", "-l", "-c", TERMINAL.format(bin=shlex.quote(str(settings.environment / "bin")))]


def account_of(course: HubCourse) -> pwd.struct_passwd:
    """Return the Unix account of a course.

    Raises:
        UserError: there is none; the message has the command that creates it.
    """
    try:
        return pwd.getpwnam(course.account)
    except KeyError:
        cure = f"useradd --system --create-home --shell /usr/sbin/nologin {course.account}"
        text = "the course {name} has no account {account}: {cure}"
        raise UserError(tr(text, name=course.name, account=course.account, cure=cure)) from None


def make_exchange(settings: HubSettings, accounts: dict[str, pwd.struct_passwd]) -> None:
    """Create the exchange with a folder of each course, or restore its owners and modes."""
    settings.exchange.mkdir(parents=True, exist_ok=True)
    settings.exchange.chmod(EXCHANGE_MODE)
    for name, account in accounts.items():
        for part, mode in COURSE_MODES.items():
            folder = settings.exchange / name / part
            folder.mkdir(exist_ok=True)
            os.chown(folder, account.pw_uid, account.pw_gid)
            folder.chmod(mode)


def make_course(settings: HubSettings, course: HubCourse, account: pwd.struct_passwd) -> None:
    """Create the folder of a course and, as its account, the course; or update them.

    Raises:
        UserError: the account cannot create it, for example because it cannot read the checkout.
    """
    course.folder.mkdir(parents=True, exist_ok=True)
    os.chown(course.folder, account.pw_uid, account.pw_gid)
    course.folder.chmod(0o700)
    options = [str(course.folder), "--exchange", str(settings.exchange), "--name", course.name]
    done = as_account(settings, course, "-c", "from dlo_lib.cli import main; main()", "course", *options)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [tr("no output")])[-1]
        text = "{account} cannot create the course in {folder}: {said}"
        raise UserError(tr(text, account=course.account, folder=course.folder, said=said))


def as_account(
    settings: HubSettings, course: HubCourse, *arguments: str, more: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python with ``arguments`` as the account of a course, in its folder."""
    account = account_of(course)
    environment = {**course_environment(settings, course), "HOME": account.pw_dir, "USER": course.account}
    return as_user(
        account,
        [str(settings.environment / "bin" / "python"), *arguments],
        course.folder,
        environment | (more or {}),
    )


def as_user(
    account: pwd.struct_passwd, command: list[str], folder: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a command as another user; a program that the user cannot read gives status 126.

    The user's process enters ``folder``: where root is squashed, as on many NFS servers, root cannot.
    """
    enter = ["/bin/sh", "-c", 'cd "$0" && exec "$@"', str(folder)]
    done = subprocess.run(
        [*enter, *command],
        cwd="/",
        env=environment,
        user=account.pw_uid,
        group=account.pw_gid,
        extra_groups=os.getgrouplist(account.pw_name, account.pw_gid),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode == CANNOT_RUN and "exec:" in done.stderr:
        done.stderr = tr("{account} cannot run {program}", account=account.pw_name, program=command[0])
    return done
