"""The seed: a kernel and its ranks share one import of PyTorch, and nothing of it is left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

PROGRAM = """
import os, sys
from dlo_lib.launch import client, seed
client.seed = seed.sow(["torch", "torch.distributed"])
import psutil
from dlo_lib.launch import run_ranks

def ids():
    import os
    import torch.distributed as dist
    total = dist.get_rank()
    return os.getpid(), os.getppid(), total

def below():
    return [child.pid for child in psutil.Process().children(recursive=True)]

(sown,) = below()
results = run_ranks(ids, 2)
runs = client._server._process.poll() is None
print(sown, runs, *[parent for _, parent, _ in results], *[rank for *_, rank in results])
print(*below(), flush=True)
sys.stdin.readline()
"""


def test_ranks_come_from_the_seed_and_end_with_the_kernel(tmp_path: Path) -> None:
    kernel = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    assert kernel.stdout is not None
    sown, runs, *rest = kernel.stdout.readline().split()
    server = rest[0]
    assert (runs, rest) == ("True", [server, server, "0", "1"])
    assert psutil.Process(int(server)).ppid() == int(sown)
    below = [psutil.Process(int(pid)) for pid in kernel.stdout.readline().split()]
    assert {process.pid for process in below} == {int(sown), int(server)}
    kernel.kill()
    kernel.wait()
    _, alive = psutil.wait_procs(below, timeout=60)
    assert alive == []


IDLE = """
import os, time
os.environ["DLO_RANKS_IDLE_MINUTES"] = "0.01"
from dlo_lib.launch import client, run_ranks, seed
if {seeded}:
    client.seed = seed.sow(["torch"])
for _ in range({times}):
    print(run_ranks(lambda: 3, 1)[0], flush=True)
    server = client._server._process
    server.wait(60)
    assert server.poll() is not None
# The server retires while the launch is on its way: another one serves it.
print(run_ranks(lambda: 3, 1)[0])
client._server._socket.shutdown(1)
print(run_ranks(lambda: 3, 1)[0])
"""


@pytest.mark.parametrize("seeded", [False, True])
def test_an_idle_server_ends_and_the_next_launch_starts_another(seeded: bool, tmp_path: Path) -> None:
    times = 2 if seeded else 1  # without a seed each server imports torch
    code = IDLE.format(seeded=seeded, times=times)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert (done.stdout.split(), done.returncode) == (["3"] * (times + 2), 0), done.stderr
