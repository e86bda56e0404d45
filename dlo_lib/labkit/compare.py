"""Comparison of a student's results with a twin on every rank, and with the values
that known mistakes give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dlo_lib.base.text import tr
from dlo_lib.grading.checks.contract import Run, Trial, Wrong

EXACT = {"rtol": 1e-9, "atol": 1e-10}
"""The tolerance of results in float64, which differ by the order of additions alone."""

Twin = Tensor | float
Mistakes = Mapping[str, Twin | Sequence[Twin]]
"""A message for the student → the value that this mistake gives."""


def double(t: Trial, *shape: int) -> Tensor:
    """Draw standard normal numbers in float64, for a comparison within ``EXACT``."""
    return t.normal(*shape, dtype=torch.float64)


def near(got: object, want: Twin | Sequence[Twin], rtol: float = 1e-6, atol: float = 1e-8) -> bool:
    """Return whether ``got`` equals ``want`` within ``atol + rtol * |want|``. Nothing
    is reported to the student.

    Tensors have the same shape and dtype. Sequences have the same length, and each pair is near; sequences of
    empty tensors are not near, because they show nothing.
    """
    if isinstance(want, Tensor):
        if type(got) is not Tensor or got.shape != want.shape or got.dtype != want.dtype:
            return False
        return bool(torch.allclose(got.double(), want.double(), rtol=rtol, atol=atol))
    if isinstance(want, Sequence):
        if not isinstance(got, Sequence) or len(got) != len(want):
            return False
        shown = any(not isinstance(value, Tensor) or value.numel() for value in want)
        return shown and all(near(mine, right, rtol, atol) for mine, right in zip(got, want))
    return isinstance(got, (int, float)) and bool(abs(got - want) <= atol + rtol * abs(want))


def wrong_if(
    t: Trial,
    got: object,
    want: Twin | Sequence[Twin],
    /,
    mistakes: Mistakes,
    rtol: float = 1e-6,
    atol: float = 1e-8,
    **values: object,
) -> None:
    """Fail with the message of the first known mistake whose value ``got`` is.

    Call it before the comparison with ``want``, the twin: a known mistake gets its name, any other
    one the distance. A mistake that gives the right value for these inputs, such as a missing
    average on one rank, is none.
    """
    for message, wrong in mistakes.items():
        t.that(near(want, wrong, rtol, atol) or not near(got, wrong, rtol, atol), message, **values)


def is_near(
    t: Trial,
    got: object,
    want: float,
    message: str,
    mistakes: Mapping[str, float] | None = None,
    rtol: float = 1e-6,
    atol: float = 1e-8,
    **values: object,
) -> None:
    """The number ``got`` is ``want``, within ``atol + rtol * |want|``.

    Args:
        message: what the student reads otherwise; it may use ``{got}``, ``{want}`` and ``values``.
        mistakes: a message for the student → the number that this mistake gives.
    """
    wrong_if(t, got, want, mistakes or {}, rtol, atol, **values)
    t.that(near(got, want, rtol, atol), message, got=got, want=want, **values)


def explained(
    student: Any, scenario: Any, inputs: Sequence[Mapping[str, Any]], causes: Mapping[str, str]
) -> Run:
    """Return the run of ``scenario``. If it ends with an error that contains a key of ``causes``, the message
    begins with the cause of the first such key.

    Raises:
        Wrong: the student's code or a collective failed.
    """
    with explaining(causes):
        run: Run = student.ranks(scenario, inputs)
    return run


@contextmanager
def explaining(causes: Mapping[str, str]) -> Iterator[None]:
    """Raise an error of the student's code with its cause in front: that of the first key of ``causes`` which
    the message contains.

    Raises:
        Wrong: the student's code or a collective failed.
    """
    try:
        yield
    except Wrong as error:
        cause = next((cause for words, cause in causes.items() if words in str(error)), None)
        if cause is None:
            raise
        raise Wrong(f"{tr(cause)}. {error}", cause) from None


def same(
    t: Trial,
    got: object,
    want: Any,
    what: str,
    /,
    mistakes: Mapping[str, Any] | None = None,
    rtol: float = 1e-4,
    atol: float = 1e-6,
    **values: object,
) -> None:
    """``got`` is ``want``: a number, a tensor, or a list or dict of such values.

    Args:
        what: the name of a result in the message. It may use ``values``, in a list ``{i}``, the number of the
            value, and in a dict ``{name}``, its key.
        mistakes: a message for the student → what ``want`` would be with this mistake.
    """
    known = mistakes or {}
    if isinstance(want, Mapping):
        t.that(type(got) is dict, "the results should be a dict, not {got}", got=got)
        for name, right in want.items():
            wrong = {message: value[name] for message, value in known.items()}
            found = got.get(name)  # type: ignore[attr-defined]
            same(t, found, right, what, wrong, rtol, atol, **{**values, "name": name})
    elif isinstance(want, (list, tuple)):
        for i, (mine, right) in enumerate(zip(t.items(got, len(want), "the list of results"), want)):
            wrong = {message: value[i] for message, value in known.items()}
            same(t, mine, right, what, wrong, rtol, atol, **{**values, "i": i})
    else:
        wrong_if(t, got, want, known, rtol, atol, **values)
        t.close(got, want, what, rtol=rtol, atol=atol, **values)  # type: ignore[arg-type]


def every_rank(
    t: Trial,
    run: Run,
    want: Any,
    what: str,
    /,
    of: Callable[[Any], Any] = lambda result: result,
    mistakes: Mapping[str, Any] | None = None,
    rtol: float = 1e-4,
    atol: float = 1e-6,
    **values: object,
) -> None:
    """The result of every rank is its twin.

    Args:
        want: one number, tensor or dict for all ranks, or a list with a value for each rank, as in ``same``.
        what: the name of the result in the message; it may use ``{rank}``, ``{world}`` and ``values``.
        of: takes the compared value out of what the scenario returned.
        mistakes: a message for the student → what ``want`` would be with this mistake.
    """
    for rank, result in enumerate(run.results):
        wrong = {message: _of_rank(value, rank) for message, value in (mistakes or {}).items()}
        where = {**values, "rank": rank, "world": run.world}
        same(t, of(result), _of_rank(want, rank), what, wrong, rtol, atol, **where)


def each_rank(t: Trial, run: Run, length: int, what: str) -> Iterator[tuple[int, list[Any]]]:
    """Yield each rank and its result, which is a list or tuple of ``length`` values.

    Args:
        what: the name of the result in the message.
    """
    for rank, result in enumerate(run.results):
        yield rank, t.items(result, length, what)


def _of_rank(value: Any, rank: int) -> Any:
    return value[rank] if isinstance(value, (list, tuple)) else value


def entry(t: Trial, got: object, key: str, what: str) -> float:
    """Return the number under ``key`` of ``got``, which should be a dict."""
    t.that(type(got) is dict, "{what} should be a dict of numbers, not {got}", what=what, got=got)
    assert isinstance(got, dict)
    t.that(key in got, '{what} has no entry "{key}"', what=what, key=key)
    return t.number(got[key], f'{what}["{key}"]')


def fields(message: str, **values: object) -> dict[str, object]:
    """Return the values if ``message`` has fields for them, else none.

    Students read the message of a hidden check only if it holds no values.
    """
    return values if "{" in message else {}
