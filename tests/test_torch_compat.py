"""Differences between releases of PyTorch; a release number or a field that a test takes away stands for an
older one."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlo_lib import torch_compat


class Twice(torch.autograd.Function):
    """A Python function, such as a fused kernel."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * grads[0]


def test_a_backward_from_an_edge_passes_a_python_function():
    """Before 2.9 the node is gone with the tensor, which is a RuntimeError."""
    x = torch.ones(3, requires_grad=True)
    owned = torch_compat.owned_edge(Twice.apply(x.exp()))
    gc.collect()
    torch.autograd.backward(owned[:1], (torch.ones(3),))
    assert torch.allclose(x.grad, 2 * x.exp())


def test_before_2_9_the_node_of_a_python_function_has_an_owner(monkeypatch):
    monkeypatch.setattr(torch_compat, "RELEASE", (2, 8))
    x = torch.ones(3, requires_grad=True)
    output = Twice.apply(x)
    edge, owner = torch_compat.owned_edge(output)
    assert owner.next_functions[0][0] is edge.node
    edge, owner = torch_compat.owned_edge(x.exp())
    assert owner is None, "a node of C++ is kept by its edge"


def test_before_2_9_the_fake_group_has_no_name(monkeypatch):
    class Nameless:
        def name(self) -> str:
            raise RuntimeError("getBackendName is not implemented")

    monkeypatch.setattr(torch_compat, "FakeProcessGroup", Nameless)
    monkeypatch.setattr(torch_compat, "RELEASE", (2, 8))
    backends = {"cpu": SimpleNamespace(name=lambda: "gloo"), "cuda": Nameless()}
    group = SimpleNamespace(_get_backend=lambda device: backends[device.type])
    names = [torch_compat.backend_name(group, torch.device(kind)) for kind in ("cpu", "cuda")]
    assert names == ["gloo", "fake"]


def test_the_loop_that_stands_for_grouped_mm_computes_the_same():
    rows, weights = torch.randn(6, 8), torch.randn(3, 8, 4)
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    expected = torch.cat((rows[:2] @ weights[0], rows[2:] @ weights[2]))
    for form in (torch_compat.grouped_mm, torch_compat._one_product_each):
        torch.testing.assert_close(form(rows, weights, offs=ends), expected)


@pytest.mark.parametrize("numbers", [(2, 8), (2, 9)])
def test_before_2_9_the_backward_of_the_ring_takes_a_mesh(monkeypatch, numbers):
    monkeypatch.setattr(torch_compat, "RELEASE", numbers)
    ring = SimpleNamespace(_templated_ring_attention_backward=lambda ranks, *_, **options: (ranks, options))
    monkeypatch.setattr(torch_compat, "pytorch_ring", lambda: ring)
    group = object()
    ranks, options = torch_compat.pytorch_ring_backward(group, 2, is_causal=True)
    assert (ranks.get_group() if numbers < (2, 9) else ranks) is group
    assert options == {"is_causal": True}
