"""The job scripts of slurm/: a cluster accepts them unchanged, and they train on virtual nodes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlo_lib.cluster.script import ready_made
from dlo_lib.cluster.slurm import commands
from dlo_lib.cluster.slurm.states import State
from dlo_lib.train import newest, read_metrics

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "slurm"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.sbatch"))
SMALL = [
    "--model",
    "tiny",
    "--data",
    "arithmetic",
    "--seq",
    "32",
    "--batch",
    "2",
    "--steps",
    "2",
    "--log-every",
    "1",
]
NODES = {  # the options for other nodes, from the head of each script
    "v100": ["--account=abc@v100"],
    "a100": ["--constraint=a100", "--cpus-per-task=8", "--account=abc@a100", "--nodes=1"],
    "h100": ["--constraint=h100", "--cpus-per-task=24", "--account=abc@h100", "--nodes=1"],
    "8 v100": ["--partition=gpu_p2", "--cpus-per-task=3", "--account=abc@v100", "--nodes=1"],
}


@pytest.fixture
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for submissions, with an environment to activate."""
    activate = tmp_path / "env" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text(f'export PATH="{Path(sys.executable).parent}:$PATH"\n')
    monkeypatch.setenv("DLO_ENV", str(tmp_path / "env"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sbatch(*words: str) -> int:
    done = subprocess.run(["sbatch", "--parsable", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def states_of(jobs: list[int]) -> list[State]:
    return [row.state for job in jobs for row in commands.queue(job).values()]


def until_over(jobs: list[int], folder: Path) -> None:
    """Poll the queue until all jobs have completed."""
    begun = time.monotonic()
    while not all(state.over for state in states_of(jobs)):
        assert time.monotonic() - begun < 300, printed(folder)
        time.sleep(0.3)
    assert set(states_of(jobs)) == {State.COMPLETED}, printed(folder)


def printed(folder: Path) -> str:
    return "".join(f"== {path.name}\n{path.read_text()}\n" for path in sorted(folder.glob("*.out")))


def test_the_scripts_equal_the_output_of_the_template():
    written = {name: (FOLDER / name).read_text(encoding="utf-8") for name in SCRIPTS}
    assert written == ready_made.scripts(), "run python -m dlo_lib.cluster.script.ready_made slurm"


CENTRE = """
title = "nodes without GPUs"
scheduler = "slurm"
gpus_per_node = 0
cores_per_gpu = 4
cores_per_node = 16
partition = "cpu"
options = { mem = "8G" }
"""


def test_the_scripts_for_another_site_have_its_options(tmp_path):
    (tmp_path / "centre.toml").write_text(CENTRE)
    ready_made.main(str(tmp_path), str(tmp_path / "centre.toml"))
    written = {name: (tmp_path / name).read_text(encoding="utf-8") for name in SCRIPTS}
    for text in written.values():
        assert "#SBATCH --partition=cpu " in text
        assert "#SBATCH --mem=8G " in text
        assert "# For nodes without GPUs.\n" in text
        assert not any(word in text for word in ("--gres", "--hint", "Jean Zay", "SLURM_GPUS_ON_NODE"))
    assert "--ntasks-per-node=4 " in written["one_node.sbatch"]
    assert '--nproc-per-node="4"' in written["torchrun.sbatch"]


@pytest.mark.parametrize("name", [*SCRIPTS, "chain.sh"])
def test_bash_and_shellcheck_accept_each(name):
    assert subprocess.run(["bash", "-n", FOLDER / name], capture_output=True, text=True).stderr == ""
    if shutil.which("shellcheck"):
        assert (
            subprocess.run(
                ["shellcheck", "--exclude=SC1091", FOLDER / name], capture_output=True, text=True
            ).stdout
            == ""
        )
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert "\nset -euo pipefail\n" in text
    assert not re.search(r"/home/|/root/|/work/|/linkhome|/gpfs", text), "no personal paths"


@pytest.mark.parametrize("nodes", NODES)
def test_a_cluster_with_the_names_of_jean_zay_accepts_each_script_unchanged(jean_zay, nodes):
    for name in SCRIPTS:
        done = subprocess.run(
            ["sbatch", "--test-only", *NODES[nodes], FOLDER / name], capture_output=True, text=True
        )
        assert done.returncode == 0, f"{name}: {done.stderr}"


def test_another_cluster_accepts_each_script_with_another_partition_and_nodes(elsewhere):
    own = ["--partition=training", "--gres=gpu:2", "--cpus-per-task=8"]
    for name in SCRIPTS:
        done = subprocess.run(["sbatch", "--test-only", *own, FOLDER / name], capture_output=True, text=True)
        assert done.returncode == 0, f"{name}: {done.stderr}"


@pytest.mark.slow
def test_each_script_trains_on_virtual_nodes(jean_zay, warm_python, at_home):
    two = ["--ntasks-per-node=2", "--gres=gpu:2"]
    one = ["--ntasks-per-node=1", "--gres=gpu:1"]
    ddp = ["--parallel", "ddp"]
    account = "--account=abc@v100"
    runs = {  # the test of the chain trains train.sbatch
        "one_node": (two, [*SMALL, *ddp]),
        "many_nodes": (one, [*SMALL, *ddp]),
        "torchrun": (one, [*SMALL, *ddp]),
        "requeue": (one, [*SMALL, "--resume"]),
    }
    jobs = [
        sbatch(account, *options, str(FOLDER / f"{name}.sbatch"), *words, "--out", f"out/{name}")
        for name, (options, words) in runs.items()
    ]
    sweep = sbatch(account, "--array=0,3", str(FOLDER / "sweep.sbatch"), *SMALL)
    until_over([*jobs, sweep], at_home)
    for name, (options, _) in runs.items():
        assert [line.step for line in read_metrics(at_home / "out" / name)] == [1, 2], name
        nodes = 2 if name in ("many_nodes", "torchrun") else 1
        assert newest(at_home / "out" / name).world_size == (2 if options is two else nodes)
    rates = {
        element: newest(at_home / f"runs/sweep-{sweep}" / element).config["lr"] for element in ("0", "3")
    }
    assert rates == {"0": 3e-4, "3": 1e-2}


@pytest.mark.slow
def test_a_chain_runs_its_links_in_order(jean_zay, warm_python, at_home):
    words = ["--account=abc@v100", str(FOLDER / "train.sbatch"), *SMALL, "--resume", "--out", "out"]
    done = subprocess.run([FOLDER / "chain.sh", "2", *words], capture_output=True, text=True)
    first, second = map(int, done.stdout.split())
    assert commands.queue(second)[0].state is State.PENDING
    assert commands.queue(second)[0].reason == "Dependency"
    until_over([first, second], at_home)
    assert "finished at step 2" in (at_home / f"train-{first}.out").read_text()
    assert [line.step for line in read_metrics(at_home / "out")] == [1, 2]


def test_a_chain_without_a_length_prints_its_usage():
    done = subprocess.run(
        [FOLDER / "chain.sh", "two"],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")
