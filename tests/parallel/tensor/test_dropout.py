"""Dropout drops the same elements of activations that all ranks hold, and different ones of parts, also when
activation checkpointing repeats the forward."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from dlo_lib.launch import run_ranks
from dlo_lib.parallel.tensor import TensorParallel, parallelize_tensor
from dlo_lib.parallel.tensor.style import ColumnParallel, RowParallel, ShardedActivation

SIZE = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(SIZE, 2 * SIZE, bias=False)
        self.inner = nn.Dropout(0.5)
        self.down = nn.Linear(2 * SIZE, SIZE, bias=False)
        self.outer = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.down(self.inner(self.up(x))))


def masks(sequence_parallel: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The elements that the inner and the outer dropout keep, the input gradient, and the next random
    number."""
    torch.manual_seed(0)
    model = Block()
    styles = {
        "up": ColumnParallel(),
        "inner": ShardedActivation(),
        "down": RowParallel(),
        "outer": ShardedActivation(only_in_sequence=True),
    }
    assert dist.group.WORLD is not None
    layout = parallelize_tensor(model, dist.group.WORLD, styles, sequence_parallel=sequence_parallel)
    kept: dict[str, list[Tensor]] = {"inner": [], "outer": []}
    for name, into in kept.items():
        module = getattr(model, name)
        module.register_forward_hook(lambda _, args, out, into=into: into.append(out.detach() != 0))
    model.train()
    x = torch.ones(1, 4, SIZE, requires_grad=True)
    with set_checkpoint_early_stop(False):  # so that the repeated forward reaches the last hook
        out = checkpoint(TensorParallel(model, layout), x, use_reentrant=False)
        out.sum().backward()
    for first, again in kept.values():
        assert torch.equal(first, again), "the repeated forward dropped other elements"
    assert x.grad is not None
    return kept["inner"][0], kept["outer"][0], x.grad, torch.rand(1)


def test_masks_differ_exactly_where_the_activations_differ():
    (inner, outer, grad, after), (its_inner, its_outer, its_grad, its_after) = run_ranks(masks, 2, False)
    assert not torch.equal(inner, its_inner)
    assert torch.equal(outer, its_outer)
    assert torch.equal(grad, its_grad)
    assert torch.equal(after, its_after), "the random states of the ranks are no longer equal"
    (_, outer, _, after), (_, its_outer, _, its_after) = run_ranks(masks, 2, True)
    assert not torch.equal(outer, its_outer)
    assert torch.equal(after, its_after)
