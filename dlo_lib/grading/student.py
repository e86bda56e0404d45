"""The student's work as checks see it, in the notebook: names of its namespace, reached through the same codec as in grading.

What a function gets and gives is copied as plain data, so that what passes here passes there. Ranks are ``run_ranks``. The judge's twin of
this class is ``attempt.RemoteStudent``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dlo_lib.grading.codec import NotPlain, pack, through, unpack
from dlo_lib.grading.contract import NotWritten, Run, Scenario, Wrong
from dlo_lib.grading.faults import Fault, fault_of
from dlo_lib.launch import RankFailure, run_ranks
from dlo_lib.text import tr

LINE_IN_CELL = re.compile(r'(?:(Cell In\[\d+\])|"<cell ([\w-]+)>"), line (\d+)')


class LocalStudent:
    """``student`` in a notebook. ``seconds`` limits a run on ranks; a plain call can be interrupted like any cell."""

    def __init__(self, namespace: Mapping[str, Any], seconds: float = 10.0) -> None:
        self._namespace = namespace
        self._seconds = seconds

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            function = self.get_object(name)
            sent_args, sent_kwargs = through(args), through(kwargs)
            try:
                result = function(*sent_args, **sent_kwargs)
            except (Exception, SystemExit) as error:
                raise as_wrong(fault_of(error)) from error
            return _received(result)

        return call

    def get(self, name: str) -> Any:
        """The value of a name, as plain data."""
        return _received(self.get_object(name))

    def get_object(self, name: str) -> Any:
        """What the namespace holds under ``name``.

        Raises:
            NotWritten: nothing.
        """
        if name not in self._namespace:
            raise as_wrong(Fault("Missing", name))
        return self._namespace[name]

    def ranks(self, scenario: Scenario, inputs_per_rank: Sequence[Mapping[str, Any]]) -> Run:
        """Run ``scenario`` on ``len(inputs_per_rank)`` ranks over gloo."""
        objects = {name: self.get_object(name) for name in names_used(scenario)}
        inputs = [pack(dict(inputs)) for inputs in inputs_per_rank]
        try:
            answers = run_ranks(_on_rank, len(inputs), scenario, objects, inputs, timeout=self._seconds)
        except RankFailure as failure:
            raise _blamed(failure) from failure
        return Run([unpack(answer) for answer in answers])


def run_scenario(scenario: Scenario, student: Any, rank: int, world: int, inputs: Mapping[str, Any]) -> Any:
    """Run a scenario from its source, in a rank: it sees torch, dist and the student's names."""
    scope: dict[str, Any] = {"torch": torch, "dist": dist}
    exec(compile(scenario.source, f"<scenario {scenario.name}>", "exec"), scope)
    return scope[scenario.name](student, rank, world, **inputs)


def names_used(scenario: Scenario) -> list[str]:
    """The student's names that a scenario uses: ``student.NAME``."""
    nodes = [node for node in ast.walk(ast.parse(scenario.source)) if isinstance(node, ast.Attribute)]
    return sorted({node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == "student"})


def as_wrong(fault: Fault) -> Wrong:
    """The verdict on a fault of the student's code."""
    if fault.not_written:
        return NotWritten(fault.message(), tr("not written yet"))
    return Wrong(fault.message(), tr("your code raised an exception"))


class Direct:
    """The student's names without copies: what a scenario calls beside the student's code."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = objects

    def __getattr__(self, name: str) -> Any:
        try:
            return self._objects[name]
        except KeyError:
            raise AttributeError(f"`{name}` is not defined") from None


def _on_rank(scenario: Scenario, objects: Mapping[str, Any], inputs: Sequence[bytes]) -> bytes:
    rank = dist.get_rank()
    return pack(run_scenario(scenario, Direct(objects), rank, dist.get_world_size(), unpack(inputs[rank])))


def _received(result: Any) -> Any:
    try:
        return through(result)
    except NotPlain as error:
        raise as_wrong(Fault("NotPlain", str(error))) from error


def _blamed(failure: RankFailure) -> Wrong:
    """The first line names rank and error; where in the student's cells comes from the traceback below it."""
    first, _, rest = str(failure).partition("\n")
    if first.rstrip(": ").endswith(" raised NotImplementedError"):
        return as_wrong(Fault("NotImplementedError", ""))
    places = LINE_IN_CELL.findall(rest.split("\n(rank ")[0])
    if places:
        numbered, named, line = places[-1]
        first += f" ({numbered or f'cell `{named}`'}, line {line})"
    return Wrong(first, tr("your code raised an exception on a rank"))
