"""Differences between releases of PyTorch; a release number or a field that a test takes away stands for an
older one."""

from __future__ import annotations

import gc
import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives

from dlo_lib.base import torch_compat
from dlo_lib.launch import run_ranks


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

    backend = "gloo"

    def size(self) -> int:
        return 4

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(name=lambda: self.backend)

    def _reduce_scatter_base(self, outputs: torch.Tensor, inputs: torch.Tensor, options: Any) -> None:
        assert options.reduceOp == dist.ReduceOp.SUM or self.backend != "gloo"
        outputs.copy_(4 * inputs[: len(outputs)])

    def reduce_scatter(self, outputs: Any, inputs: Any, options: Any) -> None:
        self._reduce_scatter_base(outputs[0], inputs[0][0], options)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, options: Any) -> None:
        self._reduce_scatter_base(outputs[0], inputs[0], options)


class Functional:
    """The operator of a functional reduce-scatter on ``Group``."""

    def _op_dk(self, key: Any, inputs: Any, reduce_op: str, size: int, group: str) -> Any:
        return (reduce_op, 4 * inputs[0] if isinstance(inputs, list) else 4 * inputs)


@pytest.fixture
def dividing(monkeypatch) -> None:
    """``divide_averages_of_gloo`` was called, twice, before 2.9."""
    for name in ("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"):
        monkeypatch.setattr(Group, name, vars(Group)[name])  # restored at the end
    monkeypatch.setattr(torch_compat.dist, "ProcessGroup", Group)
    monkeypatch.setattr(torch_compat.dist.distributed_c10d, "_resolve_process_group", lambda name: Group())
    monkeypatch.setattr(torch_compat, "RELEASE", (2, 8))
    monkeypatch.setattr(torch_compat, "_DIVIDING", [])
    implemented: list[str] = []
    library = SimpleNamespace(impl=lambda name, function, key: implemented.append(name))
    monkeypatch.setattr(torch_compat.torch.library, "Library", lambda name, kind: library)
    for _ in range(2):
        torch_compat.divide_averages_of_gloo()
    assert implemented == ["reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"]


@pytest.mark.parametrize(("asked", "result"), [(dist.ReduceOp.AVG, 1.0), (dist.ReduceOp.SUM, 4.0)])
def test_before_2_9_averages_of_gloo_are_divided(dividing, asked, result):
    """Without it, the gradients of PyTorch's FSDP are too large by the number of ranks."""
    given, out = torch.ones(8), torch.zeros(2)
    Group()._reduce_scatter_base(out, given, SimpleNamespace(reduceOp=asked))
    assert out.tolist() == [result] * 2
    assert given.tolist() == [1.0] * 8
    Group().reduce_scatter([out.zero_()], [[given[:2]] * 4], SimpleNamespace(reduceOp=asked))
    assert out.tolist() == [result] * 2
    Group().reduce_scatter_tensor_coalesced([out.zero_()], [given], SimpleNamespace(reduceOp=asked))
    assert out.tolist() == [result] * 2
    functional = torch_compat._averaging_functional(Functional())
    asked = {dist.ReduceOp.AVG: "avg", dist.ReduceOp.SUM: "sum"}[asked]
    for inputs in (given, [given]):
        assert functional(inputs, asked, 4, "0")[1].tolist() == [result] * 8


def test_before_2_9_averages_of_another_backend_reach_it(dividing, monkeypatch):
    """Such as the switch of the checks, which divides."""
    monkeypatch.setattr(Group, "backend", "switch")
    options = SimpleNamespace(reduceOp=dist.ReduceOp.AVG)
    Group()._reduce_scatter_base(torch.zeros(2), torch.ones(8), options)
    assert options.reduceOp == dist.ReduceOp.AVG
    assert torch_compat._averaging_functional(Functional())(torch.ones(8), "avg", 4, "0")[0] == "avg"


def averages() -> list[float]:
    """The average of 1 and 2 by each form of a reduce-scatter."""
    given = torch.tensor([1.0 + dist.get_rank()] * 2)
    outs = [torch.zeros(1) for _ in range(3)]
    dist.reduce_scatter_tensor(outs[0], given, op=dist.ReduceOp.AVG)
    dist.reduce_scatter(outs[1], list(given.split(1)), op=dist.ReduceOp.AVG)
    with dist.distributed_c10d._coalescing_manager():
        dist.reduce_scatter_tensor(outs[2], given, op=dist.ReduceOp.AVG)
    functional = torch.distributed._functional_collectives
    outs.append(functional.reduce_scatter_tensor(given, "avg", 0, dist.group.WORLD))
    outs += functional.reduce_scatter_tensor_coalesced([given], "avg", [0], dist.group.WORLD)
    return [out.item() for out in outs]


def test_averages_are_averages_on_this_release():
    assert run_ranks(averages, 2) == [[1.5] * 5] * 2


STAGE_OF_2_9 = """
from types import SimpleNamespace
import torch

class _PipelineStageBase:
    def _get_init_p2p_neighbors_ops(self):
        return [SimpleNamespace(tensor=torch.tensor(3)), SimpleNamespace(tensor=torch.zeros(1))]
"""


@pytest.mark.parametrize("loaded", [False, True])
def test_in_2_9_a_stage_of_pytorch_sends_what_its_neighbour_receives(monkeypatch, tmp_path, loaded):
    """Otherwise a pipeline of PyTorch on gloo ends its process, and a traced one is refused."""
    name = f"stage_of_2_9_{loaded}"
    (tmp_path / f"{name}.py").write_text(STAGE_OF_2_9, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    monkeypatch.setattr(torch_compat, "STAGE", name)
    monkeypatch.setattr(torch_compat, "RELEASE", (2, 9))
    if loaded:
        importlib.import_module(name)
    torch_compat.repair_pipelining()
    module = importlib.import_module(name)
    torch_compat.repair_pipelining()
    tensors = [operation.tensor for operation in module._PipelineStageBase()._get_init_p2p_neighbors_ops()]
    assert [tensor.tolist() for tensor in tensors] == [[3.0], [0.0]]
    assert {tensor.dtype for tensor in tensors} == {torch.float32}
    del sys.modules[name]
