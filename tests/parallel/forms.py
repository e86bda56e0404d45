"""A module distributed in each form, with an AdamW."""

from __future__ import annotations

import torch
from torch import nn

from dlo_lib.parallel import DDP, FSDP
from dlo_lib.parallel.zero import ShardedDDP, ShardedOptimizer

Spread = tuple[nn.Module, torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.05)


def ddp(module: nn.Module) -> Spread:
    return DDP(module), adamw(module)


def stage_1(module: nn.Module) -> Spread:
    return DDP(module), ShardedOptimizer(module.parameters(), torch.optim.AdamW, lr=0.05)


def stage_2(module: nn.Module) -> Spread:
    model = ShardedDDP(module)
    return model, ShardedOptimizer(model.parameters(), torch.optim.AdamW, partition=model.partition, lr=0.05)


def fsdp(module: nn.Module) -> Spread:
    model = FSDP(module)
    return model, adamw(model)
