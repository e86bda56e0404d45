"""A private SLURM cluster on this machine, for tests: virtual nodes, simulated GPUs, optional accounting.

A *supervisor* process (this file, run as a program) starts every daemon in the foreground, as a child that
dies with it, and reaps all orphans of the daemons. It lives while a process holds a shared lock on ``users``
in the cluster's folder. The test processes hold it, and the kernel releases their locks however they end.
Then the supervisor cancels the jobs and stops its daemons by their pids. All files (key, sockets,
configuration, spool, data base, logs) are in a separate folder in /tmp, which is removed at the end; nothing
is in /etc.

Needs root, namespaces, and the Debian packages slurm-wlm and munge, and for accounting slurmdbd and
mariadb-server.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

from tests.cluster.virtual_slurm_conf import ACCOUNTING_CONF, ENTER, OPEN, SLURM_CONF, SLURMDBD_CONF

START_S = 60  # far more than necessary, because the machine may be busy
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
USER_ID = 61_234
PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


@dataclass(frozen=True)
class Nodes:
    """Nodes of one kind; their names are ``prefix[1-count]``."""

    prefix: str
    count: int
    cores: int
    gpus: int
    features: str
    gpu_type: str = ""

    @property
    def typed(self) -> str:
        return f"{self.gpu_type}:" if self.gpu_type else ""

    @property
    def in_gres_conf(self) -> str:
        return f"Type={self.gpu_type} " if self.gpu_type else ""

    @property
    def in_slurm_conf(self) -> str:
        return f"Gres=gpu:{self.typed}{self.gpus} " if self.gpus else ""

    @property
    def names(self) -> list[str]:
        return [f"{self.prefix}{index}" for index in range(1, self.count + 1)]


@dataclass(frozen=True)
class Cluster:
    """The cluster to start.

    ``partitions``: name to (kinds of nodes, longest time); the first is the default one. ``conf``: lines of
    slurm.conf that replace those of ``SLURM_CONF`` with the same key; ``Key=`` takes it out; ``{d}`` is the
    cluster's folder. Nodes with 0 GPUs have no GRES. ``files``: programs in ``{d}/etc``, name to content.
    ``domain``: nodes say their full host names. ``user``: a Unix user whom only the machines of the cluster
    know (``entered``). ``database_of``: the folder of the cluster that has the data base of both.
    """

    name: str
    nodes: tuple[Nodes, ...]
    partitions: dict[str, tuple[tuple[str, ...], str]]
    qos: dict[str, dict[str, str]] = field(default_factory=dict)
    # Account: its QOS, default first; empty: no accounting.
    accounts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    conf: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    domain: str = ""
    user: str = ""
    database_of: str = ""

    @property
    def accounting(self) -> bool:
        return bool(self.accounts)

    def missing(self) -> str:
        """Return what this machine lacks for the cluster, in a few words; "" if nothing."""
        if os.geteuid() != 0:
            return "raising a SLURM cluster needs root"
        programs = ["slurmctld", "slurmd", "munged", "sbatch", "unshare"] + [
            "slurmdbd",
            "mariadbd",
            "mariadb-install-db",
        ] * self.accounting
        absent = [program for program in programs if shutil.which(program, path=PATH) is None]
        if absent:
            return f"no {', '.join(absent)}: python3 deploy/system_packages.py names the packages"
        namespaces = subprocess.run(
            ["unshare", "--mount", "--uts", "--propagation", "private", "true"], capture_output=True
        )
        return (
            ""
            if namespaces.returncode == 0
            else "namespaces are not allowed here: " + namespaces.stderr.decode().strip()
        )


@contextlib.contextmanager
def attached(cluster: Cluster, folder: Path) -> Iterator[Path]:
    """Start the cluster in ``folder`` if it is not up, and keep it up within the context.

    Yield its slurm.conf.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "users").open("a") as users:
        with (folder / "starting").open("a") as starting:
            fcntl.flock(starting, fcntl.LOCK_EX)
            # Waits for a supervisor that ends; one that is up stays up from now on.
            fcntl.flock(users, fcntl.LOCK_SH)
            if not _is_up(folder):
                _start_keeper(cluster, folder)
        yield folder / "cluster" / "etc" / "slurm.conf"


def _is_up(folder: Path) -> bool:
    up = folder / "up"
    return up.exists() and Path(f"/proc/{up.read_text()}").exists()


def _start_keeper(cluster: Cluster, folder: Path) -> None:
    (folder / "up").unlink(missing_ok=True)
    log = folder / "supervisor.log"
    with log.open("w") as output:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.virtual_slurm", str(folder), json.dumps(asdict(cluster))],
            cwd=Path(__file__).resolve().parents[2],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # an interrupt of the tests does not reach it
        )
    deadline = time.monotonic() + START_S
    while not (folder / "up").exists():
        if supervisor.poll() is not None or time.monotonic() > deadline:
            supervisor.terminate()
            supervisor.wait()
            raise RuntimeError(f"the virtual SLURM cluster did not come up:\n{log.read_text()[-4000:]}")
        time.sleep(0.05)


class Supervisor:
    """Starts and stops the daemons of one cluster."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.link = cluster, folder / "cluster"
        # A short name, because it holds a job step's socket, whose path may have at most 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="dlo-slurm-", dir="/tmp"))
        self.folder.chmod(0o755)  # munged requires that all users can reach its socket
        self.link.unlink(missing_ok=True)
        self.link.symlink_to(self.folder)
        self.etc, self.log = self.folder / "etc", self.folder / "log"
        self.daemons: list[subprocess.Popen] = []  # in the order of start
        self.ports = iter(_free_ports(3 + sum(kind.count for kind in cluster.nodes)))
        self.env = {**os.environ, "PATH": PATH, "SLURM_CONF": str(self.etc / "slurm.conf")}
        self.owner = Path(cluster.database_of, "cluster") if cluster.database_of else self.folder
        for name in ("etc", "log", "run", "dev", "sock"):
            (self.folder / name).mkdir()
        for name in ("state", "munge"):
            (self.folder / name).mkdir(mode=0o700)

    def start(self) -> None:
        self._munge()
        database, controller, store = next(self.ports), next(self.ports), next(self.ports)
        if self.cluster.database_of:
            theirs = (self.owner / "etc" / "slurm.conf").read_text()
            database = int(theirs.partition("AccountingStoragePort=")[2].split()[0])
        self._configure(controller, database)
        if self.cluster.accounting and not self.cluster.database_of:
            self._accounting(database, store)
        if self.cluster.accounting:
            self._associations()
        self._daemon("slurmctld", *entered(self.etc), "slurmctld", "-D")
        for kind in self.cluster.nodes:
            for node in kind.names:
                # A separate host name and /etc/hosts: ranks connect by names, as on separate machines.
                alone = f"hostname {node}{self.cluster.domain} && exec slurmd -D -N {node}"
                self._daemon(f"slurmd.{node}", *entered(self.etc, "--uts"), "sh", "-c", alone)
        wanted = sum(kind.count for kind in self.cluster.nodes)
        self._until(
            lambda: len(set(self._says("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split())) == wanted
        )

    def stop(self) -> None:
        """Stop jobs first, so that nothing is restarted.

        Then the daemons, the last first; then their orphans.
        """
        with contextlib.suppress(subprocess.TimeoutExpired, FileNotFoundError):
            for partition in self.cluster.partitions:
                subprocess.run(
                    ["scancel", f"--partition={partition}"], env=self.env, capture_output=True, timeout=10
                )
            self._until(lambda: not self._says("squeue", "-h"), at_most=10, must=False)
        for daemon in reversed(self.daemons):
            daemon.terminate()
        deadline = time.monotonic() + 10
        for daemon in reversed(self.daemons):
            try:
                daemon.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        while children := _children():
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, 0)
        self.link.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def reap(self) -> None:
        """Reap the daemons' orphans that have ended."""
        for child in set(_children()) - {daemon.pid for daemon in self.daemons}:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)

    def _munge(self) -> None:
        key = self.folder / "munge" / "key"
        shared = self.owner / "munge" / "key"
        key.write_bytes(shared.read_bytes() if self.cluster.database_of else secrets.token_bytes(1024))
        key.chmod(0o400)
        files = {"key-file": key, "socket": self.folder / "sock" / "munge.sock"}
        files |= {name: self.folder / "munge" / name for name in ("pid-file", "seed-file", "log-file")}
        self._daemon("munged", "munged", "-F", *(f"--{name}={path}" for name, path in files.items()))
        self._until(lambda: (self.folder / "sock" / "munge.sock").exists())

    def _configure(self, controller: int, database: int) -> None:
        host = socket.gethostname().split(".")[0]
        addresses = {
            node: f"127.0.{7 + index}.{1 + at}"
            for index, kind in enumerate(self.cluster.nodes)
            for at, node in enumerate(kind.names)
        }
        for index in range(max(kind.gpus for kind in self.cluster.nodes)):
            (self.folder / "dev" / f"nvidia{index}").symlink_to("/dev/null")  # gres requires a device file
        lines = SLURM_CONF.format(
            name=self.cluster.name,
            host=host,
            port=controller,
            d=self.folder,
            first=random.randrange(1_000, 60_000),
        ).splitlines()
        replaced = {line.partition("=")[0] for line in self.cluster.conf}
        lines = [line for line in lines if line.partition("=")[0] not in replaced]
        lines += [line.format(d=self.folder) for line in self.cluster.conf if not line.endswith("=")]
        if self.cluster.accounting:
            lines += ACCOUNTING_CONF.format(port=database, d=self.folder).splitlines()
        else:
            lines.append("AccountingStorageType=accounting_storage/none")
        gres = ["AutoDetect=off"]
        for weight, kind in enumerate(self.cluster.nodes, 1):  # the first kind is allocated first
            lines += [
                (
                    f"NodeName={node} NodeAddr={addresses[node]} Port={next(self.ports)} Sockets=2 "
                    f"CoresPerSocket={kind.cores // 2} ThreadsPerCore=1 RealMemory=160000 "
                    f"{kind.in_slurm_conf}Feature={kind.features} Weight={weight} State=UNKNOWN"
                )
                for node in kind.names
            ]
            devices = f"{self.folder}/dev/nvidia[0-{kind.gpus - 1}]"
            line = f"NodeName={','.join(kind.names)} Name=gpu {kind.in_gres_conf}File={devices}"
            gres += [line] * (kind.gpus > 0)
        default = "YES"
        for name, (kinds, longest) in self.cluster.partitions.items():
            nodes = ",".join(
                node for kind in self.cluster.nodes if kind.prefix in kinds for node in kind.names
            )
            lines.append(
                f"PartitionName={name} Nodes={nodes} Default={default} DefaultTime=0:10:00 MaxTime={longest} "
                "State=UP"
            )
            default = "NO"
        (self.etc / "slurm.conf").write_text("\n".join(lines) + "\n")
        (self.etc / "gres.conf").write_text("\n".join(gres) + "\n")
        self._machine(addresses)

    def _machine(self, addresses: dict[str, str]) -> None:
        """Write what the machines of the cluster see: host names, users, and programs of the centre.

        Args:
            addresses: of the nodes.
        """
        full = self.cluster.domain
        hosts = "".join(f"{to} {f'{node}{full} ' * bool(full)}{node}\n" for node, to in addresses.items())
        (self.etc / "hosts").write_text(Path("/etc/hosts").read_text() + hosts)
        mounts = [f"mount --bind {self.etc}/hosts /etc/hosts"]
        if user := self.cluster.user:
            # All of /etc, because a mount on a file ends when the file is replaced, as useradd does.
            mounts = [*self._open_python(), f"mount --bind {self.etc}/all /etc"]
            shutil.copytree("/etc", self.etc / "all", symlinks=True)
            shutil.copy(self.etc / "hosts", self.etc / "all")
            for name, entry in (("passwd", f"{USER_ID}::/nowhere:/bin/bash"), ("group", "")):
                with (self.etc / "all" / name).open("a") as file:
                    file.write(f"{user}:x:{USER_ID}:{entry}\n")
        programs = {"enter": ENTER.format(mounts="\n".join(mounts)), **self.cluster.files}
        for name, text in programs.items():
            (self.etc / name).write_text(text)
            (self.etc / name).chmod(0o755)

    def _open_python(self) -> list[str]:
        """Return lines after which the users of the cluster can run this Python."""
        prefix = Path(sys.base_prefix).resolve()
        closed = [folder for folder in reversed(prefix.parents) if not folder.stat().st_mode & 0o001]
        return [OPEN.format(prefix=prefix, closed=closed[0], aside=self.folder / "python")] if closed else []

    def _accounting(self, port: int, store: int) -> None:
        data, run = self.folder / "db", self.folder / "run"
        install = [
            "mariadb-install-db",
            "--no-defaults",
            f"--datadir={data}",
            "--auth-root-authentication-method=normal",
        ]
        subprocess.run(
            [*install, "--skip-test-db", "--user=root"], env=self.env, check=True, stdout=subprocess.DEVNULL
        )
        small = [
            "--innodb-buffer-pool-size=64M",
            "--innodb-log-file-size=32M",
            "--innodb-flush-log-at-trx-commit=0",
        ]
        small += ["--innodb-lock-wait-timeout=900", "--skip-log-bin", "--performance-schema=OFF"]
        where = [
            f"--datadir={data}",
            f"--socket={run}/db.sock",
            f"--pid-file={run}/mariadbd.pid",
            "--bind-address=127.0.0.1",
        ]
        self._daemon(
            "mariadbd", "mariadbd", "--no-defaults", *where, f"--port={store}", "--user=root", *small
        )
        sql = ["mariadb", "--no-defaults", "-uroot", f"--socket={run}/db.sock", "-e"]
        self._until(
            lambda: subprocess.run([*sql, "select 1"], env=self.env, capture_output=True).returncode == 0
        )
        password = secrets.token_hex(16)
        grant = "".join(
            (
                f"create user slurm@'{host}' identified by '{password}'; "
                f"grant all on slurm_acct_db.* to slurm@'{host}';"
            )
            for host in ("127.0.0.1", "localhost")
        )
        subprocess.run([*sql, f"create database slurm_acct_db; {grant}"], env=self.env, check=True)
        conf = self.etc / "slurmdbd.conf"
        conf.touch(mode=0o600)
        host = socket.gethostname().split(".")[0]
        conf.write_text(
            SLURMDBD_CONF.format(host=host, port=port, store=store, password=password, d=self.folder)
        )
        self._daemon("slurmdbd", *entered(self.etc), "slurmdbd", "-D")
        self._until(
            lambda: (
                subprocess.run(
                    ["sacctmgr", "-nP", "show", "cluster"], env=self.env, capture_output=True
                ).returncode
                == 0
            )
        )

    def _associations(self) -> None:
        """Tell the data base of the cluster, its QOS, its accounts and their users."""
        self._manage("add", "cluster", self.cluster.name)
        where = [f"Cluster={self.cluster.name}"]
        for name, limits in self.cluster.qos.items():
            self._manage("add", "qos", name, *(f"{limit}={value}" for limit, value in limits.items()))
        for account, allowed in self.cluster.accounts.items():
            qos = [f"qos={','.join(allowed)}", f"DefaultQOS={allowed[0]}"] if allowed else []
            self._manage("add", "account", account, *where, *qos)
            for user in filter(None, ["root", self.cluster.user]):
                self._manage("add", "user", user, *where, f"Account={account}")

    def _manage(self, *words: str) -> None:
        subprocess.run(["sacctmgr", "-i", *words], env=self.env, check=True, stdout=subprocess.DEVNULL)

    def _daemon(self, name: str, *command: str) -> None:
        with (self.log / name).open("w") as log:
            self.daemons.append(
                subprocess.Popen(
                    command,
                    env=self.env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    preexec_fn=_die_with_parent,
                )
            )

    def _says(self, *command: str) -> str:
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=20).stdout

    def _until(self, done, at_most: float = START_S, must: bool = True) -> None:
        deadline = time.monotonic() + at_most
        while not done():
            dead = [daemon.args for daemon in self.daemons if daemon.poll() is not None]
            if (dead or time.monotonic() > deadline) and not must:
                return
            if dead or time.monotonic() > deadline:
                logs = "".join(
                    f"== {log.name}\n{log.read_text(errors='replace')[-1500:]}\n"
                    for log in self.log.iterdir()
                )
                raise RuntimeError(f"{'ended: ' + str(dead) if dead else 'too slow'}\n{logs}")
            time.sleep(0.05)


def entered(etc: Path, *namespaces: str) -> list[str]:
    """Return the words before a command that runs as on a machine of the cluster with these files."""
    return ["unshare", "--mount", *namespaces, "--propagation", "private", str(etc / "enter")]


def _held(file: TextIO) -> bool:
    """Whether no other process held the lock on the file, so that this process has it now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()]


def _free_ports(count: int) -> list[int]:
    """Return free ports below the ephemeral ones, so that the kernel assigns them to no process."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(10_000, 20_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            found += [port] * (port not in found)
    return found


def main(folder: Path, cluster: Cluster) -> None:
    # Job steps detach from their daemon and become our children.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    began = time.monotonic()
    supervisor = Supervisor(cluster, folder)
    with (folder / "users").open("a") as users:
        try:
            supervisor.start()
            print(f"up after {time.monotonic() - began:.1f} s", flush=True)
            part = folder / "up.part"
            part.write_text(str(os.getpid()))
            part.rename(folder / "up")
            # Until the last test process has ended; a later one waits until this one ends.
            while not _held(users):
                supervisor.reap()
                time.sleep(0.2)
            (folder / "up").unlink()
        finally:
            supervisor.stop()
            used = os.times()
            print(
                f"down; daemons and jobs took {used.children_user + used.children_system:.0f} s of CPU",
                flush=True,
            )


if __name__ == "__main__":
    said = json.loads(sys.argv[2])
    kinds = tuple(Nodes(**kind) for kind in said.pop("nodes"))
    main(Path(sys.argv[1]), Cluster(nodes=kinds, **said))
