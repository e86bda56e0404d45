"""Schedules equal those of PyTorch and transformers at every step of a run and after a
resume; they are pure."""

import dataclasses

import pytest
import torch
from torch.optim import lr_scheduler

from dlo_lib.base.errors import UserError
from dlo_lib.optim.adapter import ScheduleLR
from dlo_lib.optim.draw import draw_schedules
from dlo_lib.optim.schedules import (
    Constant,
    Cosine,
    CosineRestarts,
    CurveShape,
    Exponential,
    ExpRange,
    Linear,
    OneCycle,
    Polynomial,
    ScheduleName,
    Step,
    Triangular,
    Triangular2,
    WarmUp,
    WarmUpStableDecay,
)
from tests.lazy import Lazy

transformers = Lazy("transformers")

STEPS = 37
LR, OTHER_LR = 0.4, 0.03  # one for each parameter group


def optimizer(adam: bool = False) -> torch.optim.Optimizer:
    groups = [
        {"params": [torch.nn.Parameter(torch.zeros(1))]},
        {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": OTHER_LR},
    ]
    return torch.optim.AdamW(groups, lr=LR) if adam else torch.optim.SGD(groups, lr=LR, momentum=0.9)


PEERS = {
    "constant": (Constant(), lambda o: lr_scheduler.ConstantLR(o, factor=1.0)),
    "step": (Step(5, 0.3), lambda o: lr_scheduler.StepLR(o, 5, 0.3)),
    "exponential": (Exponential(0.9), lambda o: lr_scheduler.ExponentialLR(o, 0.9)),
    "cosine": (Cosine(STEPS), lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS)),
    "linear": (Linear(20, final=0.25), lambda o: lr_scheduler.LinearLR(o, 1.0, 0.25, 20)),
    "polynomial": (Polynomial(20, power=2.5), lambda o: lr_scheduler.PolynomialLR(o, 20, 2.5)),
    "restarts": (CosineRestarts(5, growth=2), lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5, 2)),
    "equal restarts": (CosineRestarts(7), lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 7)),
    "warm-up, constant": (
        WarmUp(6, Constant()),
        lambda o: transformers.get_constant_schedule_with_warmup(o, 6),
    ),
    "warm-up, linear": (
        WarmUp(6, Linear(24)),
        lambda o: transformers.get_linear_schedule_with_warmup(o, 6, 30),
    ),
    "no warm-up, linear": (
        WarmUp(0, Linear(30)),
        lambda o: transformers.get_linear_schedule_with_warmup(o, 0, 30),
    ),
    "warm-up, cosine": (
        WarmUp(6, Cosine(STEPS - 6)),
        lambda o: transformers.get_cosine_schedule_with_warmup(o, 6, STEPS),
    ),
    "warm-up, cosine, floor": (
        WarmUp(6, Cosine(STEPS - 6, final=0.1)),
        lambda o: transformers.get_cosine_with_min_lr_schedule_with_warmup(o, 6, STEPS, min_lr_rate=0.1),
    ),
    "warm-up, restarts": (
        WarmUp(7, CosineRestarts(10)),
        lambda o: transformers.get_cosine_with_hard_restarts_schedule_with_warmup(o, 7, STEPS, num_cycles=3),
    ),
    **{
        f"wsd {shape.value}": (
            WarmUpStableDecay(5, 12, 15, lowest=0.1, shape=shape),
            lambda o, shape=shape: transformers.get_wsd_schedule(
                o, 5, 15, num_stable_steps=12, min_lr_ratio=0.1, decay_type=shape.value
            ),
        )
        for shape in CurveShape
    },
}


def run(scheduler, steps: int) -> list[list[float]]:
    """Return the learning rate and the momentum of both groups, before each step and after the last."""

    def now():
        groups = scheduler.optimizer.param_groups
        return [
            *(group["lr"] for group in groups),
            *(group["betas"][0] if "betas" in group else group["momentum"] for group in groups),
        ]

    seen = [now()]
    for _ in range(steps):
        scheduler.optimizer.step()
        scheduler.step()
        seen.append(now())
    return seen


def same(ours, theirs) -> bool:
    return torch.allclose(
        torch.tensor(ours, dtype=torch.float64),
        torch.tensor(theirs, dtype=torch.float64),
        rtol=1e-9,
        atol=1e-12,
    )


@pytest.mark.parametrize("name", PEERS)
def test_every_step_equals_that_of_the_peer(name):
    schedule, peer = PEERS[name]
    assert same(run(ScheduleLR(optimizer(), schedule), STEPS - 1), run(peer(optimizer()), STEPS - 1))


@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize(
    ("steps", "rise", "shape"), [(37, 0.3, "cos"), (20, 0.25, "linear"), (11, 0.45, "cos")]
)
def test_one_cycle_and_its_momentum_equal_pytorchs(adam, steps, rise, shape):
    schedule = OneCycle(steps, rise=rise, shape=CurveShape.COSINE if shape == "cos" else CurveShape.LINEAR)
    theirs = lr_scheduler.OneCycleLR(
        optimizer(adam),
        [LR, OTHER_LR],
        steps,
        pct_start=rise,
        anneal_strategy=shape,
        base_momentum=0.85,
        max_momentum=0.95,
    )
    assert same(run(ScheduleLR(optimizer(adam), schedule), steps - 1), run(theirs, steps - 1))


@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize("fall", [None, 7, 1])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Triangular, {"mode": "triangular"}),
        (Triangular2, {"mode": "triangular2"}),
        (ExpRange, {"mode": "exp_range", "gamma": 0.999}),
    ],
)
def test_cycles_and_their_momentum_equal_pytorchs(adam, fall, kind, options):
    theirs = lr_scheduler.CyclicLR(
        optimizer(adam), [LR / 8, OTHER_LR / 8], [LR, OTHER_LR], step_size_up=4, step_size_down=fall,
        **options
    )  # fmt: skip
    assert same(run(ScheduleLR(optimizer(adam), kind(4, lowest=1 / 8, fall=fall)), STEPS), run(theirs, STEPS))


ALL = [schedule for schedule, _ in PEERS.values()] + [
    OneCycle(STEPS),
    Triangular(4, lowest=0.1),
    Triangular2(3, 0.2),
    ExpRange(3, 0.0),
]


@pytest.mark.parametrize("schedule", ALL, ids=lambda schedule: type(schedule).__name__)
def test_a_resumed_run_equals_an_uninterrupted_one(schedule):
    whole = run(ScheduleLR(optimizer(), schedule), STEPS - 1)
    first = ScheduleLR(optimizer(), schedule)
    run(first, 15)
    resumed = ScheduleLR(optimizer(), schedule)
    resumed.load_state_dict(first.state_dict())
    resumed.optimizer.step()
    assert same(run(resumed, STEPS - 16), whole[15:])
    assert all(isinstance(value, (int, list)) for value in first.state_dict().values()), (
        "the state holds only numbers, for every schedule"
    )


def test_a_group_that_is_added_later_follows_the_schedule_from_its_own_peak():
    first = optimizer()
    scheduler = ScheduleLR(first, Step(1, 0.5))
    peaks = [*scheduler.base_lrs, 0.25]
    first.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": peaks[-1]})
    for factor in (0.5, 0.25):
        first.step()
        scheduler.step()
        assert [group["lr"] for group in first.param_groups] == [factor * peak for peak in peaks]
    with pytest.raises(UserError, match=f"saved with {len(peaks)} parameter groups, the optimiser has"):
        ScheduleLR(optimizer(), Step(2, 0.5)).load_state_dict(scheduler.state_dict())


def test_the_order_of_loading_does_not_matter():
    for optimizer_first in (True, False):
        first = ScheduleLR(optimizer(), OneCycle(STEPS))
        run(first, 15)
        resumed = ScheduleLR(optimizer(), OneCycle(STEPS))
        loads = [
            lambda r=resumed, f=first: r.optimizer.load_state_dict(f.optimizer.state_dict()),
            lambda r=resumed, f=first: r.load_state_dict(f.state_dict()),
        ]
        for load in loads if optimizer_first else reversed(loads):
            load()
        assert same(run(resumed, 3), run(first, 3))


@pytest.mark.parametrize("schedule", ALL, ids=lambda schedule: type(schedule).__name__)
def test_a_schedule_is_a_value_and_never_exceeds_its_peak(schedule):
    assert schedule == dataclasses.replace(schedule)
    assert hash(schedule) == hash(dataclasses.replace(schedule))
    factors = [schedule(step) for step in range(3 * STEPS)]
    assert factors == [schedule(step) for step in range(3 * STEPS)]
    assert 0 <= min(factors) <= max(factors) <= 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.steps = 3


@pytest.mark.parametrize(
    ("schedule", "end"),
    [
        (Linear(STEPS, final=0.2), 0.2), (Cosine(STEPS, final=0.1), 0.1), (Polynomial(STEPS, 3.0), 0.0),
        (WarmUp(3, Cosine(10)), 0.0), (WarmUpStableDecay(3, 3, 3, lowest=0.05), 0.05),
        (WarmUpStableDecay(0, 3, 0, lowest=0.5), 0.5), (OneCycle(STEPS), 1 / 25e4),
    ],
)  # fmt: skip
def test_a_schedule_is_constant_after_its_end(schedule, end):
    assert [schedule(step) for step in (STEPS, STEPS + 1, 10 * STEPS)] == pytest.approx([end] * 3)


def test_restarts_are_computed_fast_in_a_long_run():
    assert CosineRestarts(7)(7 * 10**9) == 1.0
    assert CosineRestarts(7, growth=2)(7 * (2**40 - 1)) == 1.0


def test_schedules_are_drawn_in_one_chart_with_the_momentum_below():
    figure = draw_schedules({"cosine": Cosine(10), "one cycle": OneCycle(10)}, 10)
    rates, momentum = figure.axes
    assert [line.get_label() for line in rates.lines] == ["cosine", "one cycle"]
    assert len(momentum.lines) == 1
    assert next(iter(momentum.lines[0].get_ydata())) == 0.95
    assert len(draw_schedules({"cosine": Cosine(10)}, 10).axes) == 1


@pytest.mark.parametrize("kind", ScheduleName)
@pytest.mark.parametrize(("steps", "warmup"), [(20, 0), (20, 5), (20, 18), (1, 0)])
def test_a_schedule_by_name_fills_its_steps(kind, steps, warmup):
    schedule = kind.over(steps, warmup)
    assert [schedule(step) for step in range(warmup)] == pytest.approx(
        [step / warmup for step in range(warmup)]
    )
    assert schedule(warmup) == 1.0
    assert schedule(steps) == (1.0 if kind is ScheduleName.CONSTANT else 0.0)
    if steps > warmup + 2 and kind is not ScheduleName.CONSTANT:
        assert 0 < schedule(steps - 1) < 0.6


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WarmUp(-1, Constant()), "warm-up steps is -1: use at least 0"),
        (
            lambda: ScheduleName.COSINE.over(10, 10),
            "warmup takes 10 of 10 steps: leave some to the cosine schedule",
        ),
        (lambda: Step(0), "every is 0"),
        (lambda: Cosine(0), "steps is 0"),
        (lambda: Linear(0), "steps is 0"),
        (lambda: CosineRestarts(0), "period is 0"),
        (lambda: CosineRestarts(3, growth=0), "growth is 0"),
        (lambda: WarmUpStableDecay(1, -1, 1), "stable is -1"),
        (lambda: Triangular(0, 0.1), "rise is 0"),
        (lambda: Triangular(2, 0.1, fall=0), "fall is 0"),
        (lambda: OneCycle(10, rise=0.05), "more than one step"),
        (lambda: OneCycle(10, rise=1.0), "fewer than all steps"),
        (
            lambda: ScheduleLR(torch.optim.Adagrad([torch.nn.Parameter(torch.zeros(1))]), OneCycle(10)),
            "Adagrad has none",
        ),
    ],
)
def test_invalid_schedules_raise_with_the_cure(make, message):
    with pytest.raises(UserError, match=message):
        make()
