"""A rank of a session: it joins the process group, and answers requests until the notebook's process ends.

Requests run on the main thread, one after the other. A second thread reads them, so that an interrupt arrives
while a cell runs: it raises ``KeyboardInterrupt`` in a cell that computes, and breaks the connections of a
rank that waits in a call, where no exception of Python arrives.

After a call that broke, the ranks leave their process group and join a new one. Their variables stay.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import queue
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

import cloudpickle
import torch
import torch.distributed as dist

from dlo_lib.comm.deadlock.board import Activity, Board, RankRow
from dlo_lib.comm.deadlock.rank_recorder import RankRecorder, record_row, wait_for_other_ranks
from dlo_lib.comm.tracing.group_lifetime import watched_leave
from dlo_lib.launch.rank import (
    RAISED,
    RETURNED,
    Meeting,
    SessionRank,
    error_report,
    join,
    patience,
    send_message,
)
from dlo_lib.launch.values import pack_result
from dlo_lib.live_ranks.connections import break_connections, holds_group
from dlo_lib.live_ranks.messages import (
    ASSIGN,
    BREAK,
    COMPLETE,
    EVALUATE,
    INTERRUPT,
    JOIN,
    RUN,
    SIGNAL,
    RankRequest,
    receive_request,
)
from dlo_lib.live_ranks.rank_shell import start_shell

PRELOAD = (
    "IPython.core.interactiveshell",
    "IPython.core.completer",
    "dlo_lib.live_ranks.rank",
    # What a shell imports when it starts and in its first cells: once here, not in the memory of each rank.
    "IPython.core.application",
    "IPython.core.completerlib",
    "IPython.core.crashhandler",
    "IPython.core.logger",
    "IPython.core.magics.ast_mod",
    "IPython.core.magics.execution",
    "IPython.core.oinspect",
    "IPython.core.pylabtools",
    "IPython.utils.wildcard",
    "bdb",
)
"""What the server imports before it forks ranks of a session."""


def serve(here: SessionRank) -> None:
    """Run as a rank of a session until the notebook's process closes the channel."""
    LiveRank(here).serve()


class LiveRank:
    """The state of a rank of a session."""

    def __init__(self, here: SessionRank) -> None:
        self._here = here
        self._channel = here.channel
        device = (
            torch.device("cuda", here.rank - here.job.first_rank) if here.job.nccl else torch.device("cpu")
        )
        names = {
            "torch": torch,
            "dist": dist,
            "rank": here.rank,
            "world_size": here.job.world_size,
            "device": device,
        }
        self._shell = start_shell(here.channel, names)
        self._interruptible = False
        self._main = threading.get_ident()
        self._requests: queue.SimpleQueue[RankRequest | None] = queue.SimpleQueue()
        signal.signal(signal.SIGINT, self._on_signal)
        threading.Thread(target=self._read_requests, name="dlo-requests", daemon=True).start()

    def serve(self) -> None:
        """Be a member of one process group after the other."""
        meeting, board = self._here.meeting, self._here.board
        while True:
            request = self._as_member(meeting, board)
            if request is None:
                return
            gc.collect()  # closes the sockets of the old group and its board, which are in cycles
            board, *files = request.files
            host, port = json.loads(request.content)
            meeting = Meeting.of((host, port), *files)

    def _as_member(self, meeting: Meeting, board_file: int) -> RankRequest | None:
        """Join a process group, and answer requests; return the one that asks to join another group."""
        rank, job = self._here.rank, self._here.job
        board = Board(job.world_size, board_file)
        os.close(board_file)  # it stays mapped
        stale = [name for name, value in self._variables() if holds_group(value)]
        with record_row(RankRow(board, rank)) as recorder:
            with recorder.joining():
                join(rank, job, meeting, patience(recorder))
            recorder.ends(Activity.FINISHED)
            send_message(self._channel, RETURNED, json.dumps(stale).encode())
            with watched_leave(partial(wait_for_other_ranks, recorder, board)):
                request = self._answer_requests(recorder)
            recorder.stop_recording()
        if dist.is_initialized():
            dist.destroy_process_group()
        return request

    def _answer_requests(self, recorder: RankRecorder) -> RankRequest | None:
        answers: dict[bytes, Callable[[bytes], bytes]] = {
            RUN: self._run,
            EVALUATE: self._evaluate,
            ASSIGN: self._assign,
            COMPLETE: self._complete,
        }
        while True:
            request = self._requests.get()
            if request is None or request.kind == JOIN:
                return request
            recorder.row.enter(Activity.COMPUTING)
            try:
                with self._interrupts():
                    answer = answers[request.kind](request.content)
            except BaseException as error:  # noqa: BLE001  sys.exit too: the rank stays
                recorder.ends(Activity.RAISED)
                send_message(self._channel, RAISED, error_report(error))
            else:
                recorder.ends(Activity.FINISHED)
                send_message(self._channel, RETURNED, answer)

    def _run(self, content: bytes) -> bytes:
        self._shell.run(pickle.loads(content))
        return b"1" if dist.is_initialized() else b""

    def _evaluate(self, content: bytes) -> bytes:
        return pack_result(eval(content.decode(), self._shell.user_ns))

    def _assign(self, content: bytes) -> bytes:
        self._shell.user_ns.update(cloudpickle.loads(content))
        return b""

    def _complete(self, content: bytes) -> bytes:
        text, cursor = json.loads(content)
        return json.dumps(self._shell.completions(text, cursor)).encode()

    def _variables(self) -> Iterator[tuple[str, object]]:
        hidden = self._shell.user_ns_hidden
        for name, value in list(self._shell.user_ns.items()):
            if not name.startswith("_") and name not in hidden:
                yield name, value

    @contextmanager
    def _interrupts(self) -> Iterator[None]:
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False

    def _on_signal(self, _: int, frame: FrameType | None) -> None:
        # An exception in a callback of weakref is lost; the notebook's process asks again.
        in_callback = frame is not None and frame.f_code.co_filename == weakref.__file__
        if self._interruptible and not in_callback:
            raise KeyboardInterrupt

    def _read_requests(self) -> None:
        while True:
            try:
                request = receive_request(self._channel)
            except OSError:
                request = None
            if request is not None and request.kind == INTERRUPT:
                self._interrupt(request.content)
                continue
            self._requests.put(request)
            if request is None:
                return

    def _interrupt(self, how: bytes) -> None:
        if not self._interruptible:
            return
        if SIGNAL in how:
            signal.pthread_kill(self._main, signal.SIGINT)
        if BREAK in how:
            break_connections()
