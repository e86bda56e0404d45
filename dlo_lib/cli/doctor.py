"""`dlo doctor`: check the installation and show a cure for each missing part."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from dlo_lib.base.errors import UserError
from dlo_lib.base.files import open_to_others, state_dir
from dlo_lib.base.torch_version import OLDEST, cure, release
from dlo_lib.cli.diagnosis import Diagnosis
from dlo_lib.cli.doctor_cluster import examine_cluster
from dlo_lib.cli.doctor_packages import (
    NEWEST_PYTHON,
    NEWEST_TORCH,
    OLDEST_PYTHON,
    dotted,
    examine_packages,
)
from dlo_lib.cli.jupyter import free_port
from dlo_lib.cli.private import ipython_folder, nbgrader_cache
from dlo_lib.cli.workspace import work_dir
from dlo_lib.cluster.slurm import commands

OLDEST_NBGRADER = "0.9.5"
_ANSWER_S = 20
JUPYTER = ("jupyterlab", "notebook", "nbclient", "jupytext", "ipykernel", "matplotlib", "tensorboard")


def examine() -> list[Diagnosis]:
    """Check this machine. The only change is that a missing state folder is created."""
    more: list[Callable[[], Diagnosis]] = [_slurm, _sandbox, _port, _private]
    of_course = [_course()] if in_a_course() else []
    return [*examine_for_labs(), *(look() for look in more), *examine_cluster(), *of_course]


def examine_for_labs() -> list[Diagnosis]:
    """Check what the labs need on this machine: the required parts, and the GPU."""
    packages: list[Callable[[], Diagnosis]] = [_python, _torch, _gpu, _jupyter, _nbgrader]
    machine: list[Callable[[], Diagnosis]] = [_ranks, _disk]
    return [*(look() for look in packages), *examine_packages(), *(look() for look in machine)]


def _python() -> Diagnosis:
    ok = OLDEST_PYTHON <= sys.version_info[:2] <= NEWEST_PYTHON
    promised = f"{dotted(OLDEST_PYTHON)} to {dotted(NEWEST_PYTHON)}"
    here = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    found = f"{here} (promised: {promised})"
    return Diagnosis("python", ok, found, "" if ok else f"use Python {promised}", required=True)


def _torch() -> Diagnosis:
    try:
        import torch
    except ImportError as error:
        return Diagnosis(
            "torch",
            False,
            str(error),
            "run `make lab`, or pip install -c constraints.txt torch",
            required=True,
        )
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    ok = release(torch.__version__) >= OLDEST
    found = f"{torch.__version__}, {build} (tried: {dotted(OLDEST)} to {dotted(NEWEST_TORCH)})"
    return Diagnosis("torch", ok, found, "" if ok else cure(), required=True)


def _gpu() -> Diagnosis:
    import torch

    count = torch.cuda.device_count()
    if count:
        names = sorted({torch.cuda.get_device_name(index) for index in range(count)})
        return Diagnosis("gpu", True, f"{count} × {', '.join(names)}")
    if shutil.which("nvidia-smi"):
        return Diagnosis(
            "gpu",
            False,
            "nvidia-smi exists, but torch sees no GPU",
            "install the CUDA build: make lab TORCH=cuda",
        )
    return Diagnosis(
        "gpu",
        False,
        "none: the labs run on the CPU",
        "nothing to do; on a cluster, submit the jobs of the labs",
    )


def _jupyter() -> Diagnosis:
    found, missing = [], []
    for package in JUPYTER:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    cure = f"run `make lab`, or pip install -c constraints.txt {' '.join(missing)}" if missing else ""
    return Diagnosis("jupyter", not missing, ", ".join(found) or "nothing", cure, required=True)


def _nbgrader() -> Diagnosis:
    promised = f"promised: {OLDEST_NBGRADER} or newer"
    try:
        version = importlib.metadata.version("nbgrader")
    except importlib.metadata.PackageNotFoundError:
        return Diagnosis(
            "nbgrader",
            False,
            f"none ({promised})",
            "run `make lab`, or pip install -c constraints.txt nbgrader",
            required=True,
        )
    ok = [int(part) for part in re.findall(r"\d+", version)[:3]] >= [
        int(part) for part in OLDEST_NBGRADER.split(".")
    ]
    return Diagnosis(
        "nbgrader",
        ok,
        f"{version} ({promised})",
        "" if ok else "pip install -c constraints.txt nbgrader",
        required=True,
    )


def _ranks() -> Diagnosis:
    """Start two real ranks, so that a firewall or an unresolved host name is found
    here and not during a lab."""
    from dlo_lib.launch import run_ranks

    try:
        total = run_ranks(_sum_of_ranks, 2, timeout=60)
    except Exception as error:  # noqa: BLE001  the report shows every failure
        return Diagnosis(
            "ranks",
            False,
            str(error).splitlines()[0],
            "set GLOO_SOCKET_IFNAME=lo and try again",
            required=True,
        )
    return Diagnosis("ranks", total == [1.0, 1.0], "two gloo ranks communicated", required=True)


def _sum_of_ranks() -> float:
    import torch
    import torch.distributed as dist

    value = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(value)
    return float(value)


def _slurm() -> Diagnosis:
    if not shutil.which("sbatch"):
        return Diagnosis(
            "slurm",
            False,
            "no sbatch: jobs run on this machine, one after another",
            "log in to a cluster to submit jobs",
        )
    try:
        if not commands.is_available():
            return Diagnosis(
                "slurm",
                False,
                "sbatch is here, but this machine belongs to no cluster",
                "log in to a cluster to submit jobs",
            )
        done = subprocess.run(["sbatch", "--version"], capture_output=True, text=True, timeout=_ANSWER_S)
        if done.returncode == 0:
            commands.cluster_name()  # the controller answers
    except (commands.NoAnswer, subprocess.TimeoutExpired):
        cure = "check $SLURM_CONF, try again later, or ask the cluster's support"
        return Diagnosis("slurm", False, "SLURM's commands do not answer", cure)
    ok = done.returncode == 0
    said = (done.stdout if ok else done.stderr).strip().splitlines()[-1:] or [
        f"sbatch ended with status {done.returncode}"
    ]
    return Diagnosis("slurm", ok, said[0], "" if ok else "ask the cluster's support")


def _sandbox() -> Diagnosis:
    """Start the interpreter in the sandbox, as grading does."""
    from dlo_lib.grading.sandbox.cgroups import find_hierarchy
    from dlo_lib.grading.sandbox.isolation import SANDBOX_CURE, find_isolation

    found = find_isolation()
    if found.isolation is None:
        here = in_a_course()
        cure = SANDBOX_CURE if here else f"only instructors need it: {SANDBOX_CURE}"
        return Diagnosis("sandbox", False, f"none ({'; '.join(found.reasons)})", cure)
    groups = (
        "with control groups"
        if find_hierarchy() is not None
        else "without control groups: the judge monitors the memory"
    )
    return Diagnosis("sandbox", True, f"{found.isolation.name}, {groups}")


def _course() -> Diagnosis:
    """Try whether students with an account on this machine can read the course or its solutions."""
    from dlo_lib.grading.classroom.roster.course_access import enter_course, open_to_others

    try:
        enter_course(Path.cwd())
    except UserError as error:
        return Diagnosis("course", False, str(error), "run this command")
    solutions = (Path.cwd() / "solutions").resolve()
    if solutions.is_dir() and open_to_others(solutions):
        return Diagnosis(
            "course",
            False,
            f"other users of this machine can read {solutions}",
            f"if students have accounts here: chmod -R o= {solutions}",
        )
    return Diagnosis("course", True, "no other user of this machine can read it")


def _port() -> Diagnosis:
    return Diagnosis("port", True, f"{free_port()} is free for JupyterLab")


def _disk() -> Diagnosis:
    try:
        state = state_dir()
    except UserError as error:
        problem, _, cure = str(error).rpartition(": ")
        return Diagnosis("disk", False, problem, cure, required=True)
    folder = next(path for path in (work_dir(), *work_dir().parents) if path.exists())
    free = shutil.disk_usage(state).free / 2**30
    ok = free > 1 and os.access(state, os.W_OK) and os.access(folder, os.W_OK)
    cure = "" if ok else "free 1 GiB, or set DLO_HOME and DLO_WORK to folders with space"
    return Diagnosis(
        "disk",
        ok,
        f"{free:.0f} GiB free; progress in {state}, notebooks in {work_dir()}",
        cure,
        required=True,
    )


def _private() -> Diagnosis:
    """Find folders with the user's answers that other users of this machine can enter."""
    folders = [work_dir(), state_dir(), nbgrader_cache(os.environ), ipython_folder(os.environ)]
    opened = [folder for folder in folders if open_to_others(folder)]
    if not opened:
        return Diagnosis("private", True, "no other user of this machine can read your work")
    found = f"other users of this machine can read {', '.join(map(str, opened))}"
    return Diagnosis("private", False, found, f"chmod 700 {' '.join(map(str, opened))}, unless you share it")


def in_a_course() -> bool:
    """Return whether the current folder is a course, so that the user is an instructor."""
    from dlo_lib.grading.judge.client import SECRET_FILE

    return (Path.cwd() / SECRET_FILE).is_file()


def can_grade(findings: list[Diagnosis]) -> bool:
    """Return False in the folder of a course whose submissions cannot be judged safely on this machine."""
    return not in_a_course() or all(finding.ok for finding in findings if finding.name == "sandbox")


def verdict(findings: list[Diagnosis]) -> None:
    """Raise UserError if a required part is missing."""
    missing = [finding.name for finding in findings if finding.required and not finding.ok]
    if missing:
        raise UserError(f"the labs cannot run yet: see the cure for {', '.join(missing)} above")
