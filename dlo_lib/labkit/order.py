"""The order of what happened in a run, as words, compared with the order that is right."""

from __future__ import annotations

from collections.abc import Sequence

NOTHING = "nothing"


def first_difference(got: Sequence[str], want: Sequence[str]) -> tuple[str, str, str]:
    """Return the step before the first difference, the step found there, and the step that is right;
    "nothing" where there is none."""
    pairs = enumerate(zip(got, want))
    place = next((index for index, (mine, right) in pairs if mine != right), min(len(got), len(want)))
    return step(got, place - 1), step(got, place), step(want, place)


def step(steps: Sequence[str], place: int) -> str:
    """Return the step at ``place``, or "nothing" where there is none."""
    return steps[place] if 0 <= place < len(steps) else NOTHING


def comes_before(steps: Sequence[str], first: str, second: str) -> bool:
    """Return whether both steps are there, and ``first`` comes before ``second``."""
    return first in steps and second in steps and steps.index(first) < steps.index(second)
