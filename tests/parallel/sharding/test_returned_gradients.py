"""``return p.grad`` on a rank: a part arrives as a plain tensor; a gradient that is elsewhere says where."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.launch.values import pack_result, unpack_result
from dlo_lib.parallel.sharding.sharded_grad import GradScope, RemoteGrad, ShardedGrad, mark

SCOPE = GradScope([threading.Lock()], torch.device("cpu"))  # as a process group, it cannot be pickled


def test_a_part_arrives_as_a_plain_tensor_without_its_storage():
    param = nn.Parameter(torch.zeros(2, 3))
    param.grad = mark(torch.arange(1e6)[6:12].view(2, 3), SCOPE)
    data = pack_result([param.grad])
    (arrived,) = unpack_result(data)
    assert type(arrived) is Tensor
    assert arrived.tolist() == [[6, 7, 8], [9, 10, 11]]
    assert len(data) < 10_000
    kept = copy.deepcopy(param.grad)
    assert type(kept) is type(param.grad) is ShardedGrad
    assert kept.scope is SCOPE


def test_a_gradient_of_stage_2_says_where_its_part_is():
    whole, shard = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4))
    shard.grad = mark(torch.ones(4), SCOPE)
    grad = RemoteGrad(whole, shard, SCOPE)
    with pytest.raises(
        UserError, match=r"^returned a list that cannot be sent back: .*: use p.grad.part\(\)"
    ):
        pack_result([grad])
    with pytest.raises(UserError, match=r"use p.grad.part\(\)"):
        copy.deepcopy(grad)
    assert torch.equal(unpack_result(pack_result(grad.part())), torch.ones(4))
