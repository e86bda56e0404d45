"""A graph recorded in one process runs in another, on new inputs and sizes; nothing in it is trusted."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dlo_lib.grading.checks.codec import round_trip
from dlo_lib.grading.checks.exceptions import Wrong
from dlo_lib.grading.checks.graph_run import MOST_NODES
from dlo_lib.grading.checks.graphs import Recorded, replay
from dlo_lib.profiling.compile_capture import GraphRecorder


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def recorded(function, *args, dynamic=False):
    """Return what the judge gets of a compiled call."""
    recorder = GraphRecorder({f"x{index}": arg for index, arg in enumerate(args)})
    if dynamic:
        torch._dynamo.mark_dynamic(args[0], 0)
    with torch.no_grad():
        torch.compile(function, backend=recorder)(*args)
    return Recorded.read(round_trip({"graphs": recorder.graphs, "calls": recorder.calls}))


def runs_elsewhere(function, args, others, dynamic=False):
    found = recorded(function, *args, dynamic=dynamic)
    (call,) = found.calls
    outputs = found.replayed(call, {f"x{index}": other for index, other in enumerate(others)})
    assert torch.allclose(outputs[0], function(*others), atol=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: torch.where(x.sum() > 0, x, -x) * y,
        lambda x, y: F.gelu(x + y[0], approximate="tanh").softmax(-1)[:, 1:],
        lambda x, y: F.scaled_dot_product_attention(x[None], y[None], y[None], is_causal=True),
        lambda x, y: F.rms_norm(x, (4,), eps=1e-5) @ y.T,
        lambda x, y: torch.einsum("ij,kj->ik", x, y).clamp(min=0).to(torch.float64).sum(0),
        lambda x, y: torch.cat([x, y], 0)[torch.arange(3), ..., None],
        lambda x, y: torch.stack([part.sum() for part in x.chunk(2)]) / torch.linalg.vector_norm(y),
        lambda x, y: x.clone().mul_(y).masked_fill(y > 0, 0.0) + torch.zeros(4),
    ],
)
def test_a_graph_runs_on_new_inputs(function):
    torch.manual_seed(0)
    runs_elsewhere(function, (torch.randn(4, 4), torch.randn(4, 4)), (-torch.randn(4, 4), torch.randn(4, 4)))


def test_a_symbolic_size_is_that_of_the_new_input():
    def mean(x):
        return x.reshape(x.shape[0] * 3).sum() / x.shape[0] + torch.arange(x.shape[0]).sum()

    runs_elsewhere(mean, (torch.randn(5, 3),), (torch.randn(11, 3),), dynamic=True)


def test_a_constant_size_fits_no_other_size():
    found = recorded(lambda x: x.reshape(x.shape[0] * 3), torch.randn(5, 3))
    with pytest.raises(Wrong, match="cannot be run on other inputs"):
        found.replayed(found.calls[0], {"x0": torch.randn(11, 3)})


def test_a_graph_contains_only_the_branch_that_was_taken():
    def branching(x):
        return x + 1 if x.sum() > 0 else x - 1

    found = recorded(branching, torch.ones(3))
    assert len(found.graphs) == 2
    (output,) = found.replayed(found.calls[1], {"x0": -torch.ones(3)})
    assert not torch.equal(output, branching(-torch.ones(3)))


def test_unnamed_tensors_are_passed_by_value():
    weight = torch.randn(3)
    found = recorded(lambda x: x * weight, torch.ones(3))
    (output,) = found.replayed(found.calls[0], {"x0": torch.full((3,), 2.0)})
    assert torch.equal(output, 2 * weight)


def test_inputs_of_the_judge_are_not_changed():
    found = recorded(lambda x: x.add_(1), torch.zeros(3))
    mine = torch.zeros(3)
    found.replayed(found.calls[0], {"x0": mine})
    assert torch.equal(mine, torch.zeros(3))


GRAPH: dict[str, Any] = {
    "inputs": [{"name": "x"}],
    "nodes": [
        {
            "name": "y",
            "kind": "function",
            "module": "torch",
            "op": "sin",
            "args": [{"ref": "x"}],
            "kwargs": {},
        }
    ],
    "outputs": [{"ref": "y"}],
}


def changed(**node):
    graph = deepcopy(GRAPH)
    graph["nodes"][0].update(node)
    return graph


@pytest.mark.parametrize(
    ("graph", "says"),
    [
        (changed(op="from_file"), "`from_file`, which the check cannot run"),
        (changed(op="load"), "`load`"),
        (changed(module="os", op="abs"), "`abs`"),
        (changed(kind="method", op="numpy"), "`numpy`"),
        (changed(kind="method", op="__reduce__"), "`__reduce__`"),
        (changed(module="builtins", op="getattr", args=[{"ref": "x"}, "__class__"]), "is not one"),
        (changed(module="_operator", op="attrgetter"), "`attrgetter`"),
        (changed(op="zeros", args=[1 << 40]), "too large"),
        (changed(kind="method", op="expand", args=[{"ref": "x"}, 1 << 40, 3]), "too large"),
        (changed(module="_operator", op="mul", args=[1 << 62, 4]), "too large"),
        (changed(args=[{"ref": "absent"}]), "cannot be run"),
        (changed(args=[{"file": "/etc/passwd"}]), "is not one"),
        ({**GRAPH, "inputs": []}, "is not one"),
        ({**GRAPH, "nodes": GRAPH["nodes"] * (MOST_NODES + 1)}, "is not one"),
        ({"inputs": [{"name": "x"}]}, "cannot be run"),
    ],
)
def test_a_forged_graph_is_refused(graph, says):
    with pytest.raises(Wrong, match=says):
        replay(graph, [torch.ones(3)])


@pytest.mark.parametrize(
    "got", [None, [], {"graphs": 3, "calls": []}, {"graphs": [None], "calls": []}, {"graphs": []}]
)
def test_data_that_is_no_record_is_refused(got):
    with pytest.raises(Wrong, match="is not one"):
        Recorded.read(got)


@pytest.mark.parametrize(
    "call",
    [
        {"graph": 1, "args": []},
        {"graph": 0},
        {"graph": 0, "args": [{"input": "y"}]},
        {"graph": "0", "args": []},
    ],
)
def test_a_call_without_a_graph_is_refused(call):
    with pytest.raises(Wrong, match="is not one"):
        Recorded([GRAPH], [call]).replayed(call, {"x": torch.ones(3)})
