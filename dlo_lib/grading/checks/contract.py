"""The module that authors of checks import: ``check``, ``scenario``, ``Trial`` (the ``t`` of every check),
``Wrong`` and ``Run``.

A check is a plain function, written once. In the notebook it runs on the student's names and answers at once.
In grading the judge runs the same function in a separate process and reaches the student's code only through
plain data. One check tests one idea and gives all its points or none; partial credit is several checks of one
question::

    from dlo_lib.grading.checks.contract import check, scenario

    @check("parameters", points=2)
    def check_tied_embeddings(student, t):
        "Tied embeddings are counted once"                        # the title that students see
        config = replace(model_config("tiny"), hidden=64 * t.integer(1, 4))
        got = student.count_parameters(config)                    # both arguments and results are copies
        t.equal(got, twin(config), "count_parameters({config})", config=config)

    @scenario               # sent as source; uses torch and dist, contains no expected value
    def averaged(student, rank, world, values):
        return student.all_reduce_mean(values)

    @check("mean", points=1, seconds=30)
    def check_every_rank(student, t):
        "Every rank gets the mean"
        values = [t.normal(5) for _ in range(3)]
        run = student.ranks(averaged, [{"values": v} for v in values])
        for rank, got in enumerate(run.results):
            t.close(got, sum(values) / 3, "the mean on rank {rank}", rank=rank)

Rules: a module of ``checks/`` contains no answer (only properties, the non-parallel twin, and stored values).
Random data come from ``t``, with several sizes and world sizes. Compare all ranks. Do not use counts or times
that the student's side returns. ``t.number``, ``t.equal``, ``t.close``, ``t.tensor`` and ``t.items`` check
the type first, so that no returned value makes the check itself fail. Messages are templates of
:func:`dlo_lib.base.text.tr`; values are passed by name. Of a hidden check students see the title and the
author's words without values: nothing that came from the student's process.
"""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, Protocol

from dlo_lib.comm.calls import Kind
from dlo_lib.grading.checks.claimed import claimed
from dlo_lib.grading.checks.exceptions import Late, NotWritten, Unmeasured, Wrong
from dlo_lib.grading.checks.runs import Nudge, Run
from dlo_lib.grading.checks.trial import Trial

__all__ = [
    "Check",
    "Kind",
    "Late",
    "NotWritten",
    "Nudge",
    "Run",
    "Scenario",
    "Student",
    "Trial",
    "Unmeasured",
    "Wrong",
    "check",
    "claimed",
    "scenario",
]

SCENARIO_NAMES = frozenset({"torch", "dist", "mark", "claimed"})


class Student(Protocol):
    """The student's work in a check: ``student.NAME(...)`` calls a function, with copies of plain data both
    ways.
    """

    def __getattr__(self, name: str) -> Callable[..., Any]: ...

    def get(self, name: str) -> Any:
        """Return the value of a name, such as the answers of a quiz."""
        ...

    def is_own(self, name: str) -> bool:
        """Return False if ``lab.check(..., instead=...)`` gives another value to ``name``, to compare."""
        ...

    def run(self, scenario: Scenario, **inputs: Any) -> Any:
        """Return the result of ``scenario`` in the process that answers calls, without ranks.

        For a function that takes or returns what is not plain data, such as another function. It starts no
        process: a run on one rank starts one and loads all cells again.
        """
        ...

    def fresh(self, scenario: Scenario, **inputs: Any) -> Any:
        """Return the result of ``scenario`` in a process that has only run the cells.

        What must survive a process is saved in one and loaded in another: two calls, of which the first
        returns what the second gets. Costs the start of a process, and its cells.
        """
        ...

    def ranks(
        self, scenario: Scenario, inputs_per_rank: Sequence[Mapping[str, Any]], nudge: Nudge | None = None
    ) -> Run:
        """Run ``scenario`` on one rank per entry of ``inputs_per_rank``; ``nudge`` alters one received value.

        Raises:
            Wrong: the ranks deadlock, their calls do not agree, or no rank received the value to alter.
        """
        ...


@dataclass(frozen=True)
class Check:
    """A check: ``function(student, t)`` of ``question``, worth ``points``, with a limit of ``seconds``."""

    function: Callable[[Student, Trial], None]
    question: str
    points: float
    seconds: float
    name: str
    title: str


@dataclass(frozen=True)
class Scenario:
    """A function that runs beside the student's code, sent as source."""

    name: str
    source: str


def check(
    question: str, points: float, seconds: float = 10.0
) -> Callable[[Callable[[Any, Trial], None]], Check]:
    """Return a decorator that makes a function ``(student, t)`` a check of ``question``.

    The first line of the docstring is the title that students see.

    Raises:
        ValueError: points or seconds are not positive.
    """
    if not (points > 0 and seconds > 0):
        raise ValueError(
            f"a check of {question!r} has points={points}, seconds={seconds}: both must be positive"
        )

    def decorate(function: Callable[[Any, Trial], None]) -> Check:
        title = (
            inspect.getdoc(function) or function.__name__.removeprefix("check_").replace("_", " ")
        ).splitlines()[0]
        return Check(function, question, float(points), float(seconds), function.__name__, title)

    return decorate


def scenario(function: Callable[..., Any]) -> Scenario:
    """Make a function ``(student, rank, world, **inputs)`` a scenario for ``student.ranks``, or a function
    ``(student, **inputs)`` one for ``student.run``.

    Only its source is sent to the student's processes. Besides builtins it may use ``torch`` and what it
    imports itself, on ranks also ``dist`` (torch.distributed) and ``mark("...")``, at which the judge reads
    the rank's memory. Functions and classes that its module defines are sent too, as if the scenario
    defined them: so several scenarios share them.

    Raises:
        ValueError: it uses another name of its module, or ``student`` in another form than ``student.NAME``:
            the notebook sends to the ranks the names that it finds in the source.
    """
    parts, foreign = _parts(function)
    if foreign:
        raise ValueError(
            f"scenario {function.__name__} uses {', '.join(foreign)} of its module: "
            "pass it as an input, or import it inside"
        )
    source = _source(function)
    if parts:
        node = ast.parse(source).body[0]
        assert isinstance(node, ast.FunctionDef)
        place = node.body[1 if ast.get_docstring(node) is not None else 0].lineno - 1
        lines = source.splitlines(keepends=True)
        defined = [textwrap.indent(_source(part), "    ") for part in parts]
        source = "".join([*lines[:place], *defined, *lines[place:]])
    if line := _other_use_of_student(source):
        raise ValueError(
            f"scenario {function.__name__} uses `student` in line {line} without a name behind it: "
            "write student.NAME, because a notebook sends to the ranks only the names that it finds there"
        )
    return Scenario(function.__name__, source)


def _source(part: Callable[..., Any]) -> str:
    """Return the source of a function without its decorators, or of a class."""
    source = textwrap.dedent(inspect.getsource(part))
    return source[source.index("def ") :] if inspect.isfunction(part) else source


def _parts(function: Callable[..., Any]) -> tuple[list[Callable[..., Any]], list[str]]:
    """Return the functions and classes of its module that ``function`` uses, directly or through each other,
    and the other names of the module that it uses, which a rank would lack."""
    known, foreign = SCENARIO_NAMES | set(vars(builtins)), set()
    parts: list[Callable[..., Any]] = []
    left = [function]
    while left:
        used = left.pop()
        code = used.__code__ if inspect.isfunction(used) else compile(_source(used), "<part>", "exec")
        for name in sorted(_global_names(code) - known - {used.__name__, *vars(used)}):
            value: Any = function.__globals__.get(name)
            is_part = inspect.isfunction(value) or inspect.isclass(value)
            if not is_part or value.__module__ != function.__module__:
                foreign.add(name)
            elif value not in parts:
                parts.append(value)
                left.append(value)
    return sorted(parts, key=lambda part: inspect.getsourcelines(part)[1]), sorted(foreign)


def _other_use_of_student(source: str) -> int | None:
    """Return the first line in which ``student`` is not part of ``student.NAME``, None if there is none."""
    nodes = list(ast.walk(ast.parse(source)))
    owners = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    lines = [
        node.lineno
        for node in nodes
        if isinstance(node, ast.Name) and node.id == "student" and id(node) not in owners
    ]
    return min(lines, default=None)


def _global_names(code: CodeType) -> set[str]:
    own = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    return own.union(
        *(_global_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    )
