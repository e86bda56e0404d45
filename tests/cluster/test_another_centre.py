"""A centre unlike Jean Zay: other partitions, typed GPUs, no hint, no accounting, no locks; and submitit."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from filelock import FileLock, SoftFileLock

from dlo_lib import cluster
from dlo_lib.errors import UserError
from dlo_lib.locks import file_lock
from dlo_lib.train import read_metrics
from tests.cluster.fixtures import OTHER_SITE

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
    assert job.wait(timeout=90).logs().splitlines() == [
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
    job.wait(timeout=90)
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
    job.wait(timeout=90)
    assert [job.logs(rank=rank) for rank in range(2)] == ["yes 0\n", "yes 1\n"]
    binds = f"--bind {tmp_path} --bind {job.folder} /images/torch.sif python {job.folder}/code/"
    for rank in range(2):
        assert f"apptainer exec --nv {binds}" in (runtime.parent / f"called.{rank}").read_text()


def test_a_sweep_waits_element_by_element_and_a_job_for_any_end(centre):
    first = cluster.submit(["bash", "-c", 'exit "$1"'], sweep={"code": [0, 3]}, site=centre, time=5)
    each = cluster.submit(["true"], sweep={"n": [0, 1]}, site=centre, after=first, after_kind="aftercorr")
    last = cluster.submit(["true"], site=centre, time=5, after=first, after_kind="afterany", name="last")
    last.wait(timeout=90)
    assert "--kill-on-invalid-dep" not in first.script
    with pytest.raises(cluster.JobFailed, match="element 1 cancelled"):
        each.wait(timeout=90)
    assert each.state == "1 completed, 1 cancelled"


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
