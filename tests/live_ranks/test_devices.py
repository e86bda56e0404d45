"""A GPU for each rank, as far as it can be tested without one: the number of GPUs is simulated.

NOT TESTED HERE: ranks that compute on GPUs with NCCL, which need two GPUs.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from dlo_lib.base.errors import UserError
from dlo_lib.launch import rank as launch_rank
from dlo_lib.launch.meeting import Meeting
from dlo_lib.launch.rank import join
from dlo_lib.live_ranks.devices import Devices, gpu_each, note_on_gpus
from dlo_lib.live_ranks.local_ranks import session_spec


@pytest.fixture
def two_gpus(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)


@pytest.mark.parametrize(
    ("wanted", "gpus", "ranks", "expected"),
    [
        (Devices.ANY, 4, 4, True),
        (Devices.ANY, 8, 4, True),
        (Devices.ANY, 3, 4, False),
        (Devices.ANY, 0, 4, False),
        (Devices.GPU, 4, 4, True),
        (Devices.CPU, 4, 4, False),
    ],
)
def test_ranks_compute_on_gpus_if_there_is_one_for_each(wanted, gpus, ranks, expected):
    assert gpu_each(wanted, gpus, ranks, nccl=True, where="here") is expected


def test_fewer_gpus_than_ranks_are_refused_in_a_sentence(notebook, two_gpus):
    ran = notebook.try_cell("%%ranks 4 --gpus\n1")
    assert ran.message == (
        "PyTorch sees 2 GPUs on this machine for 4 ranks, and each needs one: use fewer ranks, "
        "or --cpu for ranks on the CPU"
    )
    assert not notebook.shell.user_ns["ranks"].world_size


def test_no_gpu_is_refused_in_a_sentence(notebook, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    ran = notebook.try_cell("%%ranks 2 --gpus\n1")
    assert ran.message == (
        "PyTorch sees no GPU on this machine: check its build, or use --cpu for ranks on the CPU"
    )


def test_a_pytorch_without_nccl_is_refused():
    with pytest.raises(UserError, match="PyTorch has no NCCL here, which connects GPUs: use --cpu"):
        gpu_each(Devices.GPU, 4, 4, nccl=False, where="here")


def test_gpus_that_are_not_used_are_named(notebook, two_gpus):
    ran = notebook.cell("%%ranks 3\ndevice")
    assert ran.by_rank() == {"all 3 ranks": "device(type='cpu')"}
    note = "PyTorch sees 2 GPUs for 3 ranks, so all ranks compute on the CPU: %%ranks 2 uses the GPUs."
    assert note in ran.text
    assert note not in notebook.cell("%%ranks 3\n1").text
    assert note_on_gpus(Devices.CPU, 2, 3) == note_on_gpus(Devices.ANY, 0, 3) == ""


def test_the_cpu_can_be_chosen(notebook, two_gpus):
    assert notebook.cell("%%ranks 2 --cpu\ndevice").by_rank() == {"ranks 0 and 1": "device(type='cpu')"}


@pytest.mark.parametrize(("rank", "first_rank", "local"), [(0, 0, 0), (3, 0, 3), (5, 4, 1)])
def test_a_rank_has_the_gpu_of_its_local_rank_and_nccl(monkeypatch, rank, first_rank, local):
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: chosen.append(backend))
    monkeypatch.setattr(dist, "TCPStore", lambda *_, **__: None)
    monkeypatch.setattr(launch_rank.os, "environ", {})
    spec = replace(session_spec(8, explain=True, nccl=True), first_rank=first_rank, local_world_size=4)

    class Listener:
        def detach(self) -> int:
            return 0

    join(rank, spec, Meeting("node1", 1234, Listener() if rank == 0 else None))
    assert chosen == [local, "cpu:gloo,cuda:nccl"]
    assert launch_rank.os.environ["LOCAL_RANK"] == str(local)
    assert launch_rank.os.environ["MASTER_ADDR"] == "node1"
