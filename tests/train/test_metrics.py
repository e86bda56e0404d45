"""Metrics: complete lines, each step once, and TensorBoard's event files if the package is installed."""

from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import replace

import pytest
import torch

from dlo_lib.hardware import gpu
from dlo_lib.launch import place
from dlo_lib.models.counts import flops_per_token
from dlo_lib.train import Metrics, read_metrics, report, train
from dlo_lib.train.metrics import MetricsWriter, peak_memory


def test_a_line_has_the_loss_and_the_throughput(small_run):
    config = small_run(steps=5, log_every=2, warmup=4)
    train(config)
    lines = read_metrics(config.out)
    assert [line.step for line in lines] == [2, 4, 5], "every other step, and the last"
    assert [line.lr for line in lines] == [config.lr * 2 / 4, config.lr, config.lr]
    assert [line.tokens for line in lines] == [step * 2 * 32 for step in (2, 4, 5)]
    for line in lines:
        assert line.tokens_per_second * line.step_seconds == pytest.approx(2 * 32)
        assert line.grad_norm > 0
        assert line.peak_bytes > 50 * 2**20, "Python and torch need more"
        assert (line.mfu is not None) == (place().device.type == "cuda")
        assert line.loss_scale is None


def test_the_learning_rate_follows_its_schedule_and_is_never_zero(small_run):
    config = small_run(steps=5, warmup=2, lr_schedule="linear")
    train(config)
    assert [line.lr / config.lr for line in read_metrics(config.out)] == pytest.approx(
        [1 / 2, 1, 3 / 4, 2 / 4, 1 / 4]
    )


def test_mfu_uses_the_peak_of_the_present_gpu(small_run, small_model, monkeypatch):
    monkeypatch.setattr(report, "_gpu", lambda device, precision: gpu("h100-80"))
    config = small_run(steps=1, precision="bf16")
    train(config)
    [line] = read_metrics(config.out)
    from dlo_lib.models.checkpoint import load_checkpoint

    flops = flops_per_token(load_checkpoint(small_model).config, config.seq)
    assert line.mfu == pytest.approx(line.tokens_per_second * flops / gpu("h100-80").peak("bf16"))


def test_the_loss_scale_of_fp16_is_reported(small_run):
    train(small_run(steps=1, precision="fp16"))
    assert read_metrics(small_run().out)[0].loss_scale == 65536.0


def test_clip_0_does_not_clip_and_reports_no_norm(small_run):
    train(small_run(steps=1, clip=0.0))
    assert read_metrics(small_run().out)[0].grad_norm is None


def line(step: int, loss: float = 1.0) -> Metrics:
    return Metrics(
        step, loss, lr=0.1, grad_norm=1.0, tokens=step, tokens_per_second=1.0, step_seconds=1.0, peak_bytes=1
    )


def test_a_non_finite_number_is_null_in_json(tmp_path):
    with MetricsWriter(tmp_path, 0) as writer:
        writer.write(line(1, loss=math.nan))
    [written] = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(written, parse_constant=pytest.fail)["loss"] is None


def test_lines_can_be_read_during_the_run(tmp_path):
    with MetricsWriter(tmp_path, 0) as writer:
        for step in (1, 2):
            writer.write(line(step))
            assert [read.step for read in read_metrics(tmp_path)] == list(range(1, step + 1))


def test_tensorboard_shows_each_step_once_after_a_resume(small_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = small_run(checkpoint_every=4)
    shutil.rmtree(train(config).checkpoint)  # as if it had been killed between steps 4 and 6
    train(replace(config, resume=True))
    events = EventAccumulator(str(config.out / "tensorboard"))
    events.Reload()
    losses = events.Scalars("train/loss")
    assert [event.step for event in losses] == [1, 2, 3, 4, 5, 6]
    assert [event.value for event in losses] == pytest.approx(
        [read.loss for read in read_metrics(config.out)]
    )


def test_without_tensorboard_a_notice_is_printed_and_the_lines_are_written(small_run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    config = small_run(steps=2)
    train(config)
    assert capsys.readouterr().err.count("tensorboard is not installed") == 1
    assert len(read_metrics(config.out)) == 2


def test_peak_memory_grows_with_allocated_memory():
    before = peak_memory(torch.device("cpu"))
    held = torch.ones(before // 4 + 2**26)  # more bytes than the previous peak
    assert peak_memory(torch.device("cpu")) >= held.nbytes
