"""Communication hooks, static graphs and unequal numbers of batches, against the twin
that has all the data."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from dlo_lib.base.errors import UserError
from dlo_lib.comm.tracing.recorder import trace_collectives
from dlo_lib.launch import RankFailure, run_ranks
from dlo_lib.parallel import DDP
from dlo_lib.parallel.ddp.comm_hooks import rounding_hook, sum_hook
from dlo_lib.parallel.ddp.grad_bucket import GradBucket, PendingWork

SMALL = {"bucket_bytes": 1000, "first_bucket_bytes": 300}
KINDS = {"static_graph": {"static_graph": True}, "unused": {"find_unused_parameters": True}, "plain": {}}


def net(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """No bias before the normalisation: its gradient is rounding alone, which AdamW would blow up."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 7, bias=False), nn.BatchNorm1d(7), nn.Linear(7, 3)
    ).to(dtype)


def data(rank: int, step: int, samples: int = 3) -> Tensor:
    return torch.randn(
        samples, 4, generator=torch.Generator().manual_seed(100 * rank + step), dtype=torch.float64
    )


def same_on_all_ranks(module: nn.Module) -> None:
    flat = torch.cat(
        [held.detach().double().reshape(-1) for held in [*module.parameters(), *module.buffers()]]
    )
    every = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(every, flat)
    assert all(torch.equal(flat, other) for other in every)


def assert_parameters(module: nn.Module, twin: nn.Module) -> None:
    for (name, mine), its in zip(module.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(
            mine, its, rtol=0, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )


# Hooks


def test_a_hook_gets_every_gradient_in_buckets_of_the_same_order_on_all_ranks():
    def hooked() -> list[list[tuple[int, bool, list[tuple[int, ...]]]]]:
        seen: list[tuple[int, bool, list[tuple[int, ...]]]] = []

        def note(bucket: GradBucket) -> PendingWork:
            seen.append(
                (bucket.index, bucket.is_last, [tuple(gradient.shape) for gradient in bucket.gradients])
            )
            for gradient in bucket.gradients:  # views: what a hook does to them, it does to the bucket
                gradient.mul_(2)
            return sum_hook(bucket)

        module = net(dist.get_rank())
        model = DDP(module, comm_hook=note, **SMALL)
        twin = DDP(copy.deepcopy(module), **SMALL)
        for step in range(2):
            for mine in (model, twin):
                mine.zero_grad()
                mine(data(dist.get_rank(), step)).square().sum().backward()
            for doubled, plain in zip(module.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(doubled.grad, 2 * plain.grad)
        per_step = len(seen) // 2
        return [seen[:per_step], seen[per_step:]]

    ranks = run_ranks(hooked, 3)
    assert ranks[0] == ranks[1] == ranks[2]
    shapes = sorted(tuple(held.shape) for held in net().parameters())
    for step in ranks[0]:
        assert sorted(shape for _, _, some in step for shape in some) == shapes
        assert [index for index, _, _ in step] == list(range(len(step)))
        assert [last for _, last, _ in step] == [False] * (len(step) - 1) + [True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_gradients_are_half_the_bytes_the_same_on_every_rank_and_those_of_torch(dtype):
    def rounded() -> None:
        rank = dist.get_rank()
        module = net(dtype=torch.float32)
        peer = DistributedDataParallel(copy.deepcopy(module))
        if dtype is torch.float16:  # PyTorch has no hook for the other type on gloo
            peer.register_comm_hook(None, default_hooks.fp16_compress_hook)
        plain = DDP(copy.deepcopy(module), broadcast_buffers=False)
        model = DDP(module, comm_hook=rounding_hook(dtype), broadcast_buffers=False)
        x = data(rank, 0).float()
        sent = {}
        for mine in (plain, model, peer):
            with trace_collectives() as trace:
                mine(x).square().sum().backward()
            sent[mine] = trace.bytes("all_reduce")
        assert sent[model] * 2 == sent[plain]
        largest = max(exact.grad.abs().max() for exact in plain.parameters())
        for mine, its, exact in zip(module.parameters(), peer.parameters(), plain.parameters(), strict=True):
            for other in (
                (exact, its) if dtype is torch.float16 else (exact,)
            ):  # three roundings: of each rank's part, and of their sum
                torch.testing.assert_close(
                    mine.grad, other.grad, rtol=0, atol=3 * torch.finfo(dtype).eps * float(largest)
                )
        assert any(
            not torch.equal(mine.grad, exact.grad)
            for mine, exact in zip(module.parameters(), plain.parameters())
        )

    run_ranks(rounded, 2)


def test_rounding_to_a_type_that_saves_nothing_is_refused():
    with pytest.raises(UserError, match="rounded to 16 bits, not to torch.float32"):
        rounding_hook(torch.float32)


# Static graph


class Reached(nn.Module):
    """A layer used twice, under a reentrant checkpoint, one that rank 0 omits, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.twice, self.some, self.never, self.last = (
            nn.Linear(4, 4).double() for _ in range(5)
        )

    def forward(self, x: Tensor, with_some: bool, reentrant: bool) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(lambda held: torch.tanh(self.twice(held)), x, use_reentrant=reentrant)
        return self.last(self.some(x) if with_some else x)


@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_static_graph_takes_parameters_reached_twice_some_unused_here_and_some_everywhere(world_size, view):
    def static() -> list[int]:
        rank, size = dist.get_rank(), dist.get_world_size()
        module, twin = Reached(), Reached()
        model = DDP(
            module, static_graph=True, gradient_as_bucket_view=view, bucket_bytes=200, first_bucket_bytes=200
        )
        mine, its = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (module, twin))
        sent = []
        for step in range(4):
            with trace_collectives() as trace:
                with model.no_sync():
                    model(data(rank, 10 * step), rank > 0, True).square().sum().backward()
                model(data(rank, step), rank > 0, True).square().sum().backward()
            sent.append(trace.count("all_reduce"))
            losses = [
                twin(data(other, at), other > 0, False).square().sum()
                for other in range(size)
                for at in (10 * step, step)
            ]
            (torch.stack(losses).sum() / size).backward()
            for (name, held), other in zip(module.named_parameters(), twin.parameters(), strict=True):
                assert (held.grad is None) == (other.grad is None), name
                if held.grad is not None:
                    torch.testing.assert_close(held.grad, other.grad, rtol=0, atol=1e-10)
            for optimizer in (mine, its):
                optimizer.step()
                optimizer.zero_grad()
        return sent

    for sent in run_ranks(static, world_size):
        used = 8 if world_size > 1 else 6
        buckets = used // 2  # a weight and its bias each
        assert sent[1:] == [buckets] * 3, "no flags are asked for, and what no rank uses is not sent"
        assert sent[0] == 5 + 1, "the first step sends every bucket, and the flags"


def test_a_static_graph_sends_while_backward_runs_from_the_second_step_on():
    def early() -> list[list[str]]:
        module = net()
        order: list[str] = []

        def note(bucket: GradBucket) -> PendingWork:
            order.append("sent")
            return sum_hook(bucket)

        module[0].weight.register_hook(lambda _: order.append("last gradient"))
        model = DDP(module, static_graph=True, comm_hook=note, bucket_bytes=100, first_bucket_bytes=100)
        steps = []
        for step in range(2):
            model(data(dist.get_rank(), step)).sum().backward()
            steps.append(list(order))
            order.clear()
        return steps

    for first, second in run_ranks(early, 2):
        assert first[0] == "last gradient"
        assert second.index("last gradient") > 1


def test_a_graph_that_changes_is_named():
    def changed() -> None:
        model = DDP(Reached(), static_graph=True)
        for with_some in (False, True):
            model(data(0, 0), with_some, False).sum().backward()

    with pytest.raises(
        RankFailure,
        match=r"the graph is not static: some\.(weight|bias) used otherwise than in the first step",
    ):
        run_ranks(changed, 2)


def test_a_graph_that_leaves_something_out_is_named():
    def less() -> None:
        model = DDP(Reached(), static_graph=True)
        for with_some in (True, False):
            model(data(0, 0), with_some, False).sum().backward()

    with pytest.raises(
        RankFailure, match=r"the graph is not static: some\.weight, some\.bias used otherwise"
    ):
        run_ranks(less, 2)


# Unequal numbers of batches


def steps_of(rank: int, world_size: int) -> int:
    """The second rank has none at all; the last one has most."""
    return 0 if rank == 1 else 2 + rank


def uneven(follow: bool, options: dict, of_all: bool = True) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    module, twin = net(), net()
    model = DDP(module, **SMALL, **options)
    optimizer, its = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (module, twin))

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    for epoch in range(2):  # the second time everything has been learnt already
        with model.join(shadow_step=step if follow else None, divide_by_initial_world_size=of_all):
            for at in range(steps_of(rank, size)):
                model(data(rank, 10 * epoch + at)).square().mean().backward()
                step()
        for at in range(max(steps_of(other, size) for other in range(size))):
            active = [other for other in range(size) if at < steps_of(other, size)]
            losses = [twin(data(other, 10 * epoch + at)).square().mean() for other in active]
            (torch.stack(losses).sum() / (size if of_all else len(active))).backward()
            its.step()
            its.zero_grad()
        if follow:
            assert_parameters(module, twin)
            for mine, other in zip(module.parameters(), twin.parameters(), strict=True):
                for name, value in its.state[other].items():
                    torch.testing.assert_close(optimizer.state[mine][name], value, rtol=0, atol=1e-10)
        else:
            same_on_all_ranks(module)
            if epoch == 0:  # later the optimisers of those who ended early are behind
                assert_parameters(module, twin)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_run_out_follow_the_others_and_stay_their_equals(world_size, kind):
    run_ranks(uneven, world_size, True, KINDS[kind])


def test_without_a_separate_step_they_take_over_parameters_and_buffers():
    run_ranks(uneven, 3, False, {})


def test_averages_over_those_who_still_have_data():
    run_ranks(uneven, 3, True, {}, False)


def test_with_accumulation_only_averaged_backward_passes_count():
    def accumulated() -> None:
        rank = dist.get_rank()
        module, twin = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()
        twin.load_state_dict(module.state_dict())
        model = DDP(module)
        twin.load_state_dict(module.state_dict())
        optimizer, its = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (module, twin))
        step = functools.partial(_step, optimizer)
        with model.join(shadow_step=step):
            for at in range(1 + rank):
                with model.no_sync():
                    model(data(rank, at)).sum().backward()
                model(data(rank, at + 50)).sum().backward()
                step()
        for at in range(2):
            losses = [
                twin(data(other, of)).sum() for other in range(2) if at < 1 + other for of in (at, at + 50)
            ]
            (torch.stack(losses).sum() / 2).backward()
            _step(its)
        assert_parameters(module, twin)

    run_ranks(accumulated, 2)


def _step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def test_an_error_in_the_loop_is_not_followed_by_waiting():
    def broken() -> None:
        model = DDP(nn.Linear(4, 3).double())
        try:
            with model.join():
                raise ValueError("in the loop")
        except ValueError:
            pass
        model(data(dist.get_rank(), 0)).sum().backward()  # everyone left: nothing is announced any more

    run_ranks(broken, 2)
