"""A centre unlike Jean Zay: other partitions, typed GPUs, no hint, no accounting, no locks; and submitit."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from filelock import FileLock, SoftFileLock

from dlo_lib import cluster
from dlo_lib.base.errors import UserError
from dlo_lib.base.locks import file_lock
from dlo_lib.cli import grade_slurm
from dlo_lib.cluster.slurm import commands
from dlo_lib.train import read_metrics
from tests.cluster.fixtures import OTHER_SITE
from tests.cluster.virtual_slurm import Cluster, Nodes, attached

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def centre(elsewhere: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file of a site with a type of GPU, options, lines of setup and an initialisation of modules."""
    monkeypatch.setenv("DLO_POLL_S", "0.3")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("BASH_FUNC_module%%")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "init.sh").write_text('module() { echo "module $*"; }\n')
    file = tmp_path / "centre.toml"
    file.write_text(
        f'gpu_type = "a100"\nmodules = ["gcc/12"]\nmodules_init = "{tmp_path}/init.sh"\n'
        'options = { mem = "2G", comment = "of the site", hold = false }\n'
        f'setup = ["export OF_SITE=1"]\n{OTHER_SITE}'
    )
    return file


def test_a_job_has_the_type_the_options_and_the_software_of_its_centre(centre):
    command = 'echo "$SLURM_JOB_PARTITION $CUDA_VISIBLE_DEVICES $OF_SITE $MINE"'
    asked = {"gpus": 2, "site": centre, "time": 5, "setup": ["export MINE=2"]}
    job = cluster.submit(["bash", "-c", command], options={"nice": 3, "comment": "mine"}, **asked)
    assert job.wait(timeout=600).logs().splitlines() == [
        "module purge", "module load gcc/12", "training 0,1 1 2"
    ]  # fmt: skip
    number = str(job.record.turns[0].number)
    shown = subprocess.run(
        ["scontrol", "show", "job", number], capture_output=True, text=True, check=True
    ).stdout
    for part in ("gpu:a100:2", "MinMemoryNode=2G", "Nice=3", "Comment=mine", "Partition=training"):
        assert part in shown
    with pytest.raises(UserError, match="SLURM refuses the job: .*"):  # there is no such type
        wrong = centre.with_name("wrong.toml")
        wrong.write_text(centre.read_text().replace('gpu_type = "a100"', 'gpu_type = "h100"'))
        cluster.submit(["true"], site=wrong, time=5)


def test_ranks_without_gpus_and_the_output_of_each(centre):
    asked = {"ranks": 4, "nodes": 2, "cores": 1, "site": centre, "time": 5}
    Path("program.py").write_text("import os\nprint('task', os.environ['SLURM_PROCID'])\n")
    job = cluster.submit("program.py", **asked)
    job.wait(timeout=600)
    assert [job.logs(rank=rank) for rank in range(4)] == [f"task {rank}\n" for rank in range(4)]


APPTAINER = """#!/bin/bash
set -eu
[ "$1" = exec ]
echo "apptainer $*" > "$(dirname "$0")/called.${SLURM_PROCID:-none}"
while [ "$1" != /images/torch.sif ]; do shift; done
shift
IN_IMAGE=yes exec "$@"
"""


def test_each_rank_runs_in_the_container_of_the_site(centre, tmp_path, monkeypatch):
    runtime = tmp_path / "bin" / "apptainer"
    runtime.parent.mkdir()
    runtime.write_text(APPTAINER)
    runtime.chmod(0o755)
    monkeypatch.setenv("PATH", str(runtime.parent), prepend=os.pathsep)
    centre.write_text('container = "/images/torch.sif"\n' + centre.read_text())
    Path("program.py").write_text("import os\nprint(os.environ['IN_IMAGE'], os.environ['SLURM_PROCID'])\n")
    job = cluster.submit("program.py", gpus=2, site=centre, time=5)
    job.wait(timeout=600)
    assert [job.logs(rank=rank) for rank in range(2)] == ["yes 0\n", "yes 1\n"]
    library = job.folder.parents[1] / "library"
    binds = f"--bind {tmp_path} --bind {job.folder} --bind {library} /images/torch.sif "
    binds += f"python {job.folder}/code/"
    for rank in range(2):
        assert f"apptainer exec --nv {binds}" in (runtime.parent / f"called.{rank}").read_text()


def test_a_sweep_waits_element_by_element_and_a_job_for_any_end(centre):
    first = cluster.submit(["bash", "-c", 'exit "$1"'], sweep={"code": [0, 3]}, site=centre, time=5)
    each = cluster.submit(["true"], sweep={"n": [0, 1]}, site=centre, after=first, after_kind="aftercorr")
    last = cluster.submit(["true"], site=centre, time=5, after=first, after_kind="afterany", name="last")
    last.wait(timeout=600)
    assert "--kill-on-invalid-dep" not in first.script
    with pytest.raises(cluster.JobFailed, match="element 1 cancelled"):
        each.wait(timeout=600)
    assert each.state == "1 completed, 1 cancelled"


def test_a_time_that_no_partition_allows_is_shown_and_limits_the_default_of_the_graders(centre, capsys):
    assert commands.longest_time("debug") == timedelta(minutes=30)
    assert commands.longest_time("debug,training") == commands.longest_time("") == timedelta(days=1)
    assert commands.longest_time("no-such-partition") is None
    asked = {"gpus": 1, "site": centre, "dry_run": True}
    cluster.submit(["true"], time="1:00:00", partition="debug", **asked)
    said = "partition debug allows 30 min, and the job asks for 1 h: SLURM may accept it and never start it"
    assert said in capsys.readouterr().out
    cluster.submit(["true"], time="1:00:00", partition=["debug", "training"], **asked)
    assert "allows" not in capsys.readouterr().out
    where = cluster.site(centre)
    assert grade_slurm._longest(where) == grade_slurm.TIME
    assert grade_slurm._longest(replace(where, partition="debug")) == timedelta(minutes=30)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_flock_a_lock_is_a_file(number, monkeypatch, tmp_path):
    def refuse(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    assert type(file_lock(tmp_path / "a")) is FileLock
    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setenv("DLO_SITE", "local")
    monkeypatch.chdir(tmp_path)
    assert isinstance(file_lock(tmp_path / "b"), SoftFileLock)
    inside, overlaps = [], []

    def enter() -> None:
        with file_lock(tmp_path / "b"):
            overlaps.extend(inside)
            inside.append(1)
            inside.pop()

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert overlaps == []
    job = cluster.submit(["true"], dry_run=False)
    assert job.folder.exists()
    assert not (job.folder / "lock.held").exists()
    job.cancel()


SUBMITIT = """
import submitit
from dlo_lib.train import TrainConfig, train

executor = submitit.AutoExecutor(folder="submitit")
executor.update_parameters(nodes=2, tasks_per_node=1, slurm_gres="gpu:1", cpus_per_task=1, timeout_min=5)
config = TrainConfig(model="tiny", data="arithmetic", seq=16, steps=3, log_every=1, warmup=1,
                     parallel="ddp", batch=2, out="run", resume=True)
job = executor.submit(train, config)
print([result.step for result in job.results()])
"""


def test_submitit_starts_the_training_on_two_nodes(elsewhere, monkeypatch, tmp_path):
    pytest.importorskip("submitit")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SUBMITIT],
        capture_output=True, text=True, env=environment, timeout=300,
    )  # fmt: skip
    logs = "".join(log.read_text() for log in Path("submitit").glob("*.err"))
    assert done.stdout.splitlines()[-1:] == ["[3, 3]"], done.stderr + logs
    assert [line.step for line in read_metrics(Path("run"))] == [1, 2, 3]


STRANGER = Cluster(
    name="stranger",
    nodes=(Nodes("node", 2, cores=8, gpus=0, features="any"),),
    partitions={"day": (("node",), "1-00:00:00"), "night": (("node",), "2-00:00:00")},
    conf=("GresTypes=", "JobRequeue=0", "MaxArraySize=11"),
)
STRANGER_SITE = """
title = "GPUs that SLURM does not know"
scheduler = "slurm"
gpus_per_node = 2
cores_per_gpu = 4
gpu_option = "none"
options = { cpus-per-task = false }
srun = { wait = 60 }
environment = { OMP_NUM_THREADS = "1" }
"""


@pytest.fixture(scope="module")
def stranger_conf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The slurm.conf of a cluster without GRES, without requeues, and with arrays of at most 11 elements."""
    if missing := STRANGER.missing():
        pytest.skip(f"NOT TESTED HERE: a real SLURM ({missing})")
    with attached(STRANGER, tmp_path_factory.mktemp("stranger")) as conf:
        yield conf


@pytest.fixture
def stranger(stranger_conf: Path, log_in, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file of the site of that cluster."""
    log_in(stranger_conf)
    monkeypatch.setenv("DLO_POLL_S", "0.3")
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "stranger.toml"
    file.write_text(STRANGER_SITE)
    return file


def place_of_rank() -> tuple[str, str, str]:
    import torch.distributed as dist

    names: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(names, os.environ["SLURMD_NODENAME"])
    return os.environ["SLURM_JOB_PARTITION"], os.environ["MINE"], ",".join(map(str, names))


def test_ranks_on_nodes_without_gres_with_the_partition_and_the_variables_of_the_call(stranger):
    wanted = {"gpus": 4, "site": stranger, "time": 5, "partition": ["night", "day"]}
    job = cluster.submit(place_of_rank, env={"MINE": "it's #1"}, srun={"unbuffered": True}, **wanted)
    assert "--gres" not in job.script
    assert 'srun --kill-on-bad-exit=1 --label --wait="60" --unbuffered ' in job.script
    partition, mine, names = job.wait(timeout=600).result()
    assert (mine, names) == ("it's #1", "node1,node1,node2,node2")
    assert set(partition.split(",")) <= {"night", "day"}
    with pytest.raises(UserError, match='unknown partition "nigth": did you mean night'):
        cluster.submit(["true"], gpus=0, site=stranger, time=5, partition="nigth,day")


def test_a_sweep_larger_than_an_array_is_one_job_in_parts(stranger, capsys):
    command = ["bash", "-c", 'echo "element $DLO_ELEMENT of $2"; [ "$2" != 20 ] || exit 3', "_"]
    asked = {
        "gpus": 0,
        "site": stranger,
        "time": 5,
        "sweep": {"n": range(25)},
    }
    cluster.submit(command, dry_run=True, **asked)
    assert "refuse" not in capsys.readouterr().out
    job = cluster.submit(command, **asked)
    numbers = [turn.number for turn in job.record.turns]
    assert [turn.elements for turn in job.record.turns] == [
        tuple(range(11)), tuple(range(11, 22)), tuple(range(22, 25))
    ]  # fmt: skip
    assert cluster.submit(command, **asked).record.turns == job.record.turns
    with pytest.raises(cluster.JobFailed, match="element 20 failed"):
        job.wait(timeout=600)
    assert [job.logs(element) for element in (0, 10, 11, 24)] == [
        f"element {number} of {number}\n" for number in (0, 10, 11, 24)
    ]
    assert job.state == "24 completed, 1 failed"
    job.resubmit()
    assert [turn.elements for turn in job.record.turns[3:]] == [(20,)]
    assert job.record.turns[3].number not in numbers
    with pytest.raises(cluster.JobFailed, match="element 20 failed"):
        job.wait(timeout=600)
    assert job.logs(20).count("element 20 of 20\n") == 2


def test_an_element_of_a_later_part_is_cancelled_alone(stranger):
    command = ["sleep", "60"]
    asked = {"gpus": 0, "site": stranger, "time": 5, "sweep": [{"n": number} for number in range(13)]}
    job = cluster.submit(command, at_once=2, options={"hold": True}, **asked)
    assert "#SBATCH --array=0-12%2 " in job.script
    job.cancel(12)
    assert job.state == "12 pending, 1 cancelled"
    assert job.status()[12].state is cluster.State.CANCELLED
    job.cancel()
    assert job.state == "13 cancelled"


def test_where_jobs_are_not_requeued_an_array_may_ask_for_it(stranger):
    """The elements of the graders' array are sent again after a preemption, which JobRequeue=0 forbids."""
    job = {}
    for asked in (False, True):
        options = {"requeue": asked}
        job[asked] = cluster.submit(["sleep", "60"], gpus=0, site=stranger, time=5, options=options)
        while job[asked].state != "running":
            assert not job[asked].done
            time.sleep(0.1)
    with pytest.raises(UserError, match="SLURM does not requeue"):
        job[False].requeue(0)
    job[True].requeue(0)
    assert job[True].state in ("pending", "running")
    for one in job.values():
        one.cancel()


def test_a_part_that_slurm_refuses_is_submitted_later(stranger, monkeypatch, capsys):
    submit, refused = commands.submit, [1]

    def once(script, *words, arguments=()):
        if refused and any(word.startswith("--output=") for word in words):
            refused.pop()
            raise UserError("SLURM refuses the job: too many jobs")
        return submit(script, *words, arguments=arguments)

    monkeypatch.setattr(commands, "submit", once)
    asked = {"gpus": 0, "site": stranger, "time": 5, "sweep": {"n": range(24)}}
    job = cluster.submit(["true"], **asked)
    assert "SLURM accepts 11 of 24 elements (SLURM refuses the job: too many jobs)" in capsys.readouterr().out
    with pytest.raises(cluster.JobFailed):
        job.wait(timeout=600)
    assert job.state == "11 completed, 13 lost"
    job.resubmit()
    job.wait(timeout=600)
    assert job.state == "24 completed"
