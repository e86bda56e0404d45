"""Batch normalisation over ranks is the one over their samples in one process: outputs, gradients
and running statistics."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.comm.tracing.recorder import trace_collectives
from dlo_lib.launch import RankFailure, run_ranks
from dlo_lib.parallel import DDP, SyncBatchNorm

C = 5
SAMPLES = (3, 0, 4, 1)
"""Of each rank: unequal, and one without any."""


def inputs(rank: int, step: int, tail: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    random = torch.Generator().manual_seed(100 * rank + step)
    return (100 + torch.randn(SAMPLES[rank], C, *tail, generator=random, dtype=torch.float64)).to(dtype)


def weights(rank: int, step: int, tail: tuple[int, ...]) -> Tensor:
    return inputs(rank, 1000 + step, tail) - 100


def against_one_process(tail: tuple[int, ...], options: dict) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    kinds = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
    torch.manual_seed(0)
    twin = kinds[len(tail)](C, **options).double()
    if twin.affine:
        nn.init.normal_(twin.weight)
        nn.init.normal_(twin.bias)
    layer = SyncBatchNorm(C, **options).double()
    layer.load_state_dict(twin.state_dict())
    starts = [sum(SAMPLES[:other]) for other in range(size + 1)]
    for step in range(3):
        x = inputs(rank, step, tail).requires_grad_()
        whole = torch.cat([inputs(other, step, tail) for other in range(size)]).requires_grad_()
        out, its = layer(x), twin(whole)
        torch.testing.assert_close(out, its[starts[rank] : starts[rank + 1]], rtol=0, atol=1e-9)
        (out * weights(rank, step, tail)).sum().backward()
        (its * torch.cat([weights(other, step, tail) for other in range(size)])).sum().backward()
        torch.testing.assert_close(x.grad, whole.grad[starts[rank] : starts[rank + 1]], rtol=0, atol=1e-9)
    for mine, other in zip(layer.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-9)
    for mine, other in zip(layer.parameters(), twin.parameters(), strict=True):
        dist.all_reduce(mine.grad)  # the sum over ranks, which data parallelism takes care of
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=1e-9)
    layer.eval()
    twin.eval()
    if layer.track_running_stats:
        torch.testing.assert_close(layer(x), twin(x), rtol=0, atol=1e-9)


@pytest.mark.parametrize("tail", [(), (6,), (2, 3), (2, 1, 3)])
def test_every_number_of_dimensions(tail):
    run_ranks(against_one_process, 3, tail, {})


@pytest.mark.parametrize(
    "options",
    [{"affine": False}, {"momentum": None}, {"track_running_stats": False}, {"eps": 0.1, "momentum": 0.5}],
)
@pytest.mark.parametrize("world_size", [1, 4])
def test_every_option(world_size, options):
    run_ranks(against_one_process, world_size, (3,), options)


def test_large_means_do_not_cancel_in_fp32():
    def far() -> None:
        x = inputs(dist.get_rank(), 0, (50,), torch.float32) + 1e4
        out = SyncBatchNorm(C)(x)
        exact = SyncBatchNorm(C).double()(x.double())
        # x itself is known to 1e-3 of its deviation only
        torch.testing.assert_close(out.double(), exact, rtol=0, atol=2e-3)

    run_ranks(far, 3)


def test_16_bit_inputs_have_statistics_in_fp32_and_an_output_of_their_type():
    def half() -> None:
        x = inputs(dist.get_rank(), 0, (8,), torch.bfloat16).requires_grad_()
        layer = SyncBatchNorm(C)
        out = layer(x)
        assert out.dtype is torch.bfloat16
        exact = SyncBatchNorm(C)(x.float())
        torch.testing.assert_close(out, exact.bfloat16(), rtol=0, atol=0)
        out.sum().backward()
        assert x.grad.dtype is torch.bfloat16
        assert layer.weight.grad.dtype is torch.float32

    run_ranks(half, 3)


def test_gradients_are_those_of_finite_differences():
    torch.manual_seed(0)
    layer = SyncBatchNorm(C).double()
    x = torch.randn(4, C, 2, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(C, dtype=torch.float64, requires_grad=True) for _ in range(2))
    torch.autograd.gradcheck(
        lambda x, weight, bias: torch.func.functional_call(layer, {"weight": weight, "bias": bias}, x),
        (x, weight, bias),
    )


def test_a_network_with_it_learns_under_ddp_what_one_process_learns():
    def trained() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        twin = nn.Sequential(
            nn.Conv1d(C, 6, 3, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 5, 2)
        ).double()
        torch.manual_seed(0)
        module = nn.Sequential(
            nn.Conv1d(C, 6, 3, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 5, 2)
        ).double()
        model = DDP(SyncBatchNorm.convert(module))
        assert type(module[1]) is SyncBatchNorm
        total = sum(SAMPLES[:size])
        optimizer, its = (
            torch.optim.AdamW(model.parameters(), lr=0.01),
            torch.optim.AdamW(twin.parameters(), lr=0.01),
        )
        for step in range(5):
            loss = model(inputs(rank, step, (7,))).square().sum() * size / total
            other = twin(torch.cat([inputs(one, step, (7,)) for one in range(size)])).square().sum() / total
            for value, opt in ((loss, optimizer), (other, its)):
                opt.zero_grad()
                value.backward()
                opt.step()
            shares = loss.detach() / size
            dist.all_reduce(shares)
            torch.testing.assert_close(shares, other.detach(), rtol=0, atol=1e-9)
        for mine, same in zip(module.state_dict().values(), twin.state_dict().values(), strict=True):
            torch.testing.assert_close(mine, same, rtol=0, atol=1e-8)

    run_ranks(trained, 3)


def test_converting_keeps_parameters_buffers_mode_and_settings():
    alone = nn.BatchNorm2d(3, eps=0.1, momentum=0.3).eval()
    made = SyncBatchNorm.convert(alone)
    assert isinstance(made, SyncBatchNorm)
    assert made.weight is alone.weight
    assert made.running_var is alone.running_var
    assert (made.eps, made.momentum, made.training) == (0.1, 0.3, False)
    tree = nn.ModuleDict({"a": nn.Sequential(alone, nn.InstanceNorm2d(3)), "b": nn.Linear(1, 1)})
    assert SyncBatchNorm.convert(tree) is tree
    assert [type(part) for part in tree["a"]] == [SyncBatchNorm, nn.InstanceNorm2d]
    kept = tree["a"][0]
    assert SyncBatchNorm.convert(tree)["a"][0] is kept


def test_evaluation_sends_nothing_and_a_training_step_two_small_messages():
    def sent() -> None:
        layer, x = SyncBatchNorm(C).double(), inputs(dist.get_rank(), 0, (3,)).requires_grad_()
        with trace_collectives() as trace:
            layer(x).sum().backward()
        assert (trace.count("all_gather"), trace.count("all_reduce")) == (1, 1)
        assert trace.bytes("all_gather") == (2 * C + 1) * 8 * dist.get_world_size()
        assert trace.bytes("all_reduce") == 2 * C * 8
        for quiet in (layer.eval(), SyncBatchNorm(C, track_running_stats=False).double().eval()):
            with trace_collectives() as trace:
                quiet(torch.randn(2, C).double())
            assert trace.count() == 0

    run_ranks(sent, 2)


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (torch.randn(1, C), "a single value per channel has no variance"),
        (torch.randn(2, 3), r"input of shape \(2, 3\) for 5 channels"),
    ],
)
def test_what_cannot_be_normalised_is_named(x, says):
    with pytest.raises(UserError, match=says):
        SyncBatchNorm(C)(x)


def test_one_value_a_rank_is_enough_where_there_are_two_ranks():
    def one() -> float:
        out = SyncBatchNorm(1).double()(torch.full((1, 1), float(dist.get_rank()), dtype=torch.float64))
        return out.item()

    low, high = run_ranks(one, 2)
    assert low == pytest.approx(-high)
    assert high == pytest.approx(0.5 / (0.25 + 1e-5) ** 0.5)


def test_a_rank_that_leaves_out_a_step_is_explained():
    def skipping() -> None:
        layer = SyncBatchNorm(C)
        if dist.get_rank() == 0:
            layer(torch.randn(3, C))

    with pytest.raises(RankFailure, match="all_gather"):
        run_ranks(skipping, 2)
