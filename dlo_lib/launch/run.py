"""``run_ranks``: call a function on several ranks from a notebook, a script or a test, like a local function.

A warm server (``launch.server``) forks the ranks. The caller then runs one loop (``launch.supervisor``): it
forwards their output, reads their answers and notices how they end. It returns their results, or stops all of
them and raises the error of the rank that failed first (``launch.failure``).

Cost: 2 - 3 s for the first call of a process, then about 0.1 s for 4 ranks in addition to the function.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from dlo_lib.base.errors import UserError
from dlo_lib.base.interpreter import current_folder
from dlo_lib.base.torch_version import check_torch
from dlo_lib.comm.deadlock.detail import Explain
from dlo_lib.comm.deadlock.watcher import Watcher
from dlo_lib.comm.tracing.trace import Trace
from dlo_lib.launch.client import Launch
from dlo_lib.launch.failure import RankFailure, RankState
from dlo_lib.launch.frames import cell_sources, display_name
from dlo_lib.launch.output import RankOutput
from dlo_lib.launch.place import gpu_for_each
from dlo_lib.launch.rank import LaunchSpec
from dlo_lib.launch.supervisor import Supervisor
from dlo_lib.launch.values import pack_call, unpack_result

Result = TypeVar("Result")

_LEAVE_S = 2.0  # for exit functions of the ranks


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
    explain = Explain.from_environment() if explain is None else explain
    job = launch_spec(
        world_size, pack_call(fn, args, kwargs), explain=explain is not Explain.OFF, trace=trace
    )
    with Launch(world_size, pickle.dumps(job)) as launch:
        states = _supervise(launch, timeout, explain)
    results = [_unpack(state) for state in states]
    if not trace:
        return Results(results)
    traced = Results(result for result, _ in results)
    traced.trace = Trace.merged(part for _, part in results)
    return traced


def launch_spec(
    world_size: int,
    call: bytes,
    explain: bool,
    trace: bool = False,
    session: bool = False,
    nccl: bool | None = None,
) -> LaunchSpec:
    """Return what the ranks need to run ``call`` with the current state of this process.

    Args:
        nccl: each rank has a GPU, and NCCL connects them; None: if this machine has a GPU for each.

    Raises:
        UserError: ``world_size`` is below 1, or PyTorch is too old.
    """
    if not isinstance(world_size, int) or world_size < 1:
        raise UserError(f"world_size is {world_size!r}: use a whole number of ranks, at least 1")
    check_torch(torch.__version__)
    return LaunchSpec(
        world_size=world_size,
        nccl=gpu_for_each(world_size) if nccl is None else nccl,
        environment=dict(os.environ),
        folder=current_folder(),
        module_path=list(sys.path),
        arguments=list(sys.argv),
        sources=cell_sources(),
        explain=explain,
        trace=trace,
        call=call,
        session=session,
    )


def _supervise(launch: Launch, timeout: float | None, explain: Explain) -> list[RankState]:
    """Wait for all ranks and return their states; all have returned and ended.

    Raises:
        RankFailure: see :func:`run_ranks`. All ranks have ended.
    """
    supervisor = Supervisor(
        launch,
        Watcher(launch.board, display_name) if explain is not Explain.OFF else None,
        [RankOutput(rank, files.output) for rank, files in enumerate(launch.files)],
        timeout,
        with_stacks=explain is Explain.STACKS,
    )
    try:
        supervisor.listen()
        failure = supervisor.wait_for_outcome()
        if failure is None:
            launch.release()
            until = time.monotonic() + _LEAVE_S
            while len(supervisor.ended) < len(launch.files) and supervisor.wait(until):
                pass
    finally:
        launch.stop()
        supervisor.close()
    if failure is not None:
        raise failure
    return supervisor.states


def _unpack(state: RankState) -> Any:
    try:
        return unpack_result(state.result)
    except Exception as error:
        kind = type(error).__name__
        raise RankFailure(
            f"the result of rank {state.rank} cannot be read here ({kind}: {error}): "
            "return tensors and plain data"
        ) from error
