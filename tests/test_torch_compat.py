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
    """Before 2.9 the node is gone with the tensor: RuntimeError on 2.8, a segmentation fault on 2.6."""
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


def called_by_torch(options: object, **local: bool) -> bool:
    """Return ``is_async(options)`` in a function of torch.distributed that has the variables ``local``."""
    file = dist.distributed_c10d.__file__
    names = {"is_async": torch_compat.is_async, "options": options}
    code = f"def all_reduce({', '.join(local)}):\n    return is_async(options)"
    exec(compile(code, file, "exec"), names)
    return names["all_reduce"](**local)


@pytest.mark.parametrize("asked", [True, False])
def test_before_2_8_the_function_of_torch_shows_whether_a_call_is_asynchronous(monkeypatch, asked):
    """``AllreduceOptions`` of 2.6 lack the field: every call counted as blocking, and lab 11 was refused."""
    without, unset = SimpleNamespace(), SimpleNamespace(asyncOp=True)
    monkeypatch.setattr(torch_compat, "RELEASE", (2, 6))
    assert called_by_torch(without, async_op=asked) is asked
    assert called_by_torch(unset, async_op=asked) is asked, "all_gather of 2.6 does not set it"
    assert called_by_torch(without) is True
    assert torch_compat.is_async(without) is True, "C++ code waits for it later"


def test_since_2_8_a_missing_field_is_an_error(monkeypatch):
    monkeypatch.setattr(torch_compat, "RELEASE", (2, 8))
    assert torch_compat.is_async(SimpleNamespace(asyncOp=False)) is False
    with pytest.raises(AttributeError):
        torch_compat.is_async(SimpleNamespace())
