"""A rank that keeps 4 MiB where no figure of its processes shows it: the judge counts them, or the kernel
refuses.

Each attack defines ``hide(data)``, which keeps the data outside the ordinary memory of the process, and
``show()``, which gets them back. What is hidden and can be shown again must be in ``held_bytes()``.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator

import pytest

from dlo_lib.grading.sandbox.cgroups import find_hierarchy
from dlo_lib.grading.sandbox.hidden_memory import COPIED_BEFORE, COPIED_MEANWHILE
from dlo_lib.grading.sandbox.host import Zygote
from dlo_lib.grading.sandbox.remote_worker import Worker, deadline_after

SIZE = 4 << 20
NOISE = 1 << 20
HARNESS = """
import array, ctypes, errno, gc, hashlib, mmap, os, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
kept = []
def pieces(data, size):
    return [data[place:place + size] for place in range(0, len(data), size)]
def keep(seed):
    import random
    data = random.Random(seed).randbytes(SIZE)
    try:
        hide(data)
    except (OSError, MemoryError, ValueError) as error:
        kept.clear()
        del data
        gc.collect()
        return f"refused: {error}"
    del data
    gc.collect()
    return "hidden"
def back():
    return hashlib.sha256(show()).hexdigest()
""".replace("SIZE", str(SIZE))

ATTACKS = {
    "pipes": """
def hide(data):
    for piece in pieces(data, 60_000):
        kept.append(os.pipe())
        os.write(kept[-1][1], piece)
def show():
    return b"".join(os.read(end, 1 << 16) for end, _ in kept)
""",
    "large pipes": """
def hide(data):
    import fcntl
    for piece in pieces(data, 1 << 20):
        kept.append(os.pipe())
        fcntl.fcntl(kept[-1][1], 1031, 1 << 20)
        os.write(kept[-1][1], piece)
def show():
    return b"".join(os.read(end, 1 << 20) for end, _ in kept)
""",
    "named pipes": """
def hide(data):
    for number, piece in enumerate(pieces(data, 60_000)):
        os.mkfifo(f"pipe{number}")
        kept.append(os.open(f"pipe{number}", os.O_RDWR))
        os.write(kept[-1], piece)
        os.unlink(f"pipe{number}")
def show():
    return b"".join(os.read(end, 1 << 16) for end in kept)
""",
    "pages in pipes": """
def hide(data):
    for piece in pieces(data, 16 * 4096):
        memory = mmap.mmap(-1, len(piece), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.write(piece)
        kept.append(os.pipe())
        vector = struct.pack("QQ", ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(piece))
        if libc.vmsplice(kept[-1][1], vector, 1, 8) != len(piece):
            raise OSError(ctypes.get_errno(), "vmsplice")
def show():
    return b"".join(os.read(end, 1 << 20) for end, _ in kept)
""",
    "socket pairs": """
def hide(data):
    for piece in pieces(data, 100_000):
        kept.append(socket.socketpair())
        kept[-1][0].setblocking(False)
        if kept[-1][0].send(piece) != len(piece):
            raise OSError("full")
def show():
    return b"".join(theirs.recv(1 << 20, socket.MSG_WAITALL | socket.MSG_DONTWAIT) for _, theirs in kept)
""",
    "connections that wait to be accepted": """
def hide(data):
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen(4096)
    kept.append(server)
    for piece in pieces(data, 32_768):
        client = socket.create_connection(server.getsockname())
        client.sendall(piece)
        client.close()
def show():
    got = b""
    for _ in range(SIZE // 32_768):
        line = kept[0].accept()[0]
        while piece := line.recv(1 << 20):
            got += piece
    return got
""".replace("SIZE", str(SIZE)),
    "pipes in a message": """
def hide(data):
    here, there = socket.socketpair()
    kept.append(there)
    kept.append(here)
    for piece in pieces(data, 60_000):
        out, into = os.pipe()
        os.write(into, piece)
        socket.send_fds(here, [b"x"], [out])
        os.close(into)
        os.close(out)
def show():
    got = b""
    while len(got) < SIZE:
        got += os.read(socket.recv_fds(kept[0], 1, 1)[1][0], 1 << 16)
    return got
""".replace("SIZE", str(SIZE)),
    "a memory file": """
def hide(data):
    kept.append(os.memfd_create("x"))
    os.write(kept[0], data)
def show():
    return os.pread(kept[0], 1 << 26, 0)
""",
    "a file in /tmp/work": """
def hide(data):
    open("/tmp/work/kept", "wb").write(data)
def show():
    return open("/tmp/work/kept", "rb").read()
""",
    "a deleted file in /dev/shm": """
def hide(data):
    file = os.open("/dev/shm/kept", os.O_RDWR | os.O_CREAT)
    os.write(file, data)
    os.unlink("/dev/shm/kept")
    kept.append(mmap.mmap(file, len(data)))
    os.close(file)
    libc.madvise(ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(kept[0]))),
                 ctypes.c_size_t(len(data)), 4)
def show():
    return bytes(kept[0])
""",
    "names of files": """
def hide(data):
    text = data.hex()
    for folder in ("/tmp/work", "/dev/shm"):
        kept.append(folder)
    for number, piece in enumerate(pieces(text, 248)):
        os.mkdir(f"{kept[number % 2]}/{number:07}{piece}")
def show():
    names = sorted(os.listdir(kept[0]) + os.listdir(kept[1]))
    return bytes.fromhex("".join(name[7:] for name in names))
""",
    "a child": """
def hide(data):
    down, up = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.close(up[0])
        os.read(down[0], 1)
        for piece in pieces(data, 1 << 16):
            os.write(up[1], piece)
        os._exit(0)
    os.close(up[1])
    kept.extend([down[1], up[0]])
def show():
    os.write(kept[0], b"x")
    got = b""
    while piece := os.read(kept[1], 1 << 16):
        got += piece
    return got
""",
    "System V shared memory": """
def hide(data):
    number = libc.shmget(0, len(data), 0o1600)
    if number < 0:
        raise OSError(ctypes.get_errno(), "shmget")
    libc.shmat.restype = ctypes.c_void_p
    ctypes.memmove(place := libc.shmat(number, None, 0), data, len(data))
    libc.shmdt(ctypes.c_void_p(place))
    kept.append(number)
def show():
    return ctypes.string_at(libc.shmat(kept[0], None, 0), SIZE)
""".replace("SIZE", str(SIZE)),
    "System V messages": """
def hide(data):
    for piece in pieces(data, 8192):
        if (number := libc.msgget(0, 0o1600)) < 0:
            raise OSError(ctypes.get_errno(), "msgget")
        libc.msgsnd(number, struct.pack("q", 1) + piece, len(piece), 0)
        kept.append(number)
def show():
    text = ctypes.create_string_buffer(8200)
    return b"".join(text.raw[8:] for number in kept if libc.msgrcv(number, text, 8192, 0, 0) == 8192)
""",
    "POSIX messages": """
def hide(data):
    for number, piece in enumerate(pieces(data, 8192)):
        queue = libc.syscall(240, b"kept%d" % number, 0o102, 0o600, struct.pack("8q", 0, 1, 8192, *[0] * 5))
        if queue < 0:
            raise OSError(ctypes.get_errno(), "mq_open")
        libc.syscall(242, queue, piece, len(piece), 0, None)
        kept.append(queue)
def show():
    text = ctypes.create_string_buffer(8192)
    return b"".join(text.raw for queue in kept if libc.syscall(243, queue, text, 8192, None, None) == 8192)
""",
    "keys": """
def hide(data):
    for number, piece in enumerate(pieces(data, 16_384)):
        key = libc.syscall(248, b"user", b"kept%d" % number, piece, len(piece), -2)
        if key < 0:
            raise OSError(ctypes.get_errno(), "add_key")
        kept.append(key)
def show():
    text = ctypes.create_string_buffer(16_384)
    return b"".join(text.raw for key in kept if libc.syscall(250, 11, key, text, 16_384, 0) == 16_384)
""",
    "io_uring": """
def hide(data):
    if libc.syscall(425, 8, ctypes.create_string_buffer(120)) < 0:
        raise OSError(ctypes.get_errno(), "io_uring_setup")
    kept.append(data)
def show():
    return kept[0]
""",
    "the environment": """
def hide(data):
    for number, piece in enumerate(pieces(data.hex(), 1 << 16)):
        libc.setenv(b"KEPT%d" % number, piece.encode(), 1)
def show():
    libc.getenv.restype = ctypes.c_char_p
    return bytes.fromhex("".join(libc.getenv(b"KEPT%d" % number).decode() for number in range(SIZE >> 15)))
""".replace("SIZE", str(SIZE)),
    "shared memory without a file": """
def hide(data):
    kept.append(mmap.mmap(-1, len(data)))
    kept[0].write(data)
    place = ctypes.addressof(ctypes.c_char.from_buffer(kept[0]))
    libc.madvise(ctypes.c_void_p(place), ctypes.c_size_t(len(data)), 4)  # the pages stay allocated
def show():
    return bytes(kept[0])
""",
    "a shared mapping of /dev/zero": """
def hide(data):
    file = os.open("/dev/zero", os.O_RDWR)
    kept.append(mmap.mmap(file, len(data)))
    kept[0].write(data)
    place = ctypes.addressof(ctypes.c_char.from_buffer(kept[0]))
    libc.madvise(ctypes.c_void_p(place), ctypes.c_size_t(len(data)), 4)
def show():
    return bytes(kept[0])
""",
    "huge pages": """
def hide(data):
    kept.append(mmap.mmap(-1, len(data), 0x40000 | mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    kept[0].write(data)
def show():
    return bytes(kept[0])
""",
    "terminals": """
def hide(data):
    import tty
    for piece in pieces(data, 40_000):
        ours, theirs = os.openpty()
        tty.setraw(theirs)
        os.set_blocking(ours, False)
        os.set_blocking(theirs, False)
        kept.append((ours, theirs))
        if os.write(theirs, piece) != len(piece):
            raise OSError("full")
def show():
    got = []
    for ours, _ in kept:
        while True:
            try:
                got.append(os.read(ours, 1 << 16))
            except BlockingIOError:
                break
    return b"".join(got)
""",
    "filters of system calls": """
def hide(data):
    for piece in pieces(data, 1 << 14):
        code = b"".join(struct.pack("HBBI", 0, 0, 0, word) for word in array.array("I", piece))
        code += struct.pack("HBBI", 6, 0, 0, 0x7FFF0000)
        text = ctypes.create_string_buffer(code, len(code))
        if libc.prctl(22, 2, struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(text))):
            raise OSError(ctypes.get_errno(), "prctl")
    kept.append(data)
def show():
    return kept[0]
""",
    "queued signals": """
def hide(data):
    import signal
    signal.pthread_sigmask(signal.SIG_BLOCK, [40])
    for piece in pieces(data, 64):
        text = ctypes.create_string_buffer(struct.pack("iiiiii", 40, 0, -1, 0, 1, 0) + piece[:24], 128)
        if libc.syscall(129, os.getpid(), 40, text):
            raise OSError(ctypes.get_errno(), "rt_sigqueueinfo")
    kept.append(data)
def show():
    return kept[0]
""",
}
MOVES = """
def keep(seed):
    import random
    data = [random.Random(seed).randbytes(SIZE)]
    def move():
        copy, pipes = data.pop(), [os.pipe() for _ in range(SIZE >> 16)]
        while True:
            for place, (_, into) in enumerate(pipes):
                os.write(into, copy[place << 16:place + 1 << 16])
            copy = None
            time.sleep(0.0003)
            copy = b"".join(os.read(out, 1 << 16) for out, _ in pipes)
            time.sleep(0.0003)
    threading.Thread(target=move, daemon=True).start()
    time.sleep(0.1)
""".replace("SIZE", str(SIZE))
WRITES = """
def overwrite(count):
    for line in open("/proc/self/maps"):
        place, access, _, _, number, *_ = line.split(maxsplit=5)
        first, last = (int(end, 16) for end in place.split("-"))
        if access == "rw-p" and number == "0" and last - first >= 1 << 20:
            for page in range(first, min(last, first + 4096 * count), 4096):
                ctypes.memmove(page, page, 1)  # a private copy of the page
                count -= 1
    return count
"""


@pytest.fixture(params=["with the host's control groups", "without control groups"])
def rank(
    request: pytest.FixtureRequest, sandbox: Zygote, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Worker]:
    """A rank that has run no cell yet."""
    if request.param.startswith("without"):
        monkeypatch.setattr("dlo_lib.grading.sandbox.host.find_hierarchy", lambda: None)
    elif find_hierarchy() is None:
        pytest.skip("NOT TESTED HERE: control groups (none that this user may make)")
    worker = sandbox.ranks(1)[0]
    yield worker
    worker.close()


def call(worker: Worker, name: str, *arguments: object) -> object:
    answer = worker.ask(deadline_after(60), do="call", name=name, args=list(arguments), kwargs={})
    assert "value" in answer, answer
    return answer["value"]


def load(worker: Worker, *cells: str) -> None:
    request = [{"id": str(number), "own": True, "source": text} for number, text in enumerate(cells)]
    answer = worker.ask(deadline_after(60), do="load", cells=request)
    assert [report["fault"] for report in answer["value"]] == [None] * len(cells)


@pytest.mark.skipif(
    os.uname().machine != "x86_64", reason="NOT TESTED HERE: numbers of x86-64's system calls"
)
@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_what_is_hidden_and_can_be_shown_again_is_counted(rank: Worker, attack: str) -> None:
    load(rank, HARNESS, attack)
    before = rank.held_bytes()
    said = str(call(rank, "keep", 7))
    grown = rank.held_bytes() - before
    if said == "hidden":
        assert call(rank, "back") == hashlib.sha256(random.Random(7).randbytes(SIZE)).hexdigest()
        assert grown > SIZE - NOISE
    else:
        assert said.startswith("refused"), said


def test_inherited_memory_that_is_overwritten_is_counted(rank: Worker) -> None:
    """A tensor in place of inherited data does not change the resident memory."""
    load(rank, HARNESS, WRITES)
    rank.expect_marks()
    before = rank.held_bytes()
    assert call(rank, "overwrite", 24 << 8) == 0
    assert rank.held_bytes() - before > (24 << 20) - COPIED_BEFORE - COPIED_MEANWHILE - NOISE


def test_a_thread_that_moves_data_meanwhile_hides_nothing(rank: Worker) -> None:
    load(rank, HARNESS)
    before = rank.held_bytes()
    load(rank, MOVES)
    call(rank, "keep", 7)
    assert min(rank.held_bytes() for _ in range(30)) - before > SIZE - NOISE
