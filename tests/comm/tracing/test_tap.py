"""The tap detects unknown internals of torch, changes no result, and keeps no memory
alive; its blind spots."""

import contextlib
import subprocess
import sys
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import distributed_c10d as c10d

from dlo_lib.comm.calls import Call, Kind
from dlo_lib.comm.deadlock.board import Board, RankRow, RowView
from dlo_lib.comm.deadlock.rank_recorder import record_row
from dlo_lib.comm.tracing import operators
from dlo_lib.comm.tracing.listeners import drop_prepared_tap, listening, prepare_tap
from dlo_lib.comm.tracing.recorder import trace_collectives
from dlo_lib.comm.tracing.tap import TapUnavailable
from dlo_lib.comm.tracing.trace import Trace
from dlo_lib.launch import Explain, rank, run_ranks


class Silent:
    """A listener that does nothing."""

    def issued(self, call: Call) -> None: ...

    def waits(self, call: Call) -> None: ...

    def waited(self, call: Call, failed: bool) -> None: ...


def test_every_operator_of_torch_that_communicates_is_known():
    assert operators.unknown_operators() == []


def plant_unknown_operators() -> None:
    """Change the list of this process as a newer torch would: a new operator, one with another argument, and
    one less."""
    del operators.OPERATORS["broadcast_"]
    operators.OPERATORS["barrier"] = operators.Operator(Kind.BARRIER, local="payload")
    operators.OPERATORS["an_operator_of_another_torch"] = operators.Operator(Kind.ALL_REDUCE)


def beside_unknown_operators() -> tuple[list[float], Trace, list[str]]:
    """Return results, trace and warnings of a program with calls of known and of unknown operators."""
    plant_unknown_operators()
    with warnings.catch_warnings(record=True) as caught, trace_collectives() as trace:
        warnings.simplefilter("default")
        x, y = torch.ones(3), torch.full((2,), float(dist.get_rank()))
        dist.all_reduce(x)
        dist.broadcast(y, src=1)
        work = dist.broadcast(y, src=1, async_op=True)
        work.wait()
        dist.barrier()
    return [*x.tolist(), *y.tolist()], trace, [str(warning.message) for warning in caught]


def test_calls_of_unknown_operators_are_passed_on_and_named_and_the_rest_is_traced():
    runs = run_ranks(beside_unknown_operators, 2, explain=Explain.OFF)
    for me, (values, trace, warned) in enumerate(runs):
        assert values == [2.0] * 3 + [1.0] * 2, "passed on"
        (all_reduce,) = trace.calls(me, Kind.ALL_REDUCE)
        assert all_reduce.numel == 3, "traced"
        assert [(call.operator, call.sequence) for call in trace.calls(me, Kind.UNKNOWN)] == [
            ("broadcast_", 1),
            ("broadcast_", 2),
            ("barrier", 1),
        ], "named"
        assert trace.count() == 4, "a check that nothing was sent does not pass"
        assert "unknown operator" in trace.summary()
        assert [text.partition(":")[0].rpartition(" ")[2] for text in warned] == ["broadcast_", "barrier"]


def recorded_beside_unknown_operators() -> tuple[str, list[str]]:
    """Return why nothing is recorded, and the kinds of the calls on this rank's row."""
    plant_unknown_operators()
    board = Board(2)
    with record_row(RankRow(board, dist.get_rank())) as recorder:
        dist.broadcast(torch.ones(1), src=0)
        dist.all_reduce(torch.ones(1))
    view = RowView(board, dist.get_rank())
    view.look()
    return recorder.unavailable, [call.kind.value for call in view.calls()]


def test_dead_locks_of_known_operators_are_explained_beside_unknown_ones(capsys):
    assert run_ranks(recorded_beside_unknown_operators, 2, explain=Explain.OFF) == [("", ["all_reduce"])] * 2
    assert capsys.readouterr().out.count("deadlocks in broadcast_ are not explained: torch") == 2


def test_where_dead_locks_cannot_be_explained_calls_wait_for_a_limited_time(monkeypatch, capsys):
    monkeypatch.delattr(c10d, "_new_group_with_tag")
    with record_row(RankRow(Board(1), 0)) as recorder:
        assert rank.patience(recorder) == timedelta(seconds=rank.UNEXPLAINED_S)
    said = capsys.readouterr().out
    assert "deadlocks are not explained: torch" in said
    assert "DLO_EXPLAIN=off lifts this limit" in said
    monkeypatch.undo()
    with record_row(RankRow(Board(1), 0)) as recorder:
        assert rank.patience(recorder) is None


def test_a_missing_wait_function_makes_it_unavailable_and_torch_is_unchanged(monkeypatch):
    wait = dist.Work.wait
    monkeypatch.delattr(c10d, "_new_group_with_tag")
    with (
        pytest.raises(TapUnavailable, match="waits in another way than this tap knows"),
        listening(Silent(), rank=0),
    ):
        pytest.fail("entered")
    assert dist.Work.wait is wait
    monkeypatch.undo()
    with listening(Silent(), rank=0) as tap:
        assert tap.rank == 0, "and the next one works"


def is_tapped() -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "BackendSelect")


def test_a_listener_takes_the_prepared_tap_and_leaves_none():
    prepare_tap()
    assert is_tapped()
    with listening(Silent(), rank=3) as tap:
        assert tap.rank == 3
        assert is_tapped()
        drop_prepared_tap()
        assert is_tapped(), "it is in use"
    assert not is_tapped()


def test_a_rank_without_a_listener_drops_the_prepared_tap():
    prepare_tap()
    drop_prepared_tap()
    assert not is_tapped()
    assert run_ranks(is_tapped, 1, explain=Explain.OFF) == [False]
    assert run_ranks(is_tapped, 1) == [True]


def test_an_error_of_the_program_is_not_taken_for_a_change_in_torch():
    with pytest.raises(AttributeError, match="mine"), listening(Silent(), rank=0):
        raise AttributeError("mine")


def direct_call_on_a_backend() -> Trace:
    backend = c10d._get_default_group()._get_backend(torch.device("cpu"))
    with trace_collectives() as trace:
        backend.allreduce([torch.ones(1)]).wait()
    return trace


def the_store() -> Trace:
    store = c10d._get_default_store()
    with trace_collectives() as trace:
        store.set(f"from {dist.get_rank()}", "a kilobyte" * 100)
        store.get(f"from {1 - dist.get_rank()}")
    return trace


COMMUNICATES = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""


def another_process() -> Trace:
    with trace_collectives() as trace:
        subprocess.run([sys.executable, "-c", COMMUNICATES], check=True, capture_output=True)
    return trace


@pytest.mark.parametrize("program", [direct_call_on_a_backend, the_store, another_process])
def test_calls_that_bypass_the_dispatcher_are_not_seen(program):
    """The blind spots. A test fails when one closes; those of a GPU are below."""
    assert [trace.count() for trace in run_ranks(program, 2)] == [0, 0]


def test_symmetric_memory_has_separate_operators():
    """Ranks read and write each other's memory without a call on a process group, so the tap sees none."""
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("symm_mem::")}
    assert "symm_mem::one_shot_all_reduce" in names
    assert not any(name.removeprefix("symm_mem::") in operators.OPERATORS for name in names)


def forgotten() -> list[int]:
    """Return what the tap remembers after each hundred calls that Python never waits for."""
    remembered = []
    with listening(Silent()) as tap:
        for take in (dist.Work.get_future, dist.Work.is_completed):
            for _ in range(100):
                take(dist.all_reduce(torch.ones(1), async_op=True))
            remembered += [len(tap.pending), len(tap.futures)]
        held = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(100)]
        assert all(tap.pending.get(work) is not None for work in held), (
            "works that can still be waited for are kept"
        )
    return remembered


def test_calls_that_can_no_longer_be_waited_for_are_dropped_with_their_tensors():
    for remembered in run_ranks(forgotten, 2):
        assert max(remembered) <= 50


def results(traced: bool) -> list:
    """Return the results of a program that waits in every possible way."""
    rank = dist.get_rank()
    x = torch.arange(5.0) + rank
    with trace_collectives() if traced else contextlib.nullcontext():
        work = dist.all_reduce(x, async_op=True)
        future = work.get_future().then(lambda future: future.value()[0] * 2)
        doubled = future.wait()
        gathered = [torch.zeros(5) for _ in range(2)]
        dist.all_gather(gathered, x)
        y = functional.all_reduce(x, "max", dist.group.WORLD)
        outs = torch.zeros(2)
        dist.all_to_all_single(outs, torch.tensor([1.0, 10.0]) * rank)
        message = torch.full((2,), float(rank))
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, message.clone(), 1 - rank), dist.P2POp(dist.irecv, message, 1 - rank)]
        ):
            work.wait()
        z = dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX, async_op=True)
        z.get_future().wait()
    return [tensor.tolist() for tensor in (doubled, *gathered, y + 0, outs, message)]


def test_no_result_changes():
    assert run_ranks(results, 2, True) == run_ranks(results, 2, False)
