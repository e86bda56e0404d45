"""The two copies of a tied embedding have their own group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from dlo_lib.launch import run_ranks
from dlo_lib.parallel.pipeline.tied_embeddings import TiedEmbeddings


def a_group_afterwards() -> float:
    rank = dist.get_rank()
    TiedEmbeddings(nn.Parameter(torch.ones(2)) if rank != 1 else None, (0, 2))
    total = torch.ones(())
    if rank < 2:
        group = dist.new_group([0, 1], use_local_synchronization=True)
        dist.all_reduce(total, group=group)
    return float(total)


def test_an_end_and_another_rank_can_create_a_group_afterwards():
    assert run_ranks(a_group_afterwards, 3, timeout=60) == [2.0, 2.0, 1.0]
