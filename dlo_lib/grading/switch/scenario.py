"""Run a scenario, on a rank or without ranks, and build the ``Run`` that a check gets; notebooks and the
judge share this module.
"""

from __future__ import annotations

import ast
import functools
import marshal
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist

from dlo_lib.base.text import tr
from dlo_lib.grading.checks.asked import asked_again
from dlo_lib.grading.checks.claimed import claimed
from dlo_lib.grading.checks.contract import NotWritten, Nudge, Run, Scenario, Wrong
from dlo_lib.grading.checks.faults import Fault
from dlo_lib.grading.switch.backend import join
from dlo_lib.grading.switch.link import Link
from dlo_lib.grading.switch.server import SwitchServer

_MARK = Link.mark  # before any code of a student runs
_PLACE = "the place of mark in a scenario"


def run_scenario(
    name: str, code: bytes, student: Any, rank: int, world: int, inputs: Mapping[str, Any], link: Link
) -> Any:
    """Run the scenario ``name`` from its :func:`code_of`, in a rank, with torch, dist (the switch), mark and
    the student's names.
    """
    join(link, rank, world)
    scope: dict[str, Any] = {"torch": torch, "dist": dist, "claimed": claimed}
    exec(_with_mark(marshal.loads(code), functools.partial(_MARK, link)), scope)
    result = scope[name](student, rank, world, **inputs)
    link.report_unwaited()
    return result


def call_scenario(scenario: Scenario, student: Any, inputs: Mapping[str, Any]) -> Any:
    """Run a scenario from its source without ranks, in the process that answers calls."""
    scope: dict[str, Any] = {"torch": torch, "claimed": claimed}
    exec(compile(scenario.source, f"<scenario {scenario.name}>", "exec"), scope)
    return scope[scenario.name](student, **inputs)


@functools.lru_cache(maxsize=256)
def code_of(scenario: Scenario) -> bytes:
    """Compile a scenario for its ranks, once for all of them: a long one takes 4 ms.

    ``mark`` becomes a constant. As a global of the scenario, which the frames of the student's callers lead
    to, it could be replaced by a function that frees memory while it is measured.
    """
    tree = ast.parse(scenario.source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "mark":
            node.func = ast.copy_location(ast.Constant(_PLACE), node.func)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # a text is not callable
        return marshal.dumps(compile(tree, f"<scenario {scenario.name}>", "exec"))


def _with_mark(code: CodeType, mark: Callable[[str], None]) -> CodeType:
    def replaced(constant: object) -> object:
        return _with_mark(constant, mark) if isinstance(constant, CodeType) else constant

    constants = (mark if constant == _PLACE else replaced(constant) for constant in code.co_consts)
    return code.replace(co_consts=tuple(constants))


def has_marks(scenario: Scenario) -> bool:
    """Return True if the memory of ranks is read in this scenario."""
    return "mark(" in scenario.source


def has_claims(scenario: Scenario) -> bool:
    """Return True if this scenario marks values as claimed."""
    return "claimed(" in scenario.source


class DirectNames:
    """The student's names, called without copies in the student's process."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = objects

    def __getattr__(self, name: str) -> Any:
        try:
            return self._objects[name]
        except KeyError:
            raise AttributeError(f"`{name}` is not defined") from None


def names_used(scenario: Scenario) -> list[str]:
    """Return the student's names that a scenario uses: ``student.NAME``."""
    nodes = [node for node in ast.walk(ast.parse(scenario.source)) if isinstance(node, ast.Attribute)]
    return sorted(
        {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == "student"}
    )


@functools.lru_cache(maxsize=256)
def final_marks(scenario: Scenario) -> frozenset[str]:
    """Return the marks after which the scenario calls none of the student's functions: the traffic is
    complete.
    """
    found: set[str] = set()
    for statement in reversed(
        next(node for node in ast.parse(scenario.source).body if isinstance(node, ast.FunctionDef)).body
    ):
        for call in [node for node in ast.walk(statement) if isinstance(node, ast.Call)]:
            match call.func, call.args:
                case ast.Name(id="mark"), [ast.Constant(value=str(name))] if isinstance(statement, ast.Expr):
                    found.add(name)
                case ast.Attribute(attr="clone" | "detach" | "item" | "tolist"), _:
                    pass
                case _:
                    return frozenset(found)
    return frozenset(found)


def finished_run(
    results: list[Any],
    service: SwitchServer,
    scenario: Scenario,
    nudge: Nudge | None,
    ranks: Callable[[Scenario, Sequence[Mapping[str, Any]], Nudge], Run],
    inputs_per_rank: Sequence[Mapping[str, Any]],
) -> Run:
    """Return the ``Run`` that a check gets, without a final mark after which a rank made calls.

    ``ranks`` runs it again with a nudge; functions of the check in the inputs count from 0 then.

    Raises:
        Wrong: the rank never received the value that the nudge alters.
    """
    if nudge is not None and not service.exchange.nudged:
        text = tr(
            "rank {rank} never received element {element} of its {kind} number {call}: "
            "what should pass there did not",
            rank=nudge.rank, element=nudge.element, kind=nudge.kind.value, call=nudge.call + 1,
        )  # fmt: skip
        raise Wrong(text, tr("the data that should pass between the ranks did not"))
    traffic = tuple(service.exchange.calls(rank) for rank in range(len(results)))
    sent = tuple(service.exchange.sent(rank) for rank in range(len(results)))
    last = final_marks(scenario)
    misplaced = {
        (name, rank)
        for (name, rank), calls in service.marked.items()
        if name in last and calls < service.exchange.issued(rank)
    }
    held = {
        name: {rank: memory for rank, memory in by_rank.items() if (name, rank) not in misplaced}
        for name, by_rank in service.held.items()
    }
    issued: dict[str, dict[int, int]] = {}
    for (name, rank), calls in service.marked.items():
        issued.setdefault(name, {})[rank] = calls
    unwaited = tuple(service.exchange.unwaited(rank) for rank in range(len(results)))

    def repeat(nudge: Nudge) -> Run:
        return ranks(scenario, asked_again(inputs_per_rank), nudge)

    return Run(results, traffic, held, issued, service.open, unwaited, sent, repeat)


def as_wrong(fault: Fault, own: Mapping[str, Sequence[str]] | None = None) -> Wrong:
    """Return the verdict on a fault of the student's code.

    ``own``: the lines of the student's cells by the id of the cell, where this process knows them.
    """
    if fault.not_written:
        return NotWritten(fault.message(), tr("not written yet"))
    return Wrong(fault.message(), tr("your code raised an exception"), fault.brief(own or {}))
