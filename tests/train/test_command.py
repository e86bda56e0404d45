"""``python -m dlo_lib.train`` started alone, under torchrun and under srun."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import select
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dlo_lib.base.errors import UserError
from dlo_lib.base.stop import EXIT_STOPPED
from dlo_lib.comm.deadlock.node import EXIT_STUCK
from dlo_lib.grading.sandbox.limits import descendants
from dlo_lib.launch import place
from dlo_lib.launch.place import FIRST_PORT, PORTS
from dlo_lib.train import TrainConfig, loop, read_metrics
from dlo_lib.train.__main__ import _script_knows, main, parse

COMMAND = [sys.executable, "-m", "dlo_lib.train"]
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def not_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name in LAUNCHER_VARIABLES or name.startswith("SLURM_")]:
        monkeypatch.delenv(name)


def options(config: TrainConfig) -> list[str]:
    """Return the command line of a configuration."""
    return [
        part for name, value in config.plain().items() if value is not False for part in _option(name, value)
    ]


def _option(name: str, value: object) -> list[str]:
    flag = "--" + name.replace("_", "-")
    return [flag] if value is True else [flag, str(value)]


def start(command: list[str], **variables: str) -> subprocess.Popen:
    return subprocess.Popen(
        command, env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def free_port() -> int:
    """Return a port that no program takes by chance: below those that the system gives to clients."""
    while True:
        port = secrets.choice(range(FIRST_PORT, FIRST_PORT + PORTS))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def test_every_option_is_on_the_command_line(small_run):
    config = small_run(
        parallel="ddp", precision="fp16", optimizer_step="for-loop", checkpointing=True, clip=0.5,
        accumulation=3, seed=4, weight_decay=0.0, resume=True, keep=1, checkpoint_every=7,
    )  # fmt: skip
    assert parse(options(config)) == config
    assert parse([]) == TrainConfig()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--precision", "fp8"], 'unknown precision "fp8": '),
        (["--bath", "2"], "No such option: --bath"),
        (["--batch", "two"], "Invalid value for '--batch'"),
        (["--batch", "0"], "batch is 0: use at least 1"),
        (["--lr", "0"], "lr is 0.0: use a number above 0, such as 1e-3"),
        (["--model", "llama-3.2-3"], 'unknown model "llama-3.2-3": did you mean llama-3.2-3b'),
        (["--data", "pithon"], 'unknown data set "pithon": did you mean python'),
        (["--seq", "100000"], "seq is 100000: tiny has 1024 positions"),
        (
            ["--batch", "100000000"],
            "one micro-batch on every rank takes 100000000 (1 x 100000000): use a smaller batch",
        ),
    ],
)
def test_bad_input_is_one_line_with_the_cure_and_status_2(arguments, says, tmp_path, capfd):
    out = tmp_path / "run"
    assert main(["--data", "arithmetic", "--out", str(out), *arguments]) == 2
    captured = capfd.readouterr()
    assert says in captured.err
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("dlo_lib.train: ")
    assert not out.exists(), "nothing is written before all options are checked"


def test_an_inconsistent_environment_is_one_line(monkeypatch, capfd):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([]) == 2
    error = capfd.readouterr().err
    assert error.startswith("dlo_lib.train: RANK and WORLD_SIZE are set but MASTER_PORT is not")
    assert error.count("\n") == 1


def test_python_raises_the_error_of_the_command_line():
    with pytest.raises(UserError, match='unknown precision "fp8"'):
        TrainConfig(precision="fp8")


def test_help_lists_every_option(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all("--" + name.replace("_", "-") in shown for name in TrainConfig().plain())


def test_sigterm_ends_the_command_with_a_checkpoint_and_status_75(small_run):
    config = small_run(steps=100_000)
    process = start([*COMMAND, *options(config)])
    while "step 3/" not in process.stdout.readline():
        assert process.poll() is None, process.stderr.read()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == EXIT_STOPPED == 75, err
    last = read_metrics(config.out)[-1].step
    assert (
        f"stopped by SIGTERM after step {last}: {config.out}/checkpoints/step-{last:06d}; "
        "continue with the same command and --resume" in out
    )


SIGNAL_DURING_IMPORT = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGUSR1)

sys.meta_path.insert(0, Finder())
"""


def test_a_signal_during_the_imports_is_not_lost(small_run, tmp_path):
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "sitecustomize.py").write_text(SIGNAL_DURING_IMPORT)
    config = small_run(steps=100_000)
    progress = tmp_path / "progress"
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([str(tmp_path / "early"), root])
    process = start([*COMMAND, *options(config)], PYTHONPATH=path, DLO_PROGRESS=str(progress))
    out, err = process.communicate(timeout=120)
    assert process.returncode == EXIT_STOPPED, err
    assert "stopped by SIGUSR1 after step 1:" in out
    assert progress.read_text() == "1 100000 stopped\n"


SIGNAL_AT_THE_END = """
import os, signal, sys

class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGUSR1):
        kill(pid, number)  # while Python removes its modules, after it has restored the actions of signals

sys.late = Late()
"""


def test_a_signal_while_python_ends_does_not_change_the_status(tmp_path):
    """SLURM's warning before the time limit may arrive after the last step of a run."""
    (tmp_path / "sitecustomize.py").write_text(SIGNAL_AT_THE_END)
    root = str(Path(__file__).resolve().parents[2])
    process = start([*COMMAND, "--help"], PYTHONPATH=os.pathsep.join([str(tmp_path), root]))
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err


def test_in_a_job_script_the_ranks_of_a_launcher_stop_with_status_0(monkeypatch):
    """srun prints six lines of alarm about a rank with another status; the script reads $DLO_PROGRESS."""
    here = place()
    by_srun = replace(here, launcher="slurm")
    monkeypatch.setenv("DLO_PROGRESS", "progress")
    assert not _script_knows(by_srun)  # a script of the user reads the status
    monkeypatch.setenv("DLO_PROGRESS_DECIDES", "1")
    assert _script_knows(by_srun)
    assert not _script_knows(here)  # the status of a single process is its own


def test_ranks_end_when_torchrun_is_killed(small_run):
    config = small_run(parallel="ddp", steps=100_000, checkpoint_every=0)
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "dlo_lib.train",
    ]
    process = start([*torchrun, *options(config)])
    assert process.stdout is not None
    for line in process.stdout:
        if "ddp on 2 x cpu" in line:
            break
    ranks = [os.pidfd_open(pid) for pid in descendants(process.pid)]
    assert len(ranks) >= 2
    process.kill()
    process.communicate(timeout=60)
    for rank in ranks:
        assert select.select([rank], [], [], 60)[0], "the rank is still running"
        os.close(rank)


def under_srun(port: int, arguments: list[str]) -> list[subprocess.Popen]:
    """Start two ranks with the variables of SLURM."""
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "2",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NODELIST": "localhost",
        "SLURM_NNODES": "1",
    }
    slurm |= {
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_TASKS_PER_NODE": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_NUM_NODES": "1",
    }
    slurm |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        start([*COMMAND, *arguments], SLURM_PROCID=rank, SLURM_LOCALID=rank, **slurm) for rank in ("0", "1")
    ]


def ended(ranks: list[subprocess.Popen]) -> list[str]:
    """Wait for the ranks, end those that do not end, and return what each wrote to stderr."""
    try:
        return [rank.communicate(timeout=240)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def test_under_srun_bad_input_is_one_line_from_one_rank_and_status_2_everywhere(small_run):
    config = small_run(steps=2)  # --parallel none
    ranks = under_srun(free_port(), options(config))
    errors = "".join(ended(ranks))
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert errors == (
        "dlo_lib.train: parallel none trains on one rank, this job has 2: "
        "use --parallel ddp, or start one rank\n"
    )
    assert not Path(config.out).exists()


def test_under_srun_a_port_in_use_is_one_line_and_no_rank_waits(small_run):
    """Only rank 0 knows the reason; what watches the machine's ranks ends the others."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ranks = under_srun(port, options(small_run(steps=2, parallel="ddp")))
        errors = "".join(ended(ranks))
    assert [rank.returncode for rank in ranks] == [2, EXIT_STUCK], errors
    assert f"dlo_lib.train: port {port} of 127.0.0.1 is in use: set MASTER_PORT to a free one\n" in errors
    assert "RANK 0 raised an error, shown above." in errors


def test_a_full_gpu_is_one_line_with_its_cure(small_run, monkeypatch, capfd):
    def train_step(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(loop, "train_step", train_step)
    assert main(options(small_run())) == 2
    says = (
        "the GPU of rank 0 is full in step 1: "
        "use a smaller --batch with more --accumulation, or --checkpointing"
    )
    assert capfd.readouterr().err == f"dlo_lib.train: {says}\n"


LOGS_ON_ONE_RANK = """
import sys
import torch
import torch.distributed as dist
from dlo_lib.launch import place
from dlo_lib.train import loop
from dlo_lib.train.__main__ import main

real, steps = loop.train_step, 0

def and_logs(*arguments, **keywords):
    global steps
    steps += 1
    if steps == 3 and place().rank == 1:
        dist.all_reduce(torch.ones(1))
    return real(*arguments, **keywords)

loop.train_step = and_logs
sys.exit(main(sys.argv[1:]))
"""


def test_a_dead_lock_is_explained_with_the_stacks_of_the_ranks_and_ends(small_run, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(LOGS_ON_ONE_RANK)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(program),
        "--explain",
    ]
    done = subprocess.run(
        [*command, *options(small_run(parallel="ddp"))], capture_output=True, text=True, timeout=120
    )
    assert "exitcode  : 3" in done.stderr
    assert done.stderr.count("DEADLOCK") + done.stderr.count("MISMATCH") == 1
    assert re.search(
        r"rank 1 +all_reduce of float32\[1\]\n +program.py, line \d+: dist.all_reduce\(torch.ones\(1\)\)",
        done.stderr,
    )
    assert all(f"rank {rank} is here (most recent call last):" in done.stderr for rank in range(2))
