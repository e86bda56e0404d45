"""Each communication function and its gradient equal those of the whole tensors in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlo_lib.base.errors import UserError
from dlo_lib.launch import run_ranks
from dlo_lib.parallel.tensor.exchange import TensorGroup
from dlo_lib.parallel.tensor.functions import (
    copy_to_group,
    gather_from_group,
    gather_sequence,
    reduce_from_group,
    scatter_sequence,
    split_to_group,
)

BATCH, SEQ, HIDDEN = 2, 12, 6


def of_rank(rank: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def same_everywhere(*shape: int) -> Tensor:
    return of_rank(100, *shape)


def check_functions() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    assert dist.group.WORLD is not None
    group = TensorGroup(dist.group.WORLD)
    whole = (BATCH, SEQ, HIDDEN)
    part = (BATCH, SEQ // world, HIDDEN)
    wholes = [of_rank(each, *whole) for each in range(world)]
    parts = [of_rank(each, *part) for each in range(world)]
    total, joined = torch.stack(wholes).sum(0), torch.cat(parts, 1)

    def mine(x: Tensor, dim: int) -> Tensor:
        return x.chunk(world, dim)[rank]

    # function, input, output, gradient of the output, gradient of the input
    cases = [
        (copy_to_group, wholes[0], wholes[0], wholes[rank], total),
        (reduce_from_group, wholes[rank], total, wholes[0], wholes[0]),
        (gather_sequence, parts[rank], joined, wholes[rank], mine(total, 1)),
        (scatter_sequence, wholes[rank], mine(total, 1), parts[rank], joined),
        (gather_from_group, mine(wholes[0], 2), wholes[0], wholes[1], mine(wholes[1], 2)),
        (split_to_group, wholes[0], mine(wholes[0], 2), mine(wholes[1], 2), wholes[1]),
    ]
    for function, x, output, grad, expected in cases:
        leaf = x.clone().requires_grad_()
        sent = grad.clone()
        # times 1, because reduce_from_group overwrites its input, which may not be a leaf
        found = function(leaf * 1, group)
        torch.testing.assert_close(found, output, atol=1e-12, rtol=0)
        found.backward(sent)
        torch.testing.assert_close(leaf.grad, expected, atol=1e-12, rtol=0)
        assert torch.equal(sent, grad), f"{function.__name__} overwrote the gradient of its output"
    with pytest.raises(UserError, match="a sequence of 13 is not a multiple of tp"):
        scatter_sequence(torch.zeros(1, 13, 2), group)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_functions_and_their_gradients(world):
    run_ranks(check_functions if world > 1 else check_alone, world)


def check_alone() -> None:
    assert dist.group.WORLD is not None
    group = TensorGroup(dist.group.WORLD)
    for function in (
        copy_to_group,
        reduce_from_group,
        gather_sequence,
        scatter_sequence,
        gather_from_group,
        split_to_group,
    ):
        x = same_everywhere(BATCH, SEQ, HIDDEN).requires_grad_()
        y = function(x * 1, group)
        y.backward(y.detach())
        assert torch.equal(y, x)
        assert torch.equal(x.grad, x)
