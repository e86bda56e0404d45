"""Several ranks train the same model as one process, and an interrupted run the same
as an uninterrupted one."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from dlo_lib.launch import RankFailure, run_ranks
from dlo_lib.train import TrainConfig, TrainResult, loop, read_metrics, train

MACHINE = ("_seconds", "tokens_per_second", "peak_bytes", "mfu", "gpu")


def numbers(out) -> list[dict]:
    """Return the metrics of a run without those that depend on the machine."""
    return [
        {name: value for name, value in asdict(line).items() if not name.endswith(MACHINE)}
        for line in read_metrics(out)
    ]


def on(world_size: int, *configs: TrainConfig) -> list[TrainResult]:
    """Return the results of rank 0 for several runs in the same processes; each call starts new processes."""
    return run_ranks(_trained, world_size, configs)[0] if world_size > 1 else _trained(configs)


def _trained(configs: tuple[TrainConfig, ...]) -> list[TrainResult]:
    return [train(config) for config in configs]


def assert_same_state(one: TrainResult, other: TrainResult) -> None:
    """Return every byte of a checkpoint: parameters, optimiser, scaler, positions in
    the data, random states."""
    names, its_names = (
        sorted(path.name for path in result.checkpoint.iterdir() if path.is_file()) for result in (one, other)
    )
    assert names == its_names
    if (one.checkpoint / "sharded").is_dir():
        assert_same_values(
            *(flattened(result.checkpoint / "sharded", result.out / "whole.pt") for result in (one, other))
        )
    for name in names:
        mine, its = (one.checkpoint / name).read_bytes(), (other.checkpoint / name).read_bytes()
        if name == "checkpoint.json":
            mine, its = json.loads(mine), json.loads(its)
            for manifest in (mine, its):
                manifest.pop("config")  # contains the folder
                manifest["files"] = {
                    name: entry
                    for name, entry in manifest["files"].items()
                    if not name.startswith("sharded/")
                }
        assert mine == its, name
    assert numbers(one.out) == numbers(other.out)


def flattened(sharded: Path, file: Path) -> dict:
    """Return the tensors of a sharded checkpoint, read with PyTorch; the bytes of its files contain unique
    ids.
    """
    dcp_to_torch_save(sharded, file)
    return torch.load(file, weights_only=False)


def assert_same_values(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    assert any(name.startswith("optimizer") for name in one)
    for name, value in one.items():
        assert torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name], (
            name
        )


@pytest.mark.parametrize(("batch", "accumulation"), [(2, 1), (1, 2)])
def test_two_ranks_train_the_same_model_as_one_process(small_run, batch, accumulation):
    twin = train(small_run("twin", batch=4, steps=10))
    ranks = run_ranks(
        train, 2, small_run("ranks", parallel="ddp", batch=batch, accumulation=accumulation, steps=10)
    )
    assert ranks[0] == ranks[1]
    for mine, its in zip(numbers(ranks[0].out), numbers(twin.out), strict=True):
        assert abs(mine["loss"] - its["loss"]) < 1e-5, f"step {mine['step']}"
        assert mine["tokens"] == its["tokens"]
    assert ranks[0].tokens == twin.tokens > 0


SHARDED = [
    (2, {"parallel": "zero1"}),
    (2, {"parallel": "zero2"}),
    (2, {"parallel": "zero3"}),
    (2, {"parallel": "fsdp"}),
    (4, {"parallel": "hsdp", "dp_shard": 2}),
]


@pytest.mark.parametrize(("world_size", "form"), SHARDED)
def test_sharded_ranks_train_the_same_model_as_one_process(small_run, world_size, form):
    """This includes models that are initialised shard by shard."""
    twin = train(small_run("twin", model="tiny", batch=8))
    ranks = run_ranks(
        train, world_size, small_run("ranks", model="tiny", batch=2, accumulation=4 // world_size, **form)
    )
    assert len({result.loss for result in ranks}) == 1
    for mine, its in zip(numbers(ranks[0].out), numbers(twin.out), strict=True):
        assert abs(mine["loss"] - its["loss"]) < 1e-4, f"step {mine['step']}"
        assert abs(mine["grad_norm"] - its["grad_norm"]) < 1e-3
        assert mine["tokens"] == its["tokens"]


@pytest.mark.parametrize("form", ["zero1", "zero2", "fsdp"])
def test_a_sharded_run_resumes_on_another_number_of_ranks(small_run, form):
    """Only the number of ranks changes, because other options must be the same in a resumed run."""
    first = small_run("sharded", parallel=form, steps=3)
    run_ranks(train, 2, first)
    resumed = run_ranks(train, 3, replace(first, steps=6, resume=True))
    assert {result.step for result in resumed} == {6}
    lines = numbers(first.out)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[3]["loss"] < lines[0]["loss"]
    whole = small_run("whole", parallel="ddp", steps=2)
    run_ranks(train, 2, whole)
    with pytest.raises(RankFailure, match="was written with 4 sequences in a step, this run has 2"):
        run_ranks(train, 1, replace(whole, steps=4, resume=True))


def test_the_loss_falls(small_run):
    lines = read_metrics(train(small_run(steps=60, batch=8)).out)
    assert lines[-1].loss < lines[0].loss - 1


def test_activation_checkpointing_changes_no_number(small_run):
    plain, again = train(small_run("plain")), train(small_run("again", checkpointing=True))
    assert numbers(plain.out) == numbers(again.out)


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        (1, {"accumulation": 2}),
        (1, {"precision": "fp16"}),
        (1, {"precision": "bf16", "optimizer_step": "foreach", "clip": 0.0}),
        (2, {"parallel": "ddp", "accumulation": 2}),
        (2, {"parallel": "ddp", "precision": "bf16"}),
        (2, {"parallel": "ddp", "precision": "fp16", "accumulation": 2}),
        (2, {"parallel": "zero1", "precision": "fp16", "accumulation": 2}),
        (2, {"parallel": "zero2", "precision": "fp16", "accumulation": 2}),
        (2, {"parallel": "fsdp", "precision": "bf16", "accumulation": 2}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else f"{value} ranks",
)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(small_run, world_size, changes):
    first = small_run("resumed", **changes, steps=4, checkpoint_every=2)
    undisturbed, _ = on(world_size, small_run("undisturbed", **changes), first)
    [resumed] = on(world_size, replace(first, steps=6, resume=True))
    assert_same_state(resumed, undisturbed)
    assert [line["step"] for line in numbers(first.out)] == [1, 2, 3, 4, 5, 6]


def test_metrics_after_the_checkpoint_are_written_once(small_run):
    """A run killed at step 5 resumes from step 4: its fifth line and an incomplete line are removed."""
    config = small_run(steps=4)
    train(config)
    with (config.out / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps({**asdict(read_metrics(config.out)[-1]), "step": 5, "loss": 0.0}) + '\n{"step": 6, "lo'
        )
    train(replace(config, steps=6, resume=True))
    assert numbers(config.out) == numbers(train(small_run("undisturbed")).out)


def _train_with_signal(config: TrainConfig, rank: int, step: int) -> TrainResult:
    """Call ``train`` while one rank receives SIGUSR1 within a step."""
    real, calls = loop.train_step, 0

    def train_step(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == step and dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGUSR1)
        return real(*args, **kwargs)

    loop.train_step = train_step
    return train(config)


def test_a_signal_to_one_rank_stops_all_after_the_same_step_and_the_run_resumes(small_run):
    config = small_run("stopped", parallel="ddp")
    stopped = run_ranks(_train_with_signal, 2, config, rank=1, step=3)
    assert [(result.step, result.stopped) for result in stopped] == [(4, True), (4, True)], (
        "the vote of step 4 takes effect after it"
    )
    resumed, undisturbed = on(2, replace(config, resume=True), small_run("undisturbed", parallel="ddp"))
    assert not resumed.stopped
    assert_same_state(resumed, undisturbed)


def test_the_previous_signal_handlers_are_restored(small_run):
    def mine(number, frame): ...

    before = signal.signal(signal.SIGUSR1, mine)
    try:
        train(small_run(steps=1))
        assert signal.getsignal(signal.SIGUSR1) is mine
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_resuming_a_completed_run_trains_no_step(small_run):
    config = small_run()
    ended = train(config)
    again = train(replace(config, resume=True))
    assert (again.step, again.tokens, again.loss, again.checkpoint) == (
        ended.step,
        ended.tokens,
        None,
        ended.checkpoint,
    )
    assert_same_state(again, ended)


def test_resume_without_a_checkpoint_starts_a_new_run(small_run):
    assert train(small_run(resume=True, steps=1)).step == 1
