"""The tracer sees every communication call of a process, whoever issued it, with its bytes and its waits."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

from dlo_lib.comm import operators
from dlo_lib.comm.calls import Kind
from dlo_lib.comm.tap import TapUnavailable
from dlo_lib.comm.trace import NotTraced, Trace, trace_collectives
from dlo_lib.launch import Explain, run_ranks


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


def functions_of_torch_distributed() -> Trace:
    rank, world = dist.get_rank(), dist.get_world_size()
    with trace_collectives() as trace:
        dist.all_reduce(torch.ones(10))
        dist.all_reduce(torch.ones(10, dtype=torch.float64), dist.ReduceOp.MAX)
        dist.broadcast(torch.ones(3), 0)
        dist.all_gather([torch.zeros(5) for _ in range(world)], torch.ones(5))
        dist.reduce_scatter(torch.zeros(5), [torch.ones(5) for _ in range(world)])
        dist.all_to_all_single(torch.zeros(4 * world), torch.ones(4 * world))
        dist.barrier()
        work = dist.all_reduce(torch.ones(7), async_op=True)
        work.wait()
        dist.all_reduce(torch.ones(8), async_op=True)  # never waited for
        if rank == 0:
            dist.send(torch.ones(6), 1, tag=3)
        elif rank == 1:
            dist.recv(torch.ones(6), 0, tag=3)
        dist.barrier()
    return trace


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_functions_of_torch_distributed(world_size):
    trace = Trace.merged(run_ranks(functions_of_torch_distributed, world_size))
    share = (world_size - 1) / world_size
    for rank in range(world_size):
        assert trace.count(Kind.ALL_REDUCE, rank) == 4
        assert trace.bytes("all_reduce", rank) == 40 + 80 + 28 + 32
        assert trace.ring_bytes("all_reduce", rank) == 2 * 180 * share
        assert trace.bytes("all_gather", rank) == trace.bytes("reduce_scatter", rank) == 20 * world_size
        assert trace.ring_bytes("all_gather", rank) == 20 * world_size * share
        assert trace.bytes("all_to_all", rank) == 16 * world_size
        assert trace.count("barrier", rank) == 2
        plain, largest, waited, left = trace.select("all_reduce", rank)
        assert (largest.call.dtype, largest.call.reduction) == ("float64", "MAX")
        assert not plain.call.is_async
        assert waited.call.is_async
        assert waited.waited_until is not None
        assert left.waited_until is None
        assert [event.call.shape for event in trace.never_waited() if event.rank == rank] == [(8,)]
    (sent,) = trace.select("send")
    (received,) = trace.select("recv")
    assert (sent.rank, sent.call.peer, sent.call.tag, received.rank, received.call.peer) == (0, 1, 3, 1, 0)
    assert "all_gather" in trace.summary()


def test_the_call_site_is_the_persons_line():
    trace = run_ranks(functions_of_torch_distributed, 2)[0]
    lines = [event.call.site for event in trace.events]
    assert {site.function for site in lines} == {"functions_of_torch_distributed"}
    assert [site.api for site in lines][:3] == ["all_reduce", "all_reduce", "broadcast"]
    numbers = [site.line for site in lines]
    assert numbers == sorted(numbers)
    assert numbers[1] == numbers[0] + 1


def pytorchs_ddp() -> Trace:
    with trace_collectives() as trace:
        model = nn.parallel.DistributedDataParallel(net())
        for _ in range(2):
            model(torch.ones(2, 64)).sum().backward()
    return trace


def test_the_reducer_of_pytorchs_ddp():
    for trace in run_ranks(pytorchs_ddp, 2):
        gradients = trace.select("all_reduce")
        assert len(gradients) == 2, "one bucket a step"
        assert all(event.call.by_reducer and event.call.in_backward for event in gradients)
        assert all(event.waited_until is not None for event in gradients)
        assert trace.bytes("all_reduce") == 2 * 2 * (64 * 64 + 64) * 4


def pytorchs_fsdp2() -> Trace:
    from torch.distributed.fsdp import fully_shard

    model = net()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    with trace_collectives() as trace:
        model(torch.ones(2, 64)).sum().backward()
    return trace


def test_fsdp2():
    whole = 2 * (64 * 64 + 64) * 4
    for trace in run_ranks(pytorchs_fsdp2, 2):
        assert trace.bytes("all_gather") in (2 * whole, 1.5 * whole), "before forward and, where it was freed, before backward"
        assert trace.bytes("reduce_scatter") == whole


def functional_and_dtensor() -> Trace:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])
    with trace_collectives() as trace:
        total = functional.all_reduce(torch.ones(6), "sum", dist.group.WORLD)
        assert (total + 0).tolist() == [2.0] * 6
        assert sharded.redistribute(mesh, [Replicate()]).to_local().shape == (8, 4)
    return trace


def test_functional_collectives_and_dtensor():
    for trace in run_ranks(functional_and_dtensor, 2):
        assert trace.bytes("all_reduce") == 24
        assert trace.bytes("all_gather") == 8 * 4 * 4
        assert all(event.waited_until is not None for event in trace.events)


def our_ddp() -> Trace:
    from dlo_lib.parallel.ddp import DDP

    with trace_collectives() as trace:
        model = DDP(net())
        model(torch.ones(2, 64)).sum().backward()
        model.finish_grad_sync()
    return trace


def test_our_ddp_sends_the_gradients_once():
    for trace in run_ranks(our_ddp, 2):
        assert trace.bytes("all_reduce") == 2 * (64 * 64 + 64) * 4


def sub_groups() -> Trace:
    with trace_collectives() as trace:
        groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
        for group, members in zip(groups, ((0, 1), (1, 2))):
            if dist.get_rank() in members:
                dist.all_reduce(torch.ones(2), group=group)
    return trace


def test_sub_groups_are_told_apart():
    traces = run_ranks(sub_groups, 3)
    assert [trace.count("new_group") for trace in traces] == [2, 2, 2]
    assert [[event.call.members for event in trace.select("all_reduce")] for trace in traces] == [[(0, 1)], [(0, 1), (1, 2)], [(1, 2)]]


def left_behind() -> tuple[int, bool]:
    wait = dist.Work.wait
    with trace_collectives() as trace:
        dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1))
    with trace_collectives() as again:
        dist.all_reduce(torch.ones(1))
    return trace.count() + again.count(), dist.Work.wait is wait


def test_outside_the_context_nothing_is_traced_and_torch_is_as_before():
    assert run_ranks(left_behind, 2, explain=Explain.OFF) == [(2, True)] * 2


def the_trace_is_shut() -> tuple[str, list[str], str]:
    """What is raised inside, asked and printed where torch has another operator than those known."""
    operators.OPERATORS["an_operator_of_another_torch"] = operators.Operator(Kind.ALL_REDUCE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            with trace_collectives() as trace:
                x = torch.ones(1)
                dist.all_reduce(x)
                assert x.item() == dist.get_world_size(), "the program runs on"
    refused = []
    for question in (trace.count, trace.bytes, trace.ring_bytes, trace.select, trace.never_waited):
        with pytest.raises(NotTraced, match="nothing was traced: torch"):
            question()
        refused.append(question.__name__)
    (warning,) = caught
    return trace.summary(), refused, str(warning.message)


def test_where_torch_has_changed_the_program_runs_on_with_one_warning_and_no_question_is_answered():
    """A check that asserts that nothing was sent must not pass because nothing was seen."""
    for summary, refused, warning in run_ranks(the_trace_is_shut, 2, explain=Explain.OFF):
        assert summary.startswith("no trace: torch")
        assert len(refused) == 5
        assert warning.startswith("communication is not traced: torch")


def test_one_rank_without_a_trace_makes_the_merged_one_unanswerable():
    merged = Trace.merged([Trace(), Trace(unavailable="torch is another")])
    with pytest.raises(NotTraced, match="torch is another"):
        merged.count()


def raises_unavailable() -> str:
    try:
        with trace_collectives() as trace:
            dist.all_reduce(torch.ones(1))
            raise TapUnavailable("of the program's own")
    except TapUnavailable as error:
        return f"{error}, {trace.count()} traced"


def test_what_the_program_raises_passes_through():
    assert run_ranks(raises_unavailable, 2) == ["of the program's own, 1 traced"] * 2


def test_where_torch_has_changed_ranks_still_run_and_say_that_dead_locks_are_not_explained(capsys):
    def without_the_tap() -> float:
        x = torch.ones(1)
        dist.all_reduce(x)
        return x.item()

    from dlo_lib.comm.board import Board, Row
    from dlo_lib.comm.keeper import kept_row

    def body() -> float:
        operators.OPERATORS["an_operator_of_another_torch"] = operators.Operator(Kind.ALL_REDUCE)
        with kept_row(Row(Board(2), dist.get_rank())):
            return without_the_tap()

    assert run_ranks(body, 2, explain=Explain.OFF) == [2.0, 2.0]
    assert capsys.readouterr().out.count("dead-locks are not explained: torch") == 2


def hidden_and_exposed() -> Trace:
    x = torch.ones(100_000)
    with trace_collectives() as trace:
        early = dist.all_reduce(x, async_op=True)
        _until_completed(early)
        early.wait()
        dist.barrier()
        met = dist.all_reduce(x, async_op=True)
        met.wait()
        left = dist.all_reduce(x, async_op=True)
        _until_completed(left)
    return trace


def _until_completed(work: dist.Work) -> None:
    while not work.is_completed():
        pass


def test_a_call_is_done_when_the_backend_is_not_when_the_program_comes_to_wait():
    merged = Trace.merged(run_ranks(hidden_and_exposed, 2))
    for rank in range(2):
        hidden, met, left = merged.select("all_reduce", rank)
        assert hidden.issued < hidden.done < hidden.waited_from < hidden.waited_until, "hidden: over before the wait began"
        assert met.issued < met.done < met.waited_until
        assert left.waited_from is None
        assert left.done > met.waited_until, "known though nobody waited"
        (barrier,) = merged.select("barrier", rank)
        assert barrier.done == barrier.waited_until, "a blocking call is over when its wait is"


def test_ranks_share_a_clock_nothing_is_over_before_the_last_has_called():
    merged = Trace.merged(run_ranks(hidden_and_exposed, 3))
    for met in zip(*(merged.select("all_reduce", rank) for rank in range(3))):
        assert min(event.done for event in met) > max(event.issued for event in met)
