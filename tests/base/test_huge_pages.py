"""Collapsing memory into huge pages changes neither its content nor its size."""

import mmap
import subprocess
import sys
import textwrap

import pytest

from dlo_lib.base.huge_pages import HUGE, MADV_COLLAPSE
from dlo_lib.grading.sandbox.host import Zygote
from dlo_lib.grading.sandbox.isolation import find_isolation
from dlo_lib.grading.sandbox.remote_worker import deadline_after

PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def in_a_process_of_its_own(program: str) -> str:
    """Return the output of a separate process, because other tests measure the memory of this one."""
    begin = "import mmap, os\nfrom dlo_lib.base.huge_pages import HUGE, collapse\n"
    flags = "PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS\n"
    done = subprocess.run(
        [sys.executable, "-c", begin + flags + textwrap.dedent(program)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def allowed() -> bool:
    with mmap.mmap(-1, 2 * HUGE, flags=PRIVATE) as memory:
        memory.write(b"x" * 2 * HUGE)
        try:
            memory.madvise(MADV_COLLAPSE)
        except OSError:
            return False
    return True


def test_contents_stay_and_pages_are_huge():
    if not allowed():
        pytest.skip(
            "NOT TESTED HERE: this kernel gathers no huge pages on request (it is older than 6.1, or set so)"
        )
    size = 8 * HUGE
    said = in_a_process_of_its_own(f"""
        def in_huge_pages():
            with open("/proc/self/smaps_rollup") as file:
                return next(int(line.split()[1]) << 10 for line in file if line.startswith("AnonHugePages"))

        memory, noise, before = mmap.mmap(-1, {size}, flags=PRIVATE), os.urandom({size}), in_huge_pages()
        memory.write(noise)
        steps = sum(1 for _ in collapse())
        print(steps, in_huge_pages() - before, memory[:] == noise)
    """)
    steps, gathered, same = said.split()
    assert int(steps) >= size // HUGE - 1
    assert int(gathered) >= size - 2 * HUGE
    assert same == "True"


def test_a_child_that_writes_changes_only_its_copy():
    said = in_a_process_of_its_own("""
        memory = mmap.mmap(-1, 2 * HUGE, flags=PRIVATE)
        memory.write(b"p" * 2 * HUGE)
        for more in collapse():
            assert more
        child = os.fork()
        if child == 0:
            memory[HUGE] = ord("c")
            os._exit(memory[HUGE])
        print(chr(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])), chr(memory[HUGE]))
    """)
    assert said == "c p"


def test_a_worker_is_not_charged_for_what_the_zygote_collapses():
    """A zygote that collapsed pages while a worker lives would leave it as their only owner."""
    found = find_isolation()
    if found.isolation is None or not allowed():
        pytest.skip(f"NOT TESTED HERE: the sandbox {found.reasons}, or huge pages on request")
    cell = {"id": "a", "own": True, "source": "def f(): pass"}
    with Zygote(isolation=found.isolation) as zygote:
        (rank,) = zygote.ranks(1, [])
        rank.ask(deadline_after(20), do="load", cells=[cell])
        rank.expect_marks()
        before = rank.held_bytes()
        for _ in range(300):  # a collapsed page takes about as long as one of these calls
            rank.ask(deadline_after(20), do="call", name="f", args=[], kwargs={})
        assert rank.held_bytes() - before < 4 << 20
        rank.close()
