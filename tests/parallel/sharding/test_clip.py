"""Clipping scales gradients of every dtype by the same factor."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from dlo_lib.parallel.sharding.clip import clip_sharded_grad_norm_


def parameter(dtype: torch.dtype, *shape: int) -> nn.Parameter:
    """A parameter whose gradient consists of ones."""
    param = nn.Parameter(torch.zeros(shape, dtype=dtype))
    param.grad = torch.ones_like(param)
    return param


@pytest.mark.parametrize("first", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_factor_has_the_precision_of_each_gradient(first):
    """The gradients of one dtype may not round the factor of the others: 2 / sqrt(n) has no short form."""
    dtypes = [first, torch.float64, torch.float32, torch.bfloat16, torch.float16]
    params = [parameter(dtype, 3, 5) for dtype in dtypes] + [parameter(dtype) for dtype in dtypes]
    count = sum(param.numel() for param in params)
    norm = clip_sharded_grad_norm_(params, 2.0, ())
    assert norm.item() == pytest.approx(math.sqrt(count), rel=1e-6)
    for param in params:
        assert torch.equal(param.grad, (2 / (norm + 1e-6)).to(param.dtype).expand_as(param))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_gradient_is_rounded_once(dtype):
    """Rounding the factor before the product would shift all gradients in one direction."""
    param = nn.Parameter(torch.zeros(4096, dtype=dtype))
    param.grad = torch.linspace(1, 2, 4096, dtype=torch.float64).to(dtype)
    before = param.grad.double()
    norm = clip_sharded_grad_norm_([param], 1 / 3, ())
    assert torch.equal(param.grad, (before.float() * (1 / 3 / (norm + 1e-6)).float()).to(dtype))


def test_the_norm_of_narrow_gradients_is_that_of_their_values():
    """A norm in bf16 has three digits. The largest number of fp16 is 65,504; this norm is 75,002."""
    for dtype, value in ((torch.bfloat16, 1.0), (torch.float16, 500.0)):
        param = parameter(dtype, 22_501)
        param.grad.mul_(value)
        norm = clip_sharded_grad_norm_([param], math.inf, ())
        assert norm.item() == pytest.approx(value * math.sqrt(22_501), rel=1e-4)
