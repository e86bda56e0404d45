"""Compares a fused operation with its reference in fp64, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from dlo_lib.kernels.dispatch import KernelBackend, has_triton, using

NO_TRITON = "NOT TESTED HERE: the Triton kernels (make kernels)"
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
"""The largest error of an element, divided by the largest element of the reference: a few roundings of the
dtype (2**-52, 2**-23, 2**-8 and 2**-11)."""

BACKENDS = [
    pytest.param(KernelBackend.TORCH, id="torch"),
    pytest.param(
        KernelBackend.TRITON, id="triton", marks=pytest.mark.skipif(not has_triton(), reason=NO_TRITON)
    ),
]
"""Values of a parameter ``backend``."""


def dtypes_of(backend: KernelBackend) -> list[torch.dtype]:
    """Return the dtypes that ``backend`` computes."""
    narrow = [torch.float32, torch.bfloat16, torch.float16]
    return narrow if backend is KernelBackend.TRITON else [torch.float64, *narrow]


def check(
    fused: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    backend: KernelBackend,
    factor: float = 1.0,
) -> None:
    """Check the output of ``fused`` and the gradient of each floating-point input against ``reference``,
    which receives the same values in fp64. The gradient of the output is random. ``factor`` widens the
    tolerance, for sums of many terms."""
    ours = [_leaf(tensor, tensor.dtype) for tensor in inputs]
    theirs = [_leaf(tensor, torch.float64) for tensor in inputs]
    with using(backend):
        out = fused(*ours)
    expected = reference(*theirs)
    floating = [tensor.dtype for tensor in inputs if tensor.is_floating_point()]
    dtype = min([out.dtype, *floating], key=_digits)  # the narrowest
    close(out, expected, dtype, "output", factor)
    grad = random(*expected.shape, dtype=dtype, seed=1)
    out.backward(grad)
    expected.backward(grad.double())
    for number, (mine, exact) in enumerate(zip(ours, theirs)):
        if exact.requires_grad:
            assert mine.grad is not None, f"input {number} has no gradient"
            assert mine.grad.dtype == mine.dtype
            close(mine.grad, exact.grad, dtype, f"gradient {number}", factor)


def close(actual: Tensor, exact: Tensor, dtype: torch.dtype, what: str, factor: float = 1.0) -> None:
    """Check that ``actual`` has the values of ``exact`` within the tolerance of ``dtype``."""
    assert actual.shape == exact.shape, what
    if not exact.numel():
        return
    assert actual.isfinite().all(), f"{what} is not finite"
    error = (actual.double() - exact).abs().max().item()
    largest = max(exact.abs().max().item(), 1e-3)
    assert error <= factor * TOLERANCE[dtype] * largest, f"{what}: error {error:.3g}, largest {largest:.3g}"


def _digits(dtype: torch.dtype) -> float:
    return -torch.finfo(dtype).eps


def _leaf(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    # A view keeps the strides of the given tensor.
    return tensor.detach().to(dtype, memory_format=torch.preserve_format).requires_grad_()


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return normal random numbers: the same ones on every device."""
    numbers = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return numbers.to(torch.get_default_device(), dtype)


def strided(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return normal random numbers in a tensor that is not contiguous: its first and last dimension are
    swapped in memory."""
    return random(*shape[::-1], dtype=dtype, seed=seed).permute(*range(len(shape))[::-1])
