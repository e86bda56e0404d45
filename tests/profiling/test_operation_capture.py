"""The operations of a function are recorded as data: they run again on other inputs, and show a loop."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dlo_lib.grading.checks.codec import round_trip
from dlo_lib.grading.checks.exceptions import Wrong
from dlo_lib.grading.checks.graphs import replay
from dlo_lib.profiling.operation_capture import OperationRecorder


def recorded(function, x):
    """Return what another process gets of a call."""
    recorder = OperationRecorder({"x": x})
    with recorder, torch.no_grad():
        result = function(x)
    return round_trip(recorder.graph([result]))


def in_place(x):
    copy = x.clone()
    copy[1:].mul_(2)
    copy[:, 0] += x.sum()
    return copy


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.where(x > 0, x.sqrt(), torch.zeros(())).flip(0) @ x.T,
        lambda x: torch.stack(x.chunk(2, dim=1)).amax(0).round(),
        lambda x: F.one_hot(x.abs().long().clamp(max=2).sum(1) % 3, 3).to(x.dtype).mean(0),
        lambda x: x[torch.arange(3) - 1, 1:, None] + torch.tensor([1.0, 2.0]),
        lambda x: torch.lerp(x, x.roll(1, 0), 0.3).softmax(-1),
        in_place,
    ],
)
def test_the_operations_run_again_on_other_inputs(function):
    inputs = [torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)).abs() for seed in (0, 1)]
    (again,) = replay(recorded(function, inputs[0]), [inputs[1]])
    assert torch.allclose(again, function(inputs[1]))
    assert not torch.allclose(again, function(inputs[0]))


def test_random_numbers_are_constants():
    def shuffled(x):
        generator = torch.Generator().manual_seed(3)
        factors = torch.ones(len(x), 1).uniform_(generator=generator)
        return x[torch.randperm(len(x), generator=generator)] * factors

    first, second = torch.randn(5, 2), torch.randn(5, 2)
    (again,) = replay(recorded(shuffled, first), [second])
    assert torch.equal(again, shuffled(second))


def test_named_regions_are_no_operations():
    def named(x):
        with torch.profiler.record_function("part"):
            return x * 2

    assert [node["op"] for node in recorded(named, torch.randn(2))["nodes"]] == ["mul.Tensor"]


def test_an_index_with_a_mask_is_marked():
    x = torch.tensor([1.0, -2.0, 3.0])
    for function, masked in ((lambda x: x[x > 0], True), (lambda x: x[torch.arange(2)], False)):
        nodes = recorded(function, x)["nodes"]
        assert any(node.get("masked") is True for node in nodes) is masked


def test_only_a_loop_has_more_operations_for_a_larger_batch():
    def loop(x):
        return torch.stack([2 * row for row in x])

    few, many = torch.randn(3, 2), torch.randn(9, 2)
    assert len(recorded(loop, many)["nodes"]) > len(recorded(loop, few)["nodes"])
    assert len(recorded(torch.tanh, many)["nodes"]) == len(recorded(torch.tanh, few)["nodes"]) == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.zeros(3) + x[0, 0].item(),
        lambda x: torch.from_numpy(np.sqrt(x.numpy())),
        lambda x: x * 2 if x[0, 0] > 0.5 else x * 3,
    ],
)
def test_what_does_not_come_from_operations_on_tensors_is_a_constant(function):
    first, second = torch.full((3, 4), 0.25), torch.full((3, 4), 0.75)
    (again,) = replay(recorded(function, first), [second])
    assert not torch.allclose(again, function(second))


def test_another_operation_is_refused():
    graph = recorded(torch.tanh, torch.randn(2))
    graph["nodes"][0]["op"] = "from_file.default"
    with pytest.raises(Wrong, match="cannot run"):
        replay(graph, [torch.randn(2)])


def test_recording_does_not_load_the_compiler():
    """It would cost each worker of the judge two seconds."""
    assert OperationRecorder.__torch_dispatch__.__module__ == "dlo_lib.base.operation_capture"


def test_rows_that_a_mask_or_counts_select_are_places():
    """A replay computes all sizes before it runs, and knows no values then."""
    counts = torch.tensor([2, 0, 1])

    def selected(x):
        owner = torch.arange(3).repeat_interleave(counts)
        return torch.cat([x[owner == one] * one for one in range(3)])

    graph = recorded(selected, torch.randn(3, 2))
    x = torch.randn(3, 2)
    assert torch.equal(replay(graph, [x])[0], selected(x))
