"""The memory at a mark is what the student's code holds, in a notebook and under the judge: not what a
driver, a matrix product or the interpreter keeps, and nothing that it holds finds room without a trace.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dlo_lib.grading.checks.contract import Scenario, scenario
from dlo_lib.grading.judge.attempt import Attempt, RemoteStudent
from dlo_lib.grading.judge.cells import Origin, SubmissionCell
from dlo_lib.grading.notebook.local_student import LocalStudent
from dlo_lib.grading.sandbox.host import Zygote
from dlo_lib.grading.sandbox.isolation import find_isolation
from dlo_lib.grading.switch import local, memory
from dlo_lib.launch import Explain, run_ranks

MIB = 1 << 20
IMPORTS = "import torch\nimport torch.distributed as dist\n"
HOLES = """
import ctypes

def leave_holes():
    pieces = [ctypes.create_string_buffer(1 << 16) for _ in range(128)]  # 8 MiB below the threshold of mmap
    for piece in pieces:
        ctypes.memset(piece, 1, 1 << 16)
    return ctypes.create_string_buffer(1 << 12)  # the heap cannot shrink

last = leave_holes()
"""
DRIVER = """
#include <stdlib.h>
#include <string.h>
int cuInit(unsigned flags) { memset(malloc(3 << 20), 1, 3 << 20); return 100; /* no device */ }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
static int absent(void) { return 100; }
int cuGetProcAddress_v2(
    const char *name, void **function, int version, unsigned long long flags, int *status
) {
    if (status) *status = 0;
    *function = !strcmp(name, "cuInit") ? (void *)cuInit
        : !strcmp(name, "cuDriverGetVersion") ? (void *)cuDriverGetVersion
        : !strncmp(name, "cuGetProcAddress", 16) ? (void *)cuGetProcAddress_v2 : (void *)absent;
    return 0;
}
int cuGetProcAddress(const char *name, void **function, int version, unsigned long long flags) {
    return cuGetProcAddress_v2(name, function, version, flags, 0);
}
"""

linux_only = pytest.mark.skipif(
    sys.platform != "linux", reason="NOT TESTED HERE: memory is measured on Linux only"
)
pytestmark = linux_only
Measure = Callable[..., list[float]]


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """A zygote that has imported a module which leaves free memory in its heap."""
    found = find_isolation()
    if found.isolation is None:
        pytest.skip(f"NOT TESTED HERE: the sandbox ({'; '.join(found.reasons)})")
    file = tmp_path_factory.mktemp("holes") / "holes.py"
    file.write_text(HOLES, encoding="utf-8")
    with Zygote(isolation=found.isolation, warm=["holes"], files={"holes.py": file}) as zygote:
        yield zygote


@pytest.fixture(params=["notebook", "judge"])
def measure(request: pytest.FixtureRequest) -> Measure:
    """Return the MiB that each rank holds at the mark "held", with a cell of the student."""

    def in_notebook(scenario: Scenario, cell: str, world: int = 2) -> list[float]:
        names = {"torch": torch, "dist": dist, "__name__": "__main__"}
        exec(compile(cell, "<cell own>", "exec"), names)
        run = LocalStudent(names, 60).ranks(scenario, [{}] * world)
        return [run.memory(rank, "held") / MIB for rank in range(world)]

    def judged(scenario: Scenario, cell: str, world: int = 2) -> list[float]:
        cells = [SubmissionCell("own", Origin.ANSWER, IMPORTS + cell)]
        attempt = Attempt(request.getfixturevalue("zygote"), cells, 60)
        try:
            run = RemoteStudent(attempt, "own", 60).ranks(scenario, [{}] * world)
            assert not attempt.faults
            return [run.memory(rank, "held") / MIB for rank in range(world)]
        finally:
            attempt.close()

    return in_notebook if request.param == "notebook" else judged


@scenario
def holds(student, rank, world):
    kept = student.kept()
    mark("held")  # noqa: F821 - of the ranks
    return len(kept)


@scenario
def works(student, rank, world):
    student.work()
    mark("held")  # noqa: F821 - of the ranks
    return rank


PIECES = (
    "def kept():\n    return [torch.ones(1 << 14) for _ in range(64)]  # 4 MiB in pieces that fit into holes"
)
NOTHING = "def kept():\n    return []"


def test_tensors_in_the_holes_of_the_heap_count(measure: Measure) -> None:
    assert all(3.9 < held < 4.6 for held in measure(holds, PIECES))


def holes_then_tensors(path: str) -> int:
    """Leave free memory in the heap, as imports and cells do; connect; then let tensors take its place."""
    names: dict[str, object] = {}
    exec(HOLES, names)
    gc.collect()
    with local.connected_link(path, dist.get_rank()) as link:
        kept = [torch.ones(1 << 14) for _ in range(64)]
        link.mark("held")
        return len(kept) + 0 * ctypes.sizeof(names["last"])  # type: ignore[arg-type]


def test_tensors_in_the_holes_that_a_rank_of_a_notebook_begins_with_count() -> None:
    """Otherwise a wrong answer that keeps them passes."""
    with local.LocalSwitch(2) as switch:
        run_ranks(holes_then_tensors, 2, switch.path, timeout=60, explain=Explain.OFF)
    assert switch.service is not None
    held = switch.service.held["held"]
    assert all((held[rank] or 0) > 3.9 * MIB for rank in range(2)), held


PRODUCTS = """
def work():
    a, b = torch.ones(4, 1536), torch.ones(1536, 1536)
    for _ in range(2):
        (a @ b).sum()
        (b[:768] @ b).sum()
"""


def test_the_scratch_memory_of_a_matrix_product_does_not_count(measure: Measure) -> None:
    assert max(measure(works, PRODUCTS)) < 0.6


LINES = """
lines = [None] * 24_000
def work():
    lines[:] = (f"line {number}" for number in range(24_000))  # 1.5 MiB
"""


def test_small_objects_of_the_interpreter_do_not_count(measure: Measure) -> None:
    """``fully_shard`` makes PyTorch read a dozen source files for a traceback; Python keeps their lines."""
    assert max(measure(works, LINES)) < 0.6


THREADS = "def work():\n    if torch.get_num_threads() != 1: raise RuntimeError(torch.get_num_threads())"


def test_a_rank_that_is_checked_computes_with_one_thread(measure: Measure) -> None:
    """As in grading: the order of sums, and scratch memory, do not depend on the number of processors."""
    measure(works, THREADS, world=1)


def test_what_cells_allocate_honestly_does_not_count(measure: Measure) -> None:
    """An import, a figure, or some data at the top of a notebook."""
    cell = "names = [f'name {number}' for number in range(20_000)]\n" + NOTHING
    assert max(measure(holds, cell)) < 0.5


def test_a_buffer_that_a_cell_prepares_counts_under_the_judge(zygote: Zygote) -> None:
    cell = "import torch\nbuffer = torch.ones(4 << 20)\n" + NOTHING
    attempt = Attempt(zygote, [SubmissionCell("own", Origin.ANSWER, cell)], 60)
    try:
        run = RemoteStudent(attempt, "own", 60).ranks(holds, [{}])
        assert 11.9 < run.memory(0, "held") / MIB < 16
    finally:
        attempt.close()


def test_memory_is_counted_page_by_page(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    """``RssAnon`` is off by some MiB on kernels 6.2 to 6.16 with many processors."""
    asked: dict[str, int] = {}

    def approximate(path: str, read: Callable[[str], str] = memory.read_proc) -> str:
        asked[path] = asked.get(path, 0) + 1
        off = 2048 * asked[path]
        return re.sub(r"(?<=RssAnon:\t)\s*(\d+)", lambda found: f" {int(found[1]) + off}", read(path))

    monkeypatch.setattr(memory, "read_proc", approximate)
    assert all(3.9 < held < 4.6 for held in measure(holds, PIECES))


def test_where_pages_cannot_be_counted_status_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/7/status": "RssAnon:\t 1024 kB\nRssShmem:\t 8 kB\nVmSwap:\t 4 kB\nHugetlbPages:\t 0 kB\n",
        "/proc/7/smaps_rollup": "0 [rollup]\nAnonymous: 3072 kB\nAnonHugePages: 2048 kB\nSwap: 4 kB\n",
    }
    monkeypatch.setattr(memory, "read_proc", lambda path: files.get(path, ""))
    assert memory.exact_bytes(7) == (3072 + 4 + 8) << 10
    del files["/proc/7/smaps_rollup"]
    assert memory.exact_bytes(7) == (1024 + 4 + 8) << 10
    assert memory.exact_bytes(8) == 0, "it has ended"


# -- the driver of a GPU


def test_the_driver_is_loaded_before_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """``dist.barrier`` loads it: in a scenario it would count as the student's memory."""
    order: list[str] = []
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda: order.append("driver"))
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)  # of this process
    read = local.exact_bytes
    monkeypatch.setattr(local, "exact_bytes", lambda pid: order.append("memory") or read(pid))
    with local.LocalSwitch(1) as switch, local.connected_link(switch.path, 0):
        assert order == ["driver", "memory"]
    order.clear()
    with local.LocalSwitch(1) as switch, local.connected_link(switch.path, 0, measured=False):
        assert order == ["memory"], "a rank without marks does not wait for a driver"


BARRIER = "def work():\n    dist.barrier()"


@pytest.mark.skipif(
    torch.version.cuda is None,
    reason="NOT TESTED HERE: a PyTorch for the CPU loads no driver",
)
@pytest.mark.skipif(shutil.which("gcc") is None, reason="NOT TESTED HERE: no gcc to build a driver")
def test_what_a_driver_keeps_does_not_count(tmp_path: Path) -> None:
    """With a driver that keeps 3 MiB, in a separate process, because the loader reads its path once."""
    (tmp_path / "driver.c").write_text(DRIVER, encoding="ascii")
    library = tmp_path / "libcuda.so.1"
    if (found := find_isolation()).isolation is None:
        pytest.skip(f"NOT TESTED HERE: the sandbox ({'; '.join(found.reasons)})")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "driver.c"], check=True)
    said = subprocess.run(
        [sys.executable, "-m", "tests.grading.test_measured_memory", tmp_path],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    held = [float(number) for number in said.stdout.split()]
    assert len(held) == 2, said.stdout
    assert max(held) < 0.6


def main(folder: Path) -> None:
    """Print the MiB that a barrier costs a rank of a notebook, and a rank under the judge."""
    names = {"torch": torch, "dist": dist, "__name__": "__main__"}
    exec(BARRIER, names)
    print(LocalStudent(names, 60).ranks(works, [{}]).memory(0, "held") / MIB)
    found = find_isolation()
    assert found.isolation is not None
    with Zygote(
        isolation=found.isolation,
        environment={"LD_LIBRARY_PATH": "."},
        files={"libcuda.so.1": folder / "libcuda.so.1"},
    ) as zygote:
        cell = SubmissionCell("own", Origin.ANSWER, IMPORTS + BARRIER)
        attempt = Attempt(zygote, [cell], 60)
        print(RemoteStudent(attempt, "own", 60).ranks(works, [{}]).memory(0, "held") / MIB)
        attempt.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
