"""The start of ranks: `run_ranks` compared with torchrun and with multiprocessing's spawn. Each runs one
all-reduce on 4 gloo ranks.

The first call is a script in a new interpreter. It imports torch twice (in the caller and in the warm
server); its peers import torch once in every rank. CPU time is that of all processes: children that have
ended, and for a warm call the server and its ranks. Memory is not compared.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import psutil

from benchmarks.paired import Row, Turn, Turns, compare
from dlo_lib.launch import run_ranks

WORLD_SIZE = 4
FIRST_CALL = """
    from dlo_lib.launch import run_ranks
    def work():
        import torch, torch.distributed as dist
        x = torch.ones(1)
        dist.all_reduce(x)
    run_ranks(work, 4)
    """
TORCHRUN = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    dist.destroy_process_group()
    """
SPAWN = """
    import tempfile
    import torch, torch.distributed as dist, torch.multiprocessing as mp
    def work(rank, store):
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
        x = torch.ones(1)
        dist.all_reduce(x)
        dist.destroy_process_group()
    if __name__ == "__main__":
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(work, (folder + "/store",), nprocs=4)
    """


ROWS = 4  # measured alternately, so that all rows are complete at the same time


def rows(pairs: int = 7) -> list[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
        methods: dict[str, Callable[[], object]] = {
            "first": _script(folder / "first.py", FIRST_CALL, [sys.executable]),
            "warm": _warm,
            "torchrun": _script(folder / "torchrun.py", TORCHRUN, torchrun),
            "spawn": _script(folder / "spawn.py", SPAWN, [sys.executable]),
        }
        server = psutil.Process(_warm())
        turns: dict[str, list[Turn]] = {method: [] for method in methods}
        for pair in range(pairs):
            for method in list(methods) if pair % 2 == 0 else list(methods)[::-1]:
                turns[method].append(_turn(methods[method], server))
    return [
        compare(
            f"run_ranks, {ours} call",
            peer,
            WORLD_SIZE,
            Turns(turns[ours], turns[peer]),
            note=f"median {_medians(turns[ours])} against {_medians(turns[peer])}",
        )
        for ours in ("first", "warm")
        for peer in ("torchrun", "spawn")
    ]


def _warm() -> int:
    """Call `run_ranks` and return the process id of the warm server."""

    def work() -> int:
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(1))
        return os.getppid()

    return run_ranks(work, WORLD_SIZE)[0]


def _script(path: Path, text: str, command: list[str]) -> Callable[[], object]:
    path.write_text(dedent(text), encoding="utf-8")
    return lambda: subprocess.run([*command, str(path)], check=True, capture_output=True)


def _turn(action: Callable[[], object], server: psutil.Process) -> Turn:
    cpu, wall = _cpu_of_all(server), time.perf_counter()
    action()
    return Turn(time.perf_counter() - wall, _cpu_of_all(server) - cpu, memory=0)


def _cpu_of_all(server: psutil.Process) -> float:
    # The first four values are user and system time of the process, and of its children that have ended.
    return float(sum(sum(process.cpu_times()[:4]) for process in (psutil.Process(), server)))


def _medians(turns: list[Turn]) -> str:
    wall, cpu = (statistics.median(getattr(turn, clock) for turn in turns) for clock in ("wall", "cpu"))
    return f"{wall:.2f} s (CPU {cpu:.2f} s)"
