"""A rank's own side: takes its work from the channel, runs it with ``torch.distributed`` ready, answers, and waits to be dismissed."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import random
import signal
import socket
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from dlo_lib.launch.cells import lend
from dlo_lib.launch.wire import receive, send


@dataclass(frozen=True)
class Work:
    """What a rank is given. ``function`` is the pickled (fn, args, kwargs)."""

    rank: int
    world_size: int
    backend: str
    store: str
    threads: int
    function: bytes
    cells: dict[str, list[str]]
    environment: dict[str, str]
    folder: str
    path: list[str]


@dataclass(frozen=True)
class Answer:
    """What a rank says at its end. ``inside_call``: the exception came out of a communication call, so a neighbour may be its cause."""

    result: bytes = b""
    error: str = ""
    summary: str = ""
    inside_call: bool = False


def run_rank(channel: int, output: int, board: int | None) -> NoReturn:
    """The whole life of the process. Does not return."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), line_buffering=True, write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), line_buffering=True, write_through=True)
    faulthandler.register(signal.SIGUSR2, all_threads=False)
    with socket.socket(fileno=channel) as line:
        work: Work = receive(line)
        answer = _do(work)
        with contextlib.suppress(OSError):
            send(line, answer)
            receive(line)  # stay in the group until every rank is heard: leaving would break a neighbour's call
    _leave()


def _do(work: Work) -> Answer:
    import cloudpickle
    import torch
    import torch.distributed as dist

    os.environ.clear()
    os.environ.update(work.environment)
    here = {"RANK": work.rank, "LOCAL_RANK": work.rank, "WORLD_SIZE": work.world_size, "LOCAL_WORLD_SIZE": work.world_size}
    os.environ.update({name: str(number) for name, number in here.items()}, DLO_LAUNCHER="run_ranks")
    sys.path[:] = work.path
    try:
        os.chdir(work.folder)
        torch.set_num_threads(work.threads)
        random.seed(work.rank)
        if work.backend == "nccl":
            torch.cuda.set_device(work.rank)
        lend(work.cells)
        dist.init_process_group(work.backend, init_method=f"file://{work.store}", rank=work.rank, world_size=work.world_size)
        function, arguments, keywords = cloudpickle.loads(work.function)
        result = function(*arguments, **keywords)
        try:
            return Answer(result=cloudpickle.dumps(result))
        except Exception as error:  # noqa: BLE001  whatever pickling raises is the person's to know
            text = f"the result of rank {work.rank} cannot be sent back: {type(error).__name__}: {error}"
            return Answer(error=text, summary=text)
    except BaseException as error:  # noqa: BLE001  also SystemExit and KeyboardInterrupt end a rank
        return Answer(error=_own_traceback(error), summary=f"{type(error).__name__}: {error}", inside_call=_inside_call(error))


def _own_traceback(error: BaseException) -> str:
    """The traceback from the person's own function on."""
    frames = traceback.extract_tb(error.__traceback__)
    own = traceback.TracebackException.from_exception(error)
    ours = str(Path(__file__).parent)
    own.stack = traceback.StackSummary.from_list([frame for frame in frames if not frame.filename.startswith(ours)])
    return "".join(own.format())


def _inside_call(error: BaseException) -> bool:
    """Whether it was raised by the backend: a neighbour that left shows as a broken connection here."""
    if not isinstance(error, RuntimeError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and ("torch/distributed" in frames[-1].filename or "autograd" in frames[-1].filename)


def _leave() -> NoReturn:
    import torch.distributed as dist

    if dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
