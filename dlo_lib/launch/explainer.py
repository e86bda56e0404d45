"""Explained dead-locks under torchrun and srun: a rank's connection to the watcher of its machine.

    with explained(here):
        with init_process_group(here):
            ...

The watcher is ``comm.deadlock.node``. The rank that binds the socket's name first starts it. Every rank then
has a thread that sleeps until the watcher asks for its stack or tells it to leave.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from dlo_lib.comm.deadlock import node
from dlo_lib.comm.deadlock.board import Activity, Board, RankRow
from dlo_lib.comm.deadlock.detail import Explain
from dlo_lib.comm.deadlock.rank_recorder import record_row, wait_for_other_ranks
from dlo_lib.comm.deadlock.vocabulary import never_waited
from dlo_lib.comm.tracing.group_lifetime import watched_leave
from dlo_lib.interpreter import trusted_python
from dlo_lib.launch.frames import stack_now
from dlo_lib.launch.place import Place

_CONNECT_S = 20.0
_BOOT = """
from dlo_lib.comm.deadlock.node import main
main(*map(int, sys.argv[1:5]), sys.argv[5])
"""


@contextmanager
def explained(here: Place, explain: Explain = Explain.TABLE) -> Iterator[None]:
    """Watch this rank for dead-locks and mismatched calls. Enter before it joins the process group.

    When no progress is possible, the stderr of one rank gets the explanation, and every rank of this machine
    ends with status ``comm.deadlock.node.EXIT_STUCK``. Ranks on other machines are assumed to be on their way
    (``comm.deadlock.node``). Where watching is not possible (on systems other than Linux), a line on stderr
    gives the reason and the program runs unwatched. Does nothing within ``run_ranks``, which watches ranks
    itself, and on a single rank.
    """
    if explain is Explain.OFF or here.world_size == 1 or here.launcher == "run_ranks":
        yield
        return
    try:
        connection, board = _connect(here, explain)
    except (OSError, AttributeError) as error:
        print(f"dead-locks are not explained: {error}", file=sys.stderr, flush=True)
        yield
        return
    threading.Thread(
        target=_serve_requests, args=(connection, threading.get_ident()), name="dlo-explain", daemon=True
    ).start()
    with (
        record_row(RankRow(board, here.rank)) as recorder,
        watched_leave(partial(wait_for_other_ranks, recorder, board, partial(_is_open, connection))),
    ):
        try:
            yield
            recorder.ends(Activity.FINISHED)
        except BaseException as error:
            recorder.ends(
                Activity.FINISHED if isinstance(error, SystemExit) and not error.code else Activity.RAISED
            )
            raise
        finally:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
    for call in recorder.never_waited():
        print(f"warning: {never_waited(call)}", file=sys.stderr, flush=True)


def _is_open(connection: socket.socket) -> bool:
    with contextlib.suppress(BlockingIOError):
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    return True


def _connect(here: Place, explain: Explain) -> tuple[socket.socket, Board]:
    """Connect to the watcher of this machine, or start it; return the connection and the board.

    Raises:
        OSError: the watcher cannot be reached.
        AttributeError: this system has no such sockets.
    """
    name = "\0" + socket_name(os.environ, here)
    until = time.monotonic() + _CONNECT_S
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(name)
            listener.listen(here.world_size)
            _start(listener, here, explain)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        while True:
            try:
                connection.connect(name)
                break
            except ConnectionRefusedError:  # bound, but not listening yet
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)
        owner = node.CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, node.CREDENTIALS.size)
        )[1]
        if owner != os.getuid():
            raise PermissionError("another user has taken the name of this job's socket")
        connection.settimeout(_CONNECT_S)
        connection.send(str(here.rank).encode())
        _, files, _, _ = socket.recv_fds(connection, node.LONGEST, 1)
        if not files:
            raise ConnectionError("the process that watches this machine's ranks did not answer")
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection, Board(here.world_size, files[0])


def _start(listener: socket.socket, here: Place, explain: Explain) -> None:
    numbers = (listener.fileno(), here.world_size, here.local_world_size, os.getppid())
    subprocess.Popen(
        trusted_python(_BOOT, *map(str, numbers), explain.value),
        pass_fds=[listener.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # it outlives the rank that started it
    )


def socket_name(environment: os._Environ[str] | dict[str, str], here: Place) -> str:
    """Return the name of a job's socket on a machine: equal for its ranks, different for other jobs."""
    run = "-".join(
        environment.get(name, "")
        for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    )
    job = "-".join(environment.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    machine = environment.get("GROUP_RANK", "") or environment.get("SLURM_NODEID", "")
    return f"dlo-explain-{os.getuid()}-{here.launcher}-{run}-{job}-{machine}"


def _serve_requests(connection: socket.socket, main: int) -> None:
    while True:
        try:
            request = connection.recv(node.LONGEST)
        except OSError:
            return
        if request == node.STACKS:
            with contextlib.suppress(OSError):
                connection.send(stack_now(main).encode()[-node.LONGEST // 2 :])
        elif request == node.LEAVE:
            sys.stdout.flush()
            os._exit(node.EXIT_STUCK)
        else:
            return
