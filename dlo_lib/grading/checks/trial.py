"""The ``t`` of every check: it draws inputs, compares results, and counts the comparisons."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from dlo_lib.base.text import tr
from dlo_lib.grading.checks.asked import Asked
from dlo_lib.grading.checks.claimed import Claimed, refuse_claims
from dlo_lib.grading.checks.exceptions import Wrong
from dlo_lib.grading.checks.words import agreeing, words_of

SHORT = 80  # characters of a student's value in a message
MOST_DRAWS = 1000  # of cases by `draw_until`

Item = TypeVar("Item")


class Trial:
    """Draws a check's inputs and compares its results. The same seed draws the same inputs."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.compared = 0
        self.explanation = ""
        """What the student reads when the check passes."""
        self.measured: dict[str, Any] = {}
        """JSON values that the report keeps, of :meth:`measure`."""
        self._generator = torch.Generator().manual_seed(seed)

    # -- inputs

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Draw standard normal numbers: the same numbers for every dtype, rounded to it."""
        return torch.randn(*shape, generator=self._generator, dtype=torch.float64).to(dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Draw integers from ``low`` to ``high`` inclusive, as int64."""
        return torch.randint(low, high + 1, shape, generator=self._generator)

    def integer(self, low: int, high: int) -> int:
        """Draw one integer from ``low`` to ``high`` inclusive."""
        return int(self.integers(low, high, 1))

    def uniform(self, low: float, high: float) -> float:
        """Draw one number from [low, high)."""
        return low + (high - low) * float(torch.rand((), generator=self._generator, dtype=torch.float64))

    def choice(self, items: Sequence[Item]) -> Item:
        """Draw one of ``items``."""
        return items[self.integer(0, len(items) - 1)]

    def shuffled(self, items: Sequence[Item]) -> list[Item]:
        """Return ``items`` in random order."""
        return [items[index] for index in torch.randperm(len(items), generator=self._generator).tolist()]

    def draw_until(self, draw: Callable[[], Item], tells: Callable[[Item], bool]) -> Item:
        """Draw cases with ``draw``, and return the first one for which ``tells`` is True.

        For some inputs a known mistake gives the right result. A check with such inputs would pass it.

        Raises:
            RuntimeError: ``tells`` accepts none of 1000 cases.
        """
        for _ in range(MOST_DRAWS):
            case = draw()
            if tells(case):
                return case
        raise RuntimeError(f"none of {MOST_DRAWS} drawn cases is accepted: draw from other cases")

    def asked(
        self,
        function: Callable[..., Any],
        calls: int,
        *,
        raises: Iterable[type[Exception]] = (),
        too_many: str = "`{name}` was called more than {calls} times",
    ) -> Asked:
        """Return an argument for the student's code: it calls ``function``, and the check answers.

        ``function`` runs in the process of the check, which counts (``.count``), and neither it nor what it
        knows is in the student's process. Arguments and results are plain data.

        Args:
            calls: the largest number of calls; one more ends the check with ``too_many``.
            raises: exceptions of ``function`` that reach the student's code.
        """
        return Asked(function, calls, raises, too_many)

    # -- comparisons

    def explain(self, words: str) -> None:
        """Show ``words`` beside the check when it passes, such as the reason of a right answer."""
        self.explanation = words

    def measure(self, **values: Any) -> None:
        """Keep JSON values that the check itself has measured in the report, whether it passes or not.

        A leaderboard reads them. They are no points: compare them with ``that`` besides.

        Raises:
            ClaimScored: a value is only what the student's process says.
        """
        refuse_claims(*values.values())
        self.measured.update(values)

    def that(self, truth: bool, message: str, /, **values: object) -> None:
        """Check that ``truth`` is True; otherwise the student reads ``message`` with ``values`` filled in.

        Raises:
            ClaimScored: ``truth`` is only what the student's process says.
            TypeError: ``truth`` is not a bool; a tensor or another object that is truthy proves nothing.
        """
        self.compared += 1
        refuse_claims(truth)
        if type(truth) is not bool:
            raise TypeError(f"t.that wants a real bool, not a {type(truth).__name__}: write bool(...)")
        if not truth:
            shown = {
                name: value if isinstance(value, (int, float)) else _short(value)
                for name, value in values.items()
            }
            text = tr(message, **shown)
            words = words_of(message, values)
            raise Wrong(text, "" if values else words, words)

    def equal(self, got: Any, want: Any, what: str, /, **values: object) -> None:
        """Check that ``got`` is the plain value ``want``, with equal types at all levels (True is not 1, 2.0
        is not 2).
        """
        message = "{what} is {got}, expected {want}"
        refuse_claims(got, want)
        self._claim(_same(got, want), _Name(what, values), message, got=_Short(got), want=_Short(want))

    def number(self, got: Any, what: str, /, **values: object) -> float | int:
        """Check that ``got`` is a finite int or float; return it."""
        return self._number(got, _Name(what, values))

    def items(self, got: Any, length: int, what: str, /, **values: object) -> list[Any]:
        """Check that ``got`` is a list or tuple of ``length`` values; return them as a list.

        A value of them may be claimed.
        """
        if isinstance(got, Claimed):
            refuse_claims(got)
        name = _Name(what, values)
        good = type(got) in (list, tuple) and len(got) == length
        message = "{what} should be {length} values, not {got}"
        self._claim(good, name, message, length=length, got=_Short(got))
        return list(got)

    def tensor(
        self,
        got: Any,
        what: str,
        /,
        *,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        **values: object,
    ) -> Tensor:
        """Check that ``got`` is a tensor, with ``shape`` and ``dtype`` if given; return it."""
        return self._tensor(got, _Name(what, values), shape, dtype)

    def close(
        self,
        got: Any,
        want: Tensor | float,
        what: str,
        /,
        *,
        rtol: float = 1e-4,
        atol: float = 1e-6,
        **values: object,
    ) -> None:
        """Check that ``got`` equals ``want`` within ``atol + rtol * |want|``.

        Tensors must have the same shape and dtype, and be finite where ``want`` is. Numbers must be finite.
        """
        refuse_claims(want)
        name = _Name(what, values)
        if not isinstance(want, Tensor):
            self._number(got, name)
            near = abs(got - want) <= atol + rtol * abs(want)
            message = "{what} is {got:.6g}, expected {want:.6g}"
            if f"{got:.6g}" == f"{want:.6g}":
                message = "{what} is {got:.15g}, expected {want:.15g}"
            self._claim(bool(near), name, message, got=got, want=want)
            return
        self._tensor(got, name, want.shape, want.dtype)
        finite = torch.isfinite(want)
        self._claim(bool(torch.isfinite(got)[finite].all()), name, "{what} holds NaN or infinity")
        same_limits = _same_limits(got[~finite], want[~finite])
        self._claim(same_limits, name, "{what} differs where infinity or NaN is expected")
        error = (got[finite].double() - want[finite].double()).abs()
        largest = float(error.max()) if error.numel() else 0.0
        near = bool((error <= atol + rtol * want[finite].double().abs()).all())
        self._claim(near, name, "{what} is off by up to {error:.3g}", error=largest)

    def _number(self, got: Any, name: _Name) -> float | int:
        refuse_claims(got)
        self._claim(type(got) in (int, float), name, "{what} should be a number, not {got}", got=_Short(got))
        self._claim(_finite(got), name, "{what} is {got}, not a finite number", got=_Short(got))
        return got if abs(got) < 2**63 else float(got)  # arithmetic with a huge int would raise in the check

    def _tensor(
        self, got: Any, name: _Name, shape: Sequence[int] | None, dtype: torch.dtype | None
    ) -> Tensor:
        refuse_claims(got)
        self._claim(type(got) is Tensor, name, "{what} should be a tensor, not {got}", got=_Short(got))
        if shape is not None:
            has, wanted = tuple(got.shape), tuple(shape)
            self._claim(has == wanted, name, "{what} has shape {got}, expected {want}", got=has, want=wanted)
        if dtype is not None:
            message = "{what} is {got}, expected {want}"
            self._claim(got.dtype == dtype, name, message, got=got.dtype, want=dtype)
        return got

    def _claim(self, truth: bool, name: _Name, message: str, /, **values: object) -> None:
        """Count a comparison; the message is made only if it fails."""
        self.compared += 1
        if not truth:
            wrong = agreeing("{what} is not right", name.words)
            words = tr(wrong, what=name.words or tr("a result"))
            raise Wrong(tr(agreeing(message, name.text), what=name.text, **values), words)


@dataclass(frozen=True)
class _Name:
    """The name of a result: a template of the check's author, and the values that it takes."""

    template: str
    values: Mapping[str, object]

    @property
    def text(self) -> str:
        return tr(self.template, **self.values)

    @property
    def words(self) -> str:
        return words_of(self.template, self.values)


def _finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer too large for a float
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


class _Short:
    """A student's value in a message. Printing a tensor takes a millisecond, so it is done only then."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return _short(self._value)


def _short(value: object) -> str:
    text = (
        f"a tensor of shape {tuple(value.shape)}"
        if isinstance(value, Tensor) and value.numel() > 8
        else repr(value)
    )
    text = text if not isinstance(value, str) else value
    return text if len(text) <= SHORT else text[: SHORT - 3] + "..."
