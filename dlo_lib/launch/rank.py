"""One rank: it applies the caller's state, joins the process group, calls the function, and answers.

The caller's state at the time of the call applies: environment, current folder, ``sys.path``, ``sys.argv``
and the source of notebook cells. After its answer a rank keeps its connections open until the caller has the
answers of all ranks, so that it does not break a collective of a slower rank.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import json
import mmap
import os
import pickle
import random
import signal
import socket
import struct
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import islice
from types import ModuleType
from typing import Any, NoReturn, TextIO

import torch
import torch.distributed as dist

from dlo_lib.base.cores import usable_cores
from dlo_lib.base.lifetime import die_with
from dlo_lib.base.torch_compat import divide_averages_of_gloo, repair_pipelining
from dlo_lib.base.worker_start import start_workers_by_fork
from dlo_lib.comm.deadlock.board import Activity, Board, RankRow
from dlo_lib.comm.deadlock.rank_recorder import RankRecorder, record_row, wait_for_other_ranks
from dlo_lib.comm.deadlock.vocabulary import never_waited
from dlo_lib.comm.tracing.group_lifetime import watched_leave
from dlo_lib.comm.tracing.listeners import drop_prepared_tap, prepare_tap
from dlo_lib.comm.tracing.recorder import trace_collectives
from dlo_lib.comm.tracing.tap import TapUnavailable
from dlo_lib.comm.tracing.trace import Trace
from dlo_lib.launch.failure import STACK_SIGNAL, describe_error, is_communication_error, lost_a_worker
from dlo_lib.launch.frames import register_sources
from dlo_lib.launch.meeting import LOOPBACK, Meeting
from dlo_lib.launch.place import BACKENDS, use_loopback
from dlo_lib.launch.values import pack_result, unpack_call

HEADER = struct.Struct("!cQ")  # RETURNED or RAISED, number of bytes that follow
RETURNED, RAISED = b"V", b"E"
SEED = 0
UNEXPLAINED_S = 120
"""The longest wait of a call for other ranks, in seconds, where deadlocks should be explained and cannot."""

_WORKER_S = 3.0  # after a broken connection to a worker process: time for its end to show
WARM_PACKAGES = frozenset({"torch", "dlo_lib", "numpy", "sympy", "networkx", "safetensors", "_pytest"})
"""What ranks have imported of these the server imports too: they start no thread and touch no GPU while they
are imported. They then read the environment of the server's start."""


@dataclass(frozen=True)
class LaunchSpec:
    """What all ranks of a call share. Plain data, because it is unpickled before ``sys.path`` is set."""

    world_size: int
    nccl: bool
    environment: dict[str, str]
    folder: str | None
    module_path: list[str]
    arguments: list[str]
    sources: dict[str, tuple[str, ...]]
    explain: bool
    trace: bool
    call: bytes
    session: bool = False
    """The function of ``call`` receives a :class:`SessionRank`, answers requests of the caller until it
    leaves, and joins the process group itself."""
    store: tuple[str, int] | None = None
    """Host and port of the store that rank 0 serves, for ranks on several machines."""
    first_rank: int = 0
    """The first rank of this machine."""
    local_world_size: int | None = None
    """The number of ranks of this machine; None: all."""

    @property
    def ranks_here(self) -> int:
        """The number of ranks of this machine."""
        return self.world_size if self.local_world_size is None else self.local_world_size


@dataclass(frozen=True)
class SessionRank:
    """A rank of a session, with its connection to the caller."""

    rank: int
    job: LaunchSpec
    channel: socket.socket
    meeting: Meeting
    board: int
    """The file descriptor of the board."""


def run_rank(
    rank: int,
    server: int,
    say_imports: socket.socket,
    channel_file: int,
    output: int,
    stack_file: int,
    job_file: int,
    board: int,
    *meeting_files: int,
) -> NoReturn:
    """Run as rank ``rank``. ``server`` is the parent's process id; the other numbers are file descriptors,
    ``meeting_files`` those of :meth:`Meeting.of`.

    What this rank has imported is sent to ``say_imports`` at its end.
    """
    at_fork = len(sys.modules)
    _redirect_output(output)  # first, so that all errors are visible
    die_with(server)
    os.setpgid(0, 0)
    _write_stacks_to(stack_file)
    channel = socket.socket(fileno=channel_file)
    try:
        job = _read_job(job_file)
        _apply_caller_state(job, rank)
        fn, args, kwargs = unpack_call(job.call, vars(sys.modules["__main__"]))
        _populate_main(*args, *kwargs.values())
        meeting = Meeting.of(job.store, *meeting_files)
        call = partial(fn, *args, **kwargs)
        if job.session:
            fn(SessionRank(rank, job, channel, meeting, board), *args, **kwargs)
            _end()
        if job.explain:
            result = _explained(call, job, meeting, Board(job.world_size, board), rank)
        else:
            join(rank, job, meeting)
            result = _traced(call) if job.trace else call()
        kind, answer = RETURNED, pack_result(result)
    except BaseException as error:  # noqa: BLE001  sys.exit and KeyboardInterrupt too, because the caller needs an answer
        _ignore_ends_of_workers()
        kind, answer = RAISED, error_report(error)
    sys.stdout.flush()
    sys.stderr.flush()
    send_message(channel, kind, answer)
    if names := _imported_since(at_fork):
        with contextlib.suppress(OSError):  # full: the next rank says it again
            say_imports.send(json.dumps(names).encode())
    channel.recv(1)  # all ranks have answered, or the caller has ended
    _end()


def send_message(channel: socket.socket, kind: bytes, message: bytes) -> None:
    """Send a message to the caller."""
    channel.sendall(HEADER.pack(kind, len(message)))
    channel.sendall(message)


def _redirect_output(pipe: int) -> None:
    for standard in (1, 2):
        os.dup2(pipe, standard)
    os.close(pipe)
    sys.stdout, sys.stderr = map(_line_buffered, (1, 2))


def _line_buffered(file: int) -> TextIO:
    return open(file, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _write_stacks_to(file: int) -> None:
    faulthandler.enable(file, all_threads=False)
    faulthandler.register(STACK_SIGNAL, file, all_threads=False)


def _read_job(file: int) -> LaunchSpec:
    # Not read(), because the ranks share one file position.
    with mmap.mmap(file, 0, access=mmap.ACCESS_READ) as job:
        os.close(file)
        return pickle.loads(job)


def _apply_caller_state(job: LaunchSpec, rank: int) -> None:
    os.environ.clear()
    os.environ.update(job.environment)
    if job.store is None or job.store[0] == LOOPBACK:
        use_loopback()
    if job.folder is not None:
        os.chdir(job.folder)
    sys.path[:] = job.module_path
    sys.argv[:] = job.arguments
    sys.modules["__main__"] = ModuleType("__main__")
    register_sources(job.sources)
    start_workers_by_fork()
    gc.enable()
    torch.set_num_threads(max(1, usable_cores() // job.ranks_here))
    random.seed(SEED)
    torch.manual_seed(SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED)


def _populate_main(*values: Any) -> None:
    """Put the classes of the call's values into ``__main__``, where ``torch.save`` and others look for them.

    What its functions use is there (``unpack_call``).
    """
    main = vars(sys.modules["__main__"])
    main.update(
        {type(value).__name__: type(value) for value in values if type(value).__module__ == "__main__"}
    )


def patience(recorder: RankRecorder) -> timedelta | None:
    """Return how long a call of this rank may wait for other ranks; None is torch's default.

    A deadlock that is not explained must end: a caller without ``timeout`` would wait for it forever.
    """
    if not recorder.unavailable:
        return None
    print(
        f"a call that waits for another rank for {UNEXPLAINED_S} s fails; DLO_EXPLAIN=off lifts this limit",
        flush=True,
    )
    return timedelta(seconds=UNEXPLAINED_S)


def join(rank: int, job: LaunchSpec, meeting: Meeting, timeout: timedelta | None = None) -> None:
    """Join the process group, whose calls wait for at most ``timeout``; None is torch's default."""
    drop_prepared_tap()  # without a listener
    local_rank = rank - job.first_rank
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.ranks_here),
        MASTER_ADDR=meeting.host,
        MASTER_PORT=str(meeting.port),
        DLO_LAUNCHER="run_ranks",
    )
    if job.nccl:
        torch.cuda.set_device(
            local_rank
        )  # and not CUDA_VISIBLE_DEVICES: code that counts on LOCAL_RANK works
    store = meeting.join(rank, job.world_size)
    dist.init_process_group(
        BACKENDS["nccl" if job.nccl else "gloo"],
        store=store,
        rank=rank,
        world_size=job.world_size,
        timeout=timeout,
    )
    divide_averages_of_gloo()
    repair_pipelining()
    # PyTorch 2.13 gives its functions new names (all_gather_single, ...), which earlier releases do not have.
    warnings.filterwarnings(
        "ignore",
        r"`torch\.distributed\.\w+` is deprecated\..* use `torch\.distributed\.\w+_single`",
        FutureWarning,
    )


def _explained(fn: Callable[[], Any], job: LaunchSpec, meeting: Meeting, board: Board, rank: int) -> Any:
    """Join and call ``fn`` while recording this rank's row, from which the caller explains deadlocks."""
    row = RankRow(board, rank)
    with record_row(row) as recorder:
        try:
            with recorder.joining():
                join(row.rank, job, meeting, patience(recorder))
            with watched_leave(partial(wait_for_other_ranks, recorder, board)):
                result = _traced(fn) if job.trace else fn()
        except BaseException:
            recorder.ends(Activity.RAISED)
            raise
        recorder.ends(Activity.FINISHED)
    for call in recorder.never_waited():
        print(f"warning: {never_waited(call)}")
    return result


def _traced(fn: Callable[[], Any]) -> tuple[Any, Trace]:
    with trace_collectives() as trace:
        result = fn()
    return result, trace


def _ignore_ends_of_workers() -> None:
    """Remove the handler of torch's ``DataLoader``, which raises an error in any code that runs when a worker
    process is killed, so also in the report of this error."""
    while True:
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return
        except RuntimeError:  # of the handler
            continue


def _end_of_a_worker() -> str:
    """Return torch's message on the worker process of a ``DataLoader`` that has ended."""
    loaders = sys.modules.get("torch.utils.data._utils.signal_handling")
    until = time.monotonic() + _WORKER_S
    while loaders is not None and time.monotonic() < until:
        try:
            loaders._error_if_any_worker_fails()
        except RuntimeError as death:
            return str(death).strip()
        time.sleep(0.01)
    return "a process at the other end of a multiprocessing connection has ended: a DataLoader worker?"


def error_report(error: BaseException) -> bytes:
    """Return the message for an error of this rank."""
    is_consequence = is_communication_error(error)
    if lost_a_worker(error):
        error = RuntimeError(_end_of_a_worker()).with_traceback(error.__traceback__)
    headline, text = describe_error(error)
    return json.dumps({"headline": headline, "traceback": text, "is_consequence": is_consequence}).encode()


def _imported_since(before: int) -> list[str]:
    """The modules of ``WARM_PACKAGES`` that this process has imported from files since it had ``before``
    modules.

    It does not look at the others: each of them lies in a page of memory that the rank would copy.
    """
    return [
        name
        for name, module in sorted(islice(reversed(sys.modules.items()), max(0, len(sys.modules) - before)))
        if name.partition(".")[0] in WARM_PACKAGES
        and getattr(getattr(module, "__spec__", None), "has_location", False)
    ]


def warm_up() -> None:
    """Do once, in the process that forks the ranks, what each rank does first."""
    with contextlib.suppress(TapUnavailable):  # each rank tries again, and prints the reason
        prepare_tap()
    if not torch.backends.mps.is_built():  # there it starts the GPU, which a forked process cannot use
        torch.manual_seed(SEED)  # reads the sources of its callers


def _end() -> NoReturn:
    """End as a script does: run exit functions, flush files; do not tear down the interpreter, for speed."""
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
        atexit._run_exitfuncs()
        sys.stdout.flush()
    finally:
        os._exit(0)
