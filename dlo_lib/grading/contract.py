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
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from dlo_lib.comm.calls import Call, Kind
from dlo_lib.text import tr

__all__ = ["Check", "Kind", "NotWritten", "Nudge", "Run", "Scenario", "Student", "Trial", "Unmeasured", "Wrong", "check", "scenario"]

SHORT = 80  # characters of a student's value in a message
SCENARIO_NAMES = frozenset({"torch", "dist", "mark"})

Item = TypeVar("Item")


class Wrong(Exception):
    """The student's work is wrong; the text teaches.

    ``words`` is what the check's author wrote of it, without values: all that a hidden check shows.
    """

    def __init__(self, message: str, words: str = "") -> None:
        super().__init__(message)
        self.words = words


class NotWritten(Wrong):
    """There is no answer yet: a name is missing, or its function still raises NotImplementedError."""


class Unmeasured(Exception):
    """This machine cannot measure what the check asks for. What was compared before counts; the text is a note for the student."""


@dataclass(frozen=True)
class Nudge:
    """The judge alters one value in flight: what a rank receives in one call differs by ``by`` in one element.

    Work that uses what it receives shows it exactly where the twin predicts, and nowhere else. Right traffic whose data is thrown away
    shows nothing. Ranks cannot see that it happens.

    Attributes:
        kind: of the call.
        rank: whose received copy is altered; those of other ranks stay as they are.
        call: which call of that kind on that rank, counted from 0 in the order of issue.
        element: index into all that the rank receives in that call, flattened in order.
        by: what is added, in the type of the tensor.
    """

    kind: Kind
    rank: int
    call: int = 0
    element: int = 0
    by: float = 1.0

    def hits(self, rank: int, kind: Kind, number: int) -> bool:
        """Whether this is the call."""
        return (rank, kind, number) == (self.rank, self.kind, self.call)

    def applied(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], bool]:
        """``tensors`` with the element altered, in a copy; and whether there is such an element."""
        altered, left = list(tensors), self.element
        for index, tensor in enumerate(altered):
            if left < tensor.numel():
                copy = tensor.clone(memory_format=torch.contiguous_format)
                copy.view(-1)[left] += self.by if tensor.dtype.is_floating_point else int(self.by)
                altered[index] = copy
                return altered, True
            left -= tensor.numel()
        return altered, False


@dataclass(frozen=True)
class Run:
    """What a scenario returned on each rank, and what the switch saw of it: what passed, and the memory at each mark.

    Bytes are those of ``comm.calls``: payload is the size of the full tensor, ring bytes what a ring algorithm sends of it per rank.
    """

    results: list[Any]
    traffic: tuple[tuple[Call, ...], ...] = ()
    """By rank, the calls that were completed, in the order of issue."""
    held: Mapping[str, Mapping[int, int | None]] = field(default_factory=dict)
    """Bytes by mark and rank; None where this machine cannot tell."""

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.results)

    def calls(self, rank: int, kind: Kind | None = None) -> list[Call]:
        """The calls of ``rank``, of one kind or all."""
        return [call for call in self.traffic[rank] if kind in (None, call.kind)]

    def bytes(self, rank: int, kind: Kind | None = None) -> int:
        """Their payload: the size of the full tensors."""
        return sum(call.payload_bytes for call in self.calls(rank, kind))

    def ring_bytes(self, rank: int, kind: Kind | None = None) -> float:
        """What ring algorithms send for them."""
        return sum(call.ring_bytes for call in self.calls(rank, kind))

    def memory(self, rank: int, mark: str) -> int:
        """Bytes that the process of ``rank`` held at ``mark("...")`` of the scenario beyond a fresh one, read from outside.

        The largest, where it passed the mark several times.

        Raises:
            Wrong: it did not pass that mark.
            Unmeasured: this machine cannot tell (macOS).
        """
        at = self.held.get(mark, {})
        if rank not in at:
            raise Wrong(tr('rank {rank} did not come to "{mark}"', rank=rank, mark=mark), tr("a rank did not come to the end"))
        if (held := at[rank]) is None:
            raise Unmeasured(tr("memory cannot be measured on this machine: this counts when the lab is graded"))
        return held


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


class Trial:
    """Draws a check's inputs and compares its results. The same seed draws the same inputs; every comparison is counted."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.compared = 0
        self._generator = torch.Generator().manual_seed(seed)

    # -- inputs

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard normal numbers. The same numbers in every dtype, rounded to it."""
        return torch.randn(*shape, generator=self._generator, dtype=torch.float64).to(dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Whole numbers from ``low`` to ``high`` inclusive, int64."""
        return torch.randint(low, high + 1, shape, generator=self._generator)

    def integer(self, low: int, high: int) -> int:
        """One whole number from ``low`` to ``high`` inclusive."""
        return int(self.integers(low, high, 1))

    def uniform(self, low: float, high: float) -> float:
        """One number from [low, high)."""
        return low + (high - low) * float(torch.rand((), generator=self._generator, dtype=torch.float64))

    def choice(self, items: Sequence[Item]) -> Item:
        """One of ``items``."""
        return items[self.integer(0, len(items) - 1)]

    def shuffled(self, items: Sequence[Item]) -> list[Item]:
        """``items`` in another order."""
        return [items[index] for index in torch.randperm(len(items), generator=self._generator).tolist()]

    # -- comparisons

    def that(self, truth: bool, message: str, /, **values: object) -> None:
        """The claim holds, or the student reads ``message`` with ``values`` filled in.

        Raises:
            TypeError: ``truth`` is not a real bool: a tensor or an object that calls itself true proves nothing.
        """
        self.compared += 1
        if type(truth) is not bool:
            raise TypeError(f"t.that wants a real bool, not a {type(truth).__name__}: write bool(...)")
        if not truth:
            shown = {name: value if isinstance(value, (int, float)) else _short(value) for name, value in values.items()}
            raise Wrong(tr(message, **shown), "" if values else tr(message))

    def equal(self, got: Any, want: Any, what: str, /, **values: object) -> None:
        """``got`` is exactly the plain value ``want``, of the same types all through (True is not 1, 2.0 is not 2)."""
        name = tr(what, **values)
        self._claim(_same(got, want), tr("{what} is {got}, expected {want}", what=name, got=_short(got), want=_short(want)), name)

    def number(self, got: Any, what: str, /, **values: object) -> float | int:
        """``got`` is a finite int or float; returns it."""
        name = tr(what, **values)
        self._claim(type(got) in (int, float), tr("{what} should be a number, not {got}", what=name, got=_short(got)), name)
        self._claim(_finite(got), tr("{what} is {got}, not a finite number", what=name, got=_short(got)), name)
        return got

    def items(self, got: Any, length: int, what: str, /, **values: object) -> list[Any]:
        """``got`` is a list or tuple of ``length`` values; returns them."""
        name = tr(what, **values)
        good = type(got) in (list, tuple) and len(got) == length
        self._claim(good, tr("{what} should be {length} values, not {got}", what=name, length=length, got=_short(got)), name)
        return list(got)

    def tensor(
        self, got: Any, what: str, /, *, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None, **values: object
    ) -> Tensor:
        """``got`` is a tensor, of that shape and dtype; returns it."""
        name = tr(what, **values)
        self._claim(type(got) is Tensor, tr("{what} should be a tensor, not {got}", what=name, got=_short(got)), name)
        if shape is not None:
            text = tr("{what} has shape {got}, expected {want}", what=name, got=tuple(got.shape), want=tuple(shape))
            self._claim(tuple(got.shape) == tuple(shape), text, name)
        if dtype is not None:
            self._claim(got.dtype == dtype, tr("{what} is {got}, expected {want}", what=name, got=got.dtype, want=dtype), name)
        return got

    def close(self, got: Any, want: Tensor | float, what: str, /, *, rtol: float = 1e-4, atol: float = 1e-6, **values: object) -> None:
        """``got`` equals ``want`` within ``atol + rtol * |want|``.

        Tensors: same shape and dtype, finite wherever ``want`` is. Numbers: finite.
        """
        name = tr(what, **values)
        if not isinstance(want, Tensor):
            self.number(got, name)
            near = abs(got - want) <= atol + rtol * abs(want)
            self._claim(bool(near), tr("{what} is {got:.6g}, expected {want:.6g}", what=name, got=got, want=want), name)
            return
        self.tensor(got, name, shape=want.shape, dtype=want.dtype)
        finite = torch.isfinite(want)
        self._claim(bool(torch.isfinite(got)[finite].all()), tr("{what} holds NaN or infinity", what=name), name)
        self._claim(_same_limits(got[~finite], want[~finite]), tr("{what} differs where infinity or NaN is expected", what=name), name)
        error = (got[finite].double() - want[finite].double()).abs()
        largest = float(error.max()) if error.numel() else 0.0
        near = bool((error <= atol + rtol * want[finite].double().abs()).all())
        self._claim(near, tr("{what} is off by up to {error:.3g}", what=name, error=largest), name)

    def _claim(self, truth: bool, message: str, what: str) -> None:
        self.compared += 1
        if not truth:
            raise Wrong(message, tr("{what} is not right", what=what))


def _finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # a whole number beyond what a float holds
        return False


def _same_limits(got: Tensor, want: Tensor) -> bool:
    return bool(((got == want) | (torch.isnan(got) & torch.isnan(want))).all())


def _same(got: Any, want: Any) -> bool:
    if type(got) is not type(want):
        return False
    if isinstance(want, Tensor):
        return got.dtype == want.dtype and torch.equal(got, want)
    if isinstance(want, (list, tuple)):
        return len(got) == len(want) and all(map(_same, got, want))
    if isinstance(want, dict):
        return got.keys() == want.keys() and all(_same(got[key], want[key]) for key in want)
    return bool(got == want)


def _short(value: object) -> str:
    text = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) and value.numel() > 8 else repr(value)
    text = text if not isinstance(value, str) else value
    return text if len(text) <= SHORT else text[: SHORT - 3] + "..."
