"""Every field of a call from torch.distributed, functional collectives, DDP, FSDP2,
DTensor and this library."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

import dlo_lib
from dlo_lib.comm.calls import Kind
from dlo_lib.comm.tracing.call_sites import call_site
from dlo_lib.comm.tracing.recorder import trace_collectives
from dlo_lib.comm.tracing.trace import Trace
from dlo_lib.launch import run_ranks


def of_torch_distributed() -> Trace:
    with trace_collectives() as trace:
        dist.all_reduce(torch.ones(3, 5, dtype=torch.bfloat16), dist.ReduceOp.MAX)
    return trace


def of_a_rooted_call_on_a_group() -> Trace:
    group = dist.new_group([0, 1])
    with trace_collectives() as trace:
        if dist.get_rank() < 2:
            dist.broadcast(torch.ones(7), src=1, group=group, async_op=True).wait()
    return trace


def of_messages() -> Trace:
    rank, world = dist.get_rank(), dist.get_world_size()
    with trace_collectives() as trace:
        works = [
            dist.isend(torch.ones(3), (rank + 1) % world, tag=4),
            dist.irecv(torch.ones(3), (rank - 1) % world, tag=4),
        ]
        for work in works:
            work.wait()
    return trace


def of_pytorchs_ddp() -> Trace:
    model = nn.parallel.DistributedDataParallel(nn.Linear(6, 5))
    with trace_collectives() as trace:
        model(torch.ones(2, 6)).sum().backward()
    return trace


def of_our_ddp() -> Trace:
    from dlo_lib.parallel.ddp import DDP

    model = DDP(nn.Linear(6, 5))
    with trace_collectives() as trace:
        model(torch.ones(2, 6)).sum().backward()
        model.finish_grad_sync()
    return trace


def of_fsdp2() -> Trace:
    from tests.fsdp2 import fully_shard

    model = nn.Linear(8, 12)
    fully_shard(model)
    with trace_collectives() as trace:
        model(torch.ones(2, 8)).sum().backward()
    return trace


def of_dtensor() -> Trace:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = distribute_tensor(torch.ones(12, 3), mesh, [Shard(0)])
    with trace_collectives() as trace:
        x.redistribute(mesh, [Replicate()]).to_local().sum().item()
    return trace


def of_functional_collectives() -> Trace:
    with trace_collectives() as trace:
        functional.all_reduce(torch.ones(9, dtype=torch.float64), "avg", dist.group.WORLD).sum().item()
    return trace


GRADIENTS = 6 * 5 + 5
"""Elements of the gradients of ``nn.Linear(6, 5)``."""
OUR_BUCKET = 40
"""The same in our buckets, in which every gradient starts at a multiple of 32 bytes."""
CALLS: dict[Callable[[], Trace], tuple] = {
    # kind, dtype, shape of a rank's part by the number of ranks, payload, reduction, asynchronous, in
    # backward, function of torch
    of_torch_distributed: (
        Kind.ALL_REDUCE,
        "bfloat16",
        lambda world: (3, 5),
        30,
        "MAX",
        False,
        False,
        "all_reduce",
    ),
    of_a_rooted_call_on_a_group: (
        Kind.BROADCAST,
        "float32",
        lambda world: (7,),
        28,
        "",
        True,
        False,
        "broadcast",
    ),
    of_pytorchs_ddp: (
        Kind.ALL_REDUCE,
        "float32",
        lambda world: (GRADIENTS,),
        4 * GRADIENTS,
        "SUM",
        True,
        True,
        "backward",
    ),
    of_our_ddp: (
        Kind.ALL_REDUCE,
        "float32",
        lambda world: (OUR_BUCKET,),
        4 * OUR_BUCKET,
        "SUM",
        True,
        True,
        "all_reduce",
    ),
    of_functional_collectives: (
        Kind.ALL_REDUCE,
        "float64",
        lambda world: (9,),
        72,
        "AVG",
        True,
        False,
        "all_reduce",
    ),
    of_dtensor: (
        Kind.ALL_GATHER,
        "float32",
        lambda world: (12 // world, 3),
        144,
        "",
        True,
        False,
        "redistribute",
    ),
    of_fsdp2: (
        Kind.ALL_GATHER,
        "float32",
        lambda world: (12 // world * 9,),
        432,
        "",
        False,
        False,
        "_pre_forward",
    ),
}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("program", CALLS, ids=lambda program: program.__name__)
def test_all_fields_are_known(program, world):
    kind, dtype, shape, payload, reduction, is_async, in_backward, api = CALLS[program]
    members = (0, 1) if program is of_a_rooted_call_on_a_group else tuple(range(world))
    share = {
        Kind.ALL_REDUCE: 2 * (world - 1) / world,
        Kind.ALL_GATHER: (world - 1) / world,
        Kind.BROADCAST: 1,
    }[kind]
    lines, first = inspect.getsourcelines(program)
    traces = run_ranks(program, world, timeout=60)
    for rank in members:
        event = traces[rank].events[0]
        call = event.call
        assert (event.rank, call.kind, call.members, call.peer) == (
            rank,
            kind,
            members,
            1 if kind is Kind.BROADCAST else -1,
        )
        assert (call.dtype, call.shape, call.numel) == (dtype, shape(world), torch.Size(call.shape).numel())
        assert (call.payload_bytes, call.reduction) == (payload, reduction)
        assert call.ring_bytes == pytest.approx(payload * share)
        assert (call.is_async, call.in_backward, call.by_reducer) == (
            is_async,
            in_backward,
            program is of_pytorchs_ddp,
        )
        assert event.issued <= event.waited_from <= event.waited_until
        assert event.issued < event.done <= event.waited_until
        assert (call.site.file, call.site.function, call.site.api) == (__file__, program.__name__, api)
        assert first < call.site.line < first + len(lines)
    assert [trace.events for trace in traces if trace.events and trace.events[0].rank not in members] == []


@pytest.mark.parametrize("world", [2, 3])
def test_all_fields_of_a_message_are_known(world):
    for rank, trace in enumerate(run_ranks(of_messages, world)):
        sent, received = trace.events
        assert (sent.call.kind, sent.call.peer, sent.call.tag) == (Kind.SEND, (rank + 1) % world, 4)
        assert (received.call.kind, received.call.peer, received.call.tag) == (
            Kind.RECV,
            (rank - 1) % world,
            4,
        )
        assert (sent.call.ring_bytes, received.call.ring_bytes) == (12, 0), "counted at the sender"
        for event in (sent, received):
            assert (event.call.dtype, event.call.shape, event.call.payload_bytes, event.call.is_async) == (
                "float32",
                (3,),
                12,
                True,
            )
            assert event.issued <= event.waited_from <= event.waited_until
            assert event.call.site.api == "isend" if event is sent else "irecv"


def of_our_fsdp() -> Trace:
    from dlo_lib.parallel import FSDP

    model = FSDP(nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 4)))
    with trace_collectives() as trace:
        model(torch.ones(2, 8)).sum().backward()
    return trace


@pytest.mark.parametrize("world", [2, 3])
def test_calls_of_the_library_have_the_users_line(world):
    for trace in run_ranks(of_our_fsdp, world):
        assert trace.count() > 0
        assert {(event.call.site.file, event.call.site.function) for event in trace.events} == {
            (__file__, "of_our_fsdp")
        }
        for event in trace.events:
            if event.call.kind.point_to_point:
                assert event.call.is_async, "known from the function of torch that the library called"


@pytest.mark.parametrize("decorate", [lambda function: function, torch.no_grad()], ids=["plain", "no_grad"])
def test_a_call_of_a_helper_has_the_line_that_called_it(decorate):
    helper = decorate(lambda: call_site())
    site, _ = helper()
    assert site.caller == (__file__, site.line + 1)


def test_a_function_that_is_not_called_by_user_code_has_no_caller():
    found: list = []
    thread = threading.Thread(target=lambda: found.append(call_site()))
    thread.start()
    thread.join()
    ((site, _),) = found
    assert site.file == __file__
    assert site.caller is None


def test_without_user_code_the_call_site_is_the_librarys_line():
    """As in ``python -m dlo_lib.train``, here in a thread, whose first frames are the standard library's."""
    file = str(Path(dlo_lib.__file__).parent / "train/loop.py")
    inside: dict = {"call_site": call_site, "found": []}
    exec(compile("def step():\n    found.append(call_site())", file, "exec"), inside)
    thread = threading.Thread(target=inside["step"])
    thread.start()
    thread.join()
    ((site, _),) = inside["found"]
    assert (site.file, site.line, site.function) == (file, 2, "step")
