"""The library's own implementation under the names of this lab: what ``lab.use_reference("question")`` gives a stuck student."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor
from torch.utils.checkpoint import checkpoint

from dlo_lib.parallel import zero
from dlo_lib.parallel.clip import clip_sharded_grad_norm_


def state_bytes(parameters: int, world: int, stage: int, moments: int = 2) -> dict[str, float]:
    """From the stage at which each part is divided."""
    parts = {"weights": (1, 3), "gradients": (1, 2), "optimizer": (moments, 1)}
    return {name: 4 * numbers * parameters / (world if stage >= divided else 1) for name, (numbers, divided) in parts.items()}


def piece_of(tensor: Tensor, rank: int, world: int) -> Tensor:
    """This rank's row of the flat tensor, padded."""
    flat = tensor.detach().reshape(-1)
    return F.pad(flat, (0, -flat.numel() % world)).view(world, -1)[rank].clone()


def whole(piece: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The rows of all ranks, without the padding."""
    rows = piece.new_empty(dist.get_world_size() * piece.numel())
    dist.all_gather_into_tensor(rows, piece)
    return rows[: torch.Size(shape).numel()].view(shape)


class ShardedOptimizer:
    """The library's, behind this lab's interface."""

    def __init__(self, parameters: list, make_optimizer: Callable[[list], torch.optim.Optimizer]) -> None:
        made = make_optimizer([nn.Parameter(torch.zeros(1))])
        self.optimizer = zero.ShardedOptimizer(parameters, type(made), **made.defaults)

    def step(self) -> None:
        """Update all parameters."""
        self.optimizer.step()


def global_norm(pieces: list[Tensor]) -> Tensor:
    """What the library's clipping returns, where nothing is clipped."""
    held = [nn.Parameter(torch.empty_like(piece)) for piece in pieces]
    for one, piece in zip(held, pieces):
        one.grad = piece.clone()
    return clip_sharded_grad_norm_(held, float("inf"), dist.group.WORLD)


def shard_gradients(module: nn.Module, pieces: list) -> None:
    """Functional reduce-scatters in hooks."""

    def send(parameter: Tensor, piece: Tensor) -> None:
        assert parameter.grad is not None
        flat = parameter.grad.reshape(-1)
        padded = F.pad(flat, (0, -flat.numel() % dist.get_world_size()))
        own = reduce_scatter_tensor(padded, "sum", 0, dist.group.WORLD) / dist.get_world_size()
        piece.grad = own if piece.grad is None else piece.grad + own
        parameter.grad = None

    for parameter, piece in zip(module.parameters(), pieces):
        parameter.register_post_accumulate_grad_hook(lambda parameter, piece=piece: send(parameter, piece))


def sharded_linear(x: Tensor, weight_piece: Tensor, shape: tuple[int, int]) -> Tensor:
    """PyTorch's all-gather with a gradient, inside a checkpoint."""

    def compute(x: Tensor, piece: Tensor) -> Tensor:
        scaled = _DivideGradient.apply(piece, dist.get_world_size())
        rows = all_gather_tensor_autograd(scaled, 0, dist.group.WORLD)
        return F.linear(x, rows[: shape[0] * shape[1]].view(shape))

    return checkpoint(compute, x, weight_piece, use_reentrant=False)


class _DivideGradient(torch.autograd.Function):
    """The identity, whose gradient is divided."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: int) -> Tensor:
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.by, None


REFERENCE = {
    "state": {"state_bytes": state_bytes},
    "pieces": {"piece_of": piece_of, "whole": whole},
    "stage1": {"ShardedOptimizer": ShardedOptimizer},
    "norm": {"global_norm": global_norm},
    "stage2": {"shard_gradients": shard_gradients},
    "stage3": {"sharded_linear": sharded_linear},
}
