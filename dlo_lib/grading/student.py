"""The student's work as checks see it, in the notebook: names of its namespace, reached through the same codec as in grading.

What a function gets and gives is copied as plain data, so that what passes here passes there. Ranks are ``run_ranks``, and communicate
through the same switch as in grading. The judge's twin of this class is ``attempt.RemoteStudent``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dlo_lib.grading.codec import NotPlain, pack, through, unpack
from dlo_lib.grading.contract import NotWritten, Nudge, Run, Scenario, Wrong
from dlo_lib.grading.faults import Fault, fault_of
from dlo_lib.grading.switch.backend import join
from dlo_lib.grading.switch.link import Link
from dlo_lib.grading.switch.local import LocalSwitch, reached
from dlo_lib.grading.switch.service import Service
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

    def ranks(self, scenario: Scenario, inputs_per_rank: Sequence[Mapping[str, Any]], nudge: Nudge | None = None) -> Run:
        """Run ``scenario`` on ``len(inputs_per_rank)`` ranks, whose communication passes through a switch in this process."""
        objects = {name: self.get_object(name) for name in names_used(scenario)}
        inputs = [pack(dict(inputs)) for inputs in inputs_per_rank]
        failure: RankFailure | None = None
        answers: Sequence[bytes] = ()
        with LocalSwitch(len(inputs), nudge) as switch:
            try:
                answers = run_ranks(_on_rank, len(inputs), scenario, objects, inputs, switch.path, timeout=self._seconds)
            except RankFailure as error:
                failure = error
        if switch.verdict is not None:
            raise switch.verdict
        if failure is not None:
            raise _blamed(failure) from failure
        assert switch.service is not None  # every rank returned, so every rank had come
        return finished_run([unpack(answer) for answer in answers], switch.service, scenario, nudge)


def finished_run(results: list[Any], service: Service, scenario: Scenario, nudge: Nudge | None) -> Run:
    """What a check is given of a run. A mark that ends the scenario, and that calls came after, was not passed where it stands.

    Raises:
        Wrong: the value that was to be altered never passed.
    """
    if nudge is not None and not service.exchange.nudged:
        text = tr(
            "rank {rank} never received element {element} of its {kind} number {call}: what should pass there did not",
            rank=nudge.rank, element=nudge.element, kind=nudge.kind.value, call=nudge.call + 1,
        )  # fmt: skip
        raise Wrong(text, tr("the data that should pass between the ranks did not"))
    traffic = tuple(service.exchange.passed(rank) for rank in range(len(results)))
    last = final_marks(scenario)
    misplaced = {(name, rank) for (name, rank), calls in service.marked.items() if name in last and calls < service.exchange.issued(rank)}
    held = {
        name: {rank: memory for rank, memory in by_rank.items() if (name, rank) not in misplaced} for name, by_rank in service.held.items()
    }
    issued: dict[str, dict[int, int]] = {}
    for (name, rank), calls in service.marked.items():
        issued.setdefault(name, {})[rank] = calls
    return Run(results, traffic, held, issued)


def run_scenario(scenario: Scenario, student: Any, rank: int, world: int, inputs: Mapping[str, Any], link: Link) -> Any:
    """Run a scenario from its source, in a rank: it sees torch, dist (which is the switch), mark and the student's names."""
    join(link, rank, world)
    scope: dict[str, Any] = {"torch": torch, "dist": dist, "mark": link.mark}
    exec(compile(scenario.source, f"<scenario {scenario.name}>", "exec"), scope)
    return scope[scenario.name](student, rank, world, **inputs)


def names_used(scenario: Scenario) -> list[str]:
    """The student's names that a scenario uses: ``student.NAME``."""
    nodes = [node for node in ast.walk(ast.parse(scenario.source)) if isinstance(node, ast.Attribute)]
    return sorted({node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == "student"})


def final_marks(scenario: Scenario) -> set[str]:
    """The marks after which the scenario calls nothing of the student's: by then, all that passes between the ranks has passed."""
    found: set[str] = set()
    for statement in reversed(next(node for node in ast.parse(scenario.source).body if isinstance(node, ast.FunctionDef)).body):
        for call in [node for node in ast.walk(statement) if isinstance(node, ast.Call)]:
            match call.func, call.args:
                case ast.Name(id="mark"), [ast.Constant(value=str(name))] if isinstance(statement, ast.Expr):
                    found.add(name)
                case ast.Attribute(attr="clone" | "detach" | "item" | "tolist"), _:
                    pass
                case _:
                    return found
    return found


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


def _on_rank(scenario: Scenario, objects: Mapping[str, Any], inputs: Sequence[bytes], path: str) -> bytes:
    rank, world = dist.get_rank(), dist.get_world_size()
    with reached(path, rank) as link:
        return pack(run_scenario(scenario, Direct(objects), rank, world, unpack(inputs[rank]), link))


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
    # Below an exception's traceback come only names of ranks; below the stack of one that died or hung, those of other ranks.
    raised = failure.rank is not None and first.startswith(f"rank {failure.rank} raised")
    places = LINE_IN_CELL.findall(rest if raised else rest.strip().split("\n\n")[0])
    if places:
        numbered, named, line = places[-1]
        first += f" ({numbered or f'cell `{named}`'}, line {line})"
    return Wrong(first, tr("your code raised an exception on a rank"))
