"""The outcome of each rank, and the error that names the rank which failed first.

One failing rank makes the others fail: their collectives break, or wait forever. Therefore errors are
ordered:

    1. failures of the rank itself: an exception, ``sys.exit``, the end of its process (a signal,
       ``os._exit``)
    2. exceptions that report broken communication: nearly always the consequence of another rank's failure

Within each class the earliest is named. A rank that raised an exception keeps its connections open until it
is stopped, so it breaks no collective.
"""

from __future__ import annotations

import enum
import re
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dlo_lib.base.errors import UserError
from dlo_lib.launch.frames import strip_library_frames

STACK_SIGNAL = signal.SIGUSR2  # makes a rank write its Python stack; training scripts use SIGUSR1


class RankFailure(RuntimeError):
    """A rank failed, or ``timeout`` passed. The message starts with the first failure and its traceback.

    ``rank`` is that rank, or None after a time-out.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank

    def _render_traceback_(self) -> list[str]:
        """Show the rank's traceback in a notebook of IPython, instead of the one through this library."""
        return f"RankFailure: {self}".splitlines()


class DeadLock(RankFailure):
    """No progress was possible. The message says which rank waits in which call for which ranks."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


class Ending(enum.Enum):
    """How a rank ended."""

    RUNNING = enum.auto()
    RETURNED = enum.auto()
    RAISED = enum.auto()
    DIED = enum.auto()


@dataclass
class RankState:
    """What the caller knows about one rank."""

    rank: int
    ending: Ending = Ending.RUNNING
    at: float = 0.0
    """Time at which it ended, in ``time.monotonic()``."""
    result: bytes | bytearray = b""
    headline: str = ""
    """``raised ValueError: bad batch``, ``was killed by SIGSEGV``, ..."""
    traceback: str = ""
    is_consequence: bool = False
    """Its error reports broken communication, so another rank is the cause."""

    @property
    def failed(self) -> bool:
        """Whether the rank raised an error or died."""
        return self.ending in (Ending.RAISED, Ending.DIED)


_FEWER_GPUS = (
    "This machine has fewer GPUs than ranks, so the ranks compute on the CPU, but PyTorch uses the GPUs by "
    'default. Give a mesh: fully_shard(model, mesh=init_device_mesh("cpu", (world_size,))). Or hide the GPUs '
    "with CUDA_VISIBLE_DEVICES='', set before Python starts."
)


_BROKEN_COMMUNICATION = re.compile(
    r"gloo|nccl|tcpstore|socket|connection (was )?(closed|reset|refused|aborted)|broken pipe|"
    r"timed out waiting|Dist(Network|Store)Error",
    re.IGNORECASE,
)


def describe_error(error: BaseException) -> tuple[str, str]:
    """Return an error of a rank in a few words, and its traceback, which starts in the caller's code.

    >>> describe_error(SystemExit(3))
    ('called sys.exit(3)', '')
    """
    error.__traceback__ = strip_library_frames(error.__traceback__)
    first_line = str(error.msg if isinstance(error, SyntaxError) else error).split("\n", 1)[0]
    headline = (
        f"called sys.exit({error.code!r})"
        if isinstance(error, SystemExit)
        else f"raised {type(error).__name__}: {first_line}"
    )
    # Not raised in the caller's code: wrong arguments, a result that cannot be sent.
    if error.__traceback__ is None and not isinstance(error, SyntaxError):
        return (first_line if isinstance(error, UserError) else headline), ""
    return headline, "".join(traceback.format_exception(error))


def reports_broken_communication(text: str) -> bool:
    """Whether the text of an error reports a lost connection to another rank.

    >>> reports_broken_communication("RuntimeError: Connection closed by peer")
    True
    """
    return _BROKEN_COMMUNICATION.search(text) is not None


def is_communication_error(error: BaseException) -> bool:
    """Whether ``error``, or an error that it was raised from, is torch's report of a lost connection.

    gloo raises a bare RuntimeError in the call that notices first (a collective, ``wait``, ``backward``), so
    only its text identifies it. A lost connection to a worker process of a ``DataLoader`` is none.
    """
    link: BaseException | None = error
    while link is not None and not lost_a_worker(link):
        if isinstance(link, RuntimeError | ConnectionError) and reports_broken_communication(
            f"{type(link).__name__}: {link}"
        ):
            return True
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return False


def lost_a_worker(error: BaseException) -> bool:
    """Whether ``error`` is the report of ``multiprocessing`` that the process at the other end has ended."""
    if not isinstance(error, ConnectionError | EOFError) or error.__traceback__ is None:
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return Path(frame.f_code.co_filename).parent.name == "multiprocessing"


def blame(states: Sequence[RankState], table: str = "") -> RankFailure:
    """Return the error to raise when at least one of ``states`` failed, in the order above.

    ``table`` is a table of what the ranks did when one died.
    """
    failed = sorted(
        (state for state in states if state.failed), key=lambda state: (state.is_consequence, state.at)
    )
    cause = failed[0]
    same = sorted(state.rank for state in failed if state.headline == cause.headline)
    if len(same) > 1:  # several ranks fail in the same way: show the lowest rank
        cause = next(state for state in failed if state.rank == same[0])
    lines = [f"rank {cause.rank} {cause.headline}"]
    if cause.traceback:
        lines += ["", cause.traceback.rstrip(), ""]
    if "invalid device ordinal" in cause.headline:
        lines += [_FEWER_GPUS, ""]
    if len(same) > 1:
        lines.append(f"{ranks_in_words(same)} failed in the same way.")
    others = [state for state in failed if state.rank not in {*same, cause.rank}]
    lines += [f"rank {state.rank} {state.headline}" for state in others if not state.is_consequence]
    if lost := [state.rank for state in others if state.is_consequence]:
        lines.append(f"{ranks_in_words(sorted(lost))} lost the connection as a consequence.")
    if stopped := [state.rank for state in states if state.ending is Ending.RUNNING]:
        lines.append(
            f"{ranks_in_words(stopped)} had not finished and {'was' if len(stopped) == 1 else 'were'} "
            "stopped."
        )
    if table and cause.ending is Ending.DIED:
        lines += ["", table]
    return RankFailure("\n".join(lines).rstrip(), cause.rank)


def timed_out(states: Sequence[RankState], seconds: float, stacks: Sequence[str]) -> RankFailure:
    """Return the error to raise after ``timeout``: which ranks had finished, and the stacks of the others."""
    late = _running(states)
    done = [state.rank for state in states if state.ending is Ending.RETURNED]
    lines = [
        f"timeout: {ranks_in_words(late)} had not finished after {seconds:g} s"
        + (f"; {ranks_in_words(done)} had" if done else "")
    ]
    return RankFailure("\n".join([*lines, *_stacks(states, stacks)]))


def dead_locked(states: Sequence[RankState], explanation: str, stacks: Sequence[str] = ()) -> DeadLock:
    """Return the error to raise when no progress is possible, with the stack of each rank if given."""
    return DeadLock("\n".join([explanation, *(_stacks(states, stacks) if stacks else [])]))


def _stacks(states: Sequence[RankState], stacks: Sequence[str]) -> list[str]:
    lines = []
    for rank in _running(states):
        lines += [
            "",
            f"rank {rank} was here:",
            stacks[rank].rstrip() or "  (not in Python code, so it has no stack)",
        ]
    return lines


def _running(states: Sequence[RankState]) -> list[int]:
    return [state.rank for state in states if state.ending is Ending.RUNNING]


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ranks in words.
    >>> ranks_in_words([2]), ranks_in_words([0, 1, 3])
    ('rank 2', 'ranks 0, 1 and 3')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
