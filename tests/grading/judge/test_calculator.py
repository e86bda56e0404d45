"""What a student sent is computed in a separate process, with the results and errors of the judge."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from dlo_lib import tiles
from dlo_lib.grading.checks.calculation import calculated_by
from dlo_lib.grading.checks.contract import Scenario
from dlo_lib.grading.checks.exceptions import Wrong
from dlo_lib.grading.checks.graphs import observed, replay
from dlo_lib.grading.checks.outcome import Ended
from dlo_lib.grading.judge.calculator import Calculator
from dlo_lib.grading.judge.time_budget import TimeBudget
from dlo_lib.grading.sandbox.host import Zygote

MOST_WORK = 2_000_000
INPUT = {"name": "x"}


@pytest.fixture(scope="module")
def one_calculator(zygote: Zygote) -> Iterator[Calculator]:
    made = Calculator(zygote, TimeBudget())
    yield made
    made.close()


@pytest.fixture
def calculator(one_calculator: Calculator) -> Calculator:
    """A calculator with seconds left; it may have served other tests."""
    one_calculator.left = 5.0
    return one_calculator


def kernel(*lines: str) -> str:
    return "\n    ".join(["@triton.jit\ndef k(x_ptr, y_ptr, n, BLOCK: tl.constexpr):", *lines])


ADD = kernel(
    "o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
    "m = o < n",
    "tl.store(y_ptr + o, tl.load(x_ptr + o, mask=m) + 1.0, mask=m)",
)


def given(n: int = 10) -> dict[str, Any]:
    """Two tensors in one memory, of which one has gaps."""
    memory = torch.zeros(64)
    return {"x_ptr": memory[5 : 5 + n], "y_ptr": memory[40 : 40 + n], "n": n, "BLOCK": 8}


@pytest.mark.parametrize(
    "text",
    [
        ADD,
        ADD.replace("mask=m)", "mask=o < 99)"),
        kernel("o = tl.arange(0, 8)", "tl.store(y_ptr + 2 * o, tl.load(y_ptr + o))"),
        kernel("raise NotImplementedError"),
        kernel("x = 1 +"),
        kernel("y = z"),
        kernel("o = tl.arange(0, 8)", "tl.store(x_ptr + o + 35, 3.0)"),
    ],
    ids=["right", "outside", "race", "stub", "syntax", "name", "through the other"],
)
def test_a_kernel_does_the_same_in_the_calculator(calculator: Calculator, text: str) -> None:
    found = []
    for where in (None, calculator):
        args = given()
        try:
            if where is None:
                traffic = tiles.run(text, (2,), args, MOST_WORK)
            else:
                with calculated_by(where):
                    traffic = tiles.run(text, (2,), args, MOST_WORK)
            found.append((traffic, args["x_ptr"].untyped_storage().tolist()))
        except tiles.TileError as error:
            found.append((str(error), error.words, error.line, error.code, error.program))
        except tiles.NotWrittenError as error:
            found.append(str(error))
    assert found[0] == found[1]


def node(name: str, op: str, *args: object, module: str = "torch", **kwargs: object) -> dict[str, Any]:
    return {
        "name": name, "kind": "function", "module": module, "op": op,
        "args": list(args), "kwargs": kwargs,
    }  # fmt: skip


def graph(*nodes: dict[str, Any]) -> dict[str, Any]:
    return {"inputs": [INPUT], "nodes": list(nodes), "outputs": [{"ref": nodes[-1]["name"]}]}


X = {"ref": "x"}
BOMBS = {
    "text": graph(node("y", "mul", "x", 3 << 30, module="_operator")),
    "list": graph(node("y", "mul", [X], 3 << 30, module="_operator")),
    "attention": graph(
        node("q", "reshape", X, [1, 1 << 16, 1]),
        node("y", "scaled_dot_product_attention", {"ref": "q"}, {"ref": "q"}, {"ref": "q"},
             module="torch.nn.functional"),
    ),
    "kept": graph(*(node(f"y{number}", "add", X, number) for number in range(1999))),
}  # fmt: skip


def test_a_graph_gives_the_same_in_the_calculator(calculator: Calculator) -> None:
    one = graph(node("y", "add", X, X), node("z", "mul", {"ref": "y"}, 3, module="_operator"))
    want = replay(one, [torch.ones(3)])
    with calculated_by(calculator):
        assert torch.equal(replay(one, [torch.ones(3)])[0], want[0])
        with pytest.raises(Wrong, match="which the check cannot run"):
            replay(graph(node("y", "save", X)), [torch.ones(3)])
    assert calculator.computed > 0


def test_what_a_graph_does_is_observed_in_the_calculator(calculator: Calculator) -> None:
    one = graph(node("y", "add", X, X), node("z", "reshape", {"ref": "y"}, [3]))
    outputs, operations = observed(one, [torch.ones(1, 3)])
    assert [(each.name, each.reads, each.makes) for each in operations] == [("add", 3, 3), ("view", 3, 3)]
    calls = []

    def calculate(scenario: Scenario, inputs: Mapping[str, Any]) -> Any:
        calls.append(scenario.name)
        return calculator(scenario, inputs)

    with calculated_by(calculate):
        found, there = observed(one, [torch.ones(1, 3)])
    assert torch.equal(found[0], outputs[0])
    assert there == operations
    assert len(calls) == 1


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_graph_takes_no_time_and_memory_of_the_judge(calculator: Calculator, bomb: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF)
    calculator.left = 0.5
    with calculated_by(calculator), contextlib.suppress(Wrong, Ended):
        observed(BOMBS[bomb], [torch.ones(1 << 16)])
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_maxrss - before.ru_maxrss < 200 << 10, "kB"
    assert after.ru_utime - before.ru_utime < 2


TILE_BOMBS = {
    "tuple": kernel("t = (0, 0)", "for i in range(0, 100000):", "    t = (t, tl.arange(0, 1048576))"),
    "names": kernel(*(f"v{i} = 0" for i in range(999)), "for i in range(0, 1000000):", "    pass"),
    "store": kernel(
        "o = tl.arange(0, 1048576)", "for i in range(0, 1000000):", "    tl.store(x_ptr + o, 1.0, mask=o < n)"
    ),
}


@pytest.mark.parametrize("bomb", TILE_BOMBS)
def test_a_kernel_takes_no_time_and_memory_of_the_judge(calculator: Calculator, bomb: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF)
    calculator.left = 0.5
    with calculated_by(calculator), pytest.raises((tiles.TileError, Ended)):
        tiles.run(TILE_BOMBS[bomb], (1,), given(), MOST_WORK)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_maxrss - before.ru_maxrss < 200 << 10, "kB"
    assert after.ru_utime - before.ru_utime < 2


def test_a_calculator_works_after_one_call_has_failed(calculator: Calculator) -> None:
    calculator.left = 0.2
    with calculated_by(calculator):
        with pytest.raises((tiles.TileError, Ended)):
            tiles.run(TILE_BOMBS["tuple"], (1,), given(), MOST_WORK)
        calculator.left = 5.0
        assert replay(graph(node("y", "add", X, X)), [torch.ones(3)])[0].tolist() == [2.0, 2.0, 2.0]
