"""``dlo generate``: the text of a trained run, its options, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dlo_lib.data.tokens import END_OF_TEXT, decode, encode
from dlo_lib.inference import SamplingParams, generate_plain
from dlo_lib.models.checkpoint import load_checkpoint
from dlo_lib.train import TrainConfig, train
from dlo_lib.train.checkpoint import newest
from tests.cli.in_process import commands

run = pytest.fixture(commands)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three steps."""
    out = tmp_path_factory.mktemp("generate") / "run"
    train(TrainConfig(data="arithmetic", seq=32, batch=2, steps=3, out=out))
    return out


def test_the_text_is_that_of_the_plain_loop(run, trained: Path) -> None:
    checkpoint = newest(trained)
    assert checkpoint is not None
    model = load_checkpoint(checkpoint.folder)
    for options, params in (
        (("--temperature", 0), SamplingParams(max_tokens=7, stop=(END_OF_TEXT,))),
        (
            ("--temperature", 1.5, "--top-p", 0.9, "--top-k", 40, "--seed", 3),
            SamplingParams(1.5, 40, 0.9, 7, (END_OF_TEXT,), 3),
        ),
    ):
        ran = run("generate", trained, "1 + é", "--tokens", 7, *options)
        assert ran.status == 0, ran
        prompt = encode("1 + é").tolist()
        assert ran.out == decode(np.array(prompt + generate_plain(model, prompt, params))) + "\n"


def test_seeds_give_other_texts_and_an_empty_prompt_begins_a_document(run, trained: Path) -> None:
    texts = {
        run("generate", trained, "", "--tokens", 30, "--temperature", 2, "--seed", seed).out
        for seed in (1, 2, 1)
    }
    assert len(texts) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--temperature", "-1"), "temperature is -1.0"),
        (("--top-p", "0"), "top_p is 0.0"),
        (("--tokens", "100000"), "positions"),
    ],
)
def test_a_wrong_option_is_one_line(run, trained: Path, options: tuple[str, str], said: str) -> None:
    assert said in run("generate", trained, "a", *options).refusal


def test_a_run_without_a_full_model_of_bytes_is_refused(run, trained: Path, tmp_path: Path) -> None:
    assert "is not a folder" in run("generate", tmp_path / "absent", "a").refusal
    assert "has no checkpoint" in run("generate", tmp_path, "a").refusal
    (damaged := tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    assert "is missing or damaged" in run("generate", tmp_path, "a").refusal
    (damaged / "sharded").mkdir()
    manifest = {"step": 1, "tokens": 1, "world_size": 1, "config": {}, "scaler": None, "files": {}}
    (damaged / "checkpoint.json").write_text(json.dumps(manifest))
    assert "--parallel none" in run("generate", tmp_path, "a").refusal


def test_a_run_on_other_tokens_is_refused(run, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        vocab_size = 32_000

    monkeypatch.setattr("dlo_lib.data.open_dataset", lambda *_: Other())
    assert "another tokeniser" in run("generate", trained, "a").refusal
    assert torch.is_grad_enabled()
