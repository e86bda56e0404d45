"""A rank reads its position under torchrun, under srun, within run_ranks and alone."""

import os
import socket
import subprocess
import sys

import pytest
import torch.distributed as dist

from dlo_lib.base.errors import UserError
from dlo_lib.launch import init_process_group, place, run_ranks
from dlo_lib.launch.place import first_node, rendezvous, tasks_per_node

SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "4,2",
    "SLURM_STEP_NODELIST": "r1i0n[3-4]",
}


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("SLURM_", "TORCHELASTIC", "MASTER_")) or name in (
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
            "LOCAL_WORLD_SIZE",
        ):
            monkeypatch.delenv(name)


def set_environment(monkeypatch, values: dict[str, str]) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_alone():
    here = place()
    assert (here.rank, here.world_size, here.launcher) == (0, 1, "none")
    with init_process_group(here):
        assert dist.get_world_size() == 1
    assert not dist.is_initialized()


def test_ranks_of_a_launcher_divide_averages_as_those_of_run_ranks(monkeypatch):
    """gloo of PyTorch 2.8 returns the sum; also where the program has created the process group."""
    called = []
    module = sys.modules["dlo_lib.launch.place"]
    monkeypatch.setattr(module, "divide_averages_of_gloo", lambda: called.append(1))
    with init_process_group(place()), init_process_group(place()):
        assert called == [1, 1]


def test_under_srun(monkeypatch):
    set_environment(monkeypatch, SLURM)
    here = place()
    assert (here.rank, here.local_rank, here.world_size, here.local_world_size, here.launcher) == (
        5,
        1,
        6,
        2,
        "slurm",
    )
    address, port = rendezvous(os.environ, here)
    assert address == "r1i0n3"
    assert rendezvous({**os.environ, "SLURM_PROCID": "0"}, here) == (address, port), (
        "all ranks of a job use one port"
    )
    assert rendezvous({**os.environ, "SLURM_JOB_ID": "4243"}, here)[1] != port, "two jobs use different ports"


def test_a_shell_of_an_allocation_is_a_single_rank(monkeypatch):
    set_environment(monkeypatch, {name: value for name, value in SLURM.items() if "STEP" not in name})
    assert place().world_size == 1


def test_the_shell_of_srun_is_a_single_rank_until_srun_starts_the_ranks(monkeypatch):
    """`srun -n6 --pty bash`: the variables are those of task 0 of 6, and the other tasks start nothing."""
    terminal, other_end = os.openpty()
    shell = subprocess.Popen(["sleep", "60"], stdin=other_end)
    try:
        shown = {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0", "SLURM_PTY_PORT": "35111"}
        set_environment(monkeypatch, SLURM | shown | {"SLURM_TASK_PID": str(shell.pid)})
        assert (place().world_size, place().launcher) == (1, "none")
        monkeypatch.setenv("SLURM_TASK_PID", str(os.getpid()))  # `srun -n6 --pty python`
        assert place().world_size == 6
    finally:
        shell.kill()
        shell.wait()
        os.close(terminal)
        os.close(other_end)


@pytest.mark.parametrize(
    "names",
    [["OMPI_COMM_WORLD_SIZE"], ["MV2_COMM_WORLD_SIZE"], ["PMI_SIZE", "MPI_LOCALNRANKS"]],
    ids=["open-mpi", "mvapich", "mpich"],
)
def test_mpirun_is_refused_because_each_process_would_run_alone(names, monkeypatch):
    # mpirun starts its daemons with srun, whose variables the processes inherit.
    set_environment(monkeypatch, SLURM | dict.fromkeys(names, "4"))
    with pytest.raises(UserError, match="mpirun has started 4 processes.*torchrun or srun"):
        place()
    set_environment(monkeypatch, {"RANK": "1", "WORLD_SIZE": "4"})  # a wrapper of the user sets the numbers
    assert (place().rank, place().world_size) == (1, 4)


def test_srun_with_the_interface_of_mpi_is_no_mpirun(monkeypatch):
    set_environment(monkeypatch, SLURM | {"PMI_SIZE": "6", "PMI_RANK": "5"})
    assert place().launcher == "slurm"


def test_a_heterogeneous_job_is_one_line(monkeypatch):
    set_environment(monkeypatch, SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_HET_SIZE": "2"})
    with pytest.raises(UserError, match="a heterogeneous job cannot train"):
        place()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("r1i0n[3-5,9],r2i1n0", "r1i0n3"),
        ("a[01,07]", "a01"),
        ("gpu-1,gpu-2", "gpu-1"),
        ("n[1-2]-ib", "n1-ib"),
    ],
)
def test_the_first_node_of_a_list(nodes, first):
    assert first_node(nodes) == first


def test_tasks_per_node_in_slurms_short_form():
    assert tasks_per_node("4(x2),1") == [4, 4, 1]
    with pytest.raises(UserError, match="expected a form like"):
        tasks_per_node("four")


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 of 2"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, 'RANK is "x": it must be a whole number'),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_PORT is not"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "99999"}, "use a number from 1 to 65535"),
    ],
)
def test_an_invalid_environment_is_one_line(monkeypatch, environment, said):
    set_environment(monkeypatch, environment)
    with pytest.raises(UserError, match=said), init_process_group(place()):
        pass


def test_a_port_in_use_is_one_line(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        set_environment(
            monkeypatch, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": str(taken.getsockname()[1])}
        )
        with (
            pytest.raises(UserError, match=r"port \d+ of 127.0.0.1 is in use: set MASTER_PORT to a free one"),
            init_process_group(place()),
        ):
            pass
    assert not dist.is_initialized()


def test_within_run_ranks_the_group_is_used_and_kept():
    def ranks() -> tuple:
        here = place()
        with init_process_group(here):
            size = dist.get_world_size()
        return here.rank, here.launcher, size, dist.is_initialized()

    assert run_ranks(ranks, 2) == [(0, "run_ranks", 2, True), (1, "run_ranks", 2, True)]


def test_two_processes_connect_as_under_srun(tmp_path):
    code = (
        "import torch, torch.distributed as dist; from dlo_lib.launch import init_process_group, place\n"
        "with init_process_group(place()):\n"
        "    x = torch.tensor(place().rank + 1.0); dist.all_reduce(x); print(x.item())"
    )
    job = {
        **os.environ,
        **SLURM,
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
    }
    job |= {"SLURM_NODEID": "0", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**job, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    # PyTorch 2.8 and 2.9 print a line about the connections before it.
    assert [rank.communicate(timeout=120)[0].splitlines()[-1] for rank in ranks] == ["3.0", "3.0"]
