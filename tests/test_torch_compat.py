"""Differences between releases of PyTorch; a release number or a field that a test takes away stands for an
older one."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

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


class Group:
    """Sums what its ranks, which all pass the same numbers, reduce."""

    def size(self) -> int:
        return 4

    def _reduce_scatter_base(self, outputs: torch.Tensor, inputs: torch.Tensor, options: Any) -> None:
        assert options.reduceOp == dist.ReduceOp.SUM
        outputs.copy_(4 * inputs[: len(outputs)])

    def reduce_scatter(self, outputs: Any, inputs: Any, options: Any) -> None:
        self._reduce_scatter_base(outputs[0], inputs[0][0], options)


@pytest.mark.parametrize(("asked", "result"), [(dist.ReduceOp.AVG, 1.0), (dist.ReduceOp.SUM, 4.0)])
def test_before_2_9_averages_of_gloo_are_divided(monkeypatch, asked, result):
    """Without it, the gradients of PyTorch's FSDP are too large by the number of ranks."""
    for name in ("reduce_scatter", "_reduce_scatter_base"):
        monkeypatch.setattr(Group, name, vars(Group)[name])  # restored at the end
    monkeypatch.setattr(torch_compat.dist, "ProcessGroup", Group)
    monkeypatch.setattr(torch_compat, "RELEASE", (2, 8))
    torch_compat.divide_averages_of_gloo()
    given, out = torch.ones(8), torch.zeros(2)
    Group()._reduce_scatter_base(out, given, SimpleNamespace(reduceOp=asked))
    assert out.tolist() == [result] * 2
    assert given.tolist() == [1.0] * 8
    Group().reduce_scatter([out.zero_()], [[given[:2]] * 4], SimpleNamespace(reduceOp=asked))
    assert out.tolist() == [result] * 2
