"""A context-parallel Llama and its twin in one process, on the same sequences."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dlo_lib.models import Llama, LlamaConfig
from dlo_lib.models.llama import RopeScaling
from dlo_lib.optim import IGNORE_INDEX, train_step
from dlo_lib.parallel import DDP, FSDP
from dlo_lib.parallel.context import ContextKind, SequencePlacement, parallelize_context
from dlo_lib.parallel.context.documents import document_ids
from dlo_lib.parallel.mesh import Degrees, ParallelMesh

STEPS = 4
CONFIG = LlamaConfig(
    61,
    hidden=30,
    intermediate=37,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=6,
    rope_scaling=RopeScaling(4.0, original_max_positions=12),
    tied_embeddings=True,
)


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        cp: the context-parallel ranks; the other ranks have different sequences.
        heads: query and key heads.
        documents: whether the sequences are packed.
        count: the micro-batches of a step.
    """

    kind: ContextKind = ContextKind.RING
    placement: SequencePlacement = SequencePlacement.ZIGZAG
    inner: int | None = None
    cp: int = 0
    seq: int = 24
    heads: tuple[int, int] = (6, 2)
    documents: bool = False
    checkpointing: bool = False
    count: int = 1
    fsdp: bool = False
    dtype: torch.dtype = torch.float64

    def model(self) -> Llama:
        torch.manual_seed(0)
        config = replace(CONFIG, num_heads=self.heads[0], num_kv_heads=self.heads[1])
        return Llama(config, checkpointing=self.checkpointing).to(self.dtype)

    def batches(self, step: int, dp: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Micro-batches of data rank ``dp``: inputs, targets, of which some are ignored, and document ids."""
        made = []
        for index in range(self.count):
            random = torch.Generator().manual_seed(100 * step + 10 * dp + index)
            rows = 1 + (step + dp + index) % 3
            tokens = torch.randint(CONFIG.vocab_size, (rows, self.seq + 1), generator=random)
            targets = tokens[:, 1:].clone()
            targets[torch.rand(targets.shape, generator=random) < 0.3] = IGNORE_INDEX
            targets[:, : self.seq // 3] = IGNORE_INDEX  # the ranks have unequal numbers of valid tokens
            ids = torch.stack([self._ids(random) for _ in range(rows)])
            made.append((tokens[:, :-1], targets, ids))
        return made

    def _ids(self, random: torch.Generator) -> Tensor:
        cuts = torch.randperm(self.seq - 1, generator=random)[:3].sort().values + 1
        edges = torch.cat((torch.tensor([0]), cuts, torch.tensor([self.seq])))
        return document_ids(edges.diff(), self.seq)


@dataclass
class History:
    """The loss and the whole gradients of each step."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def alone(case: Case, data_ranks: int) -> History:
    """Train in this process, with attention to the whole sequences and explicit masks."""
    model = case.model()
    optimizer = sgd(model)
    history = History([], [])
    for step in range(STEPS):
        pieces = [piece for dp in range(data_ranks) for piece in case.batches(step, dp)]
        tokens = sum(int((targets != IGNORE_INDEX).sum()) for _, targets, _ in pieces)
        total = 0.0
        for inputs, targets, ids in pieces:
            visible = torch.ones(case.seq, case.seq, dtype=torch.bool).tril()[None, None]
            if case.documents:
                visible = visible & (ids[:, None, :, None] == ids[:, None, None, :])
            with masked(model, visible):
                logits = model(inputs).flatten(0, 1)
                loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
                (loss / tokens).backward()
            total += loss.item() / tokens
        history.losses.append(total)
        history.gradients.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return history


@contextlib.contextmanager
def masked(model: Llama, visible: Tensor):
    """Attention of ``model`` with this mask."""

    def attend(q, k, v, is_causal, enable_gqa):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=enable_gqa)

    for block in model.layers:
        block.self_attn.attend = attend
    yield
    for block in model.layers:
        del block.self_attn.attend


def on_ranks(case: Case) -> tuple[History, int]:
    """Train on the ranks of this job; return the history and the number of data ranks."""
    torch.set_num_threads(1)
    ranks = dist.get_world_size()
    cp = case.cp or ranks
    mesh = ParallelMesh(Degrees(dp_shard=ranks // cp, cp=cp))
    both = mesh.group_along("dp_shard", "cp")
    module = case.model()
    context = parallelize_context(
        module, mesh.group_along("cp"), kind=case.kind, placement=case.placement, inner=case.inner
    )
    model: Any = FSDP(module, both) if case.fsdp else DDP(module, both)
    optimizer = sgd(model)
    history = History([], [])
    seen: list[dict[str, Tensor]] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(whole_gradients(model)))
    for step in range(STEPS):
        pieces = case.batches(step, mesh.coordinate("dp_shard"))
        pairs = [(context.shard(inputs), context.shard(targets)) for inputs, targets, _ in pieces]
        with context.documents(pieces[0][2]) if case.documents else contextlib.nullcontext():
            result = train_step(model, optimizer, pairs, group=both)
        history.losses.append(result.loss.item())
    history.gradients = seen
    return history, ranks // cp


def whole_gradients(model: Any) -> dict[str, Tensor]:
    """The gradients before the optimiser steps, gathered with nothing of the library's."""
    if isinstance(model, DDP):
        return gradients(model.module)
    found = {}
    for shard in model.shards():
        parts: list[Any] = [None] * dist.get_world_size(model.group)
        dist.all_gather_object(parts, shard.param.grad.numpy(), group=model.group)
        found[shard.name] = torch.cat([torch.from_numpy(part).flatten() for part in parts]).view(shard.shape)
    return found


def train_all(cases: list[Case]) -> list[tuple[History, int]]:
    return [on_ranks(case) for case in cases]
