"""What ``hub.toml`` says, the one file that a site edits: its tables as classes.

``deploy/hub/README.md`` describes the keys for administrators, in the order of the classes below.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from dlo_lib.base.errors import UserError, unknown_name
from dlo_lib.base.ranks_idle import RANKS_IDLE


@dataclass(frozen=True)
class HubLimits:
    """What one user's server may use.

    Attributes:
        memory: such as "2G"; servers on Kubernetes and in jobs also request it.
        processors: may be a fraction.
        processes: processes and threads.
        idle: a server without activity is stopped after this time.
        notebook_idle: a notebook without activity that no page shows loses its kernel after this time.
        ranks_idle: ranks without a cell are ended after this time; the next cell with ranks starts them.
    """

    memory: str = "2G"
    processors: float = 2.0
    processes: int = 512
    idle: timedelta = timedelta(hours=1)
    notebook_idle: timedelta = timedelta(minutes=30)
    ranks_idle: timedelta = timedelta(minutes=5)

    @property
    def memory_bytes(self) -> int:
        return int(self.memory[:-1]) << {"K": 10, "M": 20, "G": 30, "T": 40}[self.memory[-1]]


@dataclass(frozen=True)
class HubCourse:
    """A course of the Hub.

    Attributes:
        name: nbgrader's course id; the Hub's groups are ``nbgrader-NAME`` and ``formgrade-NAME``.
        account: the Unix account that owns the course and judges; no person logs in as it.
        folder: the folder of the course; only ``account`` can enter it.
        checkout: a clone with the solutions; only ``account`` can enter it, and it builds releases there.
        graders: users who open formgrader.
        students: "roster" takes those of the course's gradebook; or a list of users.
        port: of the formgrader service, on the loopback interface.
    """

    name: str
    account: str
    folder: Path
    checkout: Path
    graders: tuple[str, ...]
    students: str | tuple[str, ...] = "roster"
    port: int = 0

    @property
    def student_group(self) -> str:
        return f"nbgrader-{self.name}"

    @property
    def grader_group(self) -> str:
        return f"formgrade-{self.name}"


@dataclass(frozen=True)
class SlurmServers:
    """Servers as SLURM jobs.

    Attributes:
        site: a name of ``dlo_lib/cluster/site/sites`` or a file (``slurm/SITES.md``).
        account: of the jobs; "" asks for none.
        partitions: offered in the form; () offers the one of the site.
        times: offered in the form, the first one selected.
        gpus: numbers of GPUs offered in the form, the first one selected.
        address: of the Hub, as compute nodes reach it.
        run_as: command prefix that submits as the user.
    """

    site: str
    account: str = ""
    partitions: tuple[str, ...] = ()
    times: tuple[timedelta, ...] = (timedelta(hours=1), timedelta(hours=2), timedelta(hours=4))
    gpus: tuple[int, ...] = (0, 1)
    address: str = ""
    run_as: str = "/usr/sbin/runuser -u {username} --"


@dataclass(frozen=True)
class KubernetesServers:
    """Servers as pods of Zero to JupyterHub.

    Attributes:
        image: the stage ``hub`` of deploy/Dockerfile, in a registry of the cluster.
        volume: a claim of a volume that many pods can write (ReadWriteMany): exchange and courses.
        first_uid: user number N of the Hub has the Unix id ``first_uid + N`` in the pods.
    """

    image: str
    volume: str
    first_uid: int = 20_000


@dataclass(frozen=True)
class LtiPlatform:
    """A Moodle that users come from, by LTI 1.3. Moodle shows the values when the tool is registered.

    Attributes:
        username: the claim that becomes the name of the user; ``custom_login`` is the custom parameter
            ``login`` of the tool.
    """

    issuer: str
    client_id: str
    authorize_url: str
    keys_url: str
    username: str = "custom_login"


@dataclass(frozen=True)
class HubSettings:
    """The contents of ``hub.toml``.

    Attributes:
        kind: how servers of users run: local, slurm or kubernetes.
        folder: of the Hub: its database, the exchange, and Jupyter's settings of each role.
        address: the URL that the proxy listens on; a web server in front of it adds TLS.
        admins: users with the Hub's administration page.
        environment: the Python environment of the servers, which all users can read.
        labs: the unpacked archive of `dlo kit`, which all users can read.
        proxy: command of configurable-http-proxy.
    """

    kind: str
    folder: Path
    environment: Path
    labs: Path
    admins: tuple[str, ...]
    courses: tuple[HubCourse, ...]
    address: str = "http://127.0.0.1:8000"
    proxy: str = "configurable-http-proxy"
    limits: HubLimits = field(default_factory=HubLimits)
    slurm: SlurmServers | None = None
    kubernetes: KubernetesServers | None = None
    lti: LtiPlatform | None = None
    file: Path = Path("hub.toml")

    @property
    def exchange(self) -> Path:
        return self.folder / "exchange"

    @property
    def graders(self) -> tuple[str, ...]:
        return tuple(sorted({name for course in self.courses for name in course.graders}))

    @property
    def path(self) -> str:
        """The variable ``PATH`` of servers and services."""
        return f"{self.environment / 'bin'}:/usr/local/bin:/usr/bin:/bin"

    def courses_of(self, groups: Set[str]) -> list[str]:
        """Return the names of the courses of a user who is in these groups of the Hub."""
        return [one.name for one in self.courses if {one.student_group, one.grader_group} & groups]

    def released(self, course: str) -> set[str]:
        """Return the names of the labs of a course that are in the exchange."""
        outbound = self.outbound(course)
        return {folder.name for folder in outbound.iterdir()} if outbound.is_dir() else set()

    def outbound(self, course: str) -> Path:
        """Return the folder of the exchange with the released labs of a course."""
        return self.exchange / course / "outbound"

    def jupyter_folder(self, role: str) -> Path:
        """Return the folder of Jupyter's settings for ``student``, ``grader`` or ``course``."""
        return self.folder / "jupyter" / role

    @property
    def data_folder(self) -> Path:
        """The folder with the kernel of notebooks, for ``JUPYTER_PATH``."""
        return self.folder / "jupyter" / "share"

    @property
    def server_variables(self) -> dict[str, str]:
        """The variables of the server of each user."""
        minutes = self.limits.ranks_idle.total_seconds() / 60
        # glibc otherwise keeps a heap for each of the dozen threads of a server and a kernel.
        arenas = {"MALLOC_ARENA_MAX": "2"}
        return {"JUPYTER_PATH": str(self.data_folder), RANKS_IDLE: f"{minutes:g}", **arenas}

    def course(self, name: str) -> HubCourse:
        """Return a course by its name.

        Raises:
            UserError: there is no such course.
        """
        known = {course.name: course for course in self.courses}
        if name not in known:
            raise UserError(f"{self.file}: {unknown_name('course', name, known)}")
        return known[name]
