"""Deadlocks and mismatched calls on 2, 3 and 4 ranks: each is explained within seconds."""

import ctypes
import os
import re
import signal
import time
from collections.abc import Callable

import nbclient
import nbformat
import pytest
import torch
import torch.distributed as dist
from torch import nn

from dlo_lib.launch import DeadLock, Explain, RankFailure, run_ranks

WORLDS = [2, 3, 4]


def me() -> tuple[int, int, torch.Tensor]:
    return dist.get_rank(), dist.get_world_size(), torch.full((4,), float(dist.get_rank()))


def skips_a_collective():
    rank, _, x = me()
    for step in range(3):
        if rank == 1 and step == 2:
            break
        dist.all_reduce(x)


def different_collectives_meet():
    rank, _, x = me()
    dist.broadcast(x, 0) if rank == 0 else dist.all_reduce(x)


def another_order_on_two_groups():
    rank, world, x = me()
    groups = [dist.new_group(list(range(world))) for _ in range(2)]
    for group in groups if rank == 0 else groups[::-1]:
        dist.all_reduce(x, group=group)


def shapes_differ():
    rank, _, _ = me()
    dist.all_reduce(torch.ones(4 + rank))


def dtypes_differ():
    rank, _, _ = me()
    dist.all_reduce(torch.ones(4, dtype=torch.int32 if rank else torch.float32))


def reductions_differ():
    rank, _, x = me()
    dist.all_reduce(x, dist.ReduceOp.SUM if rank else dist.ReduceOp.MAX)


def roots_differ():
    rank, _, x = me()
    dist.broadcast(x, src=min(rank, 1))


def send_without_receive():
    rank, _, x = me()
    if rank == 0:
        dist.send(x, 1)


def all_ranks_send_first():
    rank, world, x = me()
    dist.send(x, (rank + 1) % world)
    dist.recv(x, (rank - 1) % world)


def two_receive_first():
    rank, _, x = me()
    if rank < 2:
        dist.recv(x, 1 - rank)
        dist.send(x, 1 - rank)


def wrong_tag():
    rank, _, x = me()
    if rank == 0:
        dist.send(x, 1, tag=5)
    if rank == 1:
        dist.recv(x, 0, tag=6)


def message_sizes_differ():
    rank, _, _ = me()
    if rank == 0:
        dist.send(torch.ones(8), 1)
    if rank == 1:
        dist.recv(torch.ones(4), 0)


def barrier_on_some():
    rank, world, _ = me()
    if rank < world - 1:
        dist.barrier()


def splits_do_not_match():
    rank, world, _ = me()
    sends, receives = [4] * world, [4] * world
    if rank == 0:
        sends[1] = 6
    dist.all_to_all_single(torch.zeros(sum(receives)), torch.ones(sum(sends)), receives, sends)


def logs_on_rank_0_only():
    rank, _, x = me()
    for step in range(2):
        dist.all_reduce(x)
        if rank == 0 and step == 0:
            dist.all_reduce(torch.ones(()))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.always(x) + (self.sometimes(x) if dist.get_rank() else 0)


def pytorchs_ddp_with_a_branch_on_the_rank():
    model = nn.parallel.DistributedDataParallel(Branching())
    model(torch.ones(2, 4)).sum().backward()


def pytorchs_ddp_with_one_batch_more_on_rank_0():
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    for _ in range(3 + (dist.get_rank() == 0)):
        model(torch.ones(2, 4)).sum().backward()


def fsdp2_with_one_batch_more_on_rank_0():
    from tests.fsdp2 import fully_shard

    model = nn.Linear(8, 8)
    fully_shard(model)
    for _ in range(1 + (dist.get_rank() == 0)):
        model(torch.ones(2, 8)).sum().backward()


MISTAKES: dict[Callable[[], None], str] = {
    skips_a_collective: r"DEADLOCK: .*rank 1 returned after 2 calls on it while the others are at call 3",
    different_collectives_meet: (
        r"MISMATCH in call 1 on world: the ranks call different operations.*rank 0 +broadcast.* +all_reduce"
    ),
    another_order_on_two_groups: r"DEADLOCK: .*the ranks use the groups in different orders",
    shapes_differ: r"the ranks pass tensors of different sizes.*float32\[4\].*float32\[5\]",
    dtypes_differ: r"the ranks pass different dtypes.*float32\[4\].*int32\[4\]",
    reductions_differ: r"the ranks ask for different reductions.*MAX",
    roots_differ: r"the ranks name different roots.*from rank 0.*from rank 1",
    send_without_receive: r"Rank 0 waits for a recv that rank 1 will never make: it has finished",
    all_ranks_send_first: r"Each of these ranks sends first, and none of them receives: 0 → 1",
    two_receive_first: r"Ranks 0 and 1 both call recv first and wait for each other",
    wrong_tag: r"Rank 0 uses tag 5 and rank 1 tag 6",
    message_sizes_differ: (
        r"message 1 from rank 0 to rank 1 is sent as float32\[8\] and received as float32\[4\]"
    ),
    barrier_on_some: r"barrier needs every rank of world, and rank \d returned after 0 calls",
    splits_do_not_match: r"rank 0 sends 6 elements to rank 1, which expects 4 from it",
    logs_on_rank_0_only: r"MISMATCH in call 2 on world: .*float32\[\].*float32\[4\]",
    pytorchs_ddp_with_a_branch_on_the_rank: r"DDP's gradient all_reduce",
    pytorchs_ddp_with_one_batch_more_on_rank_0: r"DEADLOCK: rank 0 waits.*DDP's gradient all_reduce",
    fsdp2_with_one_batch_more_on_rank_0: r"DEADLOCK: rank 0 waits.*all_gather",
}


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_explained(mistake, world_size):
    with pytest.raises(DeadLock) as caught:
        run_ranks(mistake, world_size, timeout=60)
    message = str(caught.value)
    assert re.search(MISTAKES[mistake], message, re.DOTALL), message
    assert "test_explainer.py, line" in message, "it names the user's line"


def wrong_peer():
    rank, _, x = me()
    if rank == 0:
        dist.send(x, 2)
    if rank == 1:
        dist.recv(x, 0)
    dist.barrier()


@pytest.mark.parametrize("world_size", [3, 4])
def test_a_wrong_peer(world_size):
    with pytest.raises(
        DeadLock,
        match="Rank 0 sends to rank 2, which does not receive it, and rank 1 waits for a message from "
        "rank 0: check the destination of the send.",
    ):
        run_ranks(wrong_peer, world_size, timeout=60)


def group_of_a_subset_then_of_all():
    rank, world, x = me()
    if rank < 2:
        dist.new_group([0, 1])
    dist.all_reduce(x, group=dist.new_group(list(range(world))))


@pytest.mark.parametrize("world_size", [3, 4])
def test_new_group_called_by_a_subset_only(world_size):
    with pytest.raises(DeadLock, match=r"MISMATCH: the ranks create different groups at the same time"):
        run_ranks(group_of_a_subset_then_of_all, world_size, timeout=60)


def dies(how: str):
    rank, _, x = me()
    dist.all_reduce(x)
    if rank == 1:
        os.kill(os.getpid(), getattr(signal, how))
    dist.all_reduce(x)


@pytest.mark.parametrize(
    ("how", "said"),
    [("SIGSEGV", "was killed by SIGSEGV"), ("SIGKILL", r"was killed by SIGKILL, but memory did not run out")],
)
@pytest.mark.parametrize("world_size", WORLDS)
def test_a_killed_rank_is_no_dead_lock(how, said, world_size):
    with pytest.raises(RankFailure, match=f"rank 1 {said}") as caught:
        run_ranks(dies, world_size, how, timeout=60)
    assert not isinstance(caught.value, DeadLock)


def raises():
    rank, _, x = me()
    if rank == 1:
        raise ValueError("a bad batch")
    dist.all_reduce(x)


@pytest.mark.parametrize("world_size", WORLDS)
def test_the_first_error_is_reported_before_its_consequences(world_size):
    with pytest.raises(RankFailure, match="rank 1 raised ValueError: a bad batch") as caught:
        run_ranks(raises, world_size, timeout=60)
    assert not isinstance(caught.value, DeadLock)


def never_waits():
    work = dist.all_reduce(torch.ones(3), async_op=True)
    if dist.get_rank() != 1:
        work.wait()
    dist.barrier()


@pytest.mark.parametrize("world_size", WORLDS)
def test_an_operation_that_is_never_waited_for_gives_a_warning(capsys, world_size):
    run_ranks(never_waits, world_size)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert re.match(
        r"\[rank 1\] warning: .*test_explainer.py, line \d+: "
        r"all_reduce of float32\[3\] was started but never waited for",
        line,
    )


def long_call_that_holds_the_gil(seconds: int) -> float:
    if dist.get_rank() == 1:
        # A library loaded as PyDLL keeps the GIL, as a long computation does: this rank's row cannot change.
        ctypes.PyDLL(None).sleep(seconds)
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()


@pytest.mark.slow
def test_a_rank_that_computes_for_long_raises_no_alarm():
    assert run_ranks(long_call_that_holds_the_gil, 3, 30, timeout=120) == [3.0] * 3


def busy_and_right() -> int:
    rank, world, x = me()
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    for _ in range(300):
        dist.all_reduce(x)
        works = [
            dist.all_reduce(x.clone(), group=group, async_op=True)
            for group, members in zip(groups, ((0, 1), (1, 2)))
            if rank in members
        ]
        works += [dist.isend(x, (rank + 1) % world), dist.irecv(torch.zeros(4), (rank - 1) % world)]
        for work in works:
            work.wait()
        x.fill_(1)
    return rank


def test_many_correct_calls_in_flight_raise_no_alarm():
    assert run_ranks(busy_and_right, 3, timeout=120) == [0, 1, 2]


def slow_chain():
    rank, world, x = me()
    for _ in range(3):
        if rank == 0:
            time.sleep(0.5)  # longer than the watcher waits before it reports a deadlock
            dist.send(x, 1)
        else:
            dist.recv(x, rank - 1)
            if rank + 1 < world:
                dist.send(x, rank + 1)
        dist.barrier()


def test_a_long_chain_of_waits_that_ends_in_a_computing_rank_raises_no_alarm():
    run_ranks(slow_chain, 4, timeout=60)


def test_the_explainer_can_be_switched_off():
    with pytest.raises(RankFailure, match="timeout") as caught:
        run_ranks(barrier_on_some, 2, timeout=1.0, explain=Explain.OFF)
    assert not isinstance(caught.value, DeadLock)


def test_the_trace_of_all_ranks_comes_with_the_results():
    results = run_ranks(busy_and_right, 3, trace=True)
    assert list(results) == [0, 1, 2]
    assert results.trace.count("send") == results.trace.count("recv") == 900
    assert [event.issued for event in results.trace.events] == sorted(
        event.issued for event in results.trace.events
    )


def test_in_a_notebook_the_message_names_the_cell_and_who_calls_the_helper():
    cells = [
        "import torch\nimport torch.distributed as dist\nfrom dlo_lib.launch import run_ranks",
        "def total(x):\n    dist.all_reduce(x)\n\n"
        "def step():\n    if dist.get_rank() == 0:\n        total(torch.ones(2))",
        "run_ranks(step, 2, timeout=60)",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    with pytest.raises(nbclient.exceptions.CellExecutionError) as caught:
        nbclient.NotebookClient(book, timeout=600, startup_timeout=600, kernel_name="python3").execute()
    assert "rank 1 returned after 0 calls on it while the others are at call 1" in str(caught.value)
    assert "Cell In[2], line 2: dist.all_reduce(x)" in str(caught.value)
    assert "called from Cell In[2], line 6: total(torch.ones(2))" in str(caught.value)
