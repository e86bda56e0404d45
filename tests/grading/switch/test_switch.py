"""The switch as a process group gives the results of gloo, and raises for unsupported operations."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import Linear, ReLU, Sequential
from torch.nn.parallel import DistributedDataParallel

from dlo_lib.base.torch_compat import RELEASE
from dlo_lib.comm.calls import Kind
from dlo_lib.grading.checks.contract import Nudge, Wrong
from dlo_lib.grading.switch.backend import join
from dlo_lib.grading.switch.local import LocalSwitch, connected_link
from dlo_lib.launch import Explain, RankFailure, run_ranks

Work = Callable[[], Any]


def _on_switch(work: Work, path: str) -> Any:
    rank, world = dist.get_rank(), dist.get_world_size()
    with connected_link(path, rank) as link:
        join(link, rank, world)
        return work()


def on_switch(work: Work, world: int, nudge: Nudge | None = None) -> tuple[list[Any], LocalSwitch]:
    """Return the results of ``work`` on ranks of the switch, and the switch."""
    results: list[Any] = []
    failure = None
    with LocalSwitch(world, nudge) as switch:
        try:
            # The switch explains; run_ranks would do so too.
            results = run_ranks(_on_switch, world, work, switch.path, timeout=60, explain=Explain.OFF)
        except RankFailure as error:
            failure = error
    if switch.verdict is not None:
        raise switch.verdict
    if failure is not None:
        raise failure
    return results, switch


def calls(switch: LocalSwitch, rank: int) -> list[Kind]:
    assert switch.service is not None
    return [call.kind for call in switch.service.exchange.calls(rank)]


def same(got: Any, want: Any) -> bool:
    if isinstance(want, Tensor):
        return (
            got.dtype == want.dtype
            and got.shape == want.shape
            and torch.allclose(got.double(), want.double(), rtol=1e-5, atol=1e-6)
        )
    if isinstance(want, (list, tuple)):
        return len(got) == len(want) and all(map(same, got, want))
    return bool(got == want)


def mine(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers that depend on the rank, the same on every backend."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    return (torch.randn(*shape, generator=generator) * 8).to(dtype)


def freed_and_used_again() -> list[Tensor]:
    """Free tensors that were sent and received, as FSDP does, and allocate them again."""
    row, whole = mine(7), torch.zeros(7 * dist.get_world_size())
    dist.all_gather_into_tensor(whole, row)
    large, total = mine(40_000), torch.zeros(40_000)
    dist.all_reduce(large)
    total.copy_(large)
    gathered = whole.clone()
    for tensor in (row, whole, large):
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        storage.resize_(size)
        tensor.fill_(1)
    return [gathered, total, row + whole[:7] + large[:7]]


def test_tensors_of_messages_can_be_freed() -> None:
    got, _ = on_switch(freed_and_used_again, 2)
    assert same(got, run_ranks(freed_and_used_again, 2, explain=Explain.OFF))


# -- each operation, against gloo


def reductions() -> list[Tensor]:
    results = []
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
    ):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
            tensor = torch.full((5,), 1 + dist.get_rank()).to(dtype) + torch.arange(5).to(dtype)
            dist.all_reduce(tensor, op)
            results.append(tensor)
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        tensor = torch.arange(4) + dist.get_rank()
        dist.all_reduce(tensor, op)
        results.append(tensor)
    return results


def one_and_all() -> list[Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    strided = mine(6, 4).t()  # not contiguous
    dist.all_reduce(strided)
    from_last = mine(3)
    dist.broadcast(from_last, world - 1)
    to_one = mine(2, 2)
    dist.reduce(to_one, 1)
    everyone = [torch.empty(7) for _ in range(world)]
    dist.all_gather(everyone, mine(7))
    joined = torch.empty(world * 2, 3)
    dist.all_gather_into_tensor(joined, mine(2, 3))
    gathered = [torch.empty(4) for _ in range(world)] if rank == 0 else None
    dist.gather(mine(4), gathered, 0)
    given = torch.empty(3)
    dist.scatter(given, [mine(3) + r for r in range(world)] if rank == 0 else None, 0)
    share = torch.empty(2)
    dist.reduce_scatter_tensor(share, mine(2 * world))
    part = torch.empty(3)
    dist.reduce_scatter(part, [mine(3) + r for r in range(world)])
    dist.barrier()
    nothing = torch.empty(0)
    dist.all_reduce(nothing)
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar)
    return [
        strided,
        from_last,
        to_one if rank == 1 else 0,
        everyone,
        joined,
        gathered or 0,
        given,
        share,
        part,
        nothing,
        scalar,
    ]


def each_to_each() -> list[Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = [rank + r + 1 for r in range(world)]  # uneven, and symmetric
    got = torch.empty(sum(sizes), 2)
    dist.all_to_all_single(got, mine(sum(sizes), 2), sizes, sizes)
    even = torch.empty(world * 2)
    dist.all_to_all_single(even, mine(world * 2))
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank, "text": "é" * rank})
    shared = [["from", 1]] if rank == 1 else [None]
    dist.broadcast_object_list(shared, 1)
    return [got, even, objects, shared]


def messages() -> list[Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world, (rank - 1) % world
    got = torch.empty(3)
    ring = [dist.P2POp(dist.isend, mine(3), right), dist.P2POp(dist.irecv, got, left)]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    tagged = [torch.empty(2), torch.empty(2)]
    if rank == 0:
        for tag in (7, 8):
            dist.send(mine(2) + tag, 1, tag=tag)
    if rank == 1:  # in the other order
        waiting = [dist.irecv(tagged[tag - 7], 0, tag=tag) for tag in (8, 7)]
        for request in waiting:
            assert request is not None
            request.wait()
    anybody = []
    if rank == 0:
        box = torch.empty(1)
        anybody = sorted((dist.recv(box, tag=3), float(box)) for _ in range(world - 1))
    else:
        dist.send(torch.tensor([float(rank)]), 0, tag=3)
    return [got, tagged if rank == 1 else 0, anybody]


def groups() -> list[Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([0, world - 1]), dist.new_group([r for r in range(world) if r % 2 == 0])]
    results: list[Any] = []
    for pair in pairs:
        tensor = mine(3)
        if rank in dist.get_process_group_ranks(pair):
            dist.all_reduce(tensor, group=pair)
            dist.broadcast(tensor, dist.get_process_group_ranks(pair)[-1], group=pair)
        results.append(tensor)
    return results


def asynchronous() -> list[Any]:
    tensors = [mine(4) + i for i in range(5)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    other = mine(2)
    later = dist.all_reduce(other, async_op=True).get_future().then(lambda done: done.value()[0] * 2)
    first = dist.all_reduce(mine(2), async_op=True).get_future()
    twice = first.then(lambda done: dist.all_reduce(done.value()[0], async_op=True).get_future().wait()[0])
    nested = twice.wait()  # before another call: its order among the ranks would be open
    polled = mine(2)
    polling = dist.all_reduce(polled, async_op=True)
    while not polling.is_completed():
        pass
    return [tensors, later.wait(), nested, polled]


def functional_collectives() -> list[Any]:
    world = dist.get_world_size()
    group = dist.group.WORLD
    return [
        functional.all_reduce(mine(3), "sum", group) + 0,
        functional.all_gather_tensor(mine(2, 3), 0, group) + 0,
        functional.reduce_scatter_tensor(mine(2 * world, 2), "sum", 0, group) + 0,
        functional.all_to_all_single(mine(world * 2), None, None, group) + 0,
        [tensor + 0 for tensor in functional.all_reduce_coalesced([mine(2), mine(3)], "sum", group)],
        [tensor + 0 for tensor in functional.all_gather_into_tensor_coalesced([mine(2), mine(3)], group)],
        [
            tensor + 0
            for tensor in functional.reduce_scatter_tensor_coalesced(
                [mine(world), mine(2 * world)], "sum", [0, 0], group
            )
        ],
    ]


EVERY = [reductions, one_and_all, each_to_each, messages, groups, asynchronous, functional_collectives]


def every_operation() -> list[Any]:
    return [operation() for operation in EVERY]


@pytest.mark.parametrize("world", [2, 3])
def test_every_operation_gives_the_result_of_gloo(world: int) -> None:
    want = run_ranks(every_operation, world, timeout=60)
    got, _ = on_switch(every_operation, world)
    for rank in range(world):
        for operation, ours, theirs in zip(EVERY, got[rank], want[rank]):
            assert same(ours, theirs), (operation.__name__, rank, ours, theirs)


SHAPES = [  # of the part and of the whole tensor, on two ranks
    ((6,), (12,)), ((2, 3), (4, 3)), ((1, 6), (2, 6)),
    ((6,), (2, 6)), ((2, 3), (2, 2, 3)), ((2, 3), (12,)), ((2, 3), (4, 1, 3)),
]  # fmt: skip


def accepted_shapes() -> list[tuple[bool, bool]]:
    """Whether an all-gather and a reduce-scatter of these shapes run."""
    found = []
    for part, whole in SHAPES:
        runs = []
        for call in (
            lambda part=part, whole=whole: dist.all_gather_into_tensor(torch.empty(whole), torch.ones(part)),
            lambda part=part, whole=whole: dist.reduce_scatter_tensor(torch.empty(part), torch.ones(whole)),
        ):
            try:
                call()
                runs.append(True)
            except RuntimeError:
                runs.append(False)
        found.append(tuple(runs))
    return found


@pytest.mark.skipif(
    RELEASE < (2, 10), reason="NOT TESTED HERE: gloo of PyTorch 2.8 and 2.9 ends the process at a wrong shape"
)
def test_shapes_that_gloo_refuses_are_refused() -> None:
    """What passes a check must run in the notebook, whose ranks use gloo."""
    want = run_ranks(accepted_shapes, 2, timeout=60)
    got, _ = on_switch(accepted_shapes, 2)
    assert got == want
    assert [runs for runs, _ in want[0]] == [True] * 3 + [False] * 4


def refused_sizes() -> list[str]:
    """What is said of a flat input without padding, one with too many dimensions, and a short output."""
    said = []
    for call in (
        lambda: dist.reduce_scatter_tensor(torch.empty(4), torch.ones(7)),
        lambda: dist.reduce_scatter_tensor(torch.empty(4), torch.ones(2, 4)),
        lambda: dist.all_gather_into_tensor(torch.empty(7), torch.ones(4)),
    ):
        with pytest.raises(RuntimeError) as refused:
            call()
        said.append(str(refused.value))
    return said


def test_a_wrong_size_and_a_wrong_shape_have_different_messages() -> None:
    (said, _), _ = on_switch(refused_sizes, 2)
    unpadded, shaped, short = said
    assert unpadded.endswith("(8,): it has 7 numbers instead of 8, so append zeros (padding)")
    assert shaped.endswith("(8,): pass it with .view(-1)")
    assert short.endswith("(8,): it has 7 numbers instead of 8")


def averages() -> list[Any]:
    world = dist.get_world_size()
    mean = mine(4)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    doubled = mine(4)
    dist.all_reduce(doubled, dist._make_nccl_premul_sum(2.0))
    truth = torch.tensor([dist.get_rank() == 0, True, False])
    dist.all_reduce(truth)
    into = [[torch.empty(2 + r) for r in range(world)]]
    dist.all_gather(into[0], torch.full((2 + dist.get_rank(),), float(dist.get_rank())))  # uneven
    swapped = list(torch.empty(world, 2).unbind())
    dist.all_to_all(swapped, list(mine(world, 2).unbind()))
    with dist.distributed_c10d._coalescing_manager():
        both = [mine(2), mine(3)]
        for tensor in both:
            dist.all_reduce(tensor)
    return [mean, doubled, truth, into, swapped, both]


def test_operations_that_gloo_lacks() -> None:
    results, _ = on_switch(averages, 2)
    ranks = [(torch.randn(4, generator=torch.Generator().manual_seed(100 + rank)) * 8) for rank in range(2)]
    for rank, (mean, doubled, truth, into, swapped, both) in enumerate(results):
        assert same(mean, sum(ranks) / 2)
        assert same(doubled, 2 * sum(ranks))
        assert truth.tolist() == [True, True, False]
        assert [tensor.tolist() for tensor in into[0]] == [[0.0] * 2, [1.0] * 3]
        assert same(torch.stack(swapped), torch.stack([r.view(2, 2)[rank] for r in ranks]))
        assert same(
            both[0],
            sum(
                r[:2]
                for r in [
                    (torch.randn(2, generator=torch.Generator().manual_seed(100 + k)) * 8) for k in range(2)
                ]
            ),
        )


# -- parallelism of PyTorch


def network() -> Sequential:
    torch.manual_seed(3)
    return Sequential(Linear(8, 16), ReLU(), Linear(16, 4))


def gradients(model: torch.nn.Module) -> list[Tensor]:
    return [
        p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        for p in model.parameters()
        if p.grad is not None
    ]


def data_parallel() -> list[Tensor]:
    model = DistributedDataParallel(network(), bucket_cap_mb=1e-4)
    for _ in range(2):
        model.zero_grad()
        model(mine(5, 8)).square().mean().backward()
    return gradients(model)


def fully_sharded() -> list[Tensor]:
    model = network()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model(mine(5, 8)).square().mean().backward()
    return gradients(model)


def tensor_parallel() -> list[Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(network(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    out = model(torch.ones(3, 8))
    out.square().mean().backward()
    spread = distribute_tensor(torch.arange(12.0).view(6, 2), mesh, [Shard(0)])
    return [
        out.detach(),
        *gradients(model),
        spread.redistribute(mesh, [Replicate()]).to_local(),
        spread.redistribute(mesh, [Shard(1)]).to_local(),
    ]


def two_by_two() -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = network()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    model(torch.randn(5, 8, generator=generator)).square().mean().backward()
    return gradients(model)


@pytest.mark.parametrize(
    ("work", "world"), [(data_parallel, 2), (fully_sharded, 2), (tensor_parallel, 2), (two_by_two, 4)]
)
def test_parallelism_of_pytorch_runs_on_the_switch(work: Work, world: int) -> None:
    want = run_ranks(work, world, timeout=60)
    got, switch = on_switch(work, world)
    for rank in range(world):
        assert same(got[rank], want[rank]), rank
    assert calls(switch, 0) == calls(switch, 1)


# -- recorded calls


def a_few() -> None:
    dist.all_reduce(torch.ones(6))
    dist.all_gather_into_tensor(torch.empty(8, dtype=torch.bfloat16), torch.ones(4, dtype=torch.bfloat16))
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), 1, tag=5)
    else:
        dist.recv(torch.empty(3), 0, tag=5)


def gathered_in_one_tensor() -> list[list[float]]:
    whole = torch.empty(4) if dist.get_rank() == 1 else None
    dist.gather_single(mine(2), whole, dst=1)
    return [[] if whole is None else whole.tolist(), mine(2).tolist()]


@pytest.mark.skipif(not hasattr(dist, "gather_single"), reason="PyTorch 2.15 has it first")
def test_a_gather_into_one_tensor() -> None:
    (nothing, first), (whole, second) = on_switch(gathered_in_one_tensor, 2)[0]
    assert nothing == []
    assert whole == first + second


def blocking_and_asynchronous() -> None:
    """Call each collective twice: torch waits, then the program does."""
    rank, x, rows = dist.get_rank(), torch.ones(4), [torch.ones(4), torch.ones(4)]
    for is_async in (False, True):
        for work in (
            dist.all_reduce(x, async_op=is_async),
            dist.reduce(x, 0, async_op=is_async),
            dist.broadcast(x, 0, async_op=is_async),
            dist.all_gather(rows, x, async_op=is_async),
            dist.gather(x, rows if rank == 0 else None, 0, async_op=is_async),
            dist.scatter(x, rows if rank == 0 else None, 0, async_op=is_async),
            dist.reduce_scatter(x, rows, async_op=is_async),
            dist.all_to_all_single(torch.empty(4), x, async_op=is_async),
            dist.all_gather_into_tensor(torch.empty(8), x, async_op=is_async),
            dist.reduce_scatter_tensor(torch.empty(2), x, async_op=is_async),
            dist.barrier(async_op=is_async),
        ):
            if is_async:
                work.wait()


def test_blocking_and_asynchronous_calls_are_distinguished() -> None:
    """A lab refuses blocking calls."""
    _, switch = on_switch(blocking_and_asynchronous, 2)
    assert switch.service is not None
    asked = [(call.kind, call.is_async) for call in switch.service.exchange.calls(0)]
    kinds = [kind for kind, _ in asked[:11]]
    assert asked == [*((kind, False) for kind in kinds), *((kind, True) for kind in kinds)]


def test_completed_calls_are_recorded() -> None:
    _, switch = on_switch(a_few, 2)
    assert calls(switch, 0) == [Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.SEND]
    assert calls(switch, 1) == [Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.RECV]
    assert switch.service is not None
    reduce, gather, send = switch.service.exchange.calls(0)
    assert (reduce.payload_bytes, reduce.ring_bytes, reduce.site.function) == (24, 24.0, "a_few")
    assert (gather.payload_bytes, gather.ring_bytes, gather.dtype) == (16, 8.0, "bfloat16")
    assert (send.peer, send.tag, send.payload_bytes) == (1, 5, 12)


def twice() -> list[Tensor]:
    tensor = torch.zeros(4)
    dist.all_reduce(tensor)
    first = tensor.clone()
    dist.all_reduce(tensor)
    return [first, tensor]


def test_a_nudge_alters_one_value_of_one_rank() -> None:
    results, switch = on_switch(twice, 2, Nudge(Kind.ALL_REDUCE, rank=1, call=0, element=2, by=0.5))
    assert [tensor.tolist() for tensor in results[0]] == [[0, 0, 0, 0], [0, 0, 0.5, 0]]
    assert [tensor.tolist() for tensor in results[1]] == [[0, 0, 0.5, 0], [0, 0, 0.5, 0]]
    assert switch.service is not None
    assert switch.service.exchange.nudged


# -- errors


def crossed() -> None:
    rank = dist.get_rank()
    dist.recv(torch.empty(2), 1 - rank)
    dist.send(torch.ones(2), 1 - rank)


def one_call_too_few() -> None:
    if dist.get_rank() != 1:
        dist.all_reduce(torch.ones(2))


def different_calls() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(2))
    else:
        dist.broadcast(torch.ones(2), 0)


def different_sizes() -> None:
    dist.all_reduce(torch.ones(2 + dist.get_rank()))


def only_members_make_the_group() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), group=dist.new_group([0]))
    dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1]))


def wrong_split() -> None:
    dist.all_to_all_single(torch.empty(4), torch.ones(4), [2, 2], [1, 3])


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (crossed, "Ranks 0 and 1 both call recv first and wait for each other"),
        (one_call_too_few, "DEADLOCK: rank 0 waits"),
        (different_calls, "the ranks call different operations"),
        (different_sizes, "the ranks pass tensors of different sizes"),
        (only_members_make_the_group, "new_group must be called by every rank of the world"),
        (wrong_split, "MISMATCH in call 1 on world: rank 0 sends 1 elements to rank 0, which expects 2"),
    ],
)
def test_calls_that_cannot_match_are_reported_at_once(work: Work, words: str) -> None:
    with pytest.raises(Wrong) as error:
        on_switch(work, 2)
    assert words in str(error.value)
    assert "rank" in str(error.value)


def a_complex_tensor() -> None:
    if RELEASE >= (2, 9):  # before, gloo refuses it too
        dist.broadcast(torch.ones(2, dtype=torch.complex64), 0)
    dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn))


def bits_of_floats() -> None:
    dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND)


def behind_its_back() -> None:
    dist.group.WORLD._get_backend(torch.device("cpu")).allreduce([torch.ones(2)])


def not_there() -> None:
    dist.group.WORLD.monitored_barrier()


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (a_complex_tensor, "float8_e4m3fn"),
        pytest.param(
            behind_its_back,
            "raised",
            marks=pytest.mark.skipif(
                RELEASE < (2, 10),
                reason="NOT TESTED HERE: before PyTorch 2.10 the backend below cannot raise",
            ),
        ),
        (not_there, "has no monitored_barrier"),
    ],
)
def test_unsupported_operations_raise(work: Work, words: str) -> None:
    with pytest.raises(RankFailure, match=words):
        on_switch(work, 2)


def test_bitwise_reductions_of_floats_are_refused() -> None:
    with pytest.raises(Wrong, match="BAND is not defined for torch.float32"):
        on_switch(bits_of_floats, 2)


def one_fails() -> None:
    if dist.get_rank() == 1:
        raise ValueError("mine alone")
    dist.all_reduce(torch.ones(1))


def test_a_rank_that_raises_is_reported_instead_of_waiting_ranks() -> None:
    with pytest.raises(RankFailure, match="rank 1 raised ValueError: mine alone"):
        on_switch(one_fails, 2)


def test_no_thread_is_left_after_a_failure() -> None:
    before = threading.active_count()
    with pytest.raises(Wrong):
        on_switch(crossed, 2)
    assert threading.active_count() == before
