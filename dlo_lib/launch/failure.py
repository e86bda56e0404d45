"""What became of each rank, and the sentence that names the one to look at.

One failing rank takes the others with it: their collectives break, or wait for ever. So the errors that arrive are ordered:
    1. what a rank did by itself: an exception of its own, ``sys.exit``, the end of its process (a signal, ``os._exit``)
    2. an exception that says that communication broke: nearly always a neighbour's end, seen from here
and in each class the earliest is named. A rank that raised keeps its connections open until it is stopped: it breaks no collective.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass


class RankFailure(RuntimeError):
    """A rank failed, or ``timeout`` passed. The message begins with the rank to look at and its own traceback.

    ``rank`` is that rank, or None after a time-out.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in a notebook: the rank's traceback, not the one that leads through this library."""
        return f"RankFailure: {self}".splitlines()


class DeadLock(RankFailure):
    """No progress was possible: the message says which rank waits in which call for whom, and what to try."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


class Ending(enum.Enum):
    RUNNING = enum.auto()
    RETURNED = enum.auto()
    RAISED = enum.auto()
    DIED = enum.auto()


@dataclass
class RankState:
    """What the parent knows of one rank."""

    rank: int
    ending: Ending = Ending.RUNNING
    at: float = 0.0
    """``time.monotonic()`` when it ended."""
    result: bytes | bytearray = b""
    headline: str = ""
    """``raised ValueError: bad batch``, ``was killed by SIGSEGV``, ..."""
    traceback: str = ""
    follows: bool = False
    """Its error says that communication broke: look elsewhere for the cause."""

    @property
    def failed(self) -> bool:
        return self.ending in (Ending.RAISED, Ending.DIED)


_BROKEN_COMMUNICATION = re.compile(
    r"gloo|nccl|tcpstore|socket|connection (was )?(closed|reset|refused|aborted)|broken pipe|timed out waiting|Dist(Network|Store)Error",
    re.IGNORECASE,
)


def says_communication_broke(error: BaseException) -> bool:
    """Whether ``error``, or one that it was raised from, is torch's word for a lost neighbour.

    gloo raises a bare RuntimeError in whatever call noticed first (a collective, ``wait``, ``backward``): there is only its text to go by.
    """
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, RuntimeError | ConnectionError) and _BROKEN_COMMUNICATION.search(f"{type(link).__name__}: {link}"):
            return True
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return False


def blame(states: Sequence[RankState], table: str = "") -> RankFailure:
    """The failure to raise when at least one of ``states`` failed: see the order above. ``table`` says what the ranks did when one died."""
    failed = sorted((state for state in states if state.failed), key=lambda state: (state.follows, state.at))
    cause = failed[0]
    same = sorted(state.rank for state in failed if state.headline == cause.headline)
    if len(same) > 1:  # one bug, met by several ranks: the lowest speaks for all
        cause = next(state for state in failed if state.rank == same[0])
    lines = [f"rank {cause.rank} {cause.headline}"]
    if cause.traceback:
        lines += ["", cause.traceback.rstrip(), ""]
    if len(same) > 1:
        lines.append(f"{ranks_in_words(same)} failed in the same way.")
    others = [state for state in failed if state.rank not in {*same, cause.rank}]
    lines += [f"rank {state.rank} {state.headline}" for state in others if not state.follows]
    if lost := [state.rank for state in others if state.follows]:
        lines.append(f"{ranks_in_words(sorted(lost))} lost the connection in consequence.")
    if stopped := [state.rank for state in states if state.ending is Ending.RUNNING]:
        lines.append(f"{ranks_in_words(stopped)} had not finished and {'was' if len(stopped) == 1 else 'were'} stopped.")
    if table and cause.ending is Ending.DIED:
        lines += ["", table]
    return RankFailure("\n".join(lines).rstrip(), cause.rank)


def timed_out(states: Sequence[RankState], seconds: float, stacks: Sequence[str]) -> RankFailure:
    """The failure to raise after ``timeout``: which ranks had finished, and where each of the others was."""
    late = _running(states)
    done = [state.rank for state in states if state.ending is Ending.RETURNED]
    lines = [f"timeout: {ranks_in_words(late)} had not finished after {seconds:g} s" + (f"; {ranks_in_words(done)} had" if done else "")]
    return RankFailure("\n".join([*lines, *_stacks(states, stacks)]))


def dead_locked(states: Sequence[RankState], explanation: str, stacks: Sequence[str] = ()) -> DeadLock:
    """The failure to raise when no progress is possible; with each rank's stack below the explanation, where there are ``stacks``."""
    return DeadLock("\n".join([explanation, *(_stacks(states, stacks) if stacks else [])]))


def _stacks(states: Sequence[RankState], stacks: Sequence[str]) -> list[str]:
    lines = []
    for rank in _running(states):
        lines += ["", f"rank {rank} was here:", stacks[rank].rstrip() or "  (not in Python code that could be asked)"]
    return lines


def _running(states: Sequence[RankState]) -> list[int]:
    return [state.rank for state in states if state.ending is Ending.RUNNING]


def ranks_in_words(ranks: Sequence[int]) -> str:
    """
    >>> ranks_in_words([2]), ranks_in_words([0, 1, 3])
    ('rank 2', 'ranks 0, 1 and 3')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
