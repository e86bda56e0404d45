"""Differences between releases of PyTorch; a release number or a field that a test takes away stands for an
older one."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

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
