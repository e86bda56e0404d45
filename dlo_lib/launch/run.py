"""``run_ranks``: call a function on several ranks from a notebook, a script or a test, as if it were a local call.

The caller has the ranks forked by a warm server (``launch.server``), then sits in one loop (``_Watch``): it passes on what they print,
takes their answers and notices how they end. It returns their results, or stops them all and raises what the one to look at has said
(``launch.failure``).

Cost: 2 - 3 s for the first call of a process, then about 0.1 s for 4 ranks beyond the function's own time.
"""

from __future__ import annotations

import json
import os
import pickle
import selectors
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from dlo_lib.comm.detail import Explain
from dlo_lib.comm.endings import MemoryKills, describe_exit
from dlo_lib.comm.trace import Trace
from dlo_lib.comm.watcher import POLL_S, Watcher
from dlo_lib.errors import UserError
from dlo_lib.launch.client import Launch, current_folder
from dlo_lib.launch.failure import Ending, RankFailure, RankState, blame, dead_locked, timed_out
from dlo_lib.launch.frames import cell_sources, name_cells, shown_file
from dlo_lib.launch.output import RankOutput
from dlo_lib.launch.place import gpu_for_each
from dlo_lib.launch.rank import HEADER, RETURNED, Job
from dlo_lib.launch.values import pack_call, unpack_result

Result = TypeVar("Result")

_SETTLE_S = 0.2  # after a rank's own failure: time for the same bug to show on the others
_PATIENCE_S = 1.0  # after a broken collective: time for the cause to show
_LEAVE_S = 2.0  # for what ranks have registered with atexit
_CHUNK_BYTES = 1 << 20


class Results(list[Result]):
    """The results in rank order; with ``trace=True``, ``trace`` holds the communication of all ranks."""

    trace: Trace | None = None


def run_ranks(
    fn: Callable[..., Result],
    world_size: int,
    /,
    *args: Any,
    timeout: float | None = None,
    explain: Explain | None = None,
    trace: bool = False,
    **kwargs: Any,
) -> Results[Result]:
    """Call ``fn(*args, **kwargs)`` on ``world_size`` ranks, with ``torch.distributed`` ready; the results in rank order.

    Each rank is a fresh process with the caller's environment, folder and ``sys.path`` of now; ``dist.get_rank()`` says who it is. The
    backend is gloo, and NCCL for CUDA tensors when there is a GPU for each rank. Random states begin alike on all ranks; each has its
    share of the cores. What ranks print appears as it comes, after ``[rank r]``. Results travel by value, tensors to the CPU.

    Args:
        fn: any function, also one defined in a notebook cell.
        timeout: seconds; None waits for ever.
        explain: how much is said about dead-locks and calls that do not agree; None: what ``$DLO_EXPLAIN`` asks for, else a table.
        trace: record the ranks' communication, in ``.trace`` of the result.

    Raises:
        DeadLock: no progress is possible, or calls that meet do not agree; the message says which rank waits where for whom.
        RankFailure: a rank raised, left or was killed (the message begins with its traceback), or ``timeout`` passed (where each rank was).
            All ranks are stopped first.
        UserError: ``world_size`` below 1, or an argument or a result that cannot be sent to another process.
    """
    if not isinstance(world_size, int) or world_size < 1:
        raise UserError(f"world_size is {world_size!r}: use a whole number of ranks, at least 1")
    explain = Explain.from_environment() if explain is None else explain
    job = Job(
        world_size=world_size,
        nccl=gpu_for_each(world_size),
        environment=dict(os.environ),
        folder=current_folder(),
        module_path=list(sys.path),
        arguments=list(sys.argv),
        sources=cell_sources(),
        explain=explain is not Explain.OFF,
        trace=trace,
        call=pack_call(fn, args, kwargs),
    )
    with Launch(world_size, pickle.dumps(job)) as launch:
        states = _Watch(launch, timeout, explain).run()
    results = [_unpack(state) for state in states]
    if not trace:
        return Results(results)
    traced = Results(result for result, _ in results)
    traced.trace = Trace.merged(part for _, part in results)
    return traced


class _Watch:
    """The caller's side while its ranks run."""

    def __init__(self, launch: Launch, timeout: float | None, explain: Explain) -> None:
        self._launch = launch
        self._watcher = Watcher(launch.board, shown_file) if explain is not Explain.OFF else None
        self._with_stacks = explain is Explain.STACKS
        self._kills = MemoryKills()
        self._table = ""
        self._timeout = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._states = [RankState(rank) for rank in range(len(launch.files))]
        self._answers = [bytearray() for _ in self._states]
        self._outputs = [RankOutput(rank, files.output) for rank, files in enumerate(launch.files)]
        self._gone: set[int] = set()  # ranks whose process has ended
        self._selector = selectors.DefaultSelector()

    def run(self) -> list[RankState]:
        """The states of ranks that have all returned and left.

        Raises:
            RankFailure: see :func:`run_ranks`. No rank lives then.
        """
        try:
            self._listen()
            failure = self._until_decided()
            if failure is None:
                self._launch.let_go()
                self._until_left()
        finally:
            self._launch.stop()
            for output in self._outputs:
                output.finish()
            self._selector.close()
        if failure is not None:
            raise failure
        return self._states

    def _listen(self) -> None:
        self._selector.register(self._launch.control, selectors.EVENT_READ, self._take_exit)
        for rank, files in enumerate(self._launch.files):
            self._selector.register(files.output, selectors.EVENT_READ, partial(self._take_output, rank))
            self._selector.register(files.channel, selectors.EVENT_READ, partial(self._take_answer, rank))

    def _until_decided(self) -> RankFailure | None:
        """Wait until all have returned (None), or it is known what to raise."""
        while any(state.ending is Ending.RUNNING for state in self._states):
            explanation = self._watcher.look() if self._watcher is not None else None
            failed = [state for state in self._states if state.failed]
            if explanation is not None and all(state.follows for state in failed):
                # also when a broken connection followed from it
                return dead_locked(self._states, explanation, self._stacks() if self._with_stacks else ())
            until = [state.at + (_PATIENCE_S if state.follows else _SETTLE_S) for state in failed]
            if self._deadline is not None:
                until.append(self._deadline)
            if not self._wait(min(until, default=None), POLL_S if self._watcher is not None else None):
                break
        if any(state.failed for state in self._states):
            return blame(self._states, self._table)
        if self._timeout is not None and any(state.ending is Ending.RUNNING for state in self._states):
            return timed_out(self._states, self._timeout, self._stacks())
        return None

    def _stacks(self) -> list[str]:
        return [name_cells(stack) for stack in self._launch.stacks()]

    def _until_left(self) -> None:
        until = time.monotonic() + _LEAVE_S
        while len(self._gone) < len(self._states) and self._wait(until):
            pass

    def _wait(self, until: float | None, at_most: float | None = None) -> bool:
        """Deal with what happens next, within ``at_most`` seconds; False once ``until`` has passed."""
        left = None if until is None else until - time.monotonic()
        if left is not None and left <= 0:
            return False
        for key, _ in self._selector.select(min((wait for wait in (left, at_most) if wait is not None), default=None)):
            key.data()
        return True

    def _forget(self, source: int | socket.socket) -> None:
        if source in self._selector.get_map():  # one round of events may bring the news twice
            self._selector.unregister(source)

    def _take_output(self, rank: int) -> None:
        if not self._outputs[rank].pump():
            self._forget(self._launch.files[rank].output)

    def _take_answer(self, rank: int) -> bool:
        """Take what has arrived of a rank's answer; False when nothing had, or it has no more to say."""
        channel, answer, state = self._launch.files[rank].channel, self._answers[rank], self._states[rank]
        try:
            data = channel.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return False
        except ConnectionError:
            data = b""
        if not data:
            self._forget(channel)  # its process has ended: the server will say how
            return False
        answer += data
        if len(answer) < HEADER.size:
            return True
        kind, size = HEADER.unpack_from(answer)
        if len(answer) < HEADER.size + size:
            return True
        del answer[: HEADER.size]
        state.at = time.monotonic()
        if kind == RETURNED:
            state.ending, state.result = Ending.RETURNED, answer
        else:
            report = json.loads(answer)
            state.ending, state.headline, state.follows = Ending.RAISED, report["headline"], report["follows"]
            state.traceback = name_cells(report["traceback"])
        return False

    def _take_exit(self) -> None:
        report = self._launch.next_exit()
        if report is None:
            raise RankFailure("the process that forks the ranks was killed (out of memory?): the next call starts a new one")
        rank, status = report
        self._gone.add(rank)
        state = self._states[rank]
        while state.ending is Ending.RUNNING and self._take_answer(rank):  # it may have answered before it ended
            pass
        if state.ending is Ending.RUNNING:
            state.ending, state.at, state.headline = Ending.DIED, time.monotonic(), describe_exit(status, self._kills)
            if self._watcher is not None:
                self._watcher.died(rank, state.headline)
                self._table = self._table or self._watcher.table()
            if stack := name_cells(self._launch.files[rank].stack()):
                state.traceback = f"It was here (most recent call last):\n{stack}"


def _unpack(state: RankState) -> Any:
    try:
        return unpack_result(state.result)
    except Exception as error:
        kind = type(error).__name__
        raise RankFailure(
            f"the result of rank {state.rank} cannot be read here ({kind}: {error}): return tensors and plain data"
        ) from error
