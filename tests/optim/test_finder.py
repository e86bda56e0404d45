"""The range test: its curve, its suggestion, the restored state, and the same curve on all ranks."""

import copy
import itertools
import math
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from dlo_lib.base.errors import UserError
from dlo_lib.launch import run_ranks
from dlo_lib.optim.draw import draw_range_test
from dlo_lib.optim.finder import RangeTest, range_test, range_test_with_reset, smooth
from dlo_lib.parallel import DDP

LRS = tuple(10.0 ** (number / 10 - 5) for number in range(61))  # 1e-5 to 10


def curve(begin: float, bottom: float, end: float = 2.3) -> tuple[float, ...]:
    """Return a loss that falls from 2.3 to 1 between 10**begin and 10**bottom and then rises."""

    def loss(lr: float) -> float:
        x = math.log10(lr)
        down = min(max((x - begin) / (bottom - begin), 0), 1)
        return 2.3 - 1.3 * (1 - math.cos(math.pi * down)) / 2 + max(0, x - bottom) * end

    return tuple(loss(lr) for lr in LRS)


@pytest.mark.parametrize(("begin", "bottom"), [(-4, -1), (-3, 0), (-2.5, -0.5)])
def test_the_suggestion_matches_a_known_curve(begin, bottom):
    found = RangeTest(LRS, curve(begin, bottom), diverged=True, smoothing=0.0).suggestion()
    assert math.log10(found.bottom) == pytest.approx(bottom, abs=0.11)
    assert math.log10(found.steepest) == pytest.approx((begin + bottom) / 2, abs=0.11)
    tenth = begin + (bottom - begin) * math.acos(0.8) / math.pi
    assert math.log10(found.begins) == pytest.approx(tenth, abs=0.11)
    assert found.begins < found.steepest < found.peak < found.bottom
    assert f"falls fastest at {found.steepest:.2g}" in found.reason
    assert "diverges at 10" in found.reason


def test_smoothing_is_unbiased_from_the_first_loss():
    assert smooth([3.0] * 5, 0.9) == pytest.approx([3.0] * 5)
    assert smooth([1.0, 2.0, 4.0], 0.0) == (1.0, 2.0, 4.0)
    noisy = [2.0 + (-1) ** number for number in range(200)]
    assert max(abs(mean - 2) for mean in smooth(noisy, 0.9)[100:]) < 0.06


@pytest.mark.parametrize("end", [1e6, math.nan, math.inf])
def test_noise_and_divergence_shift_the_suggestion_only_slightly(end):
    clean = curve(-3, -1)
    stop = next(number for number, loss in enumerate(clean) if loss > clean[0])
    noise = np.random.default_rng(0).normal(0, 0.1, stop)
    noisy = RangeTest(
        LRS[: stop + 1], (*(np.array(clean[:stop]) + noise).tolist(), end), diverged=True, smoothing=0.6
    ).suggestion()
    assert math.log10(noisy.bottom) == pytest.approx(-1, abs=0.35)
    assert math.log10(noisy.steepest) == pytest.approx(-2, abs=0.5)


@pytest.mark.parametrize(
    "losses", [(2.0,) * 61, tuple(2.0 + number for number in range(61)), (math.nan,) * 61]
)
def test_a_loss_that_never_falls_raises(losses):
    test = RangeTest(LRS, losses, diverged=False)
    with pytest.raises(UserError, match="never falls in this test: start at a lower learning rate"):
        test.suggestion()
    assert "never falls" in draw_range_test(test).axes[0].get_title()


def test_the_plot_shows_the_losses_and_the_suggestion():
    axes = draw_range_test(RangeTest(LRS, curve(-3, -1), diverged=True)).axes[0]
    assert [line.get_label().split(":")[0] for line in axes.lines] == [
        "loss", "smoothed", "begins to fall", "falls fastest", "peak to use", "stops falling",
    ]  # fmt: skip


class Noisy(nn.Module):
    """A model with every kind of state: tied and frozen parameters, buffers, dropout, random numbers of three
    libraries.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.tied = self.last
        self.drop = nn.Dropout(0.2)
        self.first.bias.requires_grad_(False)

    def forward(self, x):
        random.random(), np.random.rand()
        return self.tied(self.drop(self.norm(self.last(self.first(x)))))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()


def endless(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(8, 3, generator=generator) for _ in itertools.count())


def everything(model, optimizer):
    """Return all state that a range test must restore, as comparable values."""
    return {
        "model": {name: value.tolist() for name, value in model.state_dict().items()},
        "grads": [None if p.grad is None else p.grad.tolist() for p in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "groups": [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ],
        "optimizer": {
            k: {n: v.tolist() for n, v in s.items()} for k, s in optimizer.state_dict()["state"].items()
        },
        "random": (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),
    }


def broken(model, batch):
    raise RuntimeError("out of batches of this kind")


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "trained"])
@pytest.mark.parametrize("test", [range_test, range_test_with_reset])
@pytest.mark.parametrize("loss", [loss_of, broken])
def test_all_state_is_restored(used, test, loss):
    torch.manual_seed(0)
    model = Noisy()
    groups = [
        {"params": model.first.weight, "lr": 0.01},
        {"params": [*model.norm.parameters(), *model.last.parameters()]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    if used:
        loss_of(model, next(endless())).backward()
        optimizer.step()
        model.norm.eval()
    before, held = everything(model, optimizer), [id(parameter) for parameter in model.parameters()]
    if loss is broken:
        with pytest.raises(RuntimeError, match="out of batches"):
            test(model, optimizer, endless(), loss, lowest=1e-4, highest=1.0)
    else:
        assert len(test(model, optimizer, endless(), loss, lowest=1e-4, highest=1.0).losses) >= 5
    assert everything(model, optimizer) == before
    assert [id(parameter) for parameter in model.parameters()] == held


def test_the_learning_rate_grows_by_a_constant_factor_and_groups_keep_their_ratio():
    model, seen = nn.Linear(3, 1), []
    optimizer = torch.optim.SGD(
        [{"params": model.weight, "lr": 0.1}, {"params": model.bias, "lr": 0.4}], lr=1.0
    )
    optimizer.register_step_pre_hook(lambda o, *_: seen.append([group["lr"] for group in o.param_groups]))
    test = range_test(model, optimizer, endless(), loss_of, lowest=1e-5, highest=1e-2, steps=7)
    assert test.lrs == pytest.approx([1e-5 * 10 ** (number / 2) for number in range(7)])
    assert [first for first, _ in seen] == pytest.approx(test.lrs)
    assert [second / first for first, second in seen] == pytest.approx([4.0] * 7)


def test_it_stops_at_divergence_and_finds_the_stability_bound_of_a_parabola():
    """Gradient descent on c w^2 / 2 diverges above 2 / c."""
    sharpness = 50.0
    weight = nn.ParameterList([nn.Parameter(torch.tensor(1.0))])
    optimizer = torch.optim.SGD(weight, lr=1.0)

    def parabola(model, batch):
        return sharpness * model[0] ** 2 / 2 + 1e-3

    reset = range_test_with_reset(
        weight, optimizer, itertools.repeat(None), parabola, lowest=1e-4, highest=1.0, rates=60, steps_each=8
    )  # fmt: skip
    assert reset.diverged
    assert 2 / sharpness < reset.lrs[-1] < 1.4 * 2 / sharpness
    assert reset.suggestion().bottom == pytest.approx(1 / sharpness, rel=0.35), "one step to the minimum"
    sweep = range_test(
        weight, optimizer, itertools.repeat(None), parabola, lowest=1e-4, highest=1e3, steps=100
    )
    assert sweep.diverged
    assert 2 / sharpness < sweep.lrs[-1] < 1e3
    assert len(sweep.losses) == len(sweep.lrs) < 100


def test_with_a_reset_a_learning_rate_does_not_affect_the_next():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    sizes = {"lowest": 1e-3, "highest": 1e-1, "rates": 5, "steps_each": 4}
    test = range_test_with_reset(model, optimizer, endless(), loss_of, **sizes)
    shown = list(itertools.islice(endless(), 5))
    for lr, got in zip(test.lrs, test.losses):
        alone = copy.deepcopy(model)
        descent = torch.optim.SGD(alone.parameters(), lr=lr, momentum=0.9)
        for batch in shown[:-1]:
            descent.zero_grad()
            loss_of(alone, batch).backward()
            descent.step()
        assert got == pytest.approx(loss_of(alone, shown[-1]).item(), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lowest": 0.0}, "use 0 < lowest < highest"),
        ({"lowest": 1.0, "highest": 0.1}, "use 0 < lowest"),
        ({"steps": 4}, "use at least 5"),
        ({"steps": 30}, "12 batches and the test needs 30"),
    ],
)
def test_invalid_arguments_raise_with_the_cure(options, message):
    model = nn.Linear(3, 1)
    with pytest.raises(UserError, match=message):
        range_test(
            model,
            torch.optim.SGD(model.parameters(), lr=1e-9),
            itertools.islice(endless(), 12),
            loss_of,
            **{"highest": 1e-5, **options},
        )


def curve_of_rank(kind: str) -> tuple[list[float], bool, list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    spread = DDP(model) if kind == "ours" else nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(spread.parameters(), lr=0.1)
    test = range_test(
        spread, optimizer, endless(dist.get_rank()), loss_of, lowest=1e-2, highest=1e4, steps=40,
        group=dist.group.WORLD
    )  # fmt: skip
    return (
        list(test.losses),
        test.diverged,
        [float(value) for value in torch.cat([p.detach().flatten() for p in model.parameters()])],
    )


@pytest.mark.parametrize("kind", ["ours", "torch's"])
def test_all_ranks_record_the_curve_of_one_process_with_all_batches(kind):
    results = run_ranks(curve_of_rank, 3, kind)
    assert all(result == results[0] for result in results)
    losses, diverged, parameters = results[0]
    assert diverged
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    assert parameters == [
        float(value) for value in torch.cat([p.detach().flatten() for p in model.parameters()])
    ]
    together = (torch.cat(parts) for parts in zip(*(endless(rank) for rank in range(3))))
    alone = range_test(
        model, torch.optim.SGD(model.parameters(), lr=0.1), together, loss_of, lowest=1e-2, highest=1e4,
        steps=40
    )  # fmt: skip
    calm = next((number for number, loss in enumerate(losses) if loss > 2 * losses[0]), len(losses))
    assert calm > 5
    assert losses[:calm] == pytest.approx(alone.losses[:calm], rel=1e-3), (
        "before divergence, which amplifies rounding errors"
    )
