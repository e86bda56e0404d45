"""Which rank is to blame, in one message that begins with it."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Protocol

from dlo_lib.launch.cells import name_cells
from dlo_lib.launch.rank import Answer


class RankFailure(RuntimeError):
    """A rank raised, died, or was not done in time. The message begins with the rank that caused it."""


class _Rank(Protocol):
    number: int
    answer: Answer | None
    answered: float
    exit_code: int | None


def blame(ranks: Sequence[_Rank]) -> RankFailure:
    """The failure, told from its cause: a death first, then a rank's own error, then one that came out of a communication call."""
    died = [rank for rank in ranks if rank.answer is None and rank.exit_code is not None]
    raised = [rank for rank in ranks if rank.answer is not None and rank.answer.error]
    if died:
        first = died[0]
        text = f"rank {first.number} {_death(first.exit_code or 0)}"
    else:
        own = [rank for rank in raised if rank.answer is not None and not rank.answer.inside_call]
        first = min(own or raised, key=lambda rank: rank.answered)
        assert first.answer is not None
        text = f"rank {first.number} raised {first.answer.summary}\n\n{name_cells(first.answer.error.rstrip())}"
    others = [rank for rank in died + raised if rank is not first]
    for other in others:
        what = _death(other.exit_code or 0) if other.answer is None else f"then raised {other.answer.summary.splitlines()[0]}"
        text += f"\n(rank {other.number} {what})"
    return RankFailure(text)


def too_late(ranks: Sequence[_Rank], timeout: float | None, stacks: dict[int, str]) -> RankFailure:
    """The failure for ranks that were not done in time, with where each was."""
    done = [rank.number for rank in ranks if rank.answer is not None]
    late = ", ".join(map(str, stacks))
    text = f"no answer within {timeout:g} s from rank{'s' if len(stacks) > 1 else ''} {late}"
    text += f" (done: {', '.join(map(str, done))})" if done else ""
    return RankFailure(text + "".join(f"\n\nrank {number} was here:\n{name_cells(stack)}" for number, stack in stacks.items()))


def _death(code: int) -> str:
    if code < 0:
        name = signal.Signals(-code).name
        hint = ": the system may have run out of memory" if name == "SIGKILL" else ""
        return f"was ended by {name}{hint}"
    return f"left with exit code {code} before it was done"
