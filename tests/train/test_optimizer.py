"""``--optimizer``: every optimiser of the registry trains, resumes bit for bit, or refuses in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from dlo_lib.base.errors import UserError
from dlo_lib.launch import run_ranks
from dlo_lib.models.checkpoint import load_checkpoint
from dlo_lib.optim.entry import (
    OptimizerStep,
    TrainingForm,
)
from dlo_lib.optim.registry import OPTIMIZERS
from dlo_lib.train import TrainConfig, TrainResult, newest, train
from dlo_lib.train.__main__ import main, parse
from tests.train.test_loop import assert_same_state, flattened, numbers

FORMS: list[dict[str, Any]] = [
    {"parallel": "zero2", "accumulation": 2},
    {"parallel": "fsdp", "precision": "fp16"},
    {"parallel": "zero1", "lr_schedule": "cosine"},
    {"tp": 2},
]
ALONE: list[dict[str, Any]] = [
    {"precision": "fp16"},
    {"kernels": "fused", "accumulation": 2},
    {"lr_schedule": "cosine", "clip": 0.5},
]

RATES = {"rmsprop": 1e-4, "lars": 10.0, "lamb": 0.1}
"""Rates of optimisers whose steps have another length than AdamW's."""


def in_steps(config: TrainConfig) -> tuple[TrainConfig, TrainConfig, TrainConfig]:
    """Return an undisturbed run, its first half elsewhere, and the run that resumes it."""
    half = replace(config, out=config.out.with_name(config.out.name + "-resumed"), steps=2)
    return config, half, replace(half, steps=config.steps, resume=True)


def options_alone(name: str, number: int) -> dict[str, Any]:
    return {"clip": 0.0} if OPTIMIZERS[name].in_backward else ALONE[number % len(ALONE)]


def trained(configs: list[TrainConfig]) -> list[TrainResult]:
    return [train(config) for config in configs]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains_and_resumes_bit_for_bit(small_run, name: str):
    number = list(OPTIMIZERS).index(name)
    rate = {"lr": RATES[name]} if name in RATES else {}
    config = small_run("whole", optimizer=name, steps=4, **rate, **options_alone(name, number))
    whole, _, resumed = trained([*in_steps(config)])
    assert_same_state(resumed, whole)
    losses = [line["loss"] for line in numbers(config.out)]
    assert losses[-1] < losses[0]


def test_every_kind_of_state_resumes_on_two_ranks_bit_for_bit(small_run):
    """Not that of AdamW, which the tests of the loop and of other plans resume in every form."""
    by_states = {
        entry.states: name
        for name, entry in OPTIMIZERS.items()
        if entry.wrong_under(set(TrainingForm)) is None
    }
    del by_states[OPTIMIZERS["adamw"].states]
    runs = [
        in_steps(small_run(name, optimizer=name, steps=4, **FORMS[number % len(FORMS)]))
        for number, name in enumerate(by_states.values())
    ]
    assert runs
    results = run_ranks(trained, 2, [config for run in runs for config in run])[0]
    for whole, resumed in zip(results[::3], results[2::3], strict=True):
        assert_same_state(resumed, whole)


def test_an_entry_that_needs_whole_parameters_trains_where_ranks_have_them(small_run):
    """In DDP, in ZeRO stages 1 and 2 with whole parameters as parts, and in FSDP at an owner."""
    forms = [
        small_run(form, optimizer="adafactor", steps=4, parallel=form) for form in ("ddp", "zero1", "fsdp")
    ]
    stage2 = in_steps(small_run("zero2", optimizer="adafactor", steps=4, parallel="zero2"))
    ddp, zero1, fsdp, zero2, half, resumed = run_ranks(trained, 2, [*forms, *stage2])[0]
    twin = [line["loss"] for line in numbers(ddp.out)]
    for sharded in (zero1, zero2, fsdp):
        assert [line["loss"] for line in numbers(sharded.out)] == pytest.approx(twin, abs=1e-5)
    assert_same_state(resumed, zero2)
    assert half.step == 2


def test_whole_matrices_of_an_owner_and_parts_with_whole_norms_resume_bit_for_bit(small_run):
    """Under FSDP and tensor parallelism, with the losses of one process."""
    runs = [
        in_steps(small_run(f"{name}-{number}", optimizer=name, steps=4, **options))
        for name in ("muon", "lamb", "lars", "soap", "adamw-8bit", "adafactor")
        for number, options in enumerate(({"parallel": "fsdp"}, {"tp": 2}))
    ]
    results = run_ranks(trained, 2, [config for run in runs for config in run])[0]
    for whole, resumed in zip(results[::3], results[2::3], strict=True):
        assert_same_state(resumed, whole)


def test_another_optimizer_on_resume_is_one_line_and_status_2(small_run, capfd):
    config = small_run(optimizer="sgd-momentum", steps=1)
    train(config)
    capfd.readouterr()
    arguments = ["--optimizer", "sgd", "--resume", "--out", str(config.out), "--model", config.model]
    same = ["--data", "arithmetic", "--seq", "32", "--batch", "2", "--lr", "0.01", "--warmup", "2"]
    assert main([*arguments, *same]) == 2
    said = capfd.readouterr().err
    assert "was trained with another optimizer (sgd-momentum, now sgd): use the same, or start anew" in said
    assert said.count("\n") == 1


def test_a_checkpoint_without_the_field_resumes_as_adamw(small_run):
    whole, half, resumed = in_steps(small_run("whole", steps=4))
    undisturbed, before = trained([whole, half])
    manifest = before.checkpoint / "checkpoint.json"
    content = json.loads(manifest.read_text())
    for name in ("optimizer", "optimizer_step"):
        del content["config"][name]
    manifest.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"another optimizer \(adamw, now adam\)"):
        train(replace(resumed, optimizer="adam"))
    assert_same_state(train(resumed), undisturbed)
    assert newest(resumed.out).config["optimizer"] == "adamw"


def test_the_implementation_is_the_one_with_the_fewest_kernels_and_is_stored():
    for name, entry in OPTIMIZERS.items():
        config = TrainConfig(optimizer=name, clip=0.0)
        assert config.optimizer_step is next(iter(entry.steps))
        assert config.plain()["optimizer_step"] == entry.default_step.value
        assert parse(["--optimizer", name, "--clip", "0"]) == config
    assert (
        TrainConfig(optimizer_step="auto") == TrainConfig(optimizer_step=OptimizerStep.FUSED) == TrainConfig()
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"optimizer": "adamv"}, 'unknown optimizer "adamv": did you mean adam or adamw'),
        ({"optimizer_step": "fast"}, 'unknown optimizer-step "fast"'),
        (
            {"optimizer": "adamw-in-backward", "clip": 0.0, "optimizer_step": "foreach"},
            "adamw-in-backward has no foreach step: use fused",
        ),
        ({"optimizer": "adamw-in-backward"}, "add --clip 0, or use --optimizer adamw"),
        ({"optimizer": "adamw-in-backward", "clip": 0.0, "accumulation": 2}, "add --accumulation 1"),
        (
            {"optimizer": "adamw-in-backward", "clip": 0.0, "precision": "fp16"},
            "add --precision bf16 or fp32",
        ),
    ],
)
def test_what_an_optimizer_cannot_do_is_refused(options: dict[str, Any], says: str):
    with pytest.raises(UserError) as error:
        TrainConfig(**options)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_form_under_which_the_optimizer_is_wrong_is_refused_before_anything_is_written(small_run):
    config = small_run(optimizer="adamw-in-backward", clip=0.0, parallel="ddp")
    with pytest.raises(UserError, match="before its gradient is averaged over ranks: use --parallel none"):
        train(config)
    assert not (config.out / "config.json").exists()


def test_the_help_lists_the_optimizers(capsys):
    assert main(["--help"]) == 0
    shown = "".join(capsys.readouterr().out.split())
    assert "|".join(OPTIMIZERS) in shown
    assert "auto|fused|foreach|for-loop" in shown


@pytest.mark.parametrize(
    "options", [{"average": "ema"}, {"average": "swa", "average_start": 2}, {"optimizer": "schedule-free"}]
)
def test_a_checkpoint_has_the_average_of_the_weights_and_resumes_bit_for_bit(small_run, options):
    whole, _, resumed = trained([*in_steps(small_run("whole", steps=4, **options))])
    assert_same_state(resumed, whole)
    folders = [result.checkpoint / "average" for result in (whole, resumed)]
    average, again = (load_checkpoint(folder, dtype=torch.float32).state_dict() for folder in folders)
    last = load_checkpoint(whole.checkpoint, dtype=torch.float32).state_dict()
    assert all(torch.equal(average[name], again[name]) for name in average)
    assert any(not torch.equal(average[name], last[name]) for name in average)


def test_the_learning_rate_follows_the_batch(small_run):
    config = small_run(lr=0.01, batch=4, accumulation=2, lr_rule="sqrt", lr_batch=2, warmup=0, steps=2)
    result = train(config)
    assert [line["lr"] for line in numbers(config.out)] == pytest.approx([0.02, 0.02])
    assert json.loads((config.out / "config.json").read_text())["lr"] == pytest.approx(0.02)
    resumed = train(replace(config, resume=True, steps=3))
    assert (result.step, resumed.step) == (2, 3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lr_rule": "linear"}, "belong together: --lr-rule sqrt --lr-batch 32"),
        ({"lr_batch": 8}, "belong together"),
        ({"lr_rule": "linear", "lr_batch": 8, "batch": "auto"}, "give --batch a number"),
        ({"lr_rule": "cube"}, 'unknown lr-rule "cube"'),
        ({"average_decay": 1.0}, "average-decay is 1.0"),
    ],
)
def test_wrong_batch_rules_and_averages_are_refused(options: dict[str, Any], says: str):
    with pytest.raises(UserError, match=says):
        TrainConfig(**options)


AVERAGED: list[dict[str, Any]] = [
    {"parallel": "zero1"},
    {"parallel": "zero2", "average": "swa", "average_start": 2},
    {"parallel": "fsdp"},
    {"parallel": "fsdp", "optimizer": "adafactor"},
    {"tp": 2, "optimizer": "adafactor", "average": "swa", "average_start": 2},
    {"pp": 2, "accumulation": 2},
]


def average_of(result: TrainResult) -> dict[str, torch.Tensor]:
    """Return the averaged weights of a checkpoint of whole weights."""
    return load_checkpoint(result.checkpoint / "average", dtype=torch.float32).state_dict()


def assert_same_average(parts: TrainResult, twin: TrainResult, atol: float, form: object) -> None:
    """The parts of the average in a sharded checkpoint are the average of one process."""
    expected = average_of(twin)
    held = flattened(parts.checkpoint / "sharded", parts.out / "whole.pt")
    found = {name: held[key] for name in expected if (key := f"optimizer.state.{name}.average") in held}
    assert len(found) == len([key for key in held if key.startswith("model.")])
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=atol, msg=f"{form}, {name}")


def test_an_average_of_parts_is_that_of_whole_weights_and_resumes_bit_for_bit(small_run):
    """Also with an owner of whole parameters: each rank averages its part."""
    runs = []
    for number, form in enumerate(AVERAGED):
        runs += in_steps(small_run(f"run-{number}", **{"average": "ema", "steps": 4, **form}))
    results = run_ranks(trained, 2, runs)[0]
    for number, (form, whole, resumed) in enumerate(zip(AVERAGED, results[::3], results[2::3], strict=True)):
        assert_same_state(resumed, whole)
        copies = 1 if {"tp", "pp"} & form.keys() else 2
        same = {key: form[key] for key in ("optimizer", "average", "average_start") if key in form}
        batch = 2 * copies * form.get("accumulation", 1)
        twin = train(small_run(f"twin-{number}", **{"average": "ema", "steps": 4, "batch": batch, **same}))
        assert_same_average(whole, twin, 2e-4, form)


def test_an_average_follows_a_run_to_another_plan(small_run):
    """Whole weights, parts beside an owner, pieces, other parts, and whole weights again."""
    options = {"average": "ema", "optimizer": "adafactor", "resume": True, "keep": 5}
    plans = [
        {"parallel": "ddp", "batch": 2},
        {"parallel": "fsdp", "batch": 2},
        {"parallel": "zero1", "batch": 2},
        {"tp": 2, "batch": 4},
    ]
    runs = [small_run(**options, **plan, steps=step) for step, plan in enumerate(plans, start=1)]
    run_ranks(trained, 2, runs)
    last = train(small_run(**options, batch=4, steps=5))
    twin = train(small_run("twin", **{**options, "resume": False}, batch=4, steps=5))
    one, other = average_of(last), average_of(twin)
    for name, value in other.items():
        torch.testing.assert_close(one[name], value, rtol=0, atol=2e-4, msg=name)
