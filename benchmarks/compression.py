"""Compressed gradients: DDP with each hook of the library, over gloo, compared with PyTorch's DDP.

The peer has the same hook, or exact sums where PyTorch has none: its ``batched_powerSGD_hook`` raises an
AssertionError (2.8 - 2.15), because it gives a matrix to a function that takes batches. All gradients are
one bucket in both: with several, its ``powerSGD_hook`` starts its second all-reduces in another order on each
rank, and gloo ends the process.

A turn is the forward and backward of eight linear layers of 512 x 512 with few samples, so that communication
dominates. The note has the bytes that a rank sends in a step with ring algorithms, counted by the tracer, and
their share of the exact ones. PowerSGD has rank 4, top-k sends 1 %, and the first steps, which are exact, are
not measured.

The last rows are counted from the shapes of a model: how many times fewer bytes than fp32 gradients the hooks
of a table of the course send, which names neither model nor rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.paired import Row, Turn, Turns, compare, rounds_over_ranks, take_rounds
from dlo_lib.comm.compression.low_rank import is_worth
from dlo_lib.comm.tracing.recorder import trace_collectives
from dlo_lib.launch import Explain, run_ranks
from dlo_lib.models import Llama, model_config
from dlo_lib.parallel import DDP
from dlo_lib.parallel.ddp.comm_hooks import CommHook, rounding_hook, sum_hook
from dlo_lib.parallel.ddp.compressed_sums import OneBit, PowerSGD, TopK

WORLD_SIZE, LAYERS, SIDE, SAMPLES, RANK = 2, 8, 512, 4, 4
HOOKS: dict[str, Callable[[], CommHook]] = {
    "exact": lambda: sum_hook,
    "fp16": lambda: rounding_hook(torch.float16),
    "PowerSGD": lambda: PowerSGD(RANK, start=2),
    "PowerSGD, factors in fp16": lambda: PowerSGD(RANK, start=2, dtype=torch.float16),
    "PowerSGD, batched": lambda: PowerSGD(RANK, start=2, batched=True),
    "top-k, 1 %": lambda: TopK(0.01),
    "one bit": lambda: OneBit(),
}
OF_PYTORCH = ("exact", "fp16", "PowerSGD")
ONE_BUCKET: dict[str, Any] = {"bucket_bytes": 100 << 20, "first_bucket_bytes": 100 << 20}
MODEL = "llama-3.2-1b"
ROWS = len(HOOKS) + 5
SECONDS = (6.0, 0.3)


def rows(pairs: int = 20) -> Iterator[Row]:
    exact = 0
    for name in HOOKS:
        results = run_ranks(turns_of_a_rank, WORLD_SIZE, name, pairs, explain=Explain.OFF)
        sent = results[0][1]
        exact = exact or sent
        rounds = rounds_over_ranks([result[0] for result in results])
        yield compare(
            name,
            f"PyTorch's DDP, {name if name in OF_PYTORCH else 'exact'}",
            WORLD_SIZE,
            Turns(**rounds),
            note=f"{sent:,} bytes in a step, {sent / exact:.2%} of exact",
        )
    shapes = [tuple(param.shape) for param in Llama(model_config(MODEL), device="meta").parameters()]
    for name, times in fractions(shapes).items():
        yield Row(f"{name}, rank 1", "fp32 gradients", 1, note=f"{MODEL}: {times:,.0f} times fewer bytes")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(LAYERS)))


def peer_of(name: str) -> nn.Module:
    model = DistributedDataParallel(net(), gradient_as_bucket_view=True, bucket_cap_mb=100)
    if name == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if name == "PowerSGD":
        state = powerSGD_hook.PowerSGDState(None, RANK, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model


def turns_of_a_rank(name: str, pairs: int) -> tuple[dict[str, list[Turn]], int]:
    """Return the turns of this rank, and the bytes that our step sends."""
    torch.set_num_threads(1)
    models: dict[str, Any] = {
        "ours": DDP(net(), comm_hook=HOOKS[name](), **ONE_BUCKET),
        "peer": peer_of(name),
    }
    x = torch.randn(SAMPLES, SIDE, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step(model: nn.Module) -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    actions = {key: lambda model=model: step(model) for key, model in models.items()}
    turns = take_rounds(actions, pairs, warm_up=4, between=dist.barrier)
    with trace_collectives() as trace:
        step(models["ours"])
    kinds = ("all_reduce", "all_gather", "all_to_all")
    return turns, sum(int(trace.ring_bytes(kind, dist.get_rank())) for kind in kinds)


def fractions(shapes: list[tuple[int, ...]], rank: int = 1, factor: float = 2.0) -> dict[str, float]:
    """Return how many times fewer bytes than fp32 gradients the five hooks of the course's table send.

    Args:
        shapes: of the parameters of a model.
        rank: of PowerSGD.
        factor: of PowerSGD: a matrix is sent whole if its factors are not smaller by this factor.
    """
    sizes = [torch.Size(shape).numel() for shape in shapes]
    sent = 0
    for shape, size in zip(shapes, sizes, strict=True):
        rows = shape[0] if len(shape) > 1 else 1
        columns = size // rows
        sent += (rows + columns) * min(rank, rows, columns) if is_worth(rows, columns, rank, factor) else size
    side = int((sum(sizes) - 1) ** 0.5) + 1
    layers, square = sum(sizes) / sent, sum(sizes) / (2 * side * rank)
    return {
        "fp16": 2.0,
        "PowerSGD": layers,
        "PowerSGD + fp16": 2 * layers,
        "batched PowerSGD": square,
        "batched PowerSGD + fp16": 2 * square,
    }
