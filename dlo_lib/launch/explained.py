"""Dead-locks explained under torchrun and srun: a rank's side of the process that watches its machine (``comm.node``).

    with explained(here):
        with init_process_group(here):
            ...

The first rank of a machine that comes starts the watching process; which one that is, is decided by who can bind the socket's name. Every
rank then has a thread that sleeps until it is told to show its stack or to leave.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import dlo_lib
from dlo_lib.comm import node
from dlo_lib.comm.board import Board, Row, RowView, State
from dlo_lib.comm.detail import Explain
from dlo_lib.comm.joining import watched_leave
from dlo_lib.comm.keeper import RowKeeper, kept_row
from dlo_lib.comm.vocabulary import never_waited
from dlo_lib.launch.frames import stack_now
from dlo_lib.launch.place import Place

_CONNECT_S = 20.0
_LEAVE_POLL_S = 0.01
_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[6])
from dlo_lib.comm.node import main
main(*map(int, sys.argv[1:5]), sys.argv[5])
"""


@contextmanager
def explained(here: Place, explain: Explain = Explain.TABLE) -> Iterator[None]:
    """Watch this rank for dead-locks and for calls that do not agree, from before it joins the process group.

    When no progress is possible, one rank's stderr gets the explanation, and every rank of this machine ends with status
    ``comm.node.EXIT_STUCK``. Ranks on other machines are taken to be on their way (``comm.node``). Where that cannot be (another system
    than Linux) a printed line says so, and nothing else changes. Within ``run_ranks``, which watches by itself, and on one rank alone
    nothing happens.
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
    threading.Thread(target=_obey, args=(connection, threading.get_ident()), name="dlo-explain", daemon=True).start()
    with kept_row(Row(board, here.rank)) as keeper, watched_leave(partial(_leave_together, keeper, board, connection)):
        try:
            yield
            keeper.ends(State.FINISHED)
        except BaseException as error:
            keeper.ends(State.FINISHED if isinstance(error, SystemExit) and not error.code else State.RAISED)
            raise
        finally:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
    for call in keeper.never_waited():
        print(f"warning: {never_waited(call)}", file=sys.stderr, flush=True)


def _leave_together(keeper: RowKeeper, board: Board, connection: socket.socket) -> None:
    """Keep the connections of this rank open until every rank of the machine leaves too.

    Else those that still wait for it would fail with a broken connection before anybody could say why. An error does not wait.
    """
    if sys.exc_info()[0] is not None:
        return
    keeper.row.enter(State.FINISHED)
    rows = [RowView(board, rank) for rank in range(board.world_size)]
    while any(row.look() or row.state not in (State.STARTING, State.FINISHED, State.RAISED) for row in rows) and _is_open(connection):
        time.sleep(_LEAVE_POLL_S)
    keeper.row.enter(State.COMPUTING)


def _is_open(connection: socket.socket) -> bool:
    with contextlib.suppress(BlockingIOError):
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    return True


def _connect(here: Place, explain: Explain) -> tuple[socket.socket, Board]:
    """A connection to this machine's watching process, which is started if there is none, and the board.

    Raises:
        OSError: there is no way.
        AttributeError: this system has no such sockets.
    """
    name = "\0" + meeting_name(os.environ, here)
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
            except ConnectionRefusedError:  # bound, and not listening yet
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)
        owner = node.CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, node.CREDENTIALS.size))[1]
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
    path = [str(Path(dlo_lib.__file__).parents[1]), *(entry for entry in sys.path if entry)]
    numbers = (listener.fileno(), here.world_size, here.local_world_size, os.getppid())
    subprocess.Popen(
        [sys.executable, "-P", "-c", _BOOT, *map(str, numbers), explain.value, json.dumps(path)],
        pass_fds=[listener.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # it outlives the rank that has started it, if others are left
    )


def meeting_name(environment: os._Environ[str] | dict[str, str], here: Place) -> str:
    """What the ranks of one job on one machine call the socket where they meet: the same for all of them, and for no other job."""
    run = "-".join(
        environment.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    )
    job = "-".join(environment.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    machine = environment.get("GROUP_RANK", "") or environment.get("SLURM_NODEID", "")
    return f"dlo-explain-{os.getuid()}-{here.launcher}-{run}-{job}-{machine}"


def _obey(connection: socket.socket, main: int) -> None:
    while True:
        try:
            told = connection.recv(node.LONGEST)
        except OSError:
            return
        if told == node.STACKS:
            with contextlib.suppress(OSError):
                connection.send(stack_now(main).encode()[-node.LONGEST // 2 :])
        elif told == node.LEAVE:
            sys.stdout.flush()
            os._exit(node.EXIT_STUCK)
        else:
            return
