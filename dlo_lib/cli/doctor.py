"""`dlo doctor`: what is installed, and the cure for each thing missing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from dlo_lib.cli.jupyter import free_port
from dlo_lib.cli.workspace import work_dir
from dlo_lib.errors import UserError
from dlo_lib.files import state_dir

JUPYTER = ("jupyterlab", "notebook", "nbgrader", "nbclient", "jupytext", "ipykernel", "matplotlib", "tensorboard")


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``required``: the labs do not run without it. ``cure`` is empty when all is well."""

    name: str
    ok: bool
    found: str
    cure: str = ""
    required: bool = False


def examine() -> list[Finding]:
    """Look at this machine; nothing is changed but for the state folder, which is made when it is missing."""
    looks: list[Callable[[], Finding]] = [_python, _torch, _gpu, _jupyter, _ranks, _slurm, _sandbox, _port, _disk]
    return [look() for look in looks]


def _python() -> Finding:
    ok = (3, 11) <= sys.version_info[:2] <= (3, 13)
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Finding("python", ok, found, "" if ok else "use Python 3.11, 3.12 or 3.13", required=True)


def _torch() -> Finding:
    try:
        import torch
    except ImportError as error:
        return Finding("torch", False, str(error), "run `make lab`, or pip install -c constraints.txt torch", required=True)
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    ok = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 6)
    return Finding("torch", ok, f"{torch.__version__} ({build})", "" if ok else "upgrade torch to 2.6 or newer", required=True)


def _gpu() -> Finding:
    import torch

    count = torch.cuda.device_count()
    if count:
        names = sorted({torch.cuda.get_device_name(index) for index in range(count)})
        return Finding("gpu", True, f"{count} × {', '.join(names)}")
    if shutil.which("nvidia-smi"):
        return Finding("gpu", False, "nvidia-smi is here, but torch sees no GPU", "install the CUDA build: make lab TORCH=cuda")
    return Finding("gpu", False, "none: the labs run on the CPU", "nothing to do; on a cluster, submit the jobs of the labs")


def _jupyter() -> Finding:
    found, missing = [], []
    for package in JUPYTER:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    cure = f"pip install -c constraints.txt {' '.join(missing)}" if missing else ""
    return Finding("jupyter", not missing, ", ".join(found) or "nothing", cure, required=True)


def _ranks() -> Finding:
    """Start two ranks for real: firewalls and host names that do not resolve show here, not in the middle of a lab."""
    from dlo_lib.launch import run_ranks

    try:
        total = run_ranks(_sum_of_ranks, 2, timeout=60)
    except Exception as error:  # noqa: BLE001  whatever goes wrong is what the report is for
        return Finding("ranks", False, str(error).splitlines()[0], "set GLOO_SOCKET_IFNAME=lo and try again", required=True)
    return Finding("ranks", total == [1.0, 1.0], "two gloo ranks talked to each other", required=True)


def _sum_of_ranks() -> float:
    import torch
    import torch.distributed as dist

    value = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(value)
    return float(value)


def _slurm() -> Finding:
    if not shutil.which("sbatch"):
        return Finding("slurm", False, "no sbatch here: jobs run on this machine, one after another", "log in to a cluster to submit jobs")
    done = subprocess.run(["sbatch", "--version"], capture_output=True, text=True, timeout=20)
    ok = done.returncode == 0
    return Finding("slurm", ok, done.stdout.strip() or done.stderr.strip(), "" if ok else "ask the cluster's support")


def _sandbox() -> Finding:
    """Start the interpreter inside, as grading does."""
    from dlo_lib.grading.cgroups import find_hierarchy
    from dlo_lib.grading.isolation import find_isolation

    found = find_isolation()
    if found.isolation is None:
        cure = "only instructors need it: apt-get install bubblewrap, and allow users to make namespaces"
        return Finding("sandbox", False, f"none ({'; '.join(found.reasons)})", cure)
    groups = "with control groups" if find_hierarchy() is not None else "without control groups: the judge watches memory itself"
    return Finding("sandbox", True, f"{found.isolation.name}, {groups}")


def _port() -> Finding:
    return Finding("port", True, f"{free_port()} is free for JupyterLab")


def _disk() -> Finding:
    try:
        state = state_dir()
    except OSError as error:
        return Finding("disk", False, f"cannot write progress: {error}", "set DLO_HOME to a folder of yours", required=True)
    folder = next(path for path in (work_dir(), *work_dir().parents) if path.exists())
    free = shutil.disk_usage(state).free / 2**30
    ok = free > 1 and os.access(state, os.W_OK) and os.access(folder, os.W_OK)
    cure = "" if ok else "free 1 GiB, or set DLO_HOME and DLO_WORK to folders with space"
    return Finding("disk", ok, f"{free:.0f} GiB free; progress in {state}, notebooks in {work_dir()}", cure, required=True)


def verdict(findings: list[Finding]) -> None:
    """Raises:
    UserError: something the labs cannot run without is missing."""
    missing = [finding.name for finding in findings if finding.required and not finding.ok]
    if missing:
        raise UserError(f"the labs cannot run yet: see the cure for {', '.join(missing)} above")
