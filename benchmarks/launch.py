"""Starting ranks: `run_ranks` against torchrun and against multiprocessing's spawn, all doing one all-reduce on 4 gloo ranks.

The first call is a whole script in a fresh interpreter: it imports torch twice (caller and warm server), its peers once in every rank.
CPU time is that of all processes: children that have ended, and for a warm call the server and its ranks. Memory is not compared.
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


def rows(pairs: int = 7) -> list[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
        ways: dict[str, Callable[[], object]] = {
            "first": _script(folder / "first.py", FIRST_CALL, [sys.executable]),
            "warm": _warm,
            "torchrun": _script(folder / "torchrun.py", TORCHRUN, torchrun),
            "spawn": _script(folder / "spawn.py", SPAWN, [sys.executable]),
        }
        server = psutil.Process(_warm())
        turns: dict[str, list[Turn]] = {way: [] for way in ways}
        for pair in range(pairs):
            for way in list(ways) if pair % 2 == 0 else list(ways)[::-1]:
                turns[way].append(_turn(ways[way], server))
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
    """Returns the process id of the warm server."""

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
    return float(sum(sum(process.cpu_times()[:4]) for process in (psutil.Process(), server)))  # own and ended children's, user and system


def _medians(turns: list[Turn]) -> str:
    return f"{statistics.median(turn.wall for turn in turns):.2f} s (CPU {statistics.median(turn.cpu for turn in turns):.2f} s)"
