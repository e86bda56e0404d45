"""What stage 2 of ZeRO holds, sends and when, and what it says when it cannot."""

from __future__ import annotations

import contextlib
import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.comm.tracing.recorder import trace_collectives
from dlo_lib.launch import RankFailure, run_ranks
from dlo_lib.optim import train_step
from dlo_lib.parallel import DDP, FSDP
from dlo_lib.parallel.checkpoint import load_sharded, save_sharded
from dlo_lib.parallel.grad_scaler import ShardedGradScaler
from dlo_lib.parallel.sharding.transport import CollectiveTransport
from dlo_lib.parallel.zero import ShardedDDP, ShardedOptimizer
from tests.parallel.twin import llama


class Net(nn.Module):
    def __init__(self, width: int = 9) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def step(model: nn.Module) -> None:
    model(torch.ones(2, 9)).square().mean().backward()


@pytest.mark.parametrize("transport", [None, CollectiveTransport()])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_bytes_on_the_wire_are_those_of_the_formula_padding_included(ranks, transport):
    def sent() -> tuple[list[float], int, int]:
        model = ShardedDDP(Net(), bucket_bytes=500, transport=transport)
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, partition=model.partition)
        measured = []
        for action in (lambda: step(model), lambda: step(model), optimizer.step):
            with trace_collectives() as trace:
                action()
            measured.append(trace.ring_bytes())
        with trace_collectives() as trace, model.no_sync():
            step(model)
        measured.append(trace.ring_bytes())
        padded = sum(bucket.padded_bytes for bucket in model.partition.buckets)
        return measured, padded, sum(4 * param.numel() for param in model.parameters())

    share = (ranks - 1) / ranks
    for (first, second, update, unsynced), padded, exact in run_ranks(sent, ranks):
        assert first == second == pytest.approx(padded * share)
        assert update == pytest.approx(padded * share)
        assert unsynced == 0
        assert exact <= padded <= exact + 4 * 16 * ranks + 8 * 12


RESTING = [
    (1, torch.float32, lambda n: 8 + 8 / n),
    (2, torch.float32, lambda n: 4 + 12 / n),
    (
        1,
        torch.bfloat16,
        lambda n: 2 + 2 + 12 / n,
    ),  # with a copy in fp32 and its two moments: the count of the paper
]


def nbytes_of(tensors: list[Tensor | None]) -> int:
    """The memory of ``tensors`` and of all that Python knows of."""
    gc.collect()
    known = [*tensors, *(thing for thing in gc.get_objects() if isinstance(thing, Tensor))]
    return sum(
        {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in known if t is not None}.values()
    )


@pytest.mark.parametrize(("stage", "dtype", "factor"), RESTING, ids=["1", "2", "1 in bf16"])
def test_a_rank_rests_with_what_the_formula_says(stage, dtype, factor):
    def held() -> tuple[int, int]:
        module = llama().to(dtype)
        numel = sum(param.numel() for param in module.parameters())
        # What other tests and the model's constants hold. Now, for gloo may keep a message of the
        # wrapping a moment longer.
        before = nbytes_of([]) - sum(param.nbytes for param in module.parameters())
        if stage == 1:
            masters = None if dtype is torch.float32 else torch.float32
            model = module
            optimizer = ShardedOptimizer(
                module.parameters(), torch.optim.AdamW, bucket_bytes=100_000, master_dtype=masters
            )
        else:
            model = ShardedDDP(module, bucket_bytes=100_000, keep_buffers=False)
            optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, partition=model.partition)
        inputs = torch.zeros(2, 8, dtype=torch.int64)
        for _ in range(2):
            optimizer.step()
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
        dist.barrier()
        mine = [
            param.grad for param in [*module.parameters(), *(piece.shard for piece in optimizer.pieces())]
        ]
        mine += [value for state in optimizer.local.state.values() for value in state.values()]
        return nbytes_of(mine) - before, numel

    for ranks in (1, 2, 4):
        for bytes_held, numel in run_ranks(held, ranks):
            assert bytes_held == pytest.approx(factor(ranks) * numel, rel=0.02)


def test_a_bucket_leaves_during_backward_and_two_exist_at_most():
    def order() -> tuple[list[tuple[str, int]], int]:
        module = Net()
        model = ShardedDDP(module, bucket_bytes=4 * 90, transport=CollectiveTransport())
        seen: list[tuple[str, int]] = []
        most = 0
        for index, layer in enumerate(module.layers):
            layer.register_full_backward_hook(lambda *_, index=index: seen.append(("backward", index)))
        for index, bucket in enumerate(model.buckets):
            original = bucket.start_reduce_scatter

            def start(index=index, original=original):
                nonlocal most
                seen.append(("reduce", index))
                most = max(most, sum(bucket._packed is not None for bucket in model.buckets))
                return original()

            bucket.start_reduce_scatter = start
        step(model)
        return seen, most

    for seen, most in run_ranks(order, 2):
        assert [index for event, index in seen if event == "reduce"] == [0, 1, 2, 3]
        assert seen.index(("reduce", 0)) < seen.index(("backward", 1)) < seen.index(("reduce", 3))
        assert most <= 2


def test_an_overflow_on_one_rank_is_one_for_all():
    def trained() -> list[float]:
        torch.manual_seed(0)
        module = Net()
        model = ShardedDDP(module, bucket_bytes=500)
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, partition=model.partition, lr=0.1)
        scaler = ShardedGradScaler("cpu", model.group, init_scale=8.0, growth_interval=100)
        sums = []
        for broken in (False, True, False):
            scaler.scale(model(torch.ones(2, 9)).square().mean()).backward()
            first = optimizer.pieces()[0]
            if broken and dist.get_rank() == 1:
                first.shard.grad[0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            sums.append(sum(param.sum().item() for param in module.parameters()))
        assert scaler.get_scale() == 4.0
        return sums

    def alone() -> list[float]:
        torch.manual_seed(0)
        module = Net()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        sums = []
        for broken in (False, True, False):
            module(torch.ones(2, 9)).square().mean().backward()
            if not broken:
                optimizer.step()
            optimizer.zero_grad()
            sums.append(sum(param.sum().item() for param in module.parameters()))
        return sums

    for sums in run_ranks(trained, 2):
        assert sums == pytest.approx(alone(), rel=1e-5)


def test_after_an_exception_inside_backward_the_next_step_is_right():
    def recovered() -> Tensor:
        torch.manual_seed(0)
        module = Net()
        model = ShardedDDP(module, bucket_bytes=500)
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, partition=model.partition, lr=0.1)

        def broken(gradient: Tensor) -> None:
            raise ValueError("on purpose")

        x = torch.ones(2, 9, requires_grad=True)
        handle = module.layers[1].weight.register_hook(broken)
        with pytest.raises(ValueError, match="on purpose"):
            model(x).square().mean().backward()
        handle.remove()
        optimizer.zero_grad()
        step(model)
        gradients = [piece.shard.grad.sum() for piece in optimizer.pieces()]
        return torch.stack(gradients).sum()

    torch.manual_seed(0)
    twin = Net()
    step(twin)
    whole = sum(param.grad.sum() for param in twin.parameters())
    torch.testing.assert_close(sum(run_ranks(recovered, 2)), whole)


def test_what_cannot_be_trained_is_refused_with_the_cure():
    def unused() -> None:
        module = Net()
        module.extra = nn.Linear(2, 2)
        step(ShardedDDP(module))

    with pytest.raises(RankFailure, match=r"extra.*find_unused_parameters"):
        run_ranks(unused, 2)

    def refused() -> None:
        sparse = ShardedDDP(nn.Embedding(5, 3, sparse=True))
        with pytest.raises(UserError, match="sparse=False"):
            sparse(torch.tensor([1])).sum().backward()

    run_ranks(refused, 2)
    with pytest.raises(UserError, match="needs a process group"):
        ShardedDDP(Net())


def test_buffers_of_a_step_are_bounded_whatever_the_model():
    def most() -> tuple[int, int]:
        module = Net(64)
        model = ShardedDDP(module, bucket_bytes=20_000)
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, partition=model.partition)
        lent: list[int] = []
        model.pool.on_take = lambda tensor: lent.append(tensor.numel() * tensor.element_size())
        train_step(
            taking_tokens(model),
            optimizer,
            [(torch.ones(1, 2, dtype=torch.int64), torch.ones(1, 2, dtype=torch.int64))],
        )
        return max(lent), 4 * sum(param.numel() for param in module.parameters())

    for largest, everything in run_ranks(most, 2):
        assert largest <= 20_000 + 32 < everything


def taking_tokens(model: ShardedDDP) -> nn.Module:
    """Numbers of tokens in, something that looks like logits out."""

    class Wrapped(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            return model(tokens[..., None].expand(-1, -1, 64) * 0.1)

    return Wrapped()


def test_a_checkpoint_of_one_stage_is_read_by_the_others_on_any_number_of_ranks(tmp_path):
    def backward(model: nn.Module) -> None:
        model(torch.ones(1, 4, dtype=torch.int64)).square().mean().backward()

    def saved() -> tuple[dict, dict]:
        torch.manual_seed(0)
        module = llama()
        model = DDP(module)
        optimizer = ShardedOptimizer(module.parameters(), torch.optim.AdamW, bucket_bytes=20_000, lr=0.03)
        for _ in range(2):
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
        save_sharded(tmp_path, model, optimizer)
        return optimizer.full_state_dict(), {
            name: param.detach() for name, param in module.named_parameters()
        }

    def read(state: dict, weights: dict) -> None:
        module = llama()
        model = ShardedDDP(module)
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, partition=model.partition)
        load_sharded(tmp_path, model, optimizer)
        torch.testing.assert_close(dict(module.named_parameters()), weights, rtol=0, atol=0)
        torch.testing.assert_close(optimizer.full_state_dict(), state, rtol=0, atol=0)

        stage3 = FSDP(llama())
        plain = torch.optim.AdamW(stage3.parameters())
        load_sharded(tmp_path, stage3, plain)
        whole = stage3.full_state_dict()
        torch.testing.assert_close({name: whole[name] for name in weights}, weights, rtol=0, atol=0)
        assert plain.param_groups[0]["lr"] == 0.03
        again = tmp_path / f"from-{dist.get_world_size()}"
        save_sharded(again, stage3, plain)
        load_sharded(again, model, optimizer)
        torch.testing.assert_close(optimizer.full_state_dict(), state, rtol=0, atol=0)

    state, weights = run_ranks(saved, 3)[0]
    for ranks in (1, 2, 4):
        run_ranks(read, ranks, state, weights)


CLEAR = {
    "model.zero_grad()": lambda model, optimizer: model.zero_grad(),
    "model.zero_grad(set_to_none=False)": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "optimizer.zero_grad()": lambda model, optimizer: optimizer.zero_grad(),
}


@pytest.mark.parametrize("clear", CLEAR)
def test_each_form_of_zero_grad_clears_as_without_a_wrapper(clear):
    def steps(wrapped: bool) -> list[float]:
        torch.manual_seed(0)
        model: nn.Module = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if wrapped:
            model = ShardedDDP(model, bucket_bytes=500)
            optimizer = ShardedOptimizer(
                model.parameters(), torch.optim.SGD, partition=model.partition, lr=0.1
            )
        seen = []
        for _ in range(3):
            CLEAR[clear](model, optimizer)
            step(model)
            optimizer.step()
            seen.append(sum(param.sum().item() for param in model.parameters()))
        with model.no_sync() if wrapped else contextlib.nullcontext():
            step(model)  # its gradients are discarded
        CLEAR[clear](model, optimizer)
        step(model)
        optimizer.step()
        return [*seen, sum(param.sum().item() for param in model.parameters())]

    alone = steps(wrapped=False)
    for sums in run_ranks(steps, 2, True):
        assert sums == pytest.approx(alone, rel=1e-5)


def test_a_checkpoint_does_not_know_about_sharded_ddp_and_a_copy_is_refused():
    def states() -> None:
        module = Net()
        model = ShardedDDP(module)
        assert list(model.state_dict()) == list(module.state_dict())
        model.load_state_dict(
            {name: torch.full_like(value, 3.0) for name, value in model.state_dict().items()}
        )
        assert module.layers[0].bias.tolist() == [3.0] * 9
        with pytest.raises(UserError, match=r"copy its \.module"):
            copy.deepcopy(model)

    run_ranks(states, 1)
