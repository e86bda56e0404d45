"""Mistakes with object collectives, sub-groups, functional collectives, DTensor, PyTorch's DDP and FSDP2."""

import contextlib
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from dlo_lib.launch import DeadLock, Explain, RankFailure, run_ranks


def me() -> tuple[int, int, torch.Tensor]:
    return dist.get_rank(), dist.get_world_size(), torch.full((4,), float(dist.get_rank()))


def gathers_where_others_reduce():
    rank, world, x = me()
    if rank == 0:
        dist.all_gather([torch.zeros(4) for _ in range(world)], x)
    else:
        dist.all_reduce(x)


def gathered_sizes_differ():
    rank, world, _ = me()
    dist.all_gather([torch.zeros(4 + rank) for _ in range(world)], torch.ones(4 + rank))


def large_sizes_differ():
    rank, _, _ = me()
    dist.all_reduce(torch.ones(100_000 * (1 + rank)))


def roots_of_a_scatter_differ():
    rank, world, x = me()
    root = min(rank, 1)
    dist.scatter(x, [torch.ones(4)] * world if rank == root else None, src=root)


def a_message_is_shorter_than_expected():
    rank, _, _ = me()
    if rank == 0:
        dist.send(torch.ones(4), 1)
    if rank == 1:
        dist.recv(torch.zeros(8), 0)


def a_message_is_of_another_type():
    rank, _, _ = me()
    if rank == 0:
        dist.send(torch.ones(4), 1)
    if rank == 1:
        dist.recv(torch.zeros(4, dtype=torch.int32), 0)


def all_ranks_receive_first():
    rank, world, x = me()
    dist.recv(x, (rank - 1) % world)
    dist.send(x, (rank + 1) % world)


def a_batch_of_messages_lacks_a_receive():
    rank, world, x = me()
    operations = [dist.P2POp(dist.isend, x, (rank + 1) % world)]
    if rank != 1:
        operations.append(dist.P2POp(dist.irecv, torch.zeros(4), (rank - 1) % world))
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def sends_before_a_barrier_that_comes_first_elsewhere():
    rank, _, x = me()
    if rank == 0:
        dist.send(x, 1)
        dist.barrier()
    else:
        dist.barrier()
        if rank == 1:
            dist.recv(x, 0)


def receives_from_any_rank_when_no_rank_sends():
    rank, _, x = me()
    if rank == 0:
        dist.recv(x)


def a_monitored_barrier_on_some():
    rank, _, _ = me()
    if rank != 1:
        dist.monitored_barrier(timeout=timedelta(minutes=5))


def a_monitored_barrier_meets_another():
    rank, _, _ = me()
    dist.barrier() if rank else dist.monitored_barrier(timeout=timedelta(minutes=5))


def an_object_is_gathered_on_some():
    rank, world, _ = me()
    if rank != 1:
        dist.all_gather_object([None] * world, {"rank": rank})


def an_object_is_broadcast_from_two_roots():
    rank, _, _ = me()
    dist.broadcast_object_list([rank], src=min(rank, 1))


def a_group_is_made_by_one_of_its_members():
    rank, _, _ = me()
    if rank == 0:
        dist.new_group([0, 1])


def a_sub_group_waits_for_a_member_that_left():
    rank, _, x = me()
    group = dist.new_group([0, 1])
    if rank == 0:
        dist.all_reduce(x, group=group)


def an_asynchronous_call_is_waited_for_and_never_matched():
    rank, _, x = me()
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        torch.ones(10).sum()
        work.wait()


def joins_again_without_rank_1():
    rank, world, _ = me()
    file = f"{os.environ['DLO_HOME']}/meet-{world}"  # a folder of this test
    dist.barrier()
    dist.destroy_process_group()
    if rank != 1:
        dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)


def a_rank_leaves_the_process_group_early():
    rank, _, x = me()
    for step in range(3):
        dist.all_reduce(x)
        if rank == 1 and step == 1:
            dist.destroy_process_group()
            return


def new_groups_in_different_orders():
    rank, world, x = me()
    pairs = [[0, 1], [0, world - 1], list(range(world))]
    groups = [dist.new_group(pair) for pair in (pairs if rank == 0 else reversed(pairs))]
    dist.all_reduce(x, group=groups[0])


def a_batch_sends_to_a_wrong_rank():
    rank, world, x = me()
    operations = [
        dist.P2POp(dist.isend, x, (rank + (2 if rank == 1 else 1)) % world),
        dist.P2POp(dist.irecv, torch.zeros(4), (rank - 1) % world),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def all_send_and_receive_to_the_left():
    rank, world, x = me()
    left = (rank - 1) % world
    works = [dist.isend(x, left), dist.irecv(torch.zeros(4), left)]
    for work in works:
        work.wait()


def a_helper_thread_waits_for_ever():
    rank, _, x = me()
    if rank == 0:
        helper = threading.Thread(target=lambda: dist.all_reduce(x))
        helper.start()
        helper.join()


def a_pool_waits_for_ever():
    rank, _, x = me()
    if rank == 0:
        with ThreadPoolExecutor(2) as pool:
            pool.submit(lambda: dist.all_reduce(x)).result()


def functional_on_rank_0_only():
    import torch.distributed._functional_collectives as functional

    rank, world, x = me()
    if rank == 0:
        functional.all_reduce(x, "sum", list(range(world))).sum().item()


def a_dtensor_is_printed_on_rank_0_only():
    rank, world, _ = me()
    mesh = init_device_mesh("cpu", (world,))
    x: DTensor = distribute_tensor(torch.arange(4.0 * world), mesh, [Shard(0)])
    if rank == 0:
        print(x.full_tensor())


def gradients_of_fsdp2_are_clipped_on_rank_0_only():
    from tests.fsdp2 import fully_shard

    model = nn.Linear(8, 8)
    fully_shard(model)
    model(torch.ones(2, 8)).sum().backward()
    if dist.get_rank() == 0:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert isinstance(norm, DTensor)
        assert norm.full_tensor() > 0


class Skipping(nn.Module):
    """Rank 1 skips the second of three units."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, unit in enumerate(self.units):
            if not (number == 1 and dist.get_rank() == 1):
                x = unit(x)
        return x


def fsdp2_skips_a_unit_on_rank_1():
    from tests.fsdp2 import fully_shard

    model = Skipping()
    for unit in model.units:
        fully_shard(unit)
    fully_shard(model)
    model(torch.ones(2, 8)).sum().backward()


def ddp_skips_a_unit_on_rank_1():
    model = nn.parallel.DistributedDataParallel(Skipping(), bucket_cap_mb=1e-4)
    model(torch.ones(2, 8)).sum().backward()


def pytorchs_ddp_is_left_early_and_a_barrier_follows():
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    for _ in range(2 + (dist.get_rank() == 0)):
        model(torch.ones(2, 4)).sum().backward()
    dist.barrier()


def ddp_accumulates_without_sync_on_rank_1_only():
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    with model.no_sync() if dist.get_rank() == 1 else contextlib.nullcontext():
        model(torch.ones(2, 4)).sum().backward()


def fsdp2_evaluates_on_rank_0_only():
    from tests.fsdp2 import fully_shard

    model = nn.Linear(8, 8)
    fully_shard(model)
    model(torch.ones(2, 8)).sum().backward()
    if dist.get_rank() == 0:
        with torch.no_grad():
            model(torch.ones(2, 8))


MISTAKES: dict[Callable[[], None], str] = {
    gathers_where_others_reduce: (
        r"MISMATCH in call 1 on world: the ranks call different operations.*rank 0 +all_gather.*all_reduce"
    ),
    gathered_sizes_differ: r"the ranks pass tensors of different sizes.*float32\[4\].*float32\[5\]",
    large_sizes_differ: r"the ranks pass tensors of different sizes.*float32\[100000\].*float32\[200000\]",
    roots_of_a_scatter_differ: r"the ranks name different roots.*scatter from rank 0.*scatter from rank 1",
    a_message_is_shorter_than_expected: (
        r"message 1 from rank 0 to rank 1 is sent as float32\[4\] and received as float32\[8\]"
    ),
    a_message_is_of_another_type: r"is sent as float32\[4\] and received as int32\[4\]",
    all_ranks_receive_first: (
        r"Each of these ranks receives first, and none of them sends: 0 → |Ranks 0 and 1 both call recv first"
    ),
    a_batch_of_messages_lacks_a_receive: (
        r"Rank 0 waits for a recv that rank 1 will never make|rank 1.*waits in send"
    ),
    sends_before_a_barrier_that_comes_first_elsewhere: (
        r"Rank 0 waits for a recv by rank 1, which waits in barrier"
    ),
    receives_from_any_rank_when_no_rank_sends: (
        r"Rank 0 waits for a message from any rank, and no rank will send one with tag 0"
    ),
    a_monitored_barrier_on_some: (
        r"monitored_barrier needs every rank of world, and rank 1 returned after 0 calls"
    ),
    a_monitored_barrier_meets_another: r"the ranks call different operations.*monitored_barrier\b",
    an_object_is_gathered_on_some: r"all_gather needs every rank of world, and rank 1 returned after 0 calls",
    an_object_is_broadcast_from_two_roots: r"the ranks name different roots",
    a_group_is_made_by_one_of_its_members: (
        r"new_group must be called by every rank of the world.*: rank 1 did not call it"
    ),
    a_sub_group_waits_for_a_member_that_left: (
        r"all_reduce needs every rank of group \{0, 1\}, and rank 1 returned after 0 calls"
    ),
    an_asynchronous_call_is_waited_for_and_never_matched: (
        r"all_reduce needs every rank of world, and ranks? 1.* returned"
    ),
    joins_again_without_rank_1: (
        r"init_process_group returns when every rank has called it: ranks? 0.* called it, rank 1 did not"
    ),
    a_rank_leaves_the_process_group_early: (
        r"all_reduce needs every rank of world, and rank 1 called destroy_process_group after 2 calls on it "
        r"while the others are at call 3.*1 +has left the process group"
    ),
    a_helper_thread_waits_for_ever: r"all_reduce needs every rank of world, and ranks? 1.* returned after 0",
    a_pool_waits_for_ever: r"all_reduce needs every rank of world, and ranks? 1.* returned after 0 calls",
    functional_on_rank_0_only: r"all_reduce needs every rank of world, and ranks? 1.* returned after 0 calls",
    a_dtensor_is_printed_on_rank_0_only: (
        r"all_gather needs every rank of (world|group \{0, 1.*\}), and ranks? 1"
    ),
    gradients_of_fsdp2_are_clipped_on_rank_0_only: (
        r"all_reduce needs every rank of (world|group \{0, 1.*\}), and ranks? 1"
    ),
    fsdp2_skips_a_unit_on_rank_1: r"MISMATCH.*all_gather.*reduce_scatter|DEADLOCK",
    ddp_skips_a_unit_on_rank_1: r"DDP's gradient all_reduce",
    ddp_accumulates_without_sync_on_rank_1_only: (
        r"all_reduce needs every rank of world, and rank 1 returned .*DDP's gradient all_reduce"
    ),
    fsdp2_evaluates_on_rank_0_only: r"DEADLOCK: rank 0 waits.*all_gather needs every rank of",
    pytorchs_ddp_is_left_early_and_a_barrier_follows: (
        r"the ranks call different operations.*DDP's gradient all_reduce.*barrier"
    ),
}


NEED_THREE_RANKS: dict[Callable[[], None], str] = {
    new_groups_in_different_orders: (
        r"MISMATCH: the ranks create different groups at the same time.*new_group\(\[0, 1.*"
        r"also for the groups of which it is not a member"
    ),
    a_batch_sends_to_a_wrong_rank: (
        r"Rank 1 sends to rank \d, which does not receive it, and rank 2 waits for a message from rank 1: "
        r"check the destination of the send"
    ),
    all_send_and_receive_to_the_left: (
        r"Rank 0 sends to rank \d, which does not receive it, and rank 1 waits for a message from rank 0: "
        r"check the destination of the send"
    ),
}
CASES = [(mistake, ranks) for mistake in MISTAKES for ranks in (2, 3, 4)]
CASES += [(mistake, ranks) for mistake in NEED_THREE_RANKS for ranks in (3, 4)]


@pytest.mark.parametrize(
    ("mistake", "world_size"), CASES, ids=[f"{mistake.__name__}-{ranks}" for mistake, ranks in CASES]
)
def test_a_mistake_is_explained(mistake, world_size):
    with pytest.raises(DeadLock) as caught:
        run_ranks(mistake, world_size, timeout=60)
    message = str(caught.value)
    assert re.search((MISTAKES | NEED_THREE_RANKS)[mistake], message, re.DOTALL), message
    assert "test_mismatched_calls.py, line" in message, "it names the user's line"


def processes() -> set[int]:
    """Return the children of this process and their children: the server that forks ranks, and ranks."""
    return {
        process.pid
        for process in psutil.Process().children(recursive=True)
        if process.status() != psutil.STATUS_ZOMBIE
    }


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_next_call_works_and_no_process_is_left(world_size):
    run_ranks(dist.get_rank, world_size)
    before = processes()
    for mistake in (
        large_sizes_differ,
        all_ranks_receive_first,
        ddp_skips_a_unit_on_rank_1,
        fsdp2_skips_a_unit_on_rank_1,
    ):
        with pytest.raises(DeadLock):
            run_ranks(mistake, world_size)
        assert run_ranks(dist.get_rank, world_size) == list(range(world_size))
    assert processes() == before


def another_model_on_rank_1():
    nn.parallel.DistributedDataParallel(nn.Linear(4, 4 + dist.get_rank()))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_mistake_that_pytorchs_ddp_detects_raises_its_error(world_size):
    with pytest.raises(RankFailure, match=r"RuntimeError: .*(expects same model|appears not to match)"):
        run_ranks(another_model_on_rank_1, world_size, timeout=60)


def a_group_is_used_by_a_rank_outside_it():
    rank, _, x = me()
    group = dist.new_group([0, 1])
    dist.all_reduce(x, group=group)
    dist.barrier()
    return rank


def test_a_group_used_by_a_rank_outside_it_is_no_dead_lock():
    assert run_ranks(a_group_is_used_by_a_rank_outside_it, 3, timeout=60) == [0, 1, 2]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_ranks_stack_is_shown_on_request(world_size):
    with pytest.raises(DeadLock) as caught:
        run_ranks(all_ranks_receive_first, world_size, explain=Explain.STACKS)
    message = str(caught.value)
    for rank in range(world_size):
        assert f"rank {rank} was here:" in message
    assert "in all_ranks_receive_first\n    dist.recv(x, (rank - 1) % world)" in message
    assert "dlo_lib/comm/" not in message


def test_a_notebook_asks_for_stacks_with_a_variable(monkeypatch):
    monkeypatch.setenv("DLO_EXPLAIN", "stacks")
    with pytest.raises(DeadLock, match="rank 1 was here:"):
        run_ranks(all_ranks_receive_first, 2)
    monkeypatch.setenv("DLO_EXPLAIN", "off")
    with pytest.raises(RankFailure, match="timeout"):
        run_ranks(all_ranks_receive_first, 2, timeout=0.5)
