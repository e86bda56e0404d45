"""A JupyterHub with a class on this machine, for tests and for ``python -m benchmarks hub``: Unix users, two
courses, their accounts, and a Hub that runs from ``deploy/hub/jupyterhub_config.py``.

Needs root. All users have the prefix ``dlotest-``, and all files are in one folder in /tmp; both are removed
at the end, with the processes of the users.
"""

from __future__ import annotations

import contextlib
import grp
import json
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from dlo_lib.hub.folders import as_account, as_user, prepare
from dlo_lib.hub.membership import HubApi
from dlo_lib.hub.read_settings import read_settings
from dlo_lib.hub.settings import HubSettings

ROOT = Path(__file__).resolve().parents[2]
SMALL_COURSE = ROOT / "tests" / "grading" / "small_course"
LAB = "91_small"
PREFIX = "dlotest-"
START_S = 300
STOP_S = 300  # JupyterHub waits for each of its services up to 65 s
PICTURES = os.environ.get("DLO_HUB_PICTURES", "")
"""A folder that keeps the screenshots and the logs of the Hubs."""
DLO = ("-c", "from dlo_lib.cli import main; main()")
HUB_TOML = """\
kind = "{kind}"
address = "http://127.0.0.1:{port}"
folder = "{folder}/hub"
environment = "{environment}"
labs = "{folder}/kit"
admins = []
proxy = "{proxy}"

[limits]
memory = "4G"
processors = 2
processes = 400
ranks_idle = "{ranks_idle}"

[[course]]
name = "deep"
account = "{prefix}deep"
folder = "{folder}/courses/deep"
checkout = "{folder}/checkouts/deep"
graders = ["{head}"]
port = {deep_port}

{more}
"""
SECOND_COURSE = """
[[course]]
name = "other"
account = "{prefix}other"
folder = "{folder}/courses/other"
checkout = "{folder}/checkouts/other"
graders = []
port = {other_port}
"""


def missing() -> str:
    """Return what this machine lacks for a Hub, in a few words; "" if nothing."""
    if os.geteuid() != 0:
        return "a Hub of Unix users needs root"
    if "DLO_HUB_ENVIRONMENT" not in os.environ:
        return "run `make hub`, which installs a JupyterHub"
    absent = [name for name in ("useradd", "userdel", "chpasswd", "bwrap") if shutil.which(name) is None]
    return f"no {', '.join(absent)}" if absent else ""


@dataclass
class ClassOnHub:
    """A running Hub.

    Attributes:
        passwords: of the people, by Unix name.
    """

    settings: HubSettings
    environment: Path
    folder: Path
    passwords: dict[str, str]
    ports: tuple[int, int]  # of the Hub and of its proxy's API
    variables: dict[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()  # of the command that starts the Hub
    process: subprocess.Popen[bytes] | None = None
    token: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def url(self) -> str:
        return self.settings.address

    @property
    def log(self) -> str:
        return (self.folder / "hub.log").read_text(encoding="utf-8", errors="replace")

    @property
    def api(self) -> HubApi:
        """The Hub's API with the rights of an administrator."""
        return HubApi(f"{self.url}/hub/api", self.token)

    def start(self) -> None:
        """Start the Hub, or start it again, and wait until it and the services of the courses answer."""
        config = self.folder / "jupyterhub_config.py"
        # The site's own file, and a token for the tests.
        config.write_text(
            f"load_subconfig({str(ROOT / 'deploy' / 'hub' / 'jupyterhub_config.py')!r})\n"
            "c = get_config()\n"
            f"c.JupyterHub.hub_port = {self.ports[0]}\n"
            f"c.ConfigurableHTTPProxy.api_url = 'http://127.0.0.1:{self.ports[1]}'\n"
            f"c.JupyterHub.services += [{{'name': 'tests', 'api_token': {self.token!r}}}]\n"
            "c.JupyterHub.load_roles += [{'name': 'tests', 'services': ['tests'], 'scopes': "
            "['admin:users', 'admin:servers', 'tokens', 'groups', 'list:services', 'read:hub']}]\n"
        )
        config.chmod(0o600)
        command = [*self.prefix, str(self.environment / "bin" / "jupyterhub"), "--config", str(config)]
        variables = {
            **os.environ,
            **self.variables,
            "DLO_HUB": str(self.settings.file),
            "PATH": f"{self.environment / 'bin'}:{os.environ['PATH']}",
        }
        with open(self.folder / "hub.log", "ab") as log:
            self.process = subprocess.Popen(
                command, cwd=self.folder, env=variables, stdout=log, stderr=log, start_new_session=True
            )
        (self.folder / "hub.pid").write_text(str(self.process.pid))
        self.wait_for("/hub/health")
        for course in self.settings.courses:
            self.wait_for(f"/services/{course.name}/api")

    def wait_for(self, path: str) -> None:
        """Wait until a page answers."""
        deadline = time.monotonic() + START_S
        while True:
            assert self.process is not None
            try:
                with urllib.request.urlopen(self.url + path, timeout=10):
                    return
            except urllib.error.HTTPError as error:
                if error.code in (401, 403):
                    return  # it answers, and refuses a request without a token
            except OSError:
                pass  # it does not listen yet
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the Hub does not answer at {path}:\n{self.log[-6000:]}")
            time.sleep(1)

    def stop(self) -> None:
        """Stop the Hub alone: its proxy and the servers of users stay."""
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(STOP_S)
            self.process = None

    def dlo(self, course: str, *arguments: str) -> str:
        """Run a command of `dlo` as the account of a course, in its folder; return what it prints."""
        done = as_account(self.settings, self.settings.course(course), *DLO, *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def release(self, course: str, lab: str = LAB) -> None:
        """Release a lab as the account of a course, without its proofs, which other tests run."""
        script = (
            "from dlo_lib.grading.classroom.gradebook.nbgrader_course import open_course\n"
            "from dlo_lib.grading.classroom.publish.publication import publish\n"
            "from dlo_lib.grading.lab.course import find_lab, source_labs\n"
            f"publish(open_course('.'), find_lab({lab!r}, source_labs()), True)\n"
        )
        done = as_account(self.settings, self.settings.course(course), "-c", script)
        assert done.returncode == 0, done.stdout + done.stderr

    def token_of(self, name: str) -> str:
        """Return a token with all rights of a user."""
        return str(self.api("POST", f"/users/{name}/tokens", {"note": "tests"})["token"])

    def get(self, path: str, name: str) -> tuple[int, bytes]:
        """Request a page with a token of the user ``name``; return the status and the body."""
        request = urllib.request.Request(self.url + path)
        request.add_header("Authorization", f"token {self.token_of(name)}")
        try:
            with urllib.request.urlopen(request, timeout=START_S) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def request(self, path: str, token: str, method: str = "GET", body: object = None) -> Any:
        """Send a request to a page of the Hub and return its JSON.

        Raises:
            urllib.error.HTTPError: the page refuses it.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"token {token}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            return json.loads(answer.read())

    def start_server(self, name: str, options: dict[str, str] | None = None) -> None:
        """Start the server of a user through the Hub, unless it runs, and wait until it is ready."""
        if not self.api("GET", f"/users/{name}")["servers"]:
            self.api("POST", f"/users/{name}/server", options or {})
        deadline = time.monotonic() + START_S
        while not self.api("GET", f"/users/{name}")["servers"].get("", {}).get("ready"):
            assert time.monotonic() < deadline, self.log[-6000:]
            time.sleep(0.2)

    def stop_server(self, name: str) -> None:
        """Stop the server of a user, if it runs."""
        if self.api("GET", f"/users/{name}")["servers"]:
            self.api("DELETE", f"/users/{name}/server")
        deadline = time.monotonic() + START_S
        while self.api("GET", f"/users/{name}")["servers"]:
            assert time.monotonic() < deadline, self.log[-6000:]
            time.sleep(0.2)

    def person(self, name: str) -> str:
        """Return the Unix name of a person, such as "ada"."""
        return next(one for one in self.passwords if one.endswith(f"-{name}"))

    def home(self, name: str) -> Path:
        """Return the home of a user."""
        return Path(pwd.getpwnam(name).pw_dir)

    def run_as(self, name: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command as a user of the class, in the user's home."""
        person = pwd.getpwnam(name)
        variables = {"HOME": person.pw_dir, "PATH": f"{self.environment / 'bin'}:/usr/bin:/bin"}
        return as_user(person, list(command), Path(person.pw_dir), variables)

    def enrol(self, course: str, *people: str) -> None:
        """Import people into the roster of a course and wait until the Hub has them in the group."""
        file = self.settings.course(course).folder / "users.csv"
        file.write_text("id,first name,last name,email\n" + "".join(f"{one},A,B,\n" for one in people))
        self.dlo(course, "roster", "import", str(file))
        group = self.settings.course(course).student_group
        deadline = time.monotonic() + START_S
        while not set(people) <= set(self.api("GET", f"/groups/{group}")["users"]):
            assert time.monotonic() < deadline, self.log[-3000:]
            time.sleep(0.2)


@contextlib.contextmanager
def class_on_hub(
    people: Sequence[str] = ("ada", "blaise", "head", "zoe"),
    kind: str = "local",
    more: str = "",
    variables: dict[str, str] | None = None,
    command: tuple[str, ...] = (),
    full: bool = False,
    second: bool = True,
    ranks_idle: str = "0:05:00",
) -> Iterator[ClassOnHub]:
    """Create the users and the courses, and start the Hub.

    Args:
        people: names without prefix; "head" is the grader of the course deep.
        more: further tables of hub.toml.
        variables: of the environment of the Hub.
        command: prefix of the command that starts the Hub.
        second: whether there is a second course, "other", without graders.
        ranks_idle: of the limits in hub.toml.
        full: the labs of the course instead of lab 00 and the small lab of the tests.
    """
    _remove_left_over()
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}hub-", dir="/tmp"))
    folder.chmod(0o755)
    (folder / "owner").write_text(str(os.getpid()))
    prefix = f"{PREFIX}{secrets.token_hex(2)}-"
    environment = Path(os.environ["DLO_HUB_ENVIRONMENT"])
    names = [prefix + name for name in people]
    accounts = [prefix + name for name in (("deep", "other") if second else ("deep",))]
    hub: ClassOnHub | None = None
    before = signal.signal(signal.SIGTERM, _interrupt)  # so that a terminated test run cleans up too
    try:
        passwords = {name: secrets.token_hex(8) for name in names}
        for name in names:
            _add_user(name, folder / "home" / name, "/bin/bash")
        for name in accounts:  # as the README and `dlo course --hub` say
            _add_user(name, folder / "home" / name, "/usr/sbin/nologin")
        lines = "".join(f"{name}:{password}\n" for name, password in passwords.items())
        subprocess.run(["chpasswd"], input=lines, text=True, check=True)
        _labs(folder, accounts, full)
        ports = _free_ports(5)
        toml = (HUB_TOML + SECOND_COURSE * second).format(
            kind=kind, port=ports[0], deep_port=ports[1], other_port=ports[2], folder=folder, prefix=prefix,
            environment=environment, head=prefix + "head", proxy=os.environ["DLO_HUB_PROXY"], more=more,
            ranks_idle=ranks_idle,
        )  # fmt: skip
        (folder / "hub.toml").write_text(toml)
        settings = read_settings(folder / "hub.toml")
        for _ in prepare(settings):
            pass
        hub = ClassOnHub(
            settings, environment, folder, passwords, (ports[3], ports[4]), variables or {}, command
        )
        if not full:
            hub.dlo("deep", "build")
            shutil.copytree(settings.course("deep").checkout / "labs" / LAB, settings.labs / "labs" / LAB)
        hub.start()
        yield hub
    finally:
        if hub is not None:
            with contextlib.suppress(OSError):  # jobs, which are no children of the Hub
                for user in hub.api("GET", "/users?state=active"):
                    hub.api("DELETE", f"/users/{user['name']}/server")
        if PICTURES and hub is not None:
            shutil.copy(folder / "hub.log", Path(PICTURES) / f"hub-{kind}.log")
        remove_class(folder)
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt  # pytest ends its session and its fixtures; SystemExit would fail one test


def _add_user(name: str, home: Path, shell: str) -> None:
    home.parent.mkdir(exist_ok=True)
    command = ["useradd", "--home-dir", str(home), "--create-home", "--shell", shell, name]
    subprocess.run(command, check=True)
    home.chmod(0o755)  # Debian's default


def remove_class(folder: Path) -> None:
    """End the Hub and the processes of the users of a class, and remove the users and the files."""
    for file in (folder / "hub.pid", folder / "hub" / "state" / "proxy.pid"):
        with contextlib.suppress(OSError, ValueError, psutil.NoSuchProcess):
            process = psutil.Process(int(file.read_text()))
            said = " ".join(process.cmdline())
            if str(folder) in said or "configurable-http-proxy" in said:
                process.terminate()
                psutil.wait_procs([process], timeout=60)
    homes = folder / "home"
    names = sorted(home.name for home in homes.iterdir()) if homes.is_dir() else []
    assert all(name.startswith(PREFIX) for name in names)
    _end_processes_of(names)
    for name in names:
        subprocess.run(["userdel", name], capture_output=True)
    _remove_groups(names)
    shutil.rmtree(folder, ignore_errors=True)


def _remove_left_over() -> None:
    """Remove classes whose test run was killed."""
    for folder in Path("/tmp").glob(f"{PREFIX}hub-*"):
        owner = folder / "owner"
        if owner.is_file() and not Path(f"/proc/{owner.read_text()}").exists():
            remove_class(folder)


def _labs(folder: Path, accounts: list[str], full: bool) -> None:
    """Create the kit of the students, and for each account of a course a checkout."""
    for account in accounts:
        checkout = folder / "checkouts" / account.rsplit("-", 1)[1]
        for room in ("solutions", "labs"):
            shutil.copytree((ROOT if full else SMALL_COURSE) / room, checkout / room)
        person = pwd.getpwnam(account)
        for path in (checkout, *checkout.rglob("*")):
            os.chown(path, person.pw_uid, person.pw_gid)
        checkout.chmod(0o700)
    kit = folder / "kit" / "labs"
    if full:
        shutil.copytree(ROOT / "labs", kit)
        return
    shutil.copytree(ROOT / "labs" / "00_start_here", kit / "00_start_here")


def _free_ports(number: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def _end_processes_of(names: list[str]) -> None:
    """End the processes of the temporary users, which exist only for this class."""
    users = set()
    for name in names:
        with contextlib.suppress(KeyError):
            users.add(pwd.getpwnam(name).pw_uid)
    for _ in range(50):
        left = [process for process in psutil.process_iter(["uids"]) if process.info["uids"].real in users]
        if not left:
            return
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.1)


def _remove_groups(names: list[str]) -> None:
    for place in Path("/sys/fs/cgroup").glob("**/dlo-hub"):
        for name in names:
            with contextlib.suppress(OSError):
                (place / name).rmdir()
        with contextlib.suppress(OSError):
            place.rmdir()  # fails while another Hub uses it
    for name in names:
        with contextlib.suppress(KeyError):
            grp.getgrnam(name)
            subprocess.run(["groupdel", name], capture_output=True)
