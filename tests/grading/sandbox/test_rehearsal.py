"""The zygote rehearses the steps of a worker, and the judge reads little about a rank: both cost CPU time in
every submission."""

from __future__ import annotations

import pytest

from dlo_lib.grading.lab import syntax
from dlo_lib.grading.sandbox import remote_worker
from dlo_lib.grading.sandbox.host import Zygote
from dlo_lib.grading.sandbox.remote_worker import Worker, deadline_after

CELL = """
import dis, linecache, sys
import torch.distributed as dist
from dlo_lib.grading.sandbox import worker

def adapted():
    return [found.opname for found in dis.get_instructions(worker.run_rank, adaptive=True)]

def left_behind():
    names = [*globals(), *linecache.cache]
    return [name for name in names if "rehears" in name] + ["a group"] * dist.is_initialized()

def loaded(name):
    return name in sys.modules
"""


@pytest.fixture(scope="module")
def rank(sandbox: Zygote) -> Worker:
    (rank,) = sandbox.ranks(1)
    rank.ask(deadline_after(20), do="load", cells=[{"id": "a", "own": True, "source": CELL}])
    return rank


def call(worker: Worker, name: str, *args: object) -> object:
    return worker.ask(deadline_after(20), do="call", name=name, args=list(args), kwargs={})["value"]


def test_a_worker_starts_with_code_that_python_has_adapted(rank: Worker) -> None:
    assert "LOAD_GLOBAL_MODULE" in call(rank, "adapted")  # type: ignore[operator]


def test_the_rehearsal_leaves_nothing_behind(rank: Worker) -> None:
    assert call(rank, "left_behind") == []


def test_the_start_of_a_worker_imports_no_codec(rank: Worker) -> None:
    assert call(rank, "loaded", "encodings.ascii") is False


def test_the_judge_looks_for_no_children_of_a_rank(
    sandbox: Zygote, rank: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []
    monkeypatch.setattr(remote_worker, "descendants", lambda pid: looked.append(pid) or [])
    call(rank, "loaded", "torch")
    assert rank.processes() == [rank.pid]
    assert looked == []
    worker = sandbox.worker()
    worker.usage()
    worker.close()
    assert looked


def test_only_cells_with_imports_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    monkeypatch.setattr(syntax, "parsed", lambda text: texts.append(text) or syntax.ast.Module([], []))
    syntax.imported_modules(["a = 1", "import numpy", "def f():\n    from scipy import optimize"])
    assert len(texts) == 2
