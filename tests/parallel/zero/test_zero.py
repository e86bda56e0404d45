"""What a sharded optimiser holds, sends and keeps for later, and what it says when it cannot."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.comm.tracing.recorder import trace_collectives
from dlo_lib.launch import RankFailure, run_ranks
from dlo_lib.parallel import DDP
from dlo_lib.parallel.sharding.transport import CollectiveTransport
from dlo_lib.parallel.zero import ShardedOptimizer
from dlo_lib.parallel.zero.flat_params import Partition, PartitionBy


class Net(nn.Module):
    """Sizes that no number of ranks divides, a matrix stored by columns, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(13, 5), nn.Linear(5, 13)
        self.columns = nn.Parameter(torch.randn(7, 5).t())
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(tokens) @ self.columns @ self.columns.t()) * self.scale)


def seeded(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def backward(model: nn.Module, seed: int = 0) -> None:
    tokens = torch.randint(13, (2, 6), generator=torch.Generator().manual_seed(seed))
    model(tokens).square().mean().backward()


def adamw(params, **options) -> ShardedOptimizer:
    return ShardedOptimizer(params, torch.optim.AdamW, **{"lr": 0.01, "bucket_bytes": 300, **options})


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for (name, mine), its in zip(one.named_parameters(), other.parameters()):
        torch.testing.assert_close(mine, its, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_element_is_owned_once_and_shares_are_even(ranks):
    def owned() -> tuple[list[tuple[int, int, int]], list[int], int]:
        module = seeded()
        before = copy.deepcopy(module)
        partition = Partition(module.parameters(), dist.group.WORLD, bucket_bytes=300)
        assert_equal(module, before)
        assert module.columns.stride() == before.columns.stride()
        order = [id(param) for param in module.parameters()]
        pieces = [
            (order.index(id(piece.param)), piece.start, piece.stop) for piece in partition.pieces.values()
        ]
        return (
            pieces,
            [param.numel() for param in module.parameters()],
            sum(bucket.padded_bytes for bucket in partition.buckets),
        )

    results = run_ranks(owned, ranks)
    _, sizes, padded = results[0]
    owners = {
        (number, element)
        for pieces, _, _ in results
        for number, start, stop in pieces
        for element in range(start, stop)
    }
    shares = [sum(stop - start for _, start, stop in pieces) for pieces, _, _ in results]
    assert sum(shares) == len(owners) == sum(sizes)
    assert max(shares) <= padded / 4 / ranks


def test_whole_parameters_are_dealt_out_evenly_by_size():
    def owned() -> int:
        params = [nn.Parameter(torch.zeros(size)) for size in (8, 7, 6, 5, 4)]
        partition = Partition(params, dist.group.WORLD, split=PartitionBy.PARAMETERS, bucket_bytes=100)
        assert all(piece.whole for piece in partition.pieces.values())
        return sum(piece.param.numel() for piece in partition.pieces.values())

    assert sorted(run_ranks(owned, 2)) == [13, 17]  # the best possible is 15 and 15
    assert sorted(run_ranks(owned, 6)) == [0, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("transport", [None, CollectiveTransport()])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_bytes_on_the_wire_are_those_of_the_formula_padding_included(ranks, transport):
    def sent() -> tuple[float, float, int, int]:
        module = seeded()
        model = DDP(module, bucket_bytes=300, first_bucket_bytes=300)
        partition = Partition(module.parameters(), dist.group.WORLD, bucket_bytes=300, transport=transport)
        optimizer = adamw(module.parameters(), partition=partition)
        for _ in range(2):
            with trace_collectives() as gradients:
                backward(model)
            with trace_collectives() as update:
                optimizer.step()
        b_g = sum(4 * math.ceil(param.numel() / 4) * 4 for param in module.parameters())
        b_p = sum(bucket.padded_bytes for bucket in partition.buckets)
        return gradients.ring_bytes(), update.ring_bytes(), b_g, b_p

    share = (ranks - 1) / ranks
    for gradients, update, b_g, b_p in run_ranks(sent, ranks):
        assert gradients == pytest.approx(2 * b_g * share)
        assert update == pytest.approx(b_p * share)
        assert b_g <= b_p <= b_g + 16 * ranks * 4, "padding is 16 bytes a rank and bucket at most"


def test_an_update_holds_no_buffer_and_the_state_is_a_share():
    def held() -> tuple[int, int, int]:
        module = nn.ModuleList(nn.Linear(64, 63) for _ in range(4))
        optimizer = adamw(module.parameters(), bucket_bytes=40_000)
        for param in module.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        pieces = optimizer.pieces()
        memory = {param.untyped_storage().data_ptr() for param in module.parameters()}
        assert {piece.shard.untyped_storage().data_ptr() for piece in pieces} <= memory, (
            "a piece is the parameter's own memory"
        )
        assert all(piece.shard.grad is None for piece in pieces), "a gradient that zero_grad() could not free"
        state = sum(
            value.numel() * 4
            for piece in pieces
            for value in optimizer.local.state[piece.shard].values()
            if value.dim()
        )
        return state, sum(param.numel() for param in module.parameters()), len(memory)

    for state, numel, buckets in run_ranks(held, 4):
        assert buckets == 2
        assert state == pytest.approx(8 * numel / 4, rel=0.02)


def test_groups_their_rates_and_those_added_later():
    def trained() -> None:
        module, twin = seeded(), seeded()
        optimizers = []
        for model in (module, twin):
            first = [
                {"params": [model.embed.weight], "weight_decay": 0.3},
                {"params": [model.head.weight, model.head.bias], "lr": 0.1},
            ]
            optimizers.append(adamw(first) if model is module else torch.optim.AdamW(first, lr=0.01))
        schedulers = [
            torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.2], total_steps=6)
            for optimizer in optimizers
        ]
        for step in range(5):
            if step == 2:
                for model, optimizer in zip((module, twin), optimizers):
                    rest = {"params": [model.columns, model.scale], "lr": 0.02, "betas": (0.5, 0.9)}
                    # A scheduler asks of every group what it set in those it knows.
                    optimizer.add_param_group({**optimizer.param_groups[0], **rest})
            for model, optimizer in zip((module, twin), optimizers):
                optimizer.zero_grad()
                backward(model, step)
                optimizer.step()
            if step < 2:
                for scheduler in schedulers:
                    scheduler.step()
            for mine, its in zip(optimizers[0].param_groups, optimizers[1].param_groups):
                assert {**mine, "params": 0} == {**its, "params": 0}
        assert_equal(module, twin)

    run_ranks(trained, 3)


def test_named_parameters_and_a_closure():
    def trained() -> None:
        module, twin = seeded(), seeded()
        for model, optimizer in (
            (module, adamw(module.named_parameters())),
            (twin, torch.optim.AdamW(twin.named_parameters(), lr=0.01)),
        ):
            for step in range(3):

                def closure(model=model, optimizer=optimizer, step=step) -> float:
                    optimizer.zero_grad()
                    backward(model, step)
                    return 0.25 * step

                assert optimizer.step(closure) == 0.25 * step
            assert optimizer.param_groups[0]["param_names"][0] == "columns"
        assert_equal(module, twin)

    run_ranks(trained, 2)


class LookAhead(torch.optim.Optimizer):
    """Asks for gradients twice: here, and a step further."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure):
        for _ in range(2):
            with torch.enable_grad():
                loss = closure()
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.data -= group["lr"] * param.grad
        return loss


def test_a_closure_that_is_asked_twice_sees_the_others_updates():
    def trained() -> None:
        module, twin = seeded(), seeded()
        for model, optimizer in (
            (module, ShardedOptimizer(module.parameters(), LookAhead, lr=0.1)),
            (twin, LookAhead(twin.parameters(), 0.1)),
        ):

            def closure(model=model) -> None:
                model.zero_grad()
                backward(model)

            optimizer.step(closure)
        assert_equal(module, twin)

    run_ranks(trained, 2)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor])
def test_state_saved_on_some_ranks_is_loaded_on_others_and_by_the_unsharded_optimiser(kind):
    def first() -> tuple[dict, dict]:
        module = seeded()
        optimizer = ShardedOptimizer(module.parameters(), kind, lr=0.01, bucket_bytes=300)
        for step in range(2):
            optimizer.zero_grad()
            backward(module, step)
            optimizer.step()
        return module.state_dict(), optimizer.full_state_dict()

    def second(weights: dict, state: dict) -> dict:
        module = seeded(1)
        module.load_state_dict(weights)
        optimizer = ShardedOptimizer(module.parameters(), kind, lr=0.5, bucket_bytes=500)
        optimizer.load_full_state_dict(copy.deepcopy(state))
        assert optimizer.param_groups[0]["lr"] == 0.01
        backward(module, 5)
        optimizer.step()
        return module.state_dict()

    saved = run_ranks(first, 3)
    weights, state = saved[0]
    assert all(str(rank) == str(saved[0]) for rank in saved[1:])
    twin = seeded(1)
    twin.load_state_dict(weights)
    alone = kind(twin.parameters(), lr=0.5)
    alone.load_state_dict(copy.deepcopy(state))
    backward(twin, 5)
    alone.step()
    for ranks in (1, 2, 4):
        for resumed in run_ranks(second, ranks, weights, state):
            torch.testing.assert_close(resumed, dict(twin.state_dict()), rtol=0, atol=0)


def test_master_weights_keep_what_bf16_would_round_away():
    def trained() -> tuple[float, float, dict]:
        masters, plain = (nn.Linear(9, 5, bias=False).bfloat16() for _ in range(2))
        for model in (masters, plain):
            nn.init.ones_(model.weight)
        kept = ShardedOptimizer(masters.parameters(), torch.optim.SGD, lr=1e-3, master_dtype=torch.float32)
        lost = ShardedOptimizer(plain.parameters(), torch.optim.SGD, lr=1e-3)
        for _ in range(20):
            for model, optimizer in ((masters, kept), (plain, lost)):
                model.weight.grad = torch.ones_like(model.weight)
                optimizer.step()
        return masters.weight[0, 0].item(), plain.weight[0, 0].item(), kept.full_state_dict()

    for kept, lost, _ in run_ranks(trained, 2):
        assert kept == pytest.approx(0.98, abs=0.004)
        assert lost == 1.0, "a thousandth is less than bf16 can take from 1"


def test_master_weights_are_saved_with_the_state():
    def resumed() -> None:
        torch.manual_seed(0)
        weight = torch.randn(5, 3)
        undisturbed, stopped = (nn.Parameter(weight.bfloat16()) for _ in range(2))

        def made(param: nn.Parameter) -> ShardedOptimizer:
            return adamw([param], master_dtype=torch.float32, lr=1e-4)

        optimizers = [made(undisturbed), made(stopped)]
        for step in range(6):
            if step == 3:
                state = optimizers[1].full_state_dict()
                assert state["state"][0]["master"].dtype is torch.float32
                stopped = nn.Parameter(stopped.detach().clone())
                optimizers[1] = made(stopped)
                optimizers[1].load_full_state_dict(state)
            for param, optimizer in zip((undisturbed, stopped), optimizers):
                param.grad = torch.full_like(param, 0.1 * step)
                optimizer.step()
        assert torch.equal(
            optimizers[0].full_state_dict()["state"][0]["master"],
            optimizers[1].full_state_dict()["state"][0]["master"],
        )

    run_ranks(resumed, 2)


def test_pieces_may_be_updated_elsewhere():
    def trained() -> None:
        module, twin = seeded(), seeded()
        offloaded, alone = (
            adamw(module.parameters(), state_device=torch.device("cpu")),
            torch.optim.AdamW(twin.parameters(), lr=0.01),
        )
        for step in range(3):
            for model, optimizer in ((module, offloaded), (twin, alone)):
                optimizer.zero_grad()
                backward(model, step)
                optimizer.step()
        for piece in offloaded.pieces():
            assert piece.shard.untyped_storage().data_ptr() != piece.param.untyped_storage().data_ptr()
        assert_equal(module, twin)

    run_ranks(trained, 2)


def test_autograd_notices_an_update_between_forward_and_backward():
    def interrupted() -> None:
        module = seeded()
        optimizer = adamw(module.parameters())
        backward(module)
        loss = module(torch.arange(4)).sum()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    run_ranks(interrupted, 2)


def test_what_cannot_be_sharded_is_refused_with_the_cure():
    def refused() -> None:
        module = seeded()
        with pytest.raises(UserError, match="L-BFGS"):
            ShardedOptimizer(module.parameters(), torch.optim.LBFGS)
        sparse = nn.Embedding(5, 3, sparse=True)
        optimizer = adamw(sparse.parameters())
        sparse(torch.tensor([1])).sum().backward()
        with pytest.raises(UserError, match="sparse=False"):
            optimizer.step()
        frozen = nn.Linear(3, 2)
        frozen.bias.requires_grad_(False)
        optimizer = adamw(frozen.parameters())
        frozen.bias.requires_grad_(True)
        frozen(torch.ones(3)).sum().backward()
        with pytest.raises(UserError, match="was unfrozen"):
            optimizer.step()
        shared = torch.zeros(6)
        with pytest.raises(UserError, match="share memory"):
            adamw([nn.Parameter(shared[:4]), nn.Parameter(shared[2:])])
        optimizer = adamw(module.parameters())
        for method in (
            optimizer.state_dict,
            lambda: optimizer.load_state_dict({}),
            lambda: copy.deepcopy(optimizer),
        ):
            with pytest.raises(UserError, match="full_state_dict"):
                method()
        with pytest.raises(UserError, match="other groups"):
            optimizer.load_full_state_dict({"state": {}, "param_groups": [{"params": [0]}]})
        partition = Partition(seeded().parameters(), dist.group.WORLD, bucket_bytes=300)
        with pytest.raises(UserError, match="not in the partition"):
            adamw(module.parameters(), partition=partition)
        with pytest.raises(UserError, match="whole parameters"):
            ShardedOptimizer(module.parameters(), torch.optim.Adafactor, partition=partition)

    run_ranks(refused, 2)
    with pytest.raises(UserError, match="needs a process group"):
        adamw(seeded().parameters())


def test_a_rank_that_does_not_step_is_named():
    def some() -> None:
        module = seeded()
        partition = Partition(
            module.parameters(), dist.group.WORLD, bucket_bytes=300, transport=CollectiveTransport()
        )
        optimizer = adamw(module.parameters(), partition=partition)
        backward(module)
        if dist.get_rank() == 0:
            optimizer.step()

    with pytest.raises(RankFailure, match="all_gather"):
        run_ranks(some, 2)
