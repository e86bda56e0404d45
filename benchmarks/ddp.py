"""Data parallelism: `dlo_lib.parallel.DDP` against PyTorch's `DistributedDataParallel`, on Llamas over gloo.

A turn is one `train_step` (forward, backward, gradients averaged, SGD) of the same model on the same data; both wrappers live in the
same ranks and one process group and take turns, each with gradients as bucket views and 25 MiB buckets. The floor is the same step
without any communication, on every rank. PyTorch's buckets are resident between its turns, so memory is measured apart: the peak of a
job that builds the model and trains it for a few steps in one of the two ways. There glibc is told to give every large block back to
the system when it is freed: by default it keeps many, and the figure would be that of its fragmentation, which the note also gives.
"""

from __future__ import annotations

import ctypes
import statistics
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.paired import Row, Turns, compare, measure, over_ranks, ratios, take_turns
from dlo_lib.launch import Explain, run_ranks
from dlo_lib.models import Llama, LlamaConfig
from dlo_lib.optim import train_step
from dlo_lib.parallel import DDP

PEER = "DistributedDataParallel"
CASES = {
    # name: the model, sequences per rank, their tokens
    "hidden 256": (LlamaConfig(257, 256, 704, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64, tied_embeddings=True), 4, 128),
    "hidden 1024": (LlamaConfig(257, 1024, 2816, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=128, tied_embeddings=True), 2, 64),
}
MEMORY_STEPS, MEMORY_REPEATS = 4, 5
M_MMAP_THRESHOLD = -3
"""A parameter of glibc's mallopt: larger blocks are mapped on their own. Once set it no longer grows by itself."""


class Way:
    """A model wrapped in one way, ready to take steps."""

    def __init__(self, case: str, wrapper: str) -> None:
        config, batch, seq = CASES[case]
        torch.manual_seed(0)
        model: nn.Module = Llama(config)
        self.group = None if wrapper == "none" else dist.group.WORLD
        if wrapper == "ours":
            model = DDP(model)
        elif wrapper == "peer":
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        random = torch.Generator().manual_seed(dist.get_rank())
        tokens = torch.randint(config.vocab_size, (batch, seq + 1), generator=random)
        self.pairs = [(tokens[:, :-1], tokens[:, 1:])]

    def step(self) -> None:
        train_step(self.model, self.optimizer, self.pairs, group=self.group)


def rows(pairs: int = 40) -> list[Row]:
    return [_row(case, world_size, pairs) for case in CASES for world_size in (2, 4)]


def _row(case: str, world_size: int, pairs: int) -> Row:
    per_rank = run_ranks(_turns, world_size, case, pairs, explain=Explain.OFF)
    turns, against_floor = (over_ranks([rank[index] for rank in per_rank]) for index in range(2))
    floor = statistics.median(turn.cpu for turn in against_floor.peer)
    exact, kept = (_peaks(case, world_size, min(MEMORY_REPEATS, pairs), exact) for exact in (True, False))
    mine, its = (statistics.median(exact[wrapper]) / 2**20 for wrapper in ("ours", "peer"))
    by_default = ratios(kept["ours"], kept["peer"])
    note = f"peak {mine:.0f} MiB against {its:.0f} MiB a rank; ratio with glibc's defaults {by_default}"
    row = compare(f"DDP, {case}", PEER, world_size, turns, floor_cpu=floor, note=note)
    return replace(row, memory_ratio=ratios(exact["ours"], exact["peer"]))


def _peaks(case: str, world_size: int, repeats: int, exact: bool) -> dict[str, list[float]]:
    """The largest rank's peak of each job, in turns."""
    peaks: dict[str, list[float]] = {"ours": [], "peer": []}
    for repeat in range(repeats):
        for wrapper in list(peaks)[:: 1 if repeat % 2 == 0 else -1]:
            peaks[wrapper].append(max(run_ranks(_peak, world_size, case, wrapper, exact, explain=Explain.OFF)))
    return peaks


def _turns(case: str, pairs: int) -> tuple[Turns, Turns]:
    """Ours against the peer, and ours against no communication."""
    torch.set_num_threads(1)
    ours, peer, alone = Way(case, "ours"), Way(case, "peer"), Way(case, "none")
    return (
        take_turns(ours.step, peer.step, pairs, between=dist.barrier),
        take_turns(ours.step, alone.step, -(-pairs // 4), between=dist.barrier),
    )


def _peak(case: str, wrapper: str, exact: bool) -> int:
    """Bytes above what was resident before, while a model is built and trained in a process of its own."""
    torch.set_num_threads(1)
    if exact:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 * 1024)

    def train() -> None:
        way = Way(case, wrapper)
        for _ in range(MEMORY_STEPS):
            way.step()

    return measure(train).memory
