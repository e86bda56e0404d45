"""A small Llama with experts, its non-parallel twin with masks instead of experts, and both trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dlo_lib.models import GateWeights, Llama, LlamaConfig, MoEConfig
from dlo_lib.models.moe import MoELayer, moe_layers
from dlo_lib.optim import IGNORE_INDEX, train_step
from dlo_lib.parallel import DDP
from dlo_lib.parallel.expert import ExpertParallel, parallelize_experts
from dlo_lib.parallel.mesh import Degrees, ParallelMesh
from tests.models.moe_twin import dense_moe

STEPS, SEQ, VOCAB, EXPERTS, MICRO_BATCHES = 4, 5, 31, 12, 2
PLAIN = MoEConfig(num_experts=EXPERTS, top_k=2, intermediate=6, balance_loss=0.5, z_loss=0.05)
MIXTURES = {
    "drop-less top-2": PLAIN,
    "drop-less top-1, shared": replace(
        PLAIN, top_k=1, gate_weights=GateWeights.SOFTMAX_BEFORE, shared_intermediate=8
    ),
    "capacity top-2": replace(PLAIN, capacity_factor=0.9),
    "capacity top-1, shared": replace(
        PLAIN,
        top_k=1,
        gate_weights=GateWeights.SOFTMAX_BEFORE,
        shared_intermediate=8,
        capacity_factor=1.2,
    ),
    "balance bias": replace(
        PLAIN, gate_weights=GateWeights.SIGMOID, bias_rate=0.05, balance_loss=0.0, z_loss=0.0
    ),
}


def llama(mixture: str, checkpointing: bool = False, every: int = 1) -> Llama:
    moe = replace(MIXTURES[mixture], every=every)
    config = LlamaConfig(VOCAB, 16, 20, 2, 2, 1, 8, tied_embeddings=True, initializer_std=0.3, moe=moe)
    return Llama(config, checkpointing=checkpointing).double()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def distributed(model: nn.Module, ep: int) -> ExpertParallel:
    """Over all ranks, with the experts over ``ep`` of them."""
    mesh = ParallelMesh(Degrees(dp_shard=0, ep=ep))
    layout = parallelize_experts(
        model,
        mesh.group_along("ep"),
        replicas=mesh.group_along("dp_replicate", "dp_shard_mod_ep"),
        batch=mesh.group_along("dp_replicate", "dp_shard", "cp"),
    )
    return ExpertParallel(DDP(model, layout.batch, reduced_over=layout.reduced_over(model)), layout)


def micro_batches(step: int, rank: int) -> list[tuple[Tensor, Tensor]]:
    """Unequal numbers of sequences on the ranks and of tokens to learn."""
    random = torch.Generator().manual_seed(100 * step + rank)
    pairs = []
    for index in range(MICRO_BATCHES):
        tokens = torch.randint(VOCAB, (1 + (step + rank + index) % 3, SEQ + 1), generator=random)
        targets = tokens[:, 1:].clone()
        targets[torch.rand(targets.shape, generator=random) < 0.2 * (1 + rank)] = IGNORE_INDEX
        pairs.append((tokens[:, :-1], targets))
    return pairs


@dataclass
class History:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    biases: list[list[Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    dropped: int = 0
    idle: int = 0
    """The number of experts without a token, over all layers and forwards."""


class Masks(nn.Module):
    """Replaces an ``MoELayer`` of the twin: ``dense_moe`` of the parts of the batch of all ranks."""

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self.router, self.experts, self.shared = layer.router, layer.experts, layer.shared
        self.config = layer.config
        self.parts: list[int] = []
        self.losses: list[Tensor] = []
        self.load = torch.zeros(EXPERTS, dtype=torch.int64)
        self.idle = 0

    def forward(self, x: Tensor) -> Tensor:
        weights: dict[str, Tensor] = dict(self.named_parameters())
        bias = self.router.balance_bias
        if bias is not None:
            weights["balance_bias"] = bias
        pieces = [part.flatten(0, 1) for part in x.split(self.parts)]
        outputs, losses, load = dense_moe(weights, self.config, pieces)
        self.losses.append(losses)
        self.load += load
        self.idle += int((load == 0).sum())
        return torch.cat(outputs).view(x.shape)

    @torch.no_grad()
    def update(self) -> None:
        bias = self.router.balance_bias
        if bias is not None:
            bias += self.config.bias_rate * torch.sign(self.load.double().mean() - self.load)
        self.load.zero_()


def trained_alone(mixture: str, world_size: int, max_norm: float = 0.5) -> History:
    """The twin: one loss over the data of all ranks, one backward, one step."""
    torch.manual_seed(0)
    model = llama(mixture)
    optimizer = adamw(model)
    masks = []
    for block in model.layers:
        if isinstance(block.mlp, MoELayer):
            block.mlp = Masks(block.mlp)
            masks.append(block.mlp)
    history = History()
    for step in range(STEPS):
        batches = [micro_batches(step, rank) for rank in range(world_size)]
        tokens = sum(int((targets != IGNORE_INDEX).sum()) for pairs in batches for _, targets in pairs)
        total = torch.zeros((), dtype=torch.float64)
        for index in range(MICRO_BATCHES):
            pieces = [pairs[index] for pairs in batches]
            for mask in masks:
                mask.parts = [len(inputs) for inputs, _ in pieces]
            logits = model(torch.cat([inputs for inputs, _ in pieces]))
            targets = torch.cat([targets for _, targets in pieces])
            total = total + F.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
            )
        loss = total / tokens
        auxiliary = torch.stack([mask_loss for mask in masks for mask_loss in mask.losses]).sum()
        (loss + auxiliary / MICRO_BATCHES).backward()
        history.losses.append(loss.item())
        history.norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        history.gradients.append({name: param.grad.clone() for name, param in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
        for mask in masks:
            mask.losses.clear()
            mask.update()
        biases = [mask.router.balance_bias for mask in masks]
        history.biases.append([bias.clone() for bias in biases if bias is not None])
    history.parameters = {name: param.detach().clone() for name, param in model.named_parameters()}
    history.idle = sum(mask.idle for mask in masks)
    return history


def whole(
    named: Iterator[tuple[str, Tensor]] | Sequence[tuple[str, Tensor]], model: ExpertParallel
) -> dict[str, Tensor]:
    """Tensors by name with the experts of all ranks, put together with nothing of the library's."""
    group = model.layout.group
    everyones: list[Any] = [None] * dist.get_world_size(group)
    mine = {name: tensor.detach().numpy().copy() for name, tensor in named}
    dist.all_gather_object(everyones, mine, group=group)
    return {
        name: torch.cat([torch.from_numpy(each[name]) for each in everyones])
        if ".experts." in name
        else torch.from_numpy(mine[name])
        for name in mine
    }


def trained(mixture: str, ep: int, max_norm: float = 0.5, checkpointing: bool = False) -> History:
    """On this rank."""
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())  # so that only broadcasts make the ranks equal
    module = llama(mixture, checkpointing)
    model = distributed(module, ep)
    optimizer = adamw(model)
    history = History()
    optimizer.register_step_pre_hook(
        lambda *_: history.gradients.append(
            whole([(name, param.grad) for name, param in model.named_parameters()], model)
        )
    )
    layers = moe_layers(module)
    for step in range(STEPS):
        result = train_step(
            model, optimizer, micro_batches(step, dist.get_rank()), max_norm=max_norm, group=dist.group.WORLD
        )
        assert result.grad_norm is not None
        history.losses.append(result.loss.item())
        history.norms.append(result.grad_norm.item())
        biases = [layer.router.balance_bias for layer in layers]
        history.biases.append([bias.clone() for bias in biases if bias is not None])
        history.dropped += sum(int(layer.stats.dropped) for layer in layers if layer.stats is not None)
    history.parameters = whole(list(model.named_parameters()), model)
    return history
