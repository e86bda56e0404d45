"""Explained failures and deadlocks under torchrun and srun: a rank's connection to its machine's watcher.

    with explained(here):
        with init_process_group(here):
            ...

The watcher is ``comm.deadlock.node``. The rank that binds the socket's name first starts it. Every rank then
has a thread that sleeps until the watcher asks for its stack or tells it to leave. A rank that fails records
its error in the folder of the job (``dlo_lib.base.rank_failures``).
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from hashlib import blake2s
from pathlib import Path

from dlo_lib.base import rank_failures
from dlo_lib.base.files import state_dir
from dlo_lib.base.interpreter import trusted_python
from dlo_lib.base.rank_failures import FailureReport
from dlo_lib.base.stop import EXIT_STOPPED
from dlo_lib.comm.deadlock import node
from dlo_lib.comm.deadlock.board import Activity, Board, RankRow
from dlo_lib.comm.deadlock.detail import Explain
from dlo_lib.comm.deadlock.rank_recorder import record_row, wait_for_other_ranks
from dlo_lib.comm.deadlock.vocabulary import never_waited
from dlo_lib.comm.tracing.group_lifetime import watched_leave
from dlo_lib.launch.failure import describe_error, is_communication_error
from dlo_lib.launch.frames import stack_now
from dlo_lib.launch.place import Place

_CONNECT_S = 20.0
_CONSEQUENCE_S = 30.0
"""How long an error of the communication is held back. The cause is on another rank: its launcher ends this
rank in that time, or the watcher explains why no progress is possible."""
_BOOT = """
from dlo_lib.comm.deadlock.node import main
main(*map(int, sys.argv[1:6]), *sys.argv[6:8])
"""


@contextmanager
def explained(here: Place, explain: Explain = Explain.TABLE) -> Iterator[None]:
    """Watch this rank for errors, deadlocks and mismatched calls. Enter before it joins the process group.

    An error of this rank is recorded for the state of the job. One that only reports broken communication is
    held back for some seconds, because the error of another rank is its cause.

    When no progress is possible, the stderr of one rank gets the explanation, with a table of the ranks of
    all machines, and every rank ends with status ``comm.deadlock.node.EXIT_STUCK``. The machines exchange
    their tables through files (``comm.deadlock.exchange``) in the folder of the job, or else in
    ``$DLO_HOME``. Where watching is not possible (on systems other than Linux), a line on stderr gives the
    reason and the program runs unwatched. Does nothing within ``run_ranks``, which watches ranks itself.
    """
    if here.launcher == "run_ranks":
        yield
        return
    folder = shared_folder(os.environ, here)
    with contextlib.ExitStack() as stack:
        if explain is not Explain.OFF and here.world_size > 1:
            try:
                connection, board = _connect(here, explain, folder)
            except (OSError, AttributeError) as error:
                print(f"deadlocks are not explained: {error}", file=sys.stderr, flush=True)
            else:
                stack.enter_context(_watched(here, connection, board))
        stack.enter_context(_recorded(here, folder))  # first at the end, so that the watcher finds the record
        yield


@contextmanager
def _watched(here: Place, connection: socket.socket, board: Board) -> Iterator[None]:
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
            if is_communication_error(error):
                recorder.loses_connection()
                _wait_for_the_end()
            recorder.ends(Activity.FINISHED if _is_success(error) else Activity.RAISED)
            raise
        finally:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
    for call in recorder.never_waited():
        print(f"warning: {never_waited(call)}", file=sys.stderr, flush=True)


@contextmanager
def _recorded(here: Place, folder: Path | None) -> Iterator[None]:
    """Record an error of this rank in ``folder``."""
    try:
        yield
    except BaseException as error:
        if folder is not None and not _is_success(error):
            headline, trace = describe_error(error)
            is_consequence = is_communication_error(error)
            rank_failures.record_failure(folder, FailureReport(here.rank, headline, trace, is_consequence))
        raise


def _is_success(error: BaseException) -> bool:
    """Whether a rank ends in order, also if it was asked to stop early."""
    return isinstance(error, SystemExit) and error.code in (None, 0, EXIT_STOPPED)


def _wait_for_the_end() -> None:
    """Wait for the launcher or the watcher to end this process, also if the program handles the signal."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(_CONSEQUENCE_S)


def _is_open(connection: socket.socket) -> bool:
    with contextlib.suppress(BlockingIOError):
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    return True


def _connect(here: Place, explain: Explain, folder: Path | None) -> tuple[socket.socket, Board]:
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
            _start(listener, here, explain, folder)
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


def _start(listener: socket.socket, here: Place, explain: Explain, folder: Path | None) -> None:
    node = int(_machine(os.environ) or 0)
    if folder is not None and rank_failures.VARIABLE not in os.environ:  # no job removes it
        rank_failures.forget_old_runs(folder.parent)
    numbers = (listener.fileno(), here.world_size, here.local_world_size, node, os.getppid())
    subprocess.Popen(
        trusted_python(_BOOT, *map(str, numbers), explain.value, "" if folder is None else str(folder)),
        pass_fds=[listener.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # it outlives the rank that started it
    )


def socket_name(environment: Mapping[str, str], here: Place) -> str:
    """Return the name of a job's socket on a machine: equal for its ranks, different for other jobs."""
    return f"dlo-explain-{os.getuid()}-{_run(environment, here)}-{_machine(environment)}"


def shared_folder(environment: Mapping[str, str], here: Place) -> Path | None:
    """Return the folder that all ranks of this run share: in ``$DLO_RANKS`` within a job, or else in the
    state folder if the ranks are on several machines; None on one machine.
    """
    if within := environment.get(rank_failures.VARIABLE):
        base = Path(within)
    elif here.world_size > here.local_world_size:
        base = state_dir() / "ranks"
    else:
        return None
    return base / _run(environment, here)


def _run(environment: Mapping[str, str], here: Place) -> str:
    """Return a name that is equal for the ranks of one start, and different for other starts and jobs."""
    names = (
        *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
        *("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    )
    text = "-".join([here.launcher, *(environment.get(name, "") for name in names)])
    return blake2s(text.encode(), digest_size=8).hexdigest()


def _machine(environment: Mapping[str, str]) -> str:
    """Return the number of this machine among those of the job; "" if there is only one."""
    return environment.get("GROUP_RANK", "") or environment.get("SLURM_NODEID", "")


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
