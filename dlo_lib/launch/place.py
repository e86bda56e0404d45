"""The rank of this process in a job, from the environment of torchrun or of SLURM, or a single rank.

``srun python`` needs no launcher of torch. SLURM provides everything except a port, which is derived from the
number of the job, so that two jobs on one node use different ports.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from dlo_lib.base.errors import UserError
from dlo_lib.base.torch_compat import divide_averages_of_gloo, repair_pipelining

BACKENDS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}
"""The argument of ``dist.init_process_group``; with NCCL, tensors on the CPU can be sent too."""
_OF_MPIRUN = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE")
"""Numbers of processes, set by mpirun of Open MPI, of MVAPICH, and of MPICH and Intel MPI."""
_OF_HYDRA = "MPI_LOCALNRANKS"
"""Set by mpirun of MPICH and Intel MPI. srun sets PMI_SIZE too, but not this."""
FIRST_PORT, PORTS = 20_000, 10_000  # below the ephemeral ports, which start at 32768 on Linux


@dataclass(frozen=True)
class Place:
    """A rank's position in its job. ``launcher`` is torchrun, slurm, run_ranks, environment or none."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    backend: str
    launcher: str


def place() -> Place:
    """Return the position of this process in its job, read from environment variables.

    Raises:
        UserError: the variables contradict each other, or one is not a number.
    """
    rank, local_rank, world_size, local_world_size, launcher = _numbers(os.environ)
    if not (0 <= rank < world_size and 0 <= local_rank < local_world_size):
        raise UserError(
            f"rank {rank} of {world_size} (local {local_rank} of {local_world_size}) is invalid: "
            "unset RANK and WORLD_SIZE, or use torchrun"
        )
    device, backend = _device(local_rank, local_world_size)
    return Place(rank, local_rank, world_size, local_world_size, device, backend, launcher)


def _numbers(environment: Mapping[str, str]) -> tuple[int, int, int, int, str]:
    def number(name: str, default: int) -> int:
        text = environment.get(name, str(default))
        if not text.strip().isdigit():
            raise UserError(
                f'{name} is "{text}": it must be a whole number; unset it, or start with torchrun or srun'
            )
        return int(text)

    if "RANK" in environment and "WORLD_SIZE" in environment:
        world_size = number("WORLD_SIZE", 1)
        launcher = (
            "torchrun"
            if "TORCHELASTIC_RUN_ID" in environment
            else environment.get("DLO_LAUNCHER", "environment")
        )
        return (
            number("RANK", 0),
            number("LOCAL_RANK", 0),
            world_size,
            number("LOCAL_WORLD_SIZE", world_size),
            launcher,
        )
    if (started := _started_by_mpirun(environment)) > 1:
        raise UserError(
            f"mpirun has started {started} processes, each of which would run alone: "
            "start the ranks with torchrun or srun"
        )
    # The shell of `salloc` or `srun --pty` is a single rank until srun starts the ranks.
    if "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment and not in_shell_of_srun(environment):
        world_size = number("SLURM_STEP_NUM_TASKS", number("SLURM_NTASKS", 1))
        per_node = (
            environment.get("SLURM_STEP_TASKS_PER_NODE")
            or environment.get("SLURM_TASKS_PER_NODE")
            or str(world_size)
        )
        nodes, index = tasks_per_node(per_node), number("SLURM_NODEID", 0)
        if index >= len(nodes):
            raise UserError(
                f"node {index} of the job has no place among its tasks per node ({per_node}): "
                "a heterogeneous job cannot train; ask for the same resources on all nodes"
            )
        local = nodes[index]
        return number("SLURM_PROCID", 0), number("SLURM_LOCALID", 0), world_size, local, "slurm"
    return 0, 0, 1, 1, "none"


def _started_by_mpirun(environment: Mapping[str, str]) -> int:
    """Return the number of processes that mpirun has started, 0 if it has not started this one."""
    for name in _OF_MPIRUN:
        if name in environment and (name != "PMI_SIZE" or _OF_HYDRA in environment):
            return int(environment[name]) if environment[name].isdigit() else 0
    return 0


def in_shell_of_srun(environment: Mapping[str, str]) -> bool:
    """Whether this process runs in the shell of ``srun --pty``: below its task, which has a terminal.

    The other tasks of such a step have no terminal and no program, so their ranks never start.
    """
    task = environment.get("SLURM_TASK_PID", "")
    if "SLURM_PTY_PORT" not in environment or not task.isdigit() or int(task) == os.getpid():
        return False
    try:
        return os.readlink(f"/proc/{task}/fd/0").startswith(("/dev/pts/", "/dev/tty"))
    except OSError:  # not on this machine, or not ours
        return False


def gpu_for_each(ranks: int) -> bool:
    """Whether this process sees a GPU for each of ``ranks``, as NCCL requires on a node.

    Does not initialise CUDA.
    """
    return torch.cuda.device_count() >= ranks and dist.is_nccl_available()


def use_loopback() -> None:
    """Let gloo use the loopback interface, which needs no host name that resolves and no open firewall.

    A value that the user has set is kept.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")


def _device(local_rank: int, local_world_size: int) -> tuple[torch.device, str]:
    if gpu_for_each(local_world_size):
        return torch.device("cuda", local_rank), "nccl"
    # SLURM may show each rank only its GPU.
    given = os.environ.get("SLURM_STEP_GPUS", os.environ.get("SLURM_JOB_GPUS", ""))
    if gpu_for_each(1) and given.count(",") + 1 >= local_world_size > 1:
        return torch.device("cuda", 0), "nccl"
    return torch.device("cpu"), "gloo"


@contextmanager
def init_process_group(here: Place, timeout: timedelta | None = None) -> Iterator[None]:
    """Create the process group of the job and destroy it at the end.

    A process group that exists already (within ``run_ranks``) is used and kept.

    Raises:
        UserError: the port is in use, or rank 0 cannot be reached.
    """
    divide_averages_of_gloo()
    repair_pipelining()
    if dist.is_initialized():
        yield
        return
    if here.device.type == "cuda":
        torch.cuda.set_device(here.device)
    backend = BACKENDS[here.backend]
    address, port = rendezvous(os.environ, here)
    if address in ("127.0.0.1", "localhost"):
        use_loopback()
    try:
        if port is None:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        else:
            dist.init_process_group(
                backend,
                init_method=f"tcp://{address}:{port}",
                rank=here.rank,
                world_size=here.world_size,
                timeout=timeout,
            )
    except RuntimeError as error:
        if not isinstance(error, dist.DistNetworkError):
            raise
        if "EADDRINUSE" in str(error) or "in use" in str(error):
            # Without the cause, which reads like a connection that another rank has broken.
            raise UserError(f"port {port} of {address} is in use: set MASTER_PORT to a free one") from None
        raise UserError(
            f"rank {here.rank} cannot reach rank 0 at {address}:{port}: "
            "check whether rank 0 runs, and MASTER_ADDR"
        ) from error
    try:
        yield
    finally:
        dist.destroy_process_group()


def rendezvous(environment: Mapping[str, str], here: Place) -> tuple[str, int | None]:
    """Return host and port of rank 0's store; no port for a single rank, unless MASTER_PORT is set.

    Raises:
        UserError: MASTER_PORT is missing or not a port.
    """
    address = environment.get("MASTER_ADDR")
    port = environment.get("MASTER_PORT")
    if port is not None and not (port.isdigit() and 0 < int(port) < 65_536):
        raise UserError(f'MASTER_PORT is "{port}": use a number from 1 to 65535')
    if here.world_size == 1:
        return address or "127.0.0.1", None if port is None else int(port)
    if here.launcher == "slurm":
        nodes = (
            environment.get("SLURM_STEP_NODELIST")
            or environment.get("SLURM_JOB_NODELIST")
            or environment.get("SLURM_NODELIST", "")
        )
        job = environment.get("SLURM_JOB_ID", "0")
        step = environment.get("SLURM_STEP_ID", "0")
        derived = FIRST_PORT + (int(job) * 31 + int(step)) % PORTS
        return address or first_node(nodes), int(port or derived)
    if port is None:
        raise UserError(
            "RANK and WORLD_SIZE are set but MASTER_PORT is not: "
            "start with torchrun, or set MASTER_ADDR and MASTER_PORT"
        )
    return address or "127.0.0.1", int(port)


def first_node(nodes: str) -> str:
    """Return the first host of a SLURM node list.

    >>> first_node("r1i0n[3-5,9],r2i1n0")
    'r1i0n3'
    >>> first_node("jean-zay-ia801")
    'jean-zay-ia801'
    >>> first_node("rack[1-2]n[07-09]")
    'rack1n07'
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if first is None:
        raise UserError(f'SLURM\'s node list is "{nodes}": set MASTER_ADDR to the name of the first node')
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


def tasks_per_node(text: str) -> list[int]:
    """Return the number of ranks on each node, from SLURM's short form.

    >>> tasks_per_node("4(x2),1")
    [4, 4, 1]
    """
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not match:
            raise UserError(f'SLURM\'s tasks per node are "{text}": expected a form like 4(x2),1')
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
