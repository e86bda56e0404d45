"""``run_ranks``: call a function on several ranks from a notebook, a script or a test, and get the results in rank order."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from dlo_lib.errors import UserError
from dlo_lib.launch.cells import cell_sources
from dlo_lib.launch.failure import RankFailure, blame, too_late
from dlo_lib.launch.output import LinePump
from dlo_lib.launch.rank import Answer, Work
from dlo_lib.launch.server import STATUS, ForkServer
from dlo_lib.launch.wire import receive, send

GRACE = 0.3
"""Seconds that the others have to say what happened to them after a first failure."""
_server = ForkServer()


@dataclass
class Rank:
    """A running rank, as the parent sees it."""

    number: int
    pid: int
    channel: socket.socket
    output: int
    status: int
    answer: Answer | None = None
    answered: float = 0.0
    exit_code: int | None = None
    tail: list[str] = field(default_factory=list)


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on ``world_size`` ranks with ``torch.distributed`` ready; return the results in rank order.

    Every call has fresh processes, so nothing is left over from the call before. What ranks print appears at once, with ``[rank r]`` before
    each line. The backend is gloo; it is NCCL when there are at least as many GPUs as ranks.

    Args:
        fn: may be defined in a notebook cell; ``dist.get_rank()`` tells which rank it runs on.
        timeout: seconds for the whole call; none by default.

    Raises:
        RankFailure: a rank raised, died, or was not done in time. The message starts with the rank that caused it and its traceback.
        UserError: fewer than one rank.
    """
    if world_size < 1:
        raise UserError(f"world_size is {world_size}: use at least 1")
    try:
        function = cloudpickle.dumps((fn, args, kwargs))
    except Exception as error:
        raise RankFailure(f"the function or its arguments cannot be sent to the ranks: {type(error).__name__}: {error}") from error
    with tempfile.TemporaryDirectory(prefix="dlo-ranks-") as folder:
        ranks: list[Rank] = []
        try:
            ranks.extend(_start(number, world_size, function, f"{folder}/store") for number in range(world_size))
            _watch(ranks, None if timeout is None else time.monotonic() + timeout, timeout)
            return [cloudpickle.loads(rank.answer.result) for rank in ranks if rank.answer is not None]
        finally:
            _stop(ranks)


def backend_for(world_size: int) -> str:
    """NCCL wants a GPU per rank."""
    import torch

    return "nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= world_size else "gloo"


def _start(number: int, world_size: int, function: bytes, store: str) -> Rank:
    ours, theirs = socket.socketpair()
    output, their_output = os.pipe()
    status, their_status = os.pipe()
    try:
        pid = _server.fork(theirs.fileno(), their_output, their_status)
    finally:
        theirs.close()
        os.close(their_output)
        os.close(their_status)
    rank = Rank(number, pid, ours, output, status)
    environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ} if sys.platform == "linux" else dict(os.environ)
    threads = max(1, (os.cpu_count() or 1) // world_size)
    work = Work(
        rank=number,
        world_size=world_size,
        backend=backend_for(world_size),
        store=store,
        threads=threads,
        function=function,
        cells=cell_sources(),
        environment=environment,
        folder=os.getcwd(),
        path=list(sys.path),
    )
    with contextlib.suppress(OSError):  # it died already: its exit status will say so
        send(ours, work)
    return rank


def _watch(ranks: list[Rank], deadline: float | None, timeout: float | None) -> None:
    """Print what ranks print and wait until all have answered, or until one has failed and the others had a moment to speak."""
    pump = LinePump({rank.output: f"[rank {rank.number}] " for rank in ranks})
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.channel, selectors.EVENT_READ, (rank, _read_answer))
            selector.register(rank.status, selectors.EVENT_READ, (rank, _read_status))
            selector.register(rank.output, selectors.EVENT_READ, (rank, None))
        failed_at = None
        while any(rank.answer is None and rank.exit_code is None for rank in ranks):
            now = time.monotonic()
            ends = [end for end in (deadline, failed_at and failed_at + GRACE) if end is not None]
            if ends and now >= min(ends):
                break
            for key, _ in selector.select(min(ends) - now if ends else None):
                rank, read = key.data
                if read is None:
                    if not pump.read(key.fd):
                        selector.unregister(key.fileobj)
                elif not read(rank):
                    selector.unregister(key.fileobj)
            if failed_at is None and any(_failed(rank) for rank in ranks):
                failed_at = time.monotonic()
    if any(_failed(rank) for rank in ranks):
        pump.drain()
        raise blame(ranks)
    if any(rank.answer is None for rank in ranks):
        late = [rank for rank in ranks if rank.answer is None]
        pump.drain()
        pump.silence(rank.output for rank in late)
        for rank in late:
            _signal(rank, signal.SIGUSR2)  # it writes where it is
        time.sleep(0.2)
        pump.drain()
        raise too_late(ranks, timeout, {rank.number: pump.tail(rank.output) for rank in late})
    pump.drain()


def _failed(rank: Rank) -> bool:
    return bool(rank.answer and rank.answer.error) or (rank.answer is None and rank.exit_code is not None)


def _read_answer(rank: Rank) -> bool:
    try:
        rank.answer = receive(rank.channel)
        rank.answered = time.monotonic()
    except (EOFError, OSError):
        pass
    return False


def _read_status(rank: Rank) -> bool:
    data = os.read(rank.status, STATUS.size)
    rank.exit_code = STATUS.unpack(data)[0] if len(data) == STATUS.size else -signal.SIGKILL
    return False


def _signal(rank: Rank, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(rank.pid, number)


def _stop(ranks: list[Rank]) -> None:
    """Dismiss the ranks that answered, end the others with all they started, and wait until none is left."""
    everybody_answered = all(rank.answer is not None for rank in ranks)
    for rank in ranks:
        if everybody_answered:
            with contextlib.suppress(OSError):
                send(rank.channel, "go")
        else:
            _kill(rank)
    deadline = time.monotonic() + 2
    for rank in ranks:
        if rank.exit_code is None:
            ended = select.select([rank.status], [], [], max(0.0, deadline - time.monotonic()))[0]
            if not ended:
                _kill(rank)
                select.select([rank.status], [], [])
        _kill(rank)  # what the rank itself started, in its process group
        rank.channel.close()
        os.close(rank.output)
        os.close(rank.status)


def _kill(rank: Rank) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(rank.pid, signal.SIGKILL)
