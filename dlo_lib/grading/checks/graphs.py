"""Replay graphs from a student's process on the judge's inputs, to prove that a function is one graph.

Graph breaks cannot be counted in the student's process, where any function can be patched. But a graph is
straight-line code. If a single graph, run here on new inputs, gives the values of the twin on both sides of
every branch, then it contains the whole computation. So a check gets the graph first, and draws the inputs of
the replay afterwards. The graph is data of ``dlo_lib.profiling.compile_capture``; nothing in it is trusted.

``observed`` also tells what each operation reads and makes. Under the judge the calculator runs and observes
graphs, in a separate process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dlo_lib.grading.checks.calculation import calculator
from dlo_lib.grading.checks.contract import scenario
from dlo_lib.grading.checks.exceptions import Wrong
from dlo_lib.grading.checks.graph_run import ObservedOperation, replay_here, unreadable


@dataclass(frozen=True)
class Recorded:
    """The graphs of a ``GraphRecorder`` that a scenario returned, and their calls."""

    graphs: list[Mapping[str, Any]]
    calls: list[Mapping[str, Any]]

    @classmethod
    def read(cls, got: Any) -> Recorded:
        """Read plain data from the student's process.

        Raises:
            Wrong: ``got`` is not the data of a recorder.
        """
        match got:
            case {"graphs": list(graphs), "calls": list(calls)} if all(
                type(each) is dict for each in (*graphs, *calls)
            ):
                return cls(graphs, calls)
        raise unreadable()

    def replayed(self, call: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the outputs of one recorded call, with the judge's ``inputs`` instead of the recognised
        ones.

        Raises:
            Wrong: the graph cannot be run here.
        """
        return replay(*self._called(call, inputs))

    def observed(self, call: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> list[ObservedOperation]:
        """Return the operations of one recorded call, as :meth:`replayed` runs it.

        Raises:
            Wrong: the graph cannot be run here.
        """
        return observed(*self._called(call, inputs))[1]

    def _called(
        self, call: Mapping[str, Any], inputs: Mapping[str, Tensor]
    ) -> tuple[Mapping[str, Any], list[Any]]:
        match call:
            case {"graph": int(number), "args": list(args)} if 0 <= number < len(self.graphs):
                return self.graphs[number], [_argument(arg, inputs) for arg in args]
        raise unreadable()


def replay(graph: Mapping[str, Any], args: Sequence[Any]) -> list[Tensor]:
    """Run a plain graph on ``args``, one per input; symbolic sizes are those of the given tensors.

    The calculator runs it, if there is one.

    Raises:
        Wrong: it contains an operation that is not on the list, is too large, or raises.
    """
    return _calculated(graph, args, False)[0]


def observed(graph: Mapping[str, Any], args: Sequence[Any]) -> tuple[list[Tensor], list[ObservedOperation]]:
    """Run a plain graph as :func:`replay`; return its outputs, and the operations that ran, in order."""
    return _calculated(graph, args, True)


def _calculated(
    graph: Mapping[str, Any], args: Sequence[Any], watched: bool
) -> tuple[list[Tensor], list[ObservedOperation]]:
    calculate = calculator()
    if calculate is None:
        return replay_here(graph, args, watched)
    answer = calculate(_replay, {"graph": graph, "args": list(args), "watched": watched})
    if "wrong" in answer:
        raise Wrong(*answer["wrong"])
    operations = [
        ObservedOperation(name, reads, makes, frozenset(dtypes))
        for name, reads, makes, dtypes in answer["seen"]
    ]
    return list(answer["outputs"]), operations


@scenario
def _replay(student: Any, graph: Any, args: Any, watched: Any) -> Any:
    """Run a graph; return its outputs and its operations, or what is wrong with it."""
    from dlo_lib.grading.checks.exceptions import Wrong
    from dlo_lib.grading.checks.graph_run import replay_here

    try:
        outputs, operations = replay_here(graph, args, watched)
    except Wrong as error:
        return {"wrong": [str(error), error.words]}
    seen = [[each.name, each.reads, each.makes, list(each.dtypes)] for each in operations]
    return {"outputs": outputs, "seen": seen}


def _argument(arg: Any, inputs: Mapping[str, Tensor]) -> Any:
    match arg:
        case {"input": str(name)} if name in inputs:
            return inputs[name]
        case {"value": Tensor() | int() | float() as value}:
            return value
    raise unreadable()
