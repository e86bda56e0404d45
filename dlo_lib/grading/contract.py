"""What the author of a lab's checks imports: ``check``, ``scenario``, ``Trial`` (the ``t`` of every check), ``Wrong`` and ``Run``.

A check is a plain function, written once. In the notebook it runs against the student's names and answers at once; in grading the judge
runs the same function in its own process and reaches the student's code only through plain data. One check is one idea, all or nothing;
partial credit is several checks on one question::

    from dlo_lib.grading.contract import check, scenario

    @check("parameters", points=2)
    def check_tied_embeddings(student, t):
        "Tied embeddings are counted once"                        # the title that students see
        config = replace(model_config("tiny"), hidden=64 * t.integer(1, 4))
        got = student.count_parameters(config)                    # a copy goes there, a copy comes back
        t.equal(got, twin(config), "count_parameters({config})", config=config)

    @scenario                                                     # shipped as source; sees torch and dist, and no expected value
    def averaged(student, rank, world, values):
        return student.all_reduce_mean(values)

    @check("mean", points=1, seconds=30)
    def check_every_rank(student, t):
        "Every rank gets the mean"
        values = [t.normal(5) for _ in range(3)]
        run = student.ranks(averaged, [{"values": v} for v in values])
        for rank, got in enumerate(run.results):
            t.close(got, sum(values) / 3, "the mean on rank {rank}", rank=rank)

Rules: no answer in ``checks.py`` (a property, the non-parallel twin, stored values); random data from ``t``, several sizes and world
sizes; compare all ranks; no count or time that the student's side returns. ``t.number``, ``t.equal``, ``t.close``, ``t.tensor`` and
``t.items`` look at the type first, so that a check never trips over what a student returned. Messages are templates of
:func:`dlo_lib.text.tr`: values go in by name. Of a hidden check students see its title, and the author's words where they hold no value:
nothing that came from their own process.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, Protocol

from dlo_lib.comm.calls import Kind
from dlo_lib.grading.runs import Nudge, Run
from dlo_lib.grading.trial import Trial
from dlo_lib.grading.wrong import NotWritten, Unmeasured, Wrong

__all__ = ["Check", "Kind", "NotWritten", "Nudge", "Run", "Scenario", "Student", "Trial", "Unmeasured", "Wrong", "check", "scenario"]

SCENARIO_NAMES = frozenset({"torch", "dist", "mark"})


class Student(Protocol):
    """The student's work as checks see it: ``student.NAME(...)`` calls a function, with copies of plain data both ways."""

    def __getattr__(self, name: str) -> Callable[..., Any]: ...

    def get(self, name: str) -> Any:
        """The value of a name, such as the answers of a quiz."""
        ...

    def ranks(self, scenario: Scenario, inputs_per_rank: Sequence[Mapping[str, Any]], nudge: Nudge | None = None) -> Run:
        """Run ``scenario`` on as many ranks as there are inputs; each rank gets only its own. ``nudge`` alters one value in flight.

        Raises:
            Wrong: the ranks dead-lock, their calls do not agree, or the value to be altered never passed.
        """
        ...


@dataclass(frozen=True)
class Check:
    """A check: ``function(student, t)`` of ``question``, worth ``points``, to be done within ``seconds``."""

    function: Callable[[Student, Trial], None]
    question: str
    points: float
    seconds: float
    name: str
    title: str


@dataclass(frozen=True)
class Scenario:
    """A function of the student's side, shipped as source: it runs beside the student's code on every rank."""

    name: str
    source: str


def check(question: str, points: float, seconds: float = 10.0) -> Callable[[Callable[[Any, Trial], None]], Check]:
    """Make a function ``(student, t)`` a check of ``question``. The first line of its docstring is the title that students see.

    Raises:
        ValueError: points or seconds are not positive.
    """
    if not (points > 0 and seconds > 0):
        raise ValueError(f"a check of {question!r} has points={points}, seconds={seconds}: both must be positive")

    def decorate(function: Callable[[Any, Trial], None]) -> Check:
        title = (inspect.getdoc(function) or function.__name__.removeprefix("check_").replace("_", " ")).splitlines()[0]
        return Check(function, question, float(points), float(seconds), function.__name__, title)

    return decorate


def scenario(function: Callable[..., Any]) -> Scenario:
    """Make a function ``(student, rank, world, **inputs)`` a scenario.

    Only its source goes to the ranks: besides builtins it may use ``torch``, ``dist`` (torch.distributed), ``mark("...")``, at which the
    judge reads the rank's memory, and what it imports itself.

    Raises:
        ValueError: it uses another name of its module.
    """
    if foreign := sorted(_global_names(function.__code__) - SCENARIO_NAMES - set(vars(builtins))):
        raise ValueError(f"scenario {function.__name__} uses {', '.join(foreign)} of its module: pass it as an input, or import it inside")
    source = textwrap.dedent(inspect.getsource(function))
    return Scenario(function.__name__, source[source.index("def ") :])


def _global_names(code: CodeType) -> set[str]:
    own = {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return own.union(*(_global_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)))
