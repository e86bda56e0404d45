"""The choice between a kernel, its twin and PyTorch's operators, and the checks of the inputs."""

from __future__ import annotations

import contextvars
from importlib import import_module

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dlo_lib.base.errors import UserError
from dlo_lib.kernels import KernelBackend, rms_norm, swiglu, using
from dlo_lib.kernels.dispatch import SMALLEST, is_recorded, require_same, require_shape, uses_operators
from tests.kernels.parity import random


@pytest.mark.parametrize("operation", SMALLEST)
def test_small_tensors_on_a_gpu_are_left_to_the_operators_of_pytorch(operation):
    with FakeTensorMode():
        count = SMALLEST[operation] // 2
        assert not uses_operators(operation, torch.empty(count, dtype=torch.bfloat16, device="cuda"))
        if count:
            smaller = torch.empty(count - 1, dtype=torch.bfloat16, device="cuda")
            assert uses_operators(operation, smaller)
            with using(KernelBackend.TORCH):
                assert not uses_operators(operation, smaller)


def test_on_a_cpu_only_what_computes_an_activation_again_is_left_to_them():
    x = torch.ones(4, device="cpu")
    assert uses_operators("swiglu", x)
    assert not uses_operators("rms_norm", x)
    with using(KernelBackend.TORCH):
        assert not uses_operators("swiglu", x)
    with FakeTensorMode():
        assert not uses_operators("swiglu", torch.ones(4, device="cpu"))


def test_a_backward_in_another_thread_uses_the_backend_in_use():
    """Autograd computes the backward of CUDA tensors in a thread without context variables."""
    found = []

    def hook(grad):
        found.append(contextvars.Context().run(uses_operators, "swiglu", x))

    x = torch.ones(4, device="cpu", requires_grad=True)
    x.register_hook(hook)
    with using(KernelBackend.TORCH):
        x.sum().backward()
        assert contextvars.Context().run(uses_operators, "swiglu", x)  # another thread, outside of a backward
    x.sum().backward()
    assert found == [False, True]


def test_without_gradients_no_autograd_function_is_called(monkeypatch):
    x, w = random(2, 8), random(8)
    with using(KernelBackend.TORCH):
        expected = rms_norm(x.clone().requires_grad_(), w)
        for module in ("rms_norm", "swiglu"):
            monkeypatch.setattr(import_module(f"dlo_lib.kernels.{module}"), "apply", None)
        results = [rms_norm(x, w), swiglu(x, x)]
        with torch.no_grad():
            results.append(rms_norm(x.requires_grad_(), w))
    assert not any(result.requires_grad for result in results)
    assert expected.requires_grad
    assert torch.equal(results[0], expected)
    assert torch.equal(results[2], expected)


def test_forward_mode_is_refused_and_not_ignored():
    """A kernel reads the values only: the tangent would be lost without a message."""
    x, w = random(2, 8), random(8)
    with torch.autograd.forward_ad.dual_level(), using(KernelBackend.TORCH):
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        assert is_recorded(dual)
        with pytest.raises(NotImplementedError, match="jvp"):
            rms_norm(dual, w)


def test_checks_accept_equal_and_name_different_tensors():
    x = torch.ones(2, 3)
    require_same("x and y", x, x + 1)
    require_shape("x", x, (2, 3), "")
    for other, message in ((x[:1], "shape"), (x.half(), "dtype"), (x.to("meta"), "device")):
        with pytest.raises(UserError, match=f"x and y have {message} .* they should have the same {message}"):
            require_same("x and y", x, other)


def test_attention_is_left_to_cudnn_where_it_is_faster(monkeypatch):
    attention = import_module("dlo_lib.kernels.flash_attention")
    monkeypatch.setattr(attention, "_PREFERS_CUDNN", True)
    monkeypatch.setattr(attention, "_major", lambda device: 9)
    with FakeTensorMode():
        narrow = torch.empty(1, 2, 8, 64, dtype=torch.bfloat16, device="cuda")
        assert attention._cudnn_is_faster(narrow)
        assert not attention._cudnn_is_faster(narrow.float())
        assert not attention._cudnn_is_faster(narrow.cpu())
        with using(KernelBackend.TORCH):
            assert not attention._cudnn_is_faster(narrow)
        monkeypatch.setattr(attention, "_major", lambda device: 8)
        assert not attention._cudnn_is_faster(narrow)
