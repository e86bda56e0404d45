"""One rank: from the fork to its answer. It takes over the caller's surroundings, joins the process group, calls the function, answers.

All that is the caller's *now* applies here: environment, current folder, ``sys.path``, ``sys.argv``, the source of notebook cells.
After its answer a rank keeps its connections open until the caller has heard from all of them, so that no neighbour's collective
breaks because this one was quicker, or failed.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import mmap
import os
import pickle
import random
import socket
import struct
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, NoReturn, TextIO

import torch
import torch.distributed as dist

from dlo_lib.comm.board import Board, Row, State
from dlo_lib.comm.keeper import kept_row
from dlo_lib.comm.trace import Trace, trace_collectives
from dlo_lib.comm.vocabulary import never_waited
from dlo_lib.errors import UserError
from dlo_lib.launch.failure import says_communication_broke
from dlo_lib.launch.frames import below_this_package, remember_sources
from dlo_lib.launch.lifetime import die_with
from dlo_lib.launch.place import BACKENDS, use_loopback
from dlo_lib.launch.server import STACK_SIGNAL
from dlo_lib.launch.values import pack_result, unpack_call

HEADER = struct.Struct("!cQ")  # RETURNED or RAISED, bytes that follow
RETURNED, RAISED = b"V", b"E"
SEED = 0


@dataclass(frozen=True)
class Job:
    """What all ranks of a call have in common. Plain data: it is unpickled before the caller's ``sys.path`` applies."""

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


def run_rank(
    rank: int, server: int, channel_file: int, output: int, black_box: int, job_file: int, listener_file: int, board: int
) -> NoReturn:
    """Be rank ``rank``. All numbers but this and ``server``, the parent's process id, are file descriptors."""
    _take_output(output)  # first, so that whatever goes wrong is seen
    die_with(server)
    os.setpgid(0, 0)
    _open_black_box(black_box)
    channel = socket.socket(fileno=channel_file)
    try:
        job = _read_job(job_file)
        _take_surroundings(job, rank)
        fn, args, kwargs = unpack_call(job.call)
        _fill_main(fn, *args, *kwargs.values())
        listener = socket.socket(fileno=listener_file)
        call = partial(fn, *args, **kwargs)
        if job.explain:
            result = _explained(call, job, listener, Row(Board(job.world_size, board), rank))
        else:
            _join(rank, job, listener)
            result = _traced(call) if job.trace else call()
        kind, answer = RETURNED, pack_result(result)
    except BaseException as error:  # noqa: BLE001  sys.exit and KeyboardInterrupt too: the caller must hear of it
        kind, answer = RAISED, _report(error)
    sys.stdout.flush()
    sys.stderr.flush()
    channel.sendall(HEADER.pack(kind, len(answer)))
    channel.sendall(answer)
    channel.recv(1)  # the others have all they need from us, or the caller is gone
    _end()


def _take_output(pipe: int) -> None:
    for standard in (1, 2):
        os.dup2(pipe, standard)
    os.close(pipe)
    sys.stdout, sys.stderr = map(_line_buffered, (1, 2))


def _line_buffered(file: int) -> TextIO:
    return open(file, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _open_black_box(file: int) -> None:
    faulthandler.enable(file, all_threads=False)
    faulthandler.register(STACK_SIGNAL, file, all_threads=False)


def _read_job(file: int) -> Job:
    with mmap.mmap(file, 0, access=mmap.ACCESS_READ) as job:  # not read(): the ranks share one file position
        os.close(file)
        return pickle.loads(job)


def _take_surroundings(job: Job, rank: int) -> None:
    os.environ.clear()
    os.environ.update(job.environment)
    use_loopback()
    if job.folder is not None:
        os.chdir(job.folder)
    sys.path[:] = job.module_path
    sys.argv[:] = job.arguments
    sys.modules["__main__"] = ModuleType("__main__")
    remember_sources(job.sources)
    gc.enable()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // job.world_size))
    random.seed(SEED)
    torch.manual_seed(SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED)


def _fill_main(fn: Callable[..., Any], *values: Any) -> None:
    """Give ``__main__`` what the call brought from there: ``all_gather_object`` and ``torch.save`` look for a notebook's classes in it."""
    main = vars(sys.modules["__main__"])
    if getattr(fn, "__module__", None) == "__main__":
        main.update(getattr(fn, "__globals__", {}))
    main.update({type(value).__name__: type(value) for value in values if type(value).__module__ == "__main__"})


def _join(rank: int, job: Job, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        DLO_LAUNCHER="run_ranks",
    )
    if job.nccl:
        torch.cuda.set_device(rank)
    if rank == 0:  # the store takes the listening socket over
        store = dist.TCPStore("127.0.0.1", port, job.world_size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    else:
        listener.close()
        store = dist.TCPStore("127.0.0.1", port, job.world_size, is_master=False, wait_for_workers=False)
    dist.init_process_group(BACKENDS["nccl" if job.nccl else "gloo"], store=store, rank=rank, world_size=job.world_size)
    # PyTorch 2.13 calls its own functions by new names (all_gather_single, ...), which the PyTorch of most clusters does not know yet.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated\..* use `torch\.distributed\.\w+_single`", FutureWarning)


def _explained(fn: Callable[[], Any], job: Job, listener: socket.socket, row: Row) -> Any:
    """Join and call ``fn`` with this rank's row kept, from which the caller sees when no progress is possible."""
    with kept_row(row) as keeper:
        try:
            with keeper.joining():
                _join(row.rank, job, listener)
            result = _traced(fn) if job.trace else fn()
        except BaseException:
            keeper.ends(State.RAISED)
            raise
        keeper.ends(State.FINISHED)
    for call in keeper.never_waited():
        print(f"warning: {never_waited(call)}")
    return result


def _traced(fn: Callable[[], Any]) -> tuple[Any, Trace]:
    with trace_collectives() as trace:
        result = fn()
    return result, trace


def _report(error: BaseException) -> bytes:
    error.__traceback__ = below_this_package(error.__traceback__)
    first_line = str(error).split("\n", 1)[0]
    headline = f"called sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"raised {type(error).__name__}: {first_line}"
    text = "".join(traceback.format_exception(error))
    if error.__traceback__ is None:  # not in the caller's code: wrong arguments, a result that cannot be sent
        headline, text = (first_line if isinstance(error, UserError) else headline), ""
    return json.dumps({"headline": headline, "traceback": text, "follows": says_communication_broke(error)}).encode()


def _end() -> NoReturn:
    """As at the end of a script: what was registered runs and files are flushed; but without tearing the interpreter down, for speed."""
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
        atexit._run_exitfuncs()
        sys.stdout.flush()
    finally:
        os._exit(0)
