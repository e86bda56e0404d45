"""Functions of a check that the student's code calls, and that the check answers.

``t.asked(function, calls=40)`` is passed to the student's code as an argument. In grading, the student's
process gets a *stand-in*: each call is a message of plain data, which the judge counts and answers with
``function``. So neither the function nor what it knows is in the student's process, and the check knows how
often, and with what, it was called. A notebook does the same within one process.

What the function refuses ends the check: a call beyond ``calls``, an argument that it cannot take, and a
comparison of the check that fails in it. The student's code then gets :class:`CallRefused`, which
``except Exception`` does not catch. The check has failed, also if that code continues.

On ranks, each call is answered when it arrives, through the switch. One ``Asked`` in the inputs of several
ranks counts their calls together, in an order that may differ from run to run. A refused call ends the run.
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from dlo_lib.base.text import tr
from dlo_lib.grading.checks.exceptions import Wrong

MOST_BYTES = 1000 << 10  # of the arguments of one call: a message that holds them is below the codec's limits
MOST_REFUSED = 20  # calls after a refusal; the judge ends a process that makes more
UNFIT = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""Exceptions that a wrong argument causes in the function of a check."""

_OF_TORCH = ("OutOfMemoryError", "AcceleratorError")


class CallRefused(BaseException):
    """Raised in the student's code by a call that the check refuses."""


class Asked:
    """A function of a check that the student's code can call.

    Args:
        function: takes and returns plain data.
        calls: the largest number of calls that the check answers, at least 1.
        raises: exceptions of ``function`` that reach the student's code, of Python or
            ``torch.OutOfMemoryError`` and ``torch.AcceleratorError``. Any other is an error of the check,
            except those of ``UNFIT``, which an argument causes.
        too_many: what the student reads after a call beyond ``calls``; it may use ``{name}`` and ``{calls}``.
        name: the name of the stand-in; by default that of the function.

    Raises:
        ValueError: ``calls`` is below 1, or an exception of ``raises`` cannot be sent.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        calls: int,
        raises: Iterable[type[Exception]] = (),
        too_many: str = "`{name}` was called more than {calls} times",
        name: str = "",
    ) -> None:
        self.raises = tuple(raises)
        unknown = [kind.__name__ for kind in self.raises if _exceptions().get(kind.__name__) is not kind]
        if calls < 1 or unknown:
            raise ValueError(f"calls={calls}: at least 1" if calls < 1 else f"cannot be sent: {unknown}")
        self.name = name or function.__name__
        self.count = 0
        """The number of calls that were answered."""
        self.heard: Callable[[list[Any], dict[str, Any]], None] | None = None
        """Called with the arguments of each call that is answered, before the function."""
        self._function, self._most, self._too_many = function, calls, too_many
        self._error: Exception | None = None
        self._refused = 0

    @property
    def overrun(self) -> bool:
        """True if the student's code calls again and again after a refusal."""
        return self._refused > MOST_REFUSED

    def answer(self, args: object, kwargs: object) -> dict[str, Any]:
        """Return the answer to one call: its ``value``, what it ``raises``, or ``refused``."""
        if self._error is None and self.count >= self._most:
            words = tr("a function was called too often") if "{" in self._too_many else self._too_many
            self._error = Wrong(tr(self._too_many, name=self.name, calls=self._most), words)
        if self._error is not None:
            return self._refusal()
        self.count += 1
        try:
            if type(args) is not list or type(kwargs) is not dict:
                raise TypeError("arguments")
            named = {str(name): value for name, value in kwargs.items()}
            if self.heard is not None:
                self.heard(args, named)
            return {"value": self._function(*args, **named)}
        except self.raises as error:
            return {"raises": [type(error).__name__, str(error)]}
        except UNFIT as error:
            text = tr("`{name}` cannot take what your code passes to it", name=self.name)
            self._error = Wrong(f"{text} ({type(error).__name__}: {error})", text)
        except Exception as error:  # noqa: BLE001  raise_refusal raises it
            return self.fails(error)
        return self._refusal()

    def fails(self, error: Exception) -> dict[str, Any]:
        """Record an error of the check, which :meth:`raise_refusal` raises; return the refusal."""
        self._error = error
        return self._refusal()

    def raise_refusal(self) -> None:
        """Raise the reason for which a call was refused, if there is one.

        Raises:
            Wrong: a call was refused.
            Exception: the function of the check has failed.
        """
        if self._error is not None:
            raise self._error

    def again(self) -> Asked:
        """Return the same function with a count of 0, for another run on the same inputs."""
        return Asked(self._function, self._most, self.raises, self._too_many, self.name)

    def _refusal(self) -> dict[str, Any]:
        self._refused += 1
        text = str(self._error) if isinstance(self._error, Wrong) else tr("the check itself failed")
        return {"refused": text}


def result_of(answer: Mapping[str, Any]) -> Any:
    """Return the value of an answer, or raise what it says, in the process of the student's code.

    Raises:
        CallRefused: the check refuses the call.
        Exception: what the function of the check raised, one of ``raises``.
    """
    if "refused" in answer:
        raise CallRefused(answer["refused"])
    if "raises" in answer:
        kind, text = answer["raises"]
        raise _exceptions()[kind](text)
    return answer["value"]


def asked_in(value: Any) -> list[Asked]:
    """Return the functions of the check in plain data, each once, in the order in which they stand."""
    found: dict[int, Asked] = {}

    def keep(asked: Asked) -> Asked:
        return found.setdefault(id(asked), asked)

    _with_each(value, keep)
    return list(found.values())


def asked_again(value: Any) -> Any:
    """Return ``value``, plain data, with the functions of the check in it as :meth:`Asked.again` makes them:
    what was one function is one again."""
    made: dict[int, Asked] = {}

    def renewed(asked: Asked) -> Asked:
        return made.setdefault(id(asked), asked.again())

    return _with_each(value, renewed)


def _with_each(value: Any, change: Callable[[Asked], Asked]) -> Any:
    """Return ``value`` with ``change`` of each function of the check in its lists, tuples and dicts."""
    if isinstance(value, Asked):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _with_each(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_with_each(item, change) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value


@functools.cache
def _exceptions() -> dict[str, type[Exception]]:
    """The exceptions that can be sent, by name."""
    kinds = [*vars(builtins).values(), *(getattr(torch, name, None) for name in _OF_TORCH)]
    return {kind.__name__: kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Exception)}
