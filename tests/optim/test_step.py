"""The training step on one process and on several ranks: its results, skipped steps, and its calls of a
wrapped model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dlo_lib.launch import run_ranks
from dlo_lib.optim import IGNORE_INDEX, Phase, Precision, train_step
from dlo_lib.parallel import DDP

VOCAB, SEQ = 11, 5


def model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, VOCAB)).to(dtype)


def batch(seed: int, size: int = 3, ignored: float = 0.4) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (size, SEQ + 1), generator=random)
    targets = tokens[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=random) < ignored] = IGNORE_INDEX
    return tokens[:, :-1], targets


def sgd(net: nn.Module, lr: float = 1.0) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), lr=lr)


def state(net: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in net.parameters()]


def close(mine: list[Tensor], its: list[Tensor], within: float = 1e-10) -> None:
    torch.testing.assert_close(mine, its, rtol=0, atol=within)


def test_micro_batches_with_unequal_numbers_of_valid_tokens_equal_one_batch():
    pairs = [batch(0, size=1, ignored=0.8), batch(1, size=4, ignored=0.1), batch(2)]
    mine, its = model(), model()
    result = train_step(mine, sgd(mine), pairs)

    inputs, targets = (torch.cat(parts) for parts in zip(*pairs))
    loss = F.cross_entropy(its(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX)
    loss.backward()
    sgd(its).step()
    close(state(mine), state(its))
    assert result.loss.dtype == torch.float64
    assert result.loss.item() == pytest.approx(loss.item(), abs=1e-12)
    assert result.tokens.item() == (targets != IGNORE_INDEX).sum().item()
    assert result.grad_norm is None


def test_gradients_are_none_after_a_step_and_do_not_affect_the_next_one():
    twice, second = model(), model()
    optimizer = sgd(twice)
    train_step(twice, optimizer, [batch(0)])
    assert all(parameter.grad is None for parameter in twice.parameters())
    second.load_state_dict(twice.state_dict())
    train_step(twice, optimizer, [batch(1)])
    train_step(second, sgd(second), [batch(1)])
    close(state(twice), state(second))


def test_clipping_bounds_the_step_and_reports_the_norm_before_it():
    free, clipped, loose = model(), model(), model()
    start = torch.cat([value.flatten() for value in state(free)])

    def step_of(net: nn.Module, max_norm: float | None) -> tuple[Tensor, Tensor | None]:
        result = train_step(net, sgd(net), [batch(0), batch(1)], max_norm=max_norm)
        return start - torch.cat([value.flatten() for value in state(net)]), result.grad_norm

    gradient, _ = step_of(free, None)
    shortened, norm = step_of(clipped, gradient.norm().item() / 3)
    unchanged, _ = step_of(loose, gradient.norm().item() * 3)
    assert norm.item() == pytest.approx(gradient.norm().item())
    torch.testing.assert_close(shortened, gradient / 3, rtol=1e-5, atol=0)
    close([unchanged], [gradient])


def test_a_step_without_a_valid_token_has_zero_loss_and_zero_gradients():
    net = model()
    before = state(net)
    inputs, targets = batch(0)
    result = train_step(net, sgd(net), [(inputs, torch.full_like(targets, IGNORE_INDEX))], max_norm=1.0)
    assert (result.loss.item(), result.tokens.item(), result.grad_norm.item()) == (0, 0, 0)
    close(state(net), before)


def test_phases_run_in_order_once_per_micro_batch_or_once_per_step():
    net, seen = model(), []
    train_step(net, sgd(net), [batch(0), batch(1)], max_norm=1.0, on_phase=seen.append)
    per_micro_batch = [Phase.FORWARD, Phase.LOSS, Phase.BACKWARD]
    assert seen == [*per_micro_batch, *per_micro_batch, Phase.CLIP, Phase.OPTIMIZER, Phase.END]


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16])
def test_matrix_products_use_the_precision_and_loss_and_state_are_fp32(precision):
    net, exact = model(torch.float32), model(torch.float32)
    products: list[torch.dtype] = []
    net[3].register_forward_hook(lambda module, args, output: products.append(output.dtype))
    result = train_step(net, sgd(net), [batch(0)], precision=precision)
    reference = train_step(exact, sgd(exact), [batch(0)])
    assert products == [precision.dtype]
    assert result.loss.dtype == torch.float32
    assert result.loss.item() == pytest.approx(reference.loss.item(), rel=0.02)
    assert all(value.dtype == torch.float32 for value in state(net))
    close(state(net), state(exact), within=0.02)


def test_the_scaler_changes_neither_the_step_nor_the_clipping():
    plain, scaled = model(torch.float32), model(torch.float32)
    one = train_step(plain, sgd(plain), [batch(0), batch(1)], max_norm=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    two = train_step(scaled, sgd(scaled), [batch(0), batch(1)], max_norm=0.1, scaler=scaler)
    close(state(plain), state(scaled), within=1e-6)
    assert one.grad_norm.item() == pytest.approx(two.grad_norm.item(), rel=1e-5)
    assert one.loss.item() == two.loss.item(), "the reported loss is not scaled"


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_an_overflow_skips_the_step_and_halves_the_scale(max_norm):
    net = model(torch.float32)
    before = state(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    result = train_step(net, sgd(net), [batch(0)], precision=Precision.FP16, scaler=scaler, max_norm=max_norm)
    assert result.loss.isfinite()
    assert scaler.get_scale() == 2.0**29
    close(state(net), before, within=0)


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    def step() -> tuple[float, list[Tensor]]:
        net = DDP(model(torch.float32))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        if dist.get_rank() == 1:
            net.module[1].weight.register_hook(lambda gradient: gradient * torch.inf)
        train_step(net, sgd(net), [batch(dist.get_rank())], scaler=scaler, group=net.group)
        return scaler.get_scale(), state(net)

    for scale, values in run_ranks(step, 2):
        assert scale == 512.0
        close(values, state(model(torch.float32)), within=0)


def test_a_step_sends_two_numbers_beside_the_gradients_for_any_number_of_micro_batches():
    def sent() -> list[int]:
        net = DDP(model(), bucket_bytes=10**6, first_bucket_bytes=10**6)
        real, seen = dist.all_reduce, []

        def noted(tensor: Tensor, *args, **kwargs):
            seen.append(tensor.numel())
            return real(tensor, *args, **kwargs)

        with mock.patch.object(dist, "all_reduce", noted):
            train_step(net, sgd(net), [batch(seed) for seed in range(3)], max_norm=1.0, group=net.group)
        return seen

    gradients = 11 * 8 + 8 * 16 + 16 + 16 * 11 + 12  # the last bias is padded to 16 bytes
    assert run_ranks(sent, 2) == [[1, gradients, 1]] * 2


def test_every_rank_reports_the_mean_over_all_tokens():
    def step() -> tuple[float, int]:
        net = DDP(model())
        result = train_step(
            net, sgd(net), [batch(dist.get_rank(), size=1 + dist.get_rank())], group=net.group
        )
        return result.loss.item(), result.tokens.item()

    alone = model()
    twin = train_step(alone, sgd(alone), [batch(rank, size=1 + rank) for rank in range(3)])
    for loss, tokens in run_ranks(step, 3):
        assert loss == pytest.approx(twin.loss.item(), abs=1e-12)
        assert tokens == twin.tokens.item()


class Wrapped(nn.Module):
    """A model with the methods of a data-parallel or sharded one, which records their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model()
        self.seen: list[str] = []

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen.append("forward")
        return self.inner(tokens)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.seen.append("no_sync (")
        yield
        self.seen.append(")")

    def finish_grad_sync(self) -> None:
        self.seen.append("finish")

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        self.seen.append(f"clip to {max_norm}")
        return torch.tensor(7.0)


def test_a_wrapper_synchronises_in_the_last_backward_and_its_clipping_is_used():
    net = Wrapped()
    result = train_step(net, sgd(net), [batch(0), batch(1), batch(2)], max_norm=0.5)
    assert net.seen == [
        "no_sync (",
        "forward",
        ")",
        "no_sync (",
        "forward",
        ")",
        "forward",
        "finish",
        "clip to 0.5",
    ]
    assert result.grad_norm.item() == 7.0
