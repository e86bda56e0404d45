"""What a student's process says about itself: shown in a message, and never scored.

A result of the student's function on inputs that it could not know is evidence. What a scenario collects
beside it is not: a list that its nested functions or hooks fill, a count, a time. The student's code runs in
the same process, and can write all of these. A scenario marks it: ``return [result, claimed(seen)]``, and the
check gets a :class:`Claimed`, with which only a message can be made.
"""

from __future__ import annotations

from typing import Any, NoReturn


class ClaimScored(TypeError):
    """A check computes or compares with what the student's process only says: an error of the check."""


class Claimed:
    """A value that the student's process says. It can be formatted; everything else is a ``ClaimScored``."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __repr__(self) -> str:
        return repr(self._value)

    def __format__(self, spec: str) -> str:
        return str(self._value)

    @property
    def said(self) -> Any:
        """The value, for a message. Never compare it, and compute nothing from it that is compared."""
        return self._value

    def _refuse(self, *_: object) -> NoReturn:
        raise ClaimScored(
            "what the student's process says about itself can be shown, not scored: compare a result, or "
            "pass a function of the check to the student's code (t.asked)"
        )

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __len__ = _refuse  # type: ignore[assignment]
    __iter__ = __getitem__ = __contains__ = __float__ = __int__ = __index__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __hash__ = None  # type: ignore[assignment]


def claimed(value: Any) -> Claimed:
    """Mark what a scenario collects beside the student's result; a check can show it, not score it."""
    return Claimed(value)


def refuse_claims(*values: object) -> None:
    """Raise if one of ``values`` is a :class:`Claimed`, or a list, tuple or dict that holds one.

    Raises:
        ClaimScored: there is one.
    """
    for value in values:
        if isinstance(value, Claimed):
            value._refuse()
        if isinstance(value, dict):
            refuse_claims(*value.values())
        elif isinstance(value, (list, tuple)):
            refuse_claims(*value)
