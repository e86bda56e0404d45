"""Data parallelism and sharded data parallelism: ours compared with PyTorch, for Llamas over gloo.

    DDP      DistributedDataParallel; both with gradients as bucket views of 25 MiB
    ZeRO-1   DistributedDataParallel + ZeroRedundancyOptimizer with AdamW; the peer with parameters as bucket
             views, which is its cheaper mode
    ZeRO-2   the peer of ZeRO-1, because PyTorch has no stage 2; gradients are reduce-scattered
    FSDP     fully_shard; a unit for each block, gradients reduced in fp32

A turn is one `train_step` (forward, backward, averaged gradients, optimiser step; SGD unless stated
otherwise) of the same model with the same data. Both run alternately in the same ranks and the same process
group. The floor is the same step without communication, on every rank. The note contains a lower bound: the
floor and our messages alone (``benchmarks.replay``), divided by the CPU time of the peer. All four take
turns. The state of a peer
stays resident between its turns, so memory is measured in separate jobs that build and train the model with
one of the two (``benchmarks.peaks``).
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.paired import (
    Row,
    Turn,
    Turns,
    compare,
    measure,
    median_cpu,
    of_limit,
    ratios,
    rounds_over_ranks,
    take_rounds,
)
from benchmarks.peaks import peaks_in_turns, return_freed_memory
from benchmarks.replay import Replay
from dlo_lib.launch import Explain, run_ranks
from dlo_lib.models import Llama, LlamaConfig
from dlo_lib.optim import train_step
from dlo_lib.parallel.mesh import ParallelMesh
from dlo_lib.parallel.parallelize import make_optimizer, parallelize
from dlo_lib.parallel.plan import ShortForm

CASES = {
    # name: the model, the sequences of a rank, the tokens of a sequence
    "hidden 256": (
        LlamaConfig(
            257, 256, 704, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64, tied_embeddings=True
        ),
        4,
        128,
    ),
    "hidden 1024": (
        LlamaConfig(
            257, 1024, 2816, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=128, tied_embeddings=True
        ),
        2,
        64,
    ),
}
# Few repeats, because the peaks of two runs differ by less than a percent
MEMORY_STEPS, MEMORY_REPEATS = 4, 2

Build = Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]]
"""Returns the wrapped model and its optimiser."""


@dataclass(frozen=True)
class Kind:
    """A comparison of ours, of the peer, and of the step without communication."""

    name: str
    peer: str
    build_ours: Build
    build_peer: Build
    build_alone: Build
    checkpointing: bool = False

    def build(self, wrapper: str) -> Build:
        return {"ours": self.build_ours, "peer": self.build_peer, "none": self.build_alone}[wrapper]

    def candidate(self, case: str, wrapper: str) -> Candidate:
        return Candidate(case, self, wrapper)


def _sgd(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def _adamw(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def _ours(
    form: ShortForm,
    optimizer: type[torch.optim.Optimizer],
    lr: float,
    compute_dtype: torch.dtype | None = None,
) -> Build:
    """Return the builder for the plan of this name over all ranks, with its optimiser."""

    def build(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        ranks = dist.get_world_size()
        plan = form.plan(ranks, ranks, compute_dtype=compute_dtype)
        mesh = ParallelMesh(plan.degrees)
        wrapped = parallelize(model, plan, mesh)
        return wrapped, make_optimizer(wrapped, plan, mesh, wrapped.parameters(), optimizer, lr=lr)

    return build


def _torch_ddp(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return _sgd(DistributedDataParallel(model, gradient_as_bucket_view=True))


def _torch_zero1(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    params, cls = model.parameters(), torch.optim.AdamW
    return wrapped, ZeroRedundancyOptimizer(params, cls, parameters_as_bucket_view=True, lr=1e-3)


def _fully_shard(compute_dtype: torch.dtype | None) -> Build:
    def build(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.layers:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return _sgd(model)

    return build


def _fsdp_kind(name: str, compute_dtype: torch.dtype | None = None, checkpointing: bool = False) -> Kind:
    def alone(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        return _sgd(model if compute_dtype is None else model.to(compute_dtype))

    ours = _ours(ShortForm.FSDP, torch.optim.SGD, 0.01, compute_dtype)
    return Kind(name, "fully_shard", ours, _fully_shard(compute_dtype), alone, checkpointing)


KINDS = (
    Kind("DDP", "DistributedDataParallel", _ours(ShortForm.DDP, torch.optim.SGD, 0.01), _torch_ddp, _sgd),
    Kind(
        "ZeRO-1",
        "ZeroRedundancyOptimizer",
        _ours(ShortForm.ZERO1, torch.optim.AdamW, 1e-3),
        _torch_zero1,
        _adamw,
    ),
    Kind(
        "ZeRO-2",
        "ZeroRedundancyOptimizer",
        _ours(ShortForm.ZERO2, torch.optim.AdamW, 1e-3),
        _torch_zero1,
        _adamw,
    ),
    _fsdp_kind("FSDP"),
    _fsdp_kind("FSDP bf16", torch.bfloat16),
    _fsdp_kind("FSDP checkpointing", checkpointing=True),
)


class Candidate:
    """A model with one of the wrappers, and its data."""

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


WORLD_SIZES = (2, 4)
ROWS = len(KINDS) * len(CASES) * len(WORLD_SIZES)
SECONDS = (7.5, 4.5)


def rows(pairs: int = 40) -> Iterator[Row]:
    for kind in KINDS:
        for case in CASES:
            for world_size in WORLD_SIZES:
                yield row(kind, case, world_size, pairs)


def row(kind: Kind, case: str, world_size: int, pairs: int) -> Row:
    """Measure one comparison."""
    per_rank = run_ranks(_rounds, world_size, case, kind, pairs, explain=Explain.OFF)
    rounds = rounds_over_ranks(per_rank)
    turns = Turns(rounds["ours"], rounds["peer"])
    floor, alone, peer_cpu = (median_cpu(rounds[name]) for name in ("none", "messages", "peer"))
    repeats = min(MEMORY_REPEATS, -(-pairs // 4))

    def peaks(exact: bool) -> dict[str, list[float]]:
        def job(wrapper: str) -> list[int]:
            return run_ranks(_peak, world_size, case, kind, wrapper, exact, explain=Explain.OFF)

        return peaks_in_turns(job, repeats)

    exact, kept = peaks(exact=True), peaks(exact=False)
    mine, its = (statistics.median(exact[wrapper]) / 2**20 for wrapper in ("ours", "peer"))
    note = f"peak {mine:.0f} MiB against {its:.0f} MiB per rank; "
    note += f"ratio with glibc's defaults {ratios(kept['ours'], kept['peer'])}; "
    note += f"the step of the peer takes {1e3 * peer_cpu / world_size:.0f} ms per rank, "
    note += f"arithmetic and messages alone {(floor + alone) / peer_cpu:.2f} of it"
    note += f"; ours takes {of_limit(rounds, 'none', 'messages')} of that limit"
    compared = compare(f"{kind.name}, {case}", kind.peer, world_size, turns, floor_cpu=floor, note=note)
    return replace(compared, memory_ratio=ratios(exact["ours"], exact["peer"]))


def _rounds(case: str, kind: Kind, pairs: int) -> dict[str, list[Turn]]:
    """Measure ours, the peer, the step without communication, and our messages without the step. They are in
    one round, because on a loaded machine what is measured later has another load."""
    warnings.simplefilter("ignore", FutureWarning)  # the peer calls deprecated functions of PyTorch
    torch.set_num_threads(1)
    ours, peer, alone = (kind.candidate(case, wrapper) for wrapper in ("ours", "peer", "none"))
    actions = {"ours": ours.step, "peer": peer.step, "none": alone.step, "messages": Replay(ours.step).run}
    return take_rounds(actions, pairs, between=dist.barrier)


def _peak(case: str, kind: Kind, wrapper: str, exact: bool) -> int:
    """Return the peak memory above the start, in bytes, of building and training a model in a new process."""
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    if exact:
        return_freed_memory()

    def train() -> None:
        candidate = kind.candidate(case, wrapper)
        for _ in range(MEMORY_STEPS):
            candidate.step()

    return measure(train).memory
