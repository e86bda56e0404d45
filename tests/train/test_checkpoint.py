"""A checkpoint is complete or absent; a damaged one gives one line with the file and the cure."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dlo_lib.base.errors import UserError
from dlo_lib.launch import RankFailure, run_ranks
from dlo_lib.models.checkpoint import load_checkpoint
from dlo_lib.train import newest, train
from dlo_lib.train.state import RankSnapshot, seed_everything


def checkpoints(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def test_the_newest_checkpoints_are_kept_and_latest_links_to_the_last(small_run):
    config = small_run(checkpoint_every=1, keep=2)
    result = train(config)
    assert checkpoints(config.out) == ["latest", "step-000005", "step-000006"]
    assert (config.out / "checkpoints" / "latest").resolve() == result.checkpoint.resolve()


@pytest.mark.parametrize(("world_size", "parallel"), [(1, "none"), (2, "ddp")])
def test_a_checkpoint_is_due_after_minutes_too(small_run, world_size, parallel):
    config = small_run(checkpoint_minutes=1e-9, keep=9, steps=3, parallel=parallel)
    rarely = small_run("rarely", checkpoint_minutes=1e9, keep=9, steps=3, parallel=parallel)
    for one in (config, rarely):
        run_ranks(train, world_size, one)
    assert checkpoints(config.out) == ["latest", "step-000001", "step-000002", "step-000003"]
    assert checkpoints(rarely.out) == ["latest", "step-000003"]
    with pytest.raises(UserError, match="checkpoint-minutes is -1: use at least 0"):
        small_run(checkpoint_minutes=-1)


@pytest.mark.parametrize("name", ["step-000002.bak", "step-best", "step-"])
def test_a_copy_of_a_checkpoint_with_another_name_is_left_alone(small_run, name):
    config = small_run(checkpoint_every=1, keep=1, steps=2)
    folder = train(config).checkpoint
    shutil.copytree(folder, folder.with_name(name))
    resumed = train(replace(config, steps=4, resume=True))
    assert newest(config.out).folder == resumed.checkpoint
    assert checkpoints(config.out) == sorted(["latest", "step-000004", name])


def test_another_run_can_start_from_the_model_of_a_checkpoint(small_run):
    result = train(small_run("first"))
    model = load_checkpoint(result.out / "checkpoints" / "latest")
    assert sum(parameter.numel() for parameter in model.parameters()) > 0
    second = train(small_run("second", model=str(result.checkpoint), steps=1))
    assert second.loss < train(small_run("third", steps=1)).loss


def test_nothing_in_a_checkpoint_is_pickled(small_run):
    folder = train(small_run(steps=1)).checkpoint
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _retype(key: str, value: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))

    return change


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        *(
            ("checkpoint.json", _retype(key, value), "checkpoint.json is missing or damaged")
            for key, value in [
                ("step", "6"),
                ("tokens", None),
                ("world_size", 1.0),
                ("config", ["seq", 32]),
                ("scaler", 8.0),
                ("files", ["model.safetensors"]),
                ("files", {"model.safetensors": 12}),
                ("files", {"model.safetensors": {"bytes": "12", "crc32": 1}}),
            ]
        ),
        ("model.safetensors", _truncate, r"model.safetensors is truncated \([\d,]+ of [\d,]+ bytes\)"),
        ("optimizer.safetensors", _flip, r"optimizer.safetensors is damaged \(its checksum differs\)"),
        ("rank-00000.safetensors", Path.unlink, "rank-00000.safetensors is missing"),
        ("checkpoint.json", _truncate, "checkpoint.json is missing or damaged"),
        ("checkpoint.json", Path.unlink, "checkpoint.json is missing or damaged"),
    ],
)
def test_a_damaged_checkpoint_raises_with_the_file_and_the_last_complete_one(small_run, name, damage, says):
    config = small_run(checkpoint_every=2)
    result = train(config)
    damage(result.checkpoint / name)
    with pytest.raises(
        UserError, match=f"{says}: remove .*step-000006 and resume from step-000004, which is complete"
    ):
        train(replace(config, resume=True))
    damage(result.out / "checkpoints" / "step-000004" / name)
    with pytest.raises(
        UserError, match=f"{says}, and no earlier checkpoint is complete: choose another --out"
    ):
        train(replace(config, resume=True))


def test_a_file_in_the_place_of_the_checkpoints_is_refused_before_the_first_step(small_run):
    config = small_run()
    config.out.mkdir()
    (config.out / "checkpoints").write_text("mine")
    for resume in (False, True):
        with pytest.raises(UserError, match="checkpoints is a file.*choose another --out"):
            train(replace(config, resume=resume))
    assert (config.out / "checkpoints").read_text() == "mine"
    assert not (config.out / "metrics.jsonl").exists()


def test_the_cure_for_a_damaged_checkpoint_works(small_run):
    config = small_run(checkpoint_every=2)
    result = train(config)
    before = (result.checkpoint / "model.safetensors").read_bytes()
    shutil.rmtree(result.checkpoint)
    assert train(replace(config, resume=True)).step == 6
    assert (result.checkpoint / "model.safetensors").read_bytes() == before


def test_a_full_disk_keeps_the_previous_checkpoint(small_run, tiny_disk):
    config = small_run(out=tiny_disk / "run", steps=2)
    whole = train(config).checkpoint
    ballast = tiny_disk / "ballast"
    free = os.statvfs(tiny_disk)
    ballast.write_bytes(b"\0" * (free.f_bavail * free.f_frsize - 64 * 1024))
    with pytest.raises(UserError, match="no space left to write .*step-000004.*nothing was changed"):
        train(replace(config, steps=4, resume=True))
    assert checkpoints(config.out) == ["latest", whole.name], "no incomplete folder is left"
    assert newest(config.out).step == 2
    ballast.unlink()
    assert train(replace(config, steps=4, resume=True)).step == 4


def test_a_disk_full_of_metrics_stops_every_rank(small_run, tiny_disk):
    config = small_run(out=tiny_disk / "run", parallel="ddp", steps=3000)
    ballast = tiny_disk / "ballast"
    free = os.statvfs(tiny_disk)
    ballast.write_bytes(b"\0" * (free.f_bavail * free.f_frsize - 24 * 1024))
    with pytest.raises(RankFailure, match="no space left to write"):
        run_ranks(train, 2, config, timeout=60)


def test_an_incomplete_checkpoint_of_a_killed_run_is_removed(small_run):
    config = small_run(steps=2)
    half = config.out / "checkpoints" / ".step-000001.part"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    train(config)
    assert checkpoints(config.out) == ["latest", "step-000002"]


def test_another_number_of_sequences_in_a_step_raises(small_run):
    config = small_run(parallel="ddp", steps=1)
    run_ranks(train, 2, config)
    says = (
        "was written with 4 sequences in a step, this run has 2: choose --batch and --accumulation for as "
        "many, or start anew from its weights with --model"
    )
    for changes in ({}, {"parallel": "none"}):
        with pytest.raises(UserError, match=says):
            train(replace(config, resume=True, **changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lr": 0.5}, r"another lr \(0.01, now 0.5\)"),
        ({"batch": 1, "seed": 3}, r"another batch \(2, now 1\), seed \(0, now 3\)"),
        (
            {"lr_schedule": "cosine", "lr_steps": 9},
            r"another lr-schedule \(constant, now cosine\), lr-steps \(0, now 9\)",
        ),
        ({"precision": "bf16"}, r"another precision \(fp32, now bf16\)"),
    ],
)
def test_options_that_change_the_numbers_raise(small_run, changes, says):
    config = small_run(steps=1)
    train(config)
    with pytest.raises(UserError, match=f"{says}: use the same, or start anew from its weights with --model"):
        train(replace(config, resume=True, **changes))


def test_an_option_missing_in_an_older_run_had_its_default(small_run):
    config = small_run(steps=1, warmup=0)
    older = {name: value for name, value in config.plain().items() if not name.startswith("lr_")}
    assert config.differences(older) == []
    assert replace(config, lr_schedule="linear").differences(older) == [
        "lr-schedule (constant, now linear)",
        "lr-steps (0, now 1)",
    ]


def test_options_that_change_no_number_may_change(small_run):
    config = small_run(steps=1)
    train(config)
    assert train(replace(config, resume=True, steps=2, log_every=2, keep=1, checkpoint_every=1)).step == 2


def test_another_run_in_the_folder_is_not_overwritten(small_run):
    config = small_run(steps=1)
    train(config)
    with pytest.raises(
        UserError, match="already contains a run: continue it with --resume or choose another --out"
    ):
        train(config)


def test_every_random_state_is_restored():
    def draw() -> tuple:
        return (
            random.random(),
            random.gauss(0, 1),
            np.random.rand(),
            np.random.randn(),
            torch.rand(3).tolist(),
        )

    seed_everything(5)
    draw()
    state = RankSnapshot.now()
    expected = draw()
    seed_everything(6)
    state.put_back()
    assert draw() == expected
