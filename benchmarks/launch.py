"""Starting ranks: `run_ranks` against torchrun and against multiprocessing's spawn, all doing one all-reduce on 4 gloo ranks.

The first call pays for the warm server; it is measured in a fresh interpreter each time, and both of its peers pay the import of torch in
every rank. CPU time and memory are not compared: the work is done in other processes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

from benchmarks.paired import Row, ratios
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
        first = _script(folder / "first.py", FIRST_CALL, [sys.executable])
        torchrun = _script(
            folder / "torchrun.py", TORCHRUN, [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
        )
        spawn = _script(folder / "spawn.py", SPAWN, [sys.executable])
        ways: dict[str, Callable[[], object]] = {"first": first, "warm": _warm, "torchrun": torchrun, "spawn": spawn}
        _warm()
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for pair in range(pairs):
            for way in list(ways) if pair % 2 == 0 else list(ways)[::-1]:
                seconds[way].append(_wall(ways[way]))
    return [
        Row(
            f"run_ranks, {ours} call",
            peer,
            WORLD_SIZE,
            time_ratio=ratios(seconds[ours], seconds[peer]),
            note=f"median {_median(seconds[ours]):.2f} s against {_median(seconds[peer]):.2f} s",
        )
        for ours in ("first", "warm")
        for peer in ("torchrun", "spawn")
    ]


def _warm() -> None:
    def work() -> None:
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(1))

    run_ranks(work, WORLD_SIZE)


def _script(path: Path, text: str, command: list[str]) -> Callable[[], object]:
    path.write_text(dedent(text), encoding="utf-8")
    return lambda: subprocess.run([*command, str(path)], check=True, capture_output=True)


def _wall(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
