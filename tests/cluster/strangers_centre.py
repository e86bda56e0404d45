"""A day at a centre that is unlike ours in every way that we know: ``make slurm-stranger``.

Its nodes say full host names, and SLURM does not know their GPUs. A prolog prints into every job. Jobs are
not requeued, and an array has at most 11 elements. Two clusters have one data base of accounting and give the
same numbers to their jobs. The user is ``ada.lovelace``, whose home cannot be written to. Every word that a
command prints is compared with what it should be; numbers, times and folders are replaced before.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.cluster.virtual_slurm import USER_ID, Cluster, Nodes, attached, entered
from tests.grading.small_class import make_checkout, make_class, small_lab

ROOT = Path(__file__).resolve().parents[2]
WELCOME = "*** Welcome: see https://stranger.example/news ***"
STRANGER = Cluster(
    name="stranger",
    nodes=(Nodes("node", 2, cores=8, gpus=0, features="any"),),
    partitions={"day": (("node",), "1-00:00:00"), "night": (("node",), "2-00:00:00")},
    accounts={"physics": ()},
    conf=(
        "GresTypes=",
        "JobRequeue=0",
        "MaxArraySize=11",
        "FirstJobId=5000",
        "TaskProlog={d}/etc/task_prolog",
        "Prolog={d}/etc/prolog",
    ),
    files={
        "task_prolog": f'#!/bin/sh\necho "print {WELCOME}"\n',
        "prolog": "#!/bin/sh\necho the prolog of the node\n",
    },
    domain=".stranger.example.org",
    user="ada.lovelace",
)
NEIGHBOUR = replace(
    STRANGER,
    name="neighbour",
    nodes=(Nodes("other", 1, cores=8, gpus=0, features="any"),),
    partitions={"all": (("other",), "1-00:00:00")},
    domain=".neighbour.example.org",
)
SITE = """
title = "GPUs that SLURM does not know"
scheduler = "slurm"
gpus_per_node = 1
cores_per_gpu = 2
gpu_option = "none"
environment = { OMP_NUM_THREADS = "1" }
"""
CLI = "import sys; from dlo_lib.cli import main; sys.argv[0] = 'dlo'; main()"
REPLACED = (
    (r"/tmp/dlo-stranger-\w+", "FOLDER"),
    (r"\b[0-9a-f]{16}\b", "DIGEST"),
    (r"\b(?=[0-9a-f]*[a-f])[0-9a-f]{8}\b|\b\d{8}\b", "HASH"),
    (r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?|\b\d\d-\d\d \d\d:\d\d", "WHEN"),
    (r"(?<!:)\b\d+:\d\d\b(?!:)", "TIME"),
    (r"\bnode[12]\b", "NODE"),
    (r"(blaise\W+)\d+", r"\1SOME"),  # the inputs are drawn for each course
    (r"scale \d", "scale SOME"),
    (r"\bused \S+", "used N"),
    (r"[\d.,]+ tokens/s", "N tokens/s"),
    (r"loss [\d.]+", "loss N"),
    (r"\b50(?!01\b)\d\d\b", "N"),  # the number of a job, except the first one of a cluster
    (r"\b[\d.]+ s  ", "N s  "),
    (r"; expected start WHEN", ""),
    (r"[ ]+", " "),
    (r"[ ]+$", ""),
)


def plain(said: str) -> list[str]:
    """Return the lines of a text without what differs from run to run."""
    for pattern, name in REPLACED:
        said = re.sub(pattern, name, said, flags=re.MULTILINE)
    return said.splitlines()


@dataclass(frozen=True)
class User:
    """Ada on a login node of one of the clusters."""

    folder: Path
    etc: Path

    def run(self, *command: str, fails: bool = False, within: str = "work") -> list[str]:
        """Return what a command prints, with both of its streams."""
        given = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "SLURM_CONF": str(self.etc / "slurm.conf"),
            "HOME": str(self.folder / "home"),
            "DLO_HOME": str(self.folder / "work" / "dlo"),
            "DLO_SITES": str(self.folder / "sites"),
            "DLO_SITE": "stranger",
            "DLO_COURSE": str(self.folder / "checkout"),
            "DLO_POLL_S": "0.3",
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "COLUMNS": "100",
        }
        ada = ["setpriv", "--reuid", str(USER_ID), "--regid", str(USER_ID), "--clear-groups", "env", "-i"]
        done = subprocess.run(
            [*entered(self.etc), *ada, *(f"{name}={value}" for name, value in given.items()), *command],
            cwd=self.folder / within,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
        )
        print(f"{self.etc}$ {' '.join(command)}\n{done.stdout}")
        assert (done.returncode != 0) is fails, done.stdout
        return plain(done.stdout)

    def python(self, code: str) -> list[str]:
        begin = "from dlo_lib import cluster\nfrom pathlib import Path\nimport time\n"
        return self.run(sys.executable, "-P", "-c", begin + code)

    def dlo(self, *words: str, fails: bool = False, within: str = "work") -> list[str]:
        return self.run(sys.executable, "-P", "-c", CLI, *words, fails=fails, within=within)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder that Ada can reach: pytest closes its own to other users."""
    made = Path(tempfile.mkdtemp(prefix="dlo-stranger-", dir="/tmp"))
    made.chmod(0o755)
    for name in ("home", "work", "sites"):
        (made / name).mkdir()
    (made / "home").chmod(0o555)
    (made / "sites" / "stranger.toml").write_text(SITE)
    make_checkout(made / "checkout")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("DLO_COURSE", str(made / "checkout"))
        make_class(made / "work" / "course", small_lab())
    for place in ("work", "checkout"):
        subprocess.run(["chown", "-R", "-h", f"{USER_ID}:{USER_ID}", made / place], check=True)
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def clusters(folder: Path) -> Iterator[tuple[User, User]]:
    """Ada at the first cluster, and at the second."""
    if missing := STRANGER.missing():
        pytest.skip(f"NOT TESTED HERE: a real SLURM ({missing})")
    second = replace(NEIGHBOUR, database_of=str(folder / "stranger"))
    with (
        attached(STRANGER, folder / "stranger") as one,
        attached(second, folder / "neighbour") as two,
    ):
        yield User(folder, one.resolve().parent), User(folder, two.resolve().parent)


@pytest.fixture
def ada(clusters: tuple[User, User]) -> User:
    return clusters[0]


TRAINING = """
settings = {"model": "tiny", "data": "arithmetic", "seq": 16, "steps": 4, "log_every": 2, "batch": 2}
job = cluster.submit("dlo_lib.train", settings | {"parallel": "ddp"}, gpus=2, time=5, name="first")
print(job.wait(timeout=600))
print(job.logs(), end="")
while job.usage() is None:
    time.sleep(0.3)
print(job.usage())
cluster.submit("dlo_lib.train", settings | {"parallel": "ddp"}, gpus=2, time=5, name="first")
"""


def test_a_training_on_two_nodes(ada: User) -> None:
    out = "FOLDER/work/dlo/jobs/DIGEST/out/0/checkpoints/step-000004"
    said = ada.python(TRAINING)
    assert said[:5] + sorted(said[5:-1]) + said[-1:] == [  # the lines of two ranks have no order
        "first-HASH: 2 GPUs for at most 5 min: 0.167 GPU hours",
        "submitted job 5001 (first-HASH)",
        "first-HASH on stranger, 2 GPUs, number 5001",
        "element state reason start elapsed settings",
        "0 completed WHEN TIME",
        WELCOME,
        f"0: {WELCOME}",
        f"0: finished at step 4: {out}",
        "0: step 2/4 loss N N tokens/s",
        "0: step 4/4 loss N N tokens/s",
        "0: tiny, 115,072 parameters, ddp on 2 x cpu: steps 1 to 4 of 4 sequences of 16 tokens",
        f"1: {WELCOME}",
        "used N GPU hours",
        "found job 5001 (first-HASH), submitted WHEN",
    ]


CHAIN = """
command = ["bash", "-c", 'until [ -e go ]; do sleep 0.2; done; hostname; [ "$2" != 3 ]', "_"]
sweep = cluster.submit(command, gpus=0, cores=1, sweep={"n": range(13)}, at_once=12, time=5, name="sweep")
last = cluster.submit(["hostname"], gpus=0, after=sweep, after_kind="afterany", time=5, name="last")
never = cluster.submit(["hostname"], gpus=0, after=sweep, time=5, name="never")
while last.status()[0].reason != "Dependency":
    time.sleep(0.3)
print(last)
Path("go").touch()
try:
    sweep.wait(timeout=600)
except cluster.JobFailed as error:
    print(error)
for job in (last, never):
    while not job.done:
        time.sleep(0.3)
    print(job)
print(sweep.logs(12), last.logs(), sep="", end="")
"""


HEAD = "element state reason start elapsed settings"


def test_a_sweep_larger_than_an_array_and_what_waits_for_it(ada: User) -> None:
    assert ada.python(CHAIN) == [
        "sweep-HASH: 13 elements with 1 core for at most 5 min: 1.08 core hours",
        "submitted job N, N (sweep-HASH)",
        "last-HASH: 2 cores for at most 5 min: 0.167 core hours",
        "submitted job N (last-HASH)",
        "never-HASH: 2 cores for at most 5 min: 0.167 core hours",
        "submitted job N (never-HASH)",
        "last-HASH on stranger, no GPU, number N",
        HEAD,
        "0 pending Dependency TIME",
        "Dependency: It waits for another job.",
        "sweep-HASH: element 3 failed with status 1; 1 of 13 did not complete. resubmit() runs it again. "
        "Its last lines of output:",
        WELCOME,
        "NODE.stranger.example.org",
        "",
        "last-HASH on stranger, no GPU, number N",
        HEAD,
        "0 completed WHEN TIME",
        "never-HASH on stranger, no GPU, number N",
        HEAD,
        "0 cancelled the job that it waited for did not complete TIME",
        WELCOME,
        "NODE.stranger.example.org",
        WELCOME,
        "NODE.stranger.example.org",
    ]


def test_the_array_of_graders(ada: User) -> None:
    slurm = ["--slurm", "--array", "2", "--cores", "1", "--time", "10"]
    said = ada.dlo("grade", "91", *slurm, within="work/course")
    graded = sorted(line for line in said if line.startswith(" N s"))
    assert graded == [
        " N s ada 12/12 GRADED",
        " N s blaise SOME/12 GRADED",
        " N s chloe 0/12 NO_ATTEMPT",
        " N s dorothy 12/12 GRADED",
    ]
    assert [line for line in said if line not in graded] == [
        "dlo-grade-91_small-HASH: 2 elements with 1 core for at most 10 min: 0.333 core hours",
        "submitted job N (dlo-grade-91_small-HASH)",
        " 91_small: A small lab for the tests of grading",
        "┏━━━━━━━━━━┳━━━━━━━┳━━━━━┳━━━━━━━━━━━━┳━━━━━━━━━━━━━┓",
        "┃ student ┃ total ┃ max ┃ status ┃ points lost ┃",
        "┡━━━━━━━━━━╇━━━━━━━╇━━━━━╇━━━━━━━━━━━━╇━━━━━━━━━━━━━┩",
        "│ ada │ 12 │ 12 │ GRADED │ │",
        "│ blaise │ SOME │ 12 │ GRADED │ scale SOME │",
        "│ chloe │ 0 │ 12 │ NO_ATTEMPT │ all │",
        "│ dorothy │ 12 │ 12 │ GRADED │ │",
        "│ evariste │ 0 │ 12 │ NO_ATTEMPT │ all │",
        "└──────────┴───────┴─────┴────────────┴─────────────┘",
        "results: grades/91_small",
    ]


SLEEPS = """
job = cluster.submit(["sleep", "600"], gpus=0, time=5, name="sleeper")
while job.state != "running":
    time.sleep(0.3)
"""


TABLE = [
    "job name GPUs number submitted state elapsed settings",
    "HASH first 2 5001 WHEN completed TIME --model tiny -…",
    "HASH sweep 0 N, N WHEN 12 completed, 1 TIME n: 13 values",
    " failed",
    "HASH last 0 N WHEN completed TIME",
    "HASH never 0 N WHEN cancelled TIME",
    "HASH dlo-grade-91_s… 0 N WHEN 2 completed TIME element=0,1",
    "HASH sleeper 0 N WHEN cancelled TIME",
]


def test_a_cancelled_job_and_the_cluster_beside(clusters: tuple[User, User]) -> None:
    """After the other tests, whose jobs are in the tables."""
    ada, beside = clusters
    assert ada.python(SLEEPS) == [
        "sleeper-HASH: 2 cores for at most 5 min: 0.167 core hours",
        "submitted job N (sleeper-HASH)",
    ]
    assert ada.dlo("jobs", "cancel", "sleeper") == ["sleeper-HASH is cancelled"]
    assert ada.dlo("jobs", "cancel", "sleeper") == ["sleeper-HASH has already ended: cancelled"]
    assert ada.dlo("jobs", "show", "sleeper")[:14] == [
        "sleeper-HASH on stranger, no GPU, number N",
        HEAD,
        "0 cancelled WHEN TIME",
        "used N hours without GPUs",
        "files: FOLDER/work/dlo/jobs/DIGEST",
        "",
        "#!/usr/bin/env bash",
        "#SBATCH --job-name=sleeper-HASH # the name in squeue",
        "#SBATCH --nodes=1 # of one process",
        "#SBATCH --ntasks-per-node=1 # one process",
        "#SBATCH --cpus-per-task=2 # cores of a process",
        "#SBATCH --time=00:05:00 # a short job starts earlier, because it fits into gaps",
        "#SBATCH --open-mode=append # a job that SLURM starts again keeps its output",
        "#SBATCH --output=FOLDER/work/dlo/jobs/DIGEST/logs/0.out # its output, including errors",
    ]
    assert beside.python(SLEEPS.replace("sleeper", "there").replace("600", "601"))[-1] == (
        "submitted job 5001 (there-HASH)"
    ), "both clusters have given this number"
    assert ada.dlo("jobs") == [
        *TABLE,
        "HASH there 0 5001 WHEN unknown",
        "HASH: it is a job of the cluster neighbour: ask there",
    ]
    # The ends that the first cluster has told are recorded.
    assert beside.dlo("jobs") == [*TABLE, "HASH there 0 5001 WHEN running TIME"]
    assert ada.dlo("jobs", "cancel", "there", fails=True) == [
        "dlo: there-HASH runs on the cluster neighbour: use the commands there"
    ]
    assert beside.dlo("jobs", "cancel", "there") == ["there-HASH is cancelled"]
    both = beside.run("sacct", "-nPX", "-M", "stranger,neighbour", "-j", "5001", "-o", "Cluster,JobName")
    assert both == ["stranger|first-HASH", "neighbour|there-HASH"]
    assert ada.python('print(cluster.job("first").usage())') == ["used N GPU hours"]
