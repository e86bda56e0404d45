"""Tensor and sequence parallelism: ours compared with ``parallelize_module`` of PyTorch's DTensor, for Llamas
over gloo.

    TP          ColwiseParallel, RowwiseParallel, norms on every rank, loss_parallel
    SP          the same with SequenceParallel norms
    async TP    ours with async_tp against SP of the peer, whose asynchronous form needs CUDA

A turn is one `train_step` with SGD of the same model and the same data on all ranks. The measurement is that
of ``benchmarks.parallel``. The floor is the step of a model with the sizes of one rank (its heads, its part
of the intermediate features and of the vocabulary), without communication. It computes the norms and the
residual sums of the whole sequence, also for SP.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.paired import Row
from benchmarks.parallel import Candidate, Kind, row
from dlo_lib.models import Llama, LlamaConfig
from dlo_lib.optim import train_step
from dlo_lib.parallel.mesh import ParallelMesh
from dlo_lib.parallel.parallelize import make_optimizer, parallelize
from dlo_lib.parallel.plan import ParallelPlan

CASES = {
    # name: the model, the sequences, the tokens of a sequence
    "hidden 256": (
        LlamaConfig(512, 256, 704, num_layers=4, num_heads=4, num_kv_heads=4, head_dim=64),
        4,
        128,
    ),
    "hidden 1024": (
        LlamaConfig(512, 1024, 2816, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=128),
        2,
        64,
    ),
}
WORLD_SIZES = (2, 4)


@dataclass(frozen=True)
class TensorKind(Kind):
    """Tensor parallelism with or without ``sequence_parallel``."""

    sequence_parallel: bool = False

    def candidate(self, case: str, wrapper: str) -> Candidate:
        return _TensorCandidate(case, self, wrapper)


class _TensorCandidate(Candidate):
    def __init__(self, case: str, kind: Kind, wrapper: str) -> None:
        config, batch, seq = CASES[case]
        if wrapper == "none":
            config = _of_one_rank(config, dist.get_world_size())
        torch.manual_seed(0)
        self.group = None
        self.loss_parallel = wrapper == "peer"
        self.model, self.optimizer = kind.build(wrapper)(Llama(config))
        tokens = torch.randint(
            config.vocab_size, (batch, seq + 1), generator=torch.Generator().manual_seed(0)
        )
        self.pairs = [(tokens[:, :-1], tokens[:, 1:])]

    def step(self) -> None:
        if self.loss_parallel:
            with loss_parallel():
                train_step(self.model, self.optimizer, self.pairs)
        else:
            train_step(self.model, self.optimizer, self.pairs)


def _of_one_rank(config: LlamaConfig, ranks: int) -> LlamaConfig:
    return replace(
        config,
        vocab_size=config.vocab_size // ranks,
        intermediate=config.intermediate // ranks,
        num_heads=config.num_heads // ranks,
        num_kv_heads=config.num_kv_heads // ranks,
    )


def _sgd(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)


def _ours(
    sequence_parallel: bool, model: nn.Module, async_tp: bool = False
) -> tuple[nn.Module, torch.optim.Optimizer]:
    plan = ParallelPlan(tp=dist.get_world_size(), sequence_parallel=sequence_parallel, async_tp=async_tp)
    mesh = ParallelMesh(plan.degrees)
    wrapped = parallelize(model, plan, mesh)
    optimizer = make_optimizer(
        wrapped, plan, mesh, wrapped.parameters(), torch.optim.SGD, lr=0.01, foreach=False
    )
    return wrapped, optimizer


def _summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    loss: Any = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    whole: Tensor = loss.to_local()
    return whole


def _dtensor(sequence_parallel: bool, model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    between: Any = Shard(1) if sequence_parallel else Replicate()
    norm = {"norm": SequenceParallel()} if sequence_parallel else {}
    parallelize_module(
        model,
        mesh,
        {
            "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
            **norm,
            "lm_head": ColwiseParallel(
                input_layouts=between, output_layouts=Shard(-1), use_local_output=False
            ),
        },
    )
    inputs = PrepareModuleInput(
        input_layouts=(between, None, None), desired_input_layouts=(Replicate(), None, None)
    )
    block = {
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=between),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=between),
    }
    if sequence_parallel:
        block |= {
            "input_layernorm": SequenceParallel(),
            "post_attention_layernorm": SequenceParallel(),
            "self_attn": inputs,
            "mlp": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
        }
    for layer in model.layers:  # type: ignore[union-attr]
        parallelize_module(layer, mesh, block)
    model.summed_cross_entropy = _summed_cross_entropy  # type: ignore[assignment]
    return _sgd(model)


def _ours_tp(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return _ours(False, model)


def _ours_sp(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return _ours(True, model)


def _ours_async_tp(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return _ours(True, model, async_tp=True)


def _peer_tp(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return _dtensor(False, model)


def _peer_sp(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return _dtensor(True, model)


KINDS = (
    TensorKind("TP", "parallelize_module", _ours_tp, _peer_tp, _sgd),
    TensorKind("SP", "parallelize_module", _ours_sp, _peer_sp, _sgd, sequence_parallel=True),
    TensorKind("async TP", "parallelize_module", _ours_async_tp, _peer_sp, _sgd, sequence_parallel=True),
)
ROWS = len(KINDS) * len(CASES) * len(WORLD_SIZES)
SECONDS = (12.0, 2.5)


def rows(pairs: int = 20) -> Iterator[Row]:
    for kind in KINDS:
        for case in CASES:
            for world_size in WORLD_SIZES:
                yield row(kind, case, world_size, pairs)
