"""``run_ranks``: call a function on several ranks from a notebook, a script or a test, like a local function.

A warm server (``launch.server``) forks the ranks. The caller then runs one loop (``_Supervisor``): it
forwards their output, reads their answers and notices how they end. It returns their results, or stops all of
them and raises the error of the rank that failed first (``launch.failure``).

Cost: 2 - 3 s for the first call of a process, then about 0.1 s for 4 ranks in addition to the function.
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

import torch

from dlo_lib.comm.deadlock.board import Activity
from dlo_lib.comm.deadlock.detail import Explain
from dlo_lib.comm.deadlock.exit_status import MemoryKills, describe_exit
from dlo_lib.comm.deadlock.watcher import POLL_S, Watcher
from dlo_lib.comm.tracing.trace import Trace
from dlo_lib.errors import UserError
from dlo_lib.interpreter import current_folder
from dlo_lib.launch.client import Launch
from dlo_lib.launch.failure import Ending, RankFailure, RankState, blame, dead_locked, timed_out
from dlo_lib.launch.frames import cell_sources, display_name, name_cells
from dlo_lib.launch.output import RankOutput
from dlo_lib.launch.place import gpu_for_each
from dlo_lib.launch.rank import HEADER, RETURNED, LaunchSpec
from dlo_lib.launch.values import pack_call, unpack_result
from dlo_lib.torch_version import check_torch

Result = TypeVar("Result")

_SETTLE_S = 0.2  # after a rank's failure: time for the same failure to show on other ranks
_REPORT_S = 5.0  # after an error of a rank: time for its report
_CAUSE_S = 1.0  # after broken communication: time for the cause to show
_LEAVE_S = 2.0  # for exit functions of the ranks
_CHUNK_BYTES = 1 << 20


class Results(list[Result]):
    """The results in rank order. With ``trace=True``, ``trace`` holds the communication of all ranks."""

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
    """Call ``fn(*args, **kwargs)`` on ``world_size`` ranks, with a process group, and return the results.

    Each rank is a new process with the caller's current environment, folder and ``sys.path``;
    ``dist.get_rank()`` returns its number. The backend is gloo, and NCCL for CUDA tensors if there is a GPU
    for each rank. All ranks start with the same random states and share the cores equally. Output of the
    ranks appears at once, prefixed with ``[rank r]``. Results are copied to the caller, tensors to its CPU.

    Args:
        fn: any function, including one defined in a notebook cell.
        world_size: the number of ranks, at least 1.
        timeout: seconds; None waits forever.
        explain: the detail of the explanation of deadlocks and mismatched calls; None reads
            ``$DLO_EXPLAIN``, and uses a table if it is not set.
        trace: record the communication of the ranks in ``.trace`` of the result.

    Returns:
        The results in rank order.

    Raises:
        DeadLock: no progress is possible, or calls that meet do not agree. The message says which rank waits
            in which call for which ranks.
        RankFailure: a rank raised an error, left or was killed (the message starts with its traceback), or
            ``timeout`` passed (the message gives the stack of each rank). All ranks are stopped first.
        UserError: ``world_size`` is below 1, an argument or a result cannot be sent to another process, or
            PyTorch is too old.
    """
    if not isinstance(world_size, int) or world_size < 1:
        raise UserError(f"world_size is {world_size!r}: use a whole number of ranks, at least 1")
    check_torch(torch.__version__)
    explain = Explain.from_environment() if explain is None else explain
    job = LaunchSpec(
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
        states = _Supervisor(launch, timeout, explain).run()
    results = [_unpack(state) for state in states]
    if not trace:
        return Results(results)
    traced = Results(result for result, _ in results)
    traced.trace = Trace.merged(part for _, part in results)
    return traced


class _Supervisor:
    """The caller's side while its ranks run."""

    def __init__(self, launch: Launch, timeout: float | None, explain: Explain) -> None:
        self._launch = launch
        self._watcher = Watcher(launch.board, display_name) if explain is not Explain.OFF else None
        self._with_stacks = explain is Explain.STACKS
        self._kills = MemoryKills()
        self._table = ""
        self._timeout = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._states = [RankState(rank) for rank in range(len(launch.files))]
        self._answers = [bytearray() for _ in self._states]
        self._outputs = [RankOutput(rank, files.output) for rank, files in enumerate(launch.files)]
        self._ended: set[int] = set()  # ranks whose processes have ended
        self._selector = selectors.DefaultSelector()

    def run(self) -> list[RankState]:
        """Wait for all ranks and return their states; all have returned and ended.

        Raises:
            RankFailure: see :func:`run_ranks`. All ranks have ended.
        """
        try:
            self._listen()
            failure = self._wait_for_outcome()
            if failure is None:
                self._launch.release()
                self._wait_for_exits()
        finally:
            self._launch.stop()
            for output in self._outputs:
                output.finish()
            self._selector.close()
        if failure is not None:
            raise failure
        return self._states

    def _listen(self) -> None:
        self._selector.register(self._launch.control, selectors.EVENT_READ, self._read_exit)
        for rank, files in enumerate(self._launch.files):
            self._selector.register(files.output, selectors.EVENT_READ, partial(self._read_output, rank))
            self._selector.register(files.channel, selectors.EVENT_READ, partial(self._read_answer, rank))

    def _wait_for_outcome(self) -> RankFailure | None:
        """Wait until all ranks have returned (None) or the error to raise is known."""
        while any(state.ending is Ending.RUNNING for state in self._states):
            explanation = self._watcher.look() if self._watcher is not None else None
            failed = [state for state in self._states if state.failed]
            if explanation is not None and self._error_is_coming():
                explanation = None
            if explanation is not None and all(state.is_consequence for state in failed):
                # Broken connections are a consequence of the deadlock.
                return dead_locked(self._states, explanation, self._stacks() if self._with_stacks else ())
            until = [state.at + (_CAUSE_S if state.is_consequence else _SETTLE_S) for state in failed]
            if self._deadline is not None:
                until.append(self._deadline)
            if not self._wait(min(until, default=None), POLL_S if self._watcher is not None else None):
                break
        if any(state.failed for state in self._states):
            return blame(self._states, self._table)
        if self._timeout is not None and any(state.ending is Ending.RUNNING for state in self._states):
            return timed_out(self._states, self._timeout, self._stacks())
        return None

    def _error_is_coming(self) -> bool:
        """Whether a rank has raised an error that it has not reported yet. It is the cause, not the others
        that wait for this rank."""
        assert self._watcher is not None
        now = time.monotonic_ns()
        return any(
            view.state is Activity.RAISED
            and self._states[rank].ending is Ending.RUNNING
            and now - view.since < _REPORT_S * 1e9
            for rank, view in self._watcher.views.items()
        )

    def _stacks(self) -> list[str]:
        return [name_cells(stack) for stack in self._launch.stacks()]

    def _wait_for_exits(self) -> None:
        until = time.monotonic() + _LEAVE_S
        while len(self._ended) < len(self._states) and self._wait(until):
            pass

    def _wait(self, until: float | None, at_most: float | None = None) -> bool:
        """Handle the next events, for at most ``at_most`` seconds; return False once ``until`` has passed."""
        left = None if until is None else until - time.monotonic()
        if left is not None and left <= 0:
            return False
        for key, _ in self._selector.select(
            min((wait for wait in (left, at_most) if wait is not None), default=None)
        ):
            key.data()
        return True

    def _forget(self, source: int | socket.socket) -> None:
        if source in self._selector.get_map():  # one round of events may contain a source twice
            self._selector.unregister(source)

    def _read_output(self, rank: int) -> None:
        if not self._outputs[rank].pump():
            self._forget(self._launch.files[rank].output)

    def _read_answer(self, rank: int) -> bool:
        """Read what has arrived of a rank's answer.

        Return False if nothing has, or the answer is complete.
        """
        channel, answer, state = self._launch.files[rank].channel, self._answers[rank], self._states[rank]
        try:
            data = channel.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return False
        except ConnectionError:
            data = b""
        if not data:
            self._forget(channel)  # its process has ended: the server reports how
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
            state.ending, state.headline, state.is_consequence = (
                Ending.RAISED,
                report["headline"],
                report["is_consequence"],
            )
            state.traceback = name_cells(report["traceback"])
        return False

    def _read_exit(self) -> None:
        report = self._launch.next_exit()
        if report is None:
            raise RankFailure(
                "the process that forks the ranks was killed (out of memory?): call again to start a new one"
            )
        rank, status = report
        self._ended.add(rank)
        state = self._states[rank]
        # It may have answered before its end.
        while state.ending is Ending.RUNNING and self._read_answer(rank):
            pass
        if state.ending is Ending.RUNNING:
            state.ending, state.at, state.headline = (
                Ending.DIED,
                time.monotonic(),
                describe_exit(status, self._kills),
            )
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
            f"the result of rank {state.rank} cannot be read here ({kind}: {error}): "
            "return tensors and plain data"
        ) from error
