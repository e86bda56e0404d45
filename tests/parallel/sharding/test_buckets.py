"""Messages of packed tensors: their sums, and what is copied."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist

from dlo_lib.comm.tracing.recorder import trace_collectives
from dlo_lib.launch import run_ranks
from dlo_lib.parallel.sharding.buckets import all_reduce_packed


def summed() -> tuple[list[torch.Tensor], int, list[int]]:
    """The sums of five tensors, the number of messages, and the elements of those that are packed."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    tensors = [torch.full((size,), 1.0 + rank) for size in (2, 2, 40, 3)]
    tensors.append(torch.arange(60.0).view(6, 10).T)  # not contiguous
    with trace_collectives() as trace, mock.patch.object(torch, "cat", wraps=torch.cat) as packs:
        all_reduce_packed(tensors, group, 16)
    packed = [sum(part.numel() for part in call.args[0]) for call in packs.call_args_list]
    return tensors, trace.count("all_reduce"), packed


def test_small_tensors_share_a_message_and_a_large_one_is_summed_without_a_copy():
    for tensors, messages, packed in run_ranks(summed, 2):
        for tensor, size in zip(tensors, (2, 2, 40, 3)):
            assert tensor.tolist() == [3.0] * size
        assert torch.equal(tensors[4], 2 * torch.arange(60.0).view(6, 10).T)
        assert messages == 4
        assert sorted(packed) == [4, 60]
