"""Data parallelism, whole and sharded: ours against PyTorch's own, on Llamas over gloo.

    DDP      DistributedDataParallel                                   both with gradients as bucket views of 25 MiB
    ZeRO-1   DistributedDataParallel + ZeroRedundancyOptimizer         AdamW; the peer with parameters as bucket views, its cheaper way
    ZeRO-2   the same, for PyTorch has no second stage                 gradients reduce-scattered
    FSDP     fully_shard                                               a unit for each block, gradients reduced in fp32

A turn is one `train_step` (forward, backward, gradients averaged, optimiser; SGD where nothing else is said) of the same model on the same
data; both live in the same ranks and one process group and take turns. The floor is the same step without any communication, on every
rank. A note says how far below the peer one could get: the floor, and ours' messages alone (``benchmarks.replay``), against the peer's
CPU time. What a peer keeps is resident between its turns, so memory is measured apart: the peak of jobs that build the model and train it
in one of the two ways (``benchmarks.peaks``).
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.paired import Row, Turns, compare, measure, over_ranks, ratios, take_turns
from benchmarks.peaks import peaks_in_turns, return_freed_memory
from benchmarks.replay import Replay
from dlo_lib.launch import Explain, run_ranks
from dlo_lib.models import Llama, LlamaConfig
from dlo_lib.optim import train_step
from dlo_lib.parallel import DDP, FSDP, ShardedDDP, ShardedOptimizer

CASES = {
    # name: the model, sequences per rank, their tokens
    "hidden 256": (LlamaConfig(257, 256, 704, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64, tied_embeddings=True), 4, 128),
    "hidden 1024": (LlamaConfig(257, 1024, 2816, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=128, tied_embeddings=True), 2, 64),
}
MEMORY_STEPS, MEMORY_REPEATS = 4, 2  # peaks differ by less than a percent from run to run

Build = Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]]
"""A model to what trains it: wrapped, with its optimiser."""


@dataclass(frozen=True)
class Kind:
    """What is compared: ours, the peer, and the step that needs no communication."""

    name: str
    peer: str
    ours: Build
    its: Build
    alone: Build
    checkpointing: bool = False

    def build(self, wrapper: str) -> Build:
        return {"ours": self.ours, "peer": self.its, "none": self.alone}[wrapper]


def _sgd(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def _adamw(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def _ddp(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return _sgd(DDP(model))


def _torch_ddp(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return _sgd(DistributedDataParallel(model, gradient_as_bucket_view=True))


def _zero1(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    wrapped = DDP(model)
    return wrapped, ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)


def _zero2(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    wrapped = ShardedDDP(model)
    return wrapped, ShardedOptimizer(model.parameters(), torch.optim.AdamW, partition=wrapped.partition, lr=1e-3)


def _torch_zero1(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=1e-3)


def _fsdp(compute_dtype: torch.dtype | None) -> Build:
    return lambda model: _sgd(FSDP(model, compute_dtype=compute_dtype))


def _fully_shard(compute_dtype: torch.dtype | None) -> Build:
    def build(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        for block in model.layers:  # type: ignore[union-attr]
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        return _sgd(model)

    return build


def _fsdp_kind(name: str, compute_dtype: torch.dtype | None = None, checkpointing: bool = False) -> Kind:
    def alone(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        return _sgd(model if compute_dtype is None else model.to(compute_dtype))

    return Kind(name, "fully_shard", _fsdp(compute_dtype), _fully_shard(compute_dtype), alone, checkpointing)


KINDS = (
    Kind("DDP", "DistributedDataParallel", _ddp, _torch_ddp, _sgd),
    Kind("ZeRO-1", "ZeroRedundancyOptimizer", _zero1, _torch_zero1, _adamw),
    Kind("ZeRO-2", "ZeroRedundancyOptimizer", _zero2, _torch_zero1, _adamw),
    _fsdp_kind("FSDP"),
    _fsdp_kind("FSDP bf16", torch.bfloat16),
    _fsdp_kind("FSDP checkpointing", checkpointing=True),
)


class Way:
    """A model wrapped in one way, ready to take steps."""

    def __init__(self, case: str, kind: Kind, wrapper: str) -> None:
        config, batch, seq = CASES[case]
        torch.manual_seed(0)
        self.group = None if wrapper == "none" else dist.group.WORLD
        self.model, self.optimizer = kind.build(wrapper)(Llama(config, checkpointing=kind.checkpointing))
        random = torch.Generator().manual_seed(dist.get_rank())
        tokens = torch.randint(config.vocab_size, (batch, seq + 1), generator=random)
        self.pairs = [(tokens[:, :-1], tokens[:, 1:])]

    def step(self) -> None:
        train_step(self.model, self.optimizer, self.pairs, group=self.group)


def rows(pairs: int = 40) -> Iterator[Row]:
    """About two minutes each on two idle cores with 40 pairs; a quarter of that with 8."""
    for kind in KINDS:
        for case in CASES:
            for world_size in (2, 4):
                yield row(kind, case, world_size, pairs)


def row(kind: Kind, case: str, world_size: int, pairs: int) -> Row:
    """One comparison."""
    per_rank = run_ranks(_turns, world_size, case, kind, pairs, explain=Explain.OFF)
    turns, against_floor, of_bytes = (over_ranks([rank[index] for rank in per_rank]) for index in range(3))
    floor, its_cpu = (statistics.median(turn.cpu for turn in taken) for taken in (against_floor.peer, turns.peer))
    alone = statistics.median(turn.cpu for turn in of_bytes.ours)
    repeats = min(MEMORY_REPEATS, -(-pairs // 4))

    def peaks(exact: bool) -> dict[str, list[float]]:
        return peaks_in_turns(lambda wrapper: run_ranks(_peak, world_size, case, kind, wrapper, exact, explain=Explain.OFF), repeats)

    exact, kept = peaks(exact=True), peaks(exact=False)
    mine, its = (statistics.median(exact[wrapper]) / 2**20 for wrapper in ("ours", "peer"))
    note = f"peak {mine:.0f} MiB against {its:.0f} MiB a rank; ratio with glibc's defaults {ratios(kept['ours'], kept['peer'])}; "
    note += f"the peer's step {1e3 * its_cpu / world_size:.0f} ms a rank, arithmetic and bytes alone {(floor + alone) / its_cpu:.2f} of it"
    compared = compare(f"{kind.name}, {case}", kind.peer, world_size, turns, floor_cpu=floor, note=note)
    return replace(compared, memory_ratio=ratios(exact["ours"], exact["peer"]))


def _turns(case: str, kind: Kind, pairs: int) -> tuple[Turns, Turns, Turns]:
    """Ours against the peer, ours against no communication, and ours' messages against nothing."""
    warnings.simplefilter("ignore", FutureWarning)  # the peer's own calls, of names that are deprecated
    torch.set_num_threads(1)
    ours, peer, alone = (Way(case, kind, wrapper) for wrapper in ("ours", "peer", "none"))
    return (
        take_turns(ours.step, peer.step, pairs, between=dist.barrier),
        take_turns(ours.step, alone.step, -(-pairs // 4), between=dist.barrier),
        take_turns(Replay(ours.step).run, lambda: None, -(-pairs // 2), between=dist.barrier),
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
