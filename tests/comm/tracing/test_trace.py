"""The tracer sees every communication call of a process, from any source, with its bytes and its waits."""

import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dlo_lib.comm.calls import Call, Kind
from dlo_lib.comm.tracing import completion
from dlo_lib.comm.tracing.events import Event
from dlo_lib.comm.tracing.recorder import trace_collectives
from dlo_lib.comm.tracing.tap import TapUnavailable
from dlo_lib.comm.tracing.trace import NotTraced, Trace
from dlo_lib.launch import Explain, run_ranks

if hasattr(functional, "all_gather_single"):
    _all_gather, _reduce_scatter = functional.all_gather_single, functional.reduce_scatter_single
    _all_gather_autograd = functional.all_gather_single_autograd
else:  # the names of torch 2.11
    _all_gather, _reduce_scatter = functional.all_gather_tensor, functional.reduce_scatter_tensor
    _all_gather_autograd = functional.all_gather_tensor_autograd


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


def test_the_call_site_is_the_users_line():
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
        assert len(gradients) == 2, "one bucket per step"
        assert all(event.call.by_reducer and event.call.in_backward for event in gradients)
        assert all(event.waited_until is not None for event in gradients)
        assert trace.bytes("all_reduce") == 2 * 2 * (64 * 64 + 64) * 4


class CountsOperators(TorchDispatchMode):
    """A mode of a user, which passes every operator on."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators += 1
        return func(*args, **(kwargs or {}))


def pytorchs_ddp_in_a_mode(ours: bool) -> Trace:
    from dlo_lib.profiling import MemoryTracker

    mode = MemoryTracker() if ours else CountsOperators()
    with trace_collectives() as trace, mode:
        model = nn.parallel.DistributedDataParallel(net())
        for _ in range(2):
            model(torch.ones(2, 64)).sum().backward()
        dist.all_reduce(torch.ones(3))
    return trace


@pytest.mark.parametrize("ours", [True, False], ids=["our memory tracker", "a mode of the user"])
def test_the_reducer_of_pytorchs_ddp_in_a_dispatch_mode(ours):
    """A mode stands between the reducer and its calls on the stack."""
    for trace in run_ranks(pytorchs_ddp_in_a_mode, 2, ours):
        *gradients, own = trace.select("all_reduce")
        assert len(gradients) == 2
        assert all(event.call.by_reducer and event.call.in_backward for event in gradients)
        assert all(event.waited_until is not None for event in gradients)
        assert not own.call.by_reducer
        assert own.call.site.function == "pytorchs_ddp_in_a_mode"
        assert trace.never_waited() == []


def bytes_that_ddp_holds() -> list[int]:
    """The bytes of tensors that live after each of three steps, with what explains deadlocks in place."""
    from dlo_lib.profiling import MemoryTracker

    held = []
    with MemoryTracker() as tracker:
        model = nn.parallel.DistributedDataParallel(net())
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(2, 64)).sum().backward()
            held.append(sum(tracker.live_bytes().values()))
    return held


def test_what_watches_the_calls_keeps_no_message_alive():
    """Weights, gradients and buckets live; the message with which DDP has sent the first weights does not."""
    weights = sum(parameter.nbytes for parameter in net().parameters())
    for held in run_ranks(bytes_that_ddp_holds, 2):
        assert held[-1] < 3.5 * weights


def pytorchs_fsdp2() -> Trace:
    from tests.fsdp2 import fully_shard

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
        assert trace.bytes("all_gather") in (2 * whole, 1.5 * whole), (
            "before forward and, if freed, before backward"
        )
        assert trace.bytes("reduce_scatter") == whole


def functional_collectives() -> Trace:
    world = dist.group.WORLD
    with trace_collectives() as trace:
        functional.all_reduce(torch.ones(6), "sum", world).tolist()
        functional.all_reduce_coalesced([torch.ones(6), torch.ones(2)], "sum", world)[1].tolist()
        functional.broadcast(torch.ones(2), 0, world).tolist()
        _all_gather(torch.ones(2), 0, world).tolist()
        _reduce_scatter(torch.ones(4), "sum", 0, world).tolist()
        functional.all_to_all_single(torch.ones(4), None, None, world).tolist()
    return trace


def test_every_functional_collective_is_seen_to_be_waited_for():
    for trace in run_ranks(functional_collectives, 2):
        assert [event.call.site.line for event in trace.events if event.waited_until is None] == []
        assert [event.call.kind for event in trace.events] == [
            Kind.ALL_REDUCE, Kind.ALL_REDUCE, Kind.BROADCAST, Kind.ALL_GATHER, Kind.REDUCE_SCATTER,
            Kind.ALL_TO_ALL,
        ]  # fmt: skip


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


def backward_of_functional_collectives() -> Trace:
    x = torch.ones(4, requires_grad=True)
    with trace_collectives() as trace:
        used = x * 2
        used.register_hook(lambda gradient: dist.barrier())
        gathered = _all_gather_autograd(used, 0, dist.group.WORLD)
        (gathered * torch.arange(8.0)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [float(4 * (4 * dist.get_rank() + place)) for place in range(4)]
    return trace


def test_the_backward_of_functional_collectives_is_not_attributed_to_ddp():
    for trace in run_ranks(backward_of_functional_collectives, 2):
        _, scattered, barrier = trace.events
        assert scattered.call.kind is Kind.REDUCE_SCATTER
        assert barrier.call.kind is Kind.BARRIER
        assert scattered.call.in_backward
        assert not scattered.call.by_reducer
        assert scattered.call.reduction == "SUM"
        assert scattered.waited_until < barrier.issued, (
            "waited for where its result is used, not at the end of backward"
        )


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


def test_sub_groups_are_distinguished():
    traces = run_ranks(sub_groups, 3)
    assert [trace.count("new_group") for trace in traces] == [2, 2, 2]
    assert [[event.call.members for event in trace.select("all_reduce")] for trace in traces] == [
        [(0, 1)],
        [(0, 1), (1, 2)],
        [(1, 2)],
    ]


def left_behind() -> tuple[int, bool]:
    wait = dist.Work.wait
    with trace_collectives() as trace:
        dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1))
    with trace_collectives() as again:
        dist.all_reduce(torch.ones(1))
    return trace.count() + again.count(), dist.Work.wait is wait


def test_outside_the_context_nothing_is_traced_and_torch_is_unchanged():
    assert run_ranks(left_behind, 2, explain=Explain.OFF) == [(2, True)] * 2


def test_the_end_of_a_process_waits_for_the_callback_and_not_only_for_the_call(monkeypatch):
    """gloo's thread asks for the GIL once more after a callback has returned, to drop it."""
    kept = []

    class Future:
        def add_done_callback(self, callback):
            kept.append(callback)

    monkeypatch.setattr(completion, "_get_future", lambda work: Future())
    clock = completion.CompletionClock(lambda number, moment: None)
    clock.start(Call(1, Kind.ALL_REDUCE, "0", (0, 1), 1, is_async=True), object(), on_device=False)
    kept[0](None)  # the call is over, and the thread of gloo still has the callback
    assert clock._runs()
    kept.clear()
    assert not clock._runs()
    clock.stop()


def the_trace_is_shut() -> tuple[str, list[str], str]:
    """Return what is raised, answered and printed when torch waits in an unknown function."""
    del c10d._new_group_with_tag
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            with trace_collectives() as trace:
                x = torch.ones(1)
                dist.all_reduce(x)
                assert x.item() == dist.get_world_size(), "the program continues"
    refused = []
    for question in (trace.count, trace.bytes, trace.ring_bytes, trace.select, trace.never_waited):
        with pytest.raises(NotTraced, match="nothing was traced: torch"):
            question()
        refused.append(question.__name__)
    (warning,) = caught
    return trace.summary(), refused, str(warning.message)


def test_with_unknown_internals_the_program_continues_with_one_warning_and_questions_raise():
    """A check that asserts that nothing was sent must not pass because nothing was seen."""
    for summary, refused, warning in run_ranks(the_trace_is_shut, 2, explain=Explain.OFF):
        assert summary.startswith("no trace: torch")
        assert len(refused) == 5
        assert warning.startswith("communication is not traced: torch")


def test_one_rank_without_a_trace_makes_the_merged_trace_unavailable():
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


def test_errors_of_the_program_pass_through():
    assert run_ranks(raises_unavailable, 2) == ["of the program's own, 1 traced"] * 2


def test_with_unknown_internals_ranks_run_and_report_that_dead_locks_are_not_explained(capsys):
    def without_the_tap() -> float:
        x = torch.ones(1)
        dist.all_reduce(x)
        return x.item()

    from dlo_lib.comm.deadlock.board import Board, RankRow
    from dlo_lib.comm.deadlock.rank_recorder import record_row

    def body() -> float:
        del c10d._new_group_with_tag
        with record_row(RankRow(Board(2), dist.get_rank())):
            return without_the_tap()

    assert run_ranks(body, 2, explain=Explain.OFF) == [2.0, 2.0]
    assert capsys.readouterr().out.count("deadlocks are not explained: torch") == 2


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


def test_a_call_is_done_when_the_backend_is_not_when_the_program_waits():
    merged = Trace.merged(run_ranks(hidden_and_exposed, 2))
    for rank in range(2):
        hidden, met, left = merged.select("all_reduce", rank)
        assert hidden.issued < hidden.done < hidden.waited_from < hidden.waited_until, (
            "hidden: over before the wait began"
        )
        assert met.issued < met.done < met.waited_until
        assert left.waited_from is None
        assert left.done > met.waited_until, "known without a wait"
        (barrier,) = merged.select("barrier", rank)
        # Before torch 2.13 the backend says when it is done, which is a little earlier.
        assert barrier.issued < barrier.done <= barrier.waited_until, "a blocking call ends with its wait"


def test_ranks_share_a_clock_and_no_call_ends_before_the_last_rank_called():
    merged = Trace.merged(run_ranks(hidden_and_exposed, 3))
    for met in zip(*(merged.select("all_reduce", rank) for rank in range(3))):
        assert min(event.done for event in met) > max(event.issued for event in met)


GLOO_LACKS_LISTS = torch.__version__ < (2, 13)
"""Its all-to-all takes one tensor only, as in torch 2.11 on the machines with GPUs."""
ASYNCHRONOUS = {
    "all_reduce": lambda x, parts: dist.all_reduce(x, async_op=True),
    "broadcast": lambda x, parts: dist.broadcast(x, 0, async_op=True),
    "reduce": lambda x, parts: dist.reduce(x, 0, async_op=True),
    "all_gather": lambda x, parts: dist.all_gather(parts, x, async_op=True),
    "all_gather into one tensor": lambda x, parts: dist.all_gather_into_tensor(
        torch.cat(parts), x, async_op=True
    ),
    "gather": lambda x, parts: dist.gather(x, parts if dist.get_rank() == 0 else None, 0, async_op=True),
    "scatter": lambda x, parts: dist.scatter(x, parts if dist.get_rank() == 0 else None, 0, async_op=True),
    "reduce_scatter": lambda x, parts: dist.reduce_scatter(x, parts, async_op=True),
    "reduce_scatter of one tensor": lambda x, parts: dist.reduce_scatter_tensor(
        x, torch.cat(parts), async_op=True
    ),
    "all_to_all": lambda x, parts: dist.all_to_all(parts, [part.clone() for part in parts], async_op=True),
    "all_to_all of one tensor": lambda x, parts: dist.all_to_all_single(
        torch.cat(parts), torch.cat(parts), async_op=True
    ),
    "barrier": lambda x, parts: dist.barrier(async_op=True),
}


if GLOO_LACKS_LISTS:
    del ASYNCHRONOUS["all_to_all"]


def all_asynchronous() -> list[tuple[str, bool]]:
    """Return for each call whether its end is known, and before the end of the wait."""
    told = []
    for name, issue in ASYNCHRONOUS.items():
        with trace_collectives() as trace:
            issue(torch.ones(4), [torch.ones(4) for _ in range(2)]).wait()
        (event,) = trace.events
        told.append((name, event.done is not None and event.issued < event.done <= event.waited_until))
    return told


def test_the_end_of_every_asynchronous_collective_is_known():
    for told in run_ranks(all_asynchronous, 2, timeout=60):
        assert told == [(name, True) for name in ASYNCHRONOUS]


def messages() -> Trace:
    other = 1 - dist.get_rank()
    with trace_collectives() as trace:
        for work in (dist.isend(torch.ones(3), other), dist.irecv(torch.ones(3), other)):
            work.wait()
        dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, torch.ones(3), other), dist.P2POp(dist.irecv, torch.ones(3), other)]
        )[1].wait()
        (dist.send if dist.get_rank() else dist.recv)(torch.ones(3), other)
    return trace


def test_of_messages_only_an_upper_bound_of_the_end_is_known():
    """gloo does not report their end: ``isend`` and ``irecv`` are known to be over once the wait is."""
    for trace in run_ranks(messages, 2):
        *posted, blocking = trace.events
        assert [event.done for event in posted] == [None] * 4
        assert [event.over for event in posted] == [event.waited_until for event in posted]
        assert sum(event.over is None for event in posted) == 1, "the one without a wait"
        assert blocking.done == blocking.waited_until


LEFT_BEHIND = """
import sys, time
import torch, torch.distributed as dist
from dlo_lib.comm.tracing.recorder import trace_collectives
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
x = torch.ones(1)
if rank == 0:
    with trace_collectives() as trace:
        dist.all_reduce(x, async_op=True)
    print(trace.events[0].done)
else:
    sys.stdin.read()
    time.sleep(0.5)
    dist.all_reduce(x)
    # The test is about the other rank. Without this, PyTorch aborts now and then when this one exits: gloo's
    # threads may outlive the process group, with a tracer or without.
    dist.destroy_process_group()
"""


def test_a_call_without_a_wait_may_end_while_the_process_exits(tmp_path):
    """Rank 0 has finished its program when rank 1 calls: gloo's thread then runs while Python shuts down."""
    command = [sys.executable, "-c", LEFT_BEHIND]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for rank in (0, 1)
    ]
    said = (line for line in ranks[0].stdout if not line.startswith(b"[Gloo]"))  # of PyTorch 2.8 and 2.9
    assert next(said) == b"None\n"
    ranks[1].communicate()
    ranks[0].communicate()
    assert [rank.returncode for rank in ranks] == [0, 0]


def event(
    kind: Kind, issued: float, done: float | None, waited_from: float | None, waited_until: float | None
) -> Event:
    return Event(
        0,
        Call(1, kind, "0", (0, 1), 1, payload_bytes=2048, is_async=True),
        issued,
        done,
        waited_from,
        waited_until,
    )


def test_the_summary_shows_the_hidden_share_of_the_communication():
    trace = Trace(
        [
            event(Kind.ALL_REDUCE, 0.0, 0.004, 0.003, 0.0041),
            event(Kind.ALL_REDUCE, 0.010, 0.014, 0.020, 0.0201),  # over before the wait: hidden in full
            event(Kind.SEND, 0.030, None, 0.031, 0.032),
            event(Kind.BROADCAST, 0.040, None, None, None),
        ]
    )
    header, *lines = trace.summary().splitlines()
    assert header.split() == [
        "operation",
        "calls",
        "payload",
        "ring",
        "communicating",
        "exposed",
        "hidden",
        "late",
        "ranks",
    ]
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines}
    assert rows["all_reduce"] == "2 4.0 KiB 4.0 KiB 8.0 ms 1.0 ms 88% -"
    assert rows["send"] == "1 2.0 KiB 2.0 KiB at most 2.0 ms 1.0 ms at most 50% -"
    assert rows["broadcast"] == "1 2.0 KiB 2.0 KiB 0.0 ms 0.0 ms - -"
