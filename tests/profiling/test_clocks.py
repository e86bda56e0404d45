"""The chronometer, the profile of a loader, the parts of a step and the roofline, with clocks that do not
run."""

from __future__ import annotations

import json
import re

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.profiler import record_function

from dlo_lib.base.errors import UserError
from dlo_lib.hardware import gpu
from dlo_lib.profiling import (
    Ceilings,
    Chronometer,
    MeasuredOperation,
    StepProfile,
    measure_ceilings,
    measure_operation,
    plot_roofline,
    profile_loader,
    profile_steps,
)
from dlo_lib.profiling.step_profile import ProfiledEvent


class Clock:
    """A clock that moves only by ``wait``."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def test_phases_of_a_step_and_what_lies_between():
    clock = Clock()
    chronometer = Chronometer(clock=clock)
    for number in range(6):
        with chronometer.step(samples=4):
            for _ in range(2):  # accumulation: a phase may occur twice
                with chronometer.phase("forward"):
                    clock.wait(1.0 if number >= 2 else 50.0)
            clock.wait(0.5)
            with chronometer.phase("backward"):
                clock.wait(float(number))
    phases = chronometer.phases()
    assert list(phases) == ["forward", "backward", "other"]
    assert (phases["forward"].median, phases["other"].median) == (2.0, 0.5)
    assert (phases["backward"].low, phases["backward"].median, phases["backward"].high) == (2.75, 3.5, 4.25)
    assert phases["forward"].share == pytest.approx(2 / 6)
    assert chronometer.step_time().median == 6.0
    assert chronometer.throughput() == pytest.approx(16 / 24)


def test_wrong_nesting_and_too_few_steps_are_refused():
    chronometer = Chronometer(clock=Clock())
    with pytest.raises(UserError, match="outside a step"), chronometer.phase("forward"):
        pass
    inner = chronometer.phase("b")
    with pytest.raises(UserError, match="within 'a'"), chronometer.step(), chronometer.phase("a"), inner:
        pass
    with pytest.raises(UserError, match="a step within a step"), chronometer.step(), chronometer.step():
        pass
    with pytest.raises(UserError, match="0 steps were measured, of which 2"):
        chronometer.phases()
    unsynchronised = Chronometer(synchronise=False, clock=Clock())
    for _ in range(3):
        with unsynchronised.step(), unsynchronised.phase("forward"):
            pass
    assert unsynchronised.phases() == {}


def test_a_loader_costs_what_the_steps_wait_for_it():
    clock = Clock()

    def loader(seconds: float):
        ready = 0.0
        for _ in range(8):  # one worker: it loads while the step runs
            ready = max(ready, 0.0) + seconds
            clock.now = max(clock.now, ready)
            yield 0

    hidden = profile_loader(loader(1.0), 2.0, batches=6, sleep=clock.wait, clock=clock)
    assert (hidden.first, set(hidden.waits), hidden.share) == (1.0, {0.0}, 0.0)
    clock.now = 0.0
    visible = profile_loader(loader(3.0), 1.0, batches=6, sleep=clock.wait, clock=clock)
    assert (visible.first, visible.wait, visible.share) == (3.0, 2.0, pytest.approx(2 / 3))
    for options in ({"batches": 1}, {"step_seconds": -1.0}):
        with pytest.raises(UserError, match="use at least 2"):
            profile_loader([1, 2, 3], **options)
    with pytest.raises(UserError, match="the loader has 1 batches"):
        profile_loader([1])


def events(**own: float) -> list[ProfiledEvent]:
    """Events of one step, one after another, with the given seconds."""
    found, now = [], 0.0
    for name, seconds in own.items():
        found.append(ProfiledEvent(name, now, seconds, seconds))
        now += seconds
    python = own.pop("python", 0.0)
    return [
        ProfiledEvent("ProfilerStep#2", 0.0, now, python),
        *(event for event in found if event.name != "python"),
    ]


@pytest.mark.parametrize(
    ("own", "part", "words"),
    [
        ({"enumerate(DataLoader)#x": 6.0, "aten::mm": 3.0}, "data", "67% of the 9000.0 .* data; .* workers"),
        ({"aten::copy_": 5.0, "aten::mm": 3.0}, "copies", "take 38%.* pin memory"),
        ({"aten::item": 5.0, "aten::mm": 3.0}, "waiting", "waiting for the device; .* remove item"),
        ({"Optimizer.step#SGD.step": 5.0, "aten::mm": 3.0}, "optimizer", "fused=True"),
        ({"python": 5.0, "aten::mm": 3.0}, "python", "1 operators start in it.* torch.compile"),
        ({"aten::mm": 3.0, "aten::addmm": 4.0, "python": 1.0}, "operators", "addmm takes 50%.* roofline"),
    ],
)  # fmt: skip
def test_the_bottleneck_is_named_with_its_evidence(own, part, words):
    found = StepProfile.of(events(**own), steps=1)
    assert found.bottleneck == part
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert re.search(words, found.explained())


def test_what_happens_within_a_region_belongs_to_it():
    step = ProfiledEvent("ProfilerStep#3", 0.0, 10.0, 2.0)
    optimizer = ProfiledEvent("Optimizer.step#AdamW.step", 1.0, 6.0, 1.0)
    inside = ProfiledEvent("aten::add_", 2.0, 5.0, 5.0)
    outer, inner = ProfiledEvent("aten::linear", 8.0, 2.0, 0.5), ProfiledEvent("aten::mm", 8.5, 1.5, 1.5)
    found = StepProfile.of([inner, inside, outer, optimizer, step], steps=1)
    assert found.parts == {
        "data": 0, "copies": 0, "waiting": 0, "optimizer": 6.0, "operators": 2.0, "python": 2.0
    }  # fmt: skip
    assert found.operators == 3
    assert list(found.largest) == ["aten::mm", "aten::linear"]


def test_a_real_step_is_divided_and_its_trace_written(tmp_path):
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = iter(torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=4))

    def step() -> None:
        with record_function("forward"):
            loss = model(next(batches)).square().mean()
        with record_function("backward"):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    found = profile_steps(step, steps=3, folder=tmp_path)
    assert all(found.parts[part] > 0 for part in ("data", "waiting", "optimizer", "operators", "python"))
    assert sum(found.parts.values()) == pytest.approx(found.seconds, rel=0.05)
    assert found.operators > 10
    assert found.device_seconds is None or torch.cuda.is_available()
    assert found.trace is not None
    names = {event.get("name") for event in json.loads(found.trace.read_text())["traceEvents"]}
    assert "aten::addmm" in names
    assert list(found.phases) == ["forward", "backward"]
    assert 0 < found.phases["forward"] < found.seconds
    assert re.search(r"The longest phase is (forward|backward), \d+% of the step\.", found.explained())
    found.to_tensorboard(tmp_path / "board", step=3)
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    assert {"step/total_ms", "part/data_ms", "phase/backward_ms"} <= set(board.Tags()["scalars"])
    (scalar,) = board.Scalars("phase/backward_ms")
    assert (scalar.step, scalar.value) == (3, pytest.approx(1e3 * found.phases["backward"]))
    assert board.Tags()["tensors"] == ["step/bottleneck/text_summary"]
    with pytest.raises(UserError, match="use at least 1"):
        profile_steps(step, steps=0)


def test_the_roofline_has_a_ridge():
    ceilings = Ceilings(flops=100e9, bandwidth=10e9)
    assert (ceilings.ridge, ceilings.attainable(5), ceilings.attainable(50)) == (10, 50e9, 100e9)
    slow = MeasuredOperation(flops=2_000, bytes=1_000, seconds=1e-7)
    assert (slow.intensity, slow.rate, slow.limit(ceilings)) == (2, pytest.approx(20e9), "memory")
    assert slow.efficiency(ceilings) == pytest.approx(1.0)
    fast = MeasuredOperation(flops=10**6, bytes=1_000, seconds=2e-5)
    assert (fast.limit(ceilings), fast.efficiency(ceilings)) == ("arithmetic", pytest.approx(0.5))
    figure = plot_roofline(ceilings, {"copy": slow, "matmul": fast})
    assert [line.get_label() for line in figure.axes[0].lines][:3] == ["ceiling", "copy", "matmul"]
    a100 = gpu("a100-80")
    assert Ceilings.of(a100, "bf16").ridge == a100.peak("bf16") / a100.bandwidth


def test_operations_are_counted():
    a, b = torch.ones(4, 8), torch.ones(8, 16)
    product = measure_operation(torch.mm, a, b, repeats=1)
    assert (product.flops, product.bytes) == (2 * 4 * 8 * 16, 4 * (32 + 128 + 64))
    total = measure_operation(torch.add, a, a, repeats=1)
    assert (total.flops, total.bytes) == (32, 3 * 128)
    measured = measure_ceilings(size=32, repeats=1)
    assert measured.flops > 0
    assert measured.bandwidth > 0
    for call in (
        lambda: measure_ceilings(size=0),
        lambda: measure_operation(torch.rand),
        lambda: measure_operation(torch.neg, a, repeats=0),
    ):
        with pytest.raises(UserError):
            call()
