"""The technical check: its numbers, its text and its figure; and memory measured against the batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dlo_lib.base.errors import UserError
from dlo_lib.hardware import gpu
from dlo_lib.profiling import (
    TechnicalCheck,
    largest_measured_batch,
    memory_of_batches,
    step_peak,
    technical_check,
)
from dlo_lib.profiling import batch_memory as module

GIB = 2**30
PAGE = TechnicalCheck(
    batch=64,
    phases={"load": 0.03, "forward": 0.02, "backward": 0.04, "communication": 0.01},
    memory={32: GIB, 64: 2 * GIB, 128: 4 * GIB, 256: None},
    limit_bytes=3 * GIB,
    card="a card",
)


def test_the_scale_of_the_gauge_is_the_step_that_does_not_wait():
    assert PAGE.throughput == pytest.approx(640)
    assert PAGE.attainable == pytest.approx(64 / 0.06)
    assert PAGE.largest_fitting == 64
    alone = TechnicalCheck(8, {"load": 0.5}, {})
    assert (alone.attainable, alone.largest_fitting) == (16, None)


def test_the_page_as_text():
    text = PAGE.text()
    assert "640 of 1067 samples/s (60%) at batch 64" in text
    assert "load          ███████················· 30.0 ms (30%)" in text
    assert "batch 128     ████████████████████████ 4 GiB, above the 3 GiB of a card" in text
    assert "batch 256     ████████████████████████ does not fit" in text
    assert "The largest part of a step is backward, 40% of 100.0 ms." in text
    assert "Hide load behind the computation: a step can be 1.7 times as fast." in text
    assert "64 is the largest that fits on a card" in text
    small = TechnicalCheck(8, {"forward": 0.1}, {8: GIB}, GIB // 2, "a card")
    assert small.explained().endswith("No measured batch fits on a card: try activation checkpointing.")
    assert "Hide" not in small.explained()
    assert (
        "8 MiB, above the 4 MiB of a card"
        in TechnicalCheck(8, {"forward": 0.1}, {8: 1 << 23}, 1 << 22, "a card").text()
    )


def test_the_page_as_a_figure():
    gauge, step, memory = PAGE.plot().axes
    assert [bar.get_width() for bar in gauge.patches] == pytest.approx([64 / 0.06, 640])
    assert [bar.get_width() for bar in step.patches] == pytest.approx([30, 20, 40, 10])
    assert [text.get_text() for text in step.get_legend().get_texts()] == list(PAGE.phases)
    assert list(memory.lines[0].get_ydata()) == [1, 2, 4]
    assert {line.get_label() for line in memory.lines} >= {"a card: 3 GiB", "batch 256 does not fit"}


def make_step(batch):
    model = nn.Linear(16, 16, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(chronometer):
        with chronometer.phase("load"):
            x = torch.ones(batch, 16)
        with chronometer.phase("forward"):
            loss = model(x).square().mean()
        with chronometer.phase("backward"):
            loss.backward()
        with chronometer.phase("optimizer"):
            optimizer.step()
            optimizer.zero_grad()

    return step


def test_a_real_step_is_checked():
    page = technical_check(make_step, 8, (8, 64), card=gpu("v100-16"), steps=3)
    assert list(page.phases) == ["load", "forward", "backward", "optimizer", "other"]
    assert all(seconds > 0 for name, seconds in page.phases.items() if name != "other")
    assert page.memory[64] > page.memory[8] > 16 * 16 * 4
    assert (page.limit_bytes, page.card) == (gpu("v100-16").usable_bytes, gpu("v100-16").title)
    assert page.largest_fitting == 64
    given = technical_check(make_step, 8, steps=1, limit_bytes=1)
    assert (given.card, given.memory) == ("the given limit", {})


def test_wrong_phases_and_counts_are_refused():
    def other(batch):
        def step(chronometer):
            with chronometer.phase("augment"):
                pass

        return step

    with pytest.raises(UserError, match="the phase 'augment' is unknown: use load, forward"):
        technical_check(other, 8, steps=1)
    with pytest.raises(UserError, match="the step names no phase"):
        technical_check(lambda batch: lambda chronometer: None, 8, steps=1)
    with pytest.raises(UserError, match="steps is 0"):
        technical_check(make_step, 8, steps=0)


def build(batch):
    """A step whose peak is a batch of activations, its square and a buffer of 1 MiB."""
    kept = torch.zeros(1 << 18)

    def step():
        x = torch.ones(batch, 256)
        return kept.sum() + (x * x).sum()

    return step


def test_the_peak_grows_with_the_batch():
    found = memory_of_batches(build, (64, 128, 256))
    assert found[128] - found[64] == 64 * 2 * 1024
    assert found[256] - found[128] == 128 * 2 * 1024
    assert found[64] == step_peak(lambda: build(64))


def test_the_largest_batch_is_found_by_measurements():
    limit = step_peak(lambda: build(21)) + 1000
    assert largest_measured_batch(build, limit) == 21
    assert largest_measured_batch(build, limit, most=5) == 5
    assert largest_measured_batch(build, 1) == 0


def test_a_step_that_runs_out_of_memory_does_not_fit(monkeypatch):
    def peak(build_one, device):
        build_one()
        return 1

    def on_a_card(batch):
        if batch > 37:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return lambda: None

    monkeypatch.setattr(module, "step_peak", peak)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert largest_measured_batch(on_a_card, device="cuda") == 37
    assert memory_of_batches(on_a_card, (37, 38), "cuda") == {37: 1, 38: None}
    with pytest.raises(UserError, match="needs limit_bytes"):
        largest_measured_batch(on_a_card)
    with pytest.raises(UserError, match="batch is 0"):
        memory_of_batches(on_a_card, (0,))
