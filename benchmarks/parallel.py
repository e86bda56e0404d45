"""Sharded data parallelism: `dlo_lib.parallel.FSDP` against PyTorch's `fully_shard`, on Llamas over gloo.

A turn is one `train_step` (forward, backward, gradients averaged, SGD) of the same model on the same data; both live in the same ranks and
one process group and take turns, with a unit for each block and gradients reduced in fp32. The floor is the same step without any
communication, on every rank; memory is the peak of jobs that build the model and train it in one of the two ways (``benchmarks.peaks``).
"""

from __future__ import annotations

import statistics
import warnings
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.ddp import CASES, MEMORY_REPEATS, MEMORY_STEPS
from benchmarks.paired import Row, Turns, compare, measure, over_ranks, ratios, take_turns
from benchmarks.peaks import peaks_in_turns, return_freed_memory
from dlo_lib.launch import Explain, run_ranks
from dlo_lib.models import Llama
from dlo_lib.optim import train_step
from dlo_lib.parallel import FSDP

PEER = "fully_shard"


@dataclass(frozen=True)
class Kind:
    """What is compared: dtype of computing, None for fp32; and whether activations are computed again."""

    name: str
    compute_dtype: torch.dtype | None = None
    checkpointing: bool = False


KINDS = (Kind("FSDP"), Kind("FSDP bf16", torch.bfloat16), Kind("FSDP checkpointing", checkpointing=True))


class Way:
    """A model wrapped in one way, ready to take steps."""

    def __init__(self, case: str, kind: Kind, wrapper: str) -> None:
        config, batch, seq = CASES[case]
        torch.manual_seed(0)
        model: nn.Module = Llama(config, checkpointing=kind.checkpointing)
        self.group = None if wrapper == "none" else dist.group.WORLD
        if wrapper == "ours":
            model = FSDP(model, compute_dtype=kind.compute_dtype)
        elif wrapper == "peer":
            policy = MixedPrecisionPolicy(param_dtype=kind.compute_dtype, reduce_dtype=torch.float32)
            for block in model.layers:  # type: ignore[union-attr]
                fully_shard(block, mp_policy=policy)
            fully_shard(model, mp_policy=policy)
        elif kind.compute_dtype is not None:
            model = model.to(kind.compute_dtype)
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        random = torch.Generator().manual_seed(dist.get_rank())
        tokens = torch.randint(config.vocab_size, (batch, seq + 1), generator=random)
        self.pairs = [(tokens[:, :-1], tokens[:, 1:])]

    def step(self) -> None:
        train_step(self.model, self.optimizer, self.pairs, group=self.group)


def rows(pairs: int = 40) -> list[Row]:
    return [_row(case, kind, world_size, pairs) for kind in KINDS for case in CASES for world_size in (2, 4)]


def _row(case: str, kind: Kind, world_size: int, pairs: int) -> Row:
    per_rank = run_ranks(_turns, world_size, case, kind, pairs, explain=Explain.OFF)
    turns, against_floor = (over_ranks([rank[index] for rank in per_rank]) for index in range(2))
    floor = statistics.median(turn.cpu for turn in against_floor.peer)
    repeats = min(MEMORY_REPEATS, pairs)

    def peaks(exact: bool) -> dict[str, list[float]]:
        return peaks_in_turns(lambda wrapper: run_ranks(_peak, world_size, case, kind, wrapper, exact, explain=Explain.OFF), repeats)

    exact, kept = peaks(exact=True), peaks(exact=False)
    mine, its = (statistics.median(exact[wrapper]) / 2**20 for wrapper in ("ours", "peer"))
    note = f"peak {mine:.0f} MiB against {its:.0f} MiB a rank; ratio with glibc's defaults {ratios(kept['ours'], kept['peer'])}"
    row = compare(f"{kind.name}, {case}", PEER, world_size, turns, floor_cpu=floor, note=note)
    return replace(row, memory_ratio=ratios(exact["ours"], exact["peer"]))


def _turns(case: str, kind: Kind, pairs: int) -> tuple[Turns, Turns]:
    """Ours against the peer, and ours against no communication."""
    warnings.simplefilter("ignore", FutureWarning)  # the peer's own calls, of names that are deprecated
    torch.set_num_threads(1)
    ours, peer, alone = (Way(case, kind, wrapper) for wrapper in ("ours", "peer", "none"))
    return (
        take_turns(ours.step, peer.step, pairs, between=dist.barrier),
        take_turns(ours.step, alone.step, -(-pairs // 4), between=dist.barrier),
    )


def _peak(case: str, kind: Kind, wrapper: str, exact: bool) -> int:
    """Bytes above what was resident before, while a model is built and trained in a process of its own."""
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    if exact:
        return_freed_memory()

    def train() -> None:
        way = Way(case, kind, wrapper)
        for _ in range(MEMORY_STEPS):
            way.step()

    return measure(train).memory
