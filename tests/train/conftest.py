"""Small runs: a Llama of 10,000 parameters, saved once, on generated data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dlo_lib.models import Llama, LlamaConfig
from dlo_lib.models.checkpoint import save_checkpoint
from dlo_lib.train import TrainConfig


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=257,
        hidden=16,
        intermediate=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        tied_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("small-model")
    save_checkpoint(Llama(sizes), folder)
    return folder


@pytest.fixture
def small_run(small_model: Path, tmp_path: Path):
    """Return a function that configures a run of 6 steps, each logged; its arguments replace options."""

    def make(name: str = "run", **changes) -> TrainConfig:
        base = {
            "model": str(small_model),
            "data": "arithmetic",
            "seq": 32,
            "batch": 2,
            "steps": 6,
            "lr": 1e-2,
            "warmup": 2,
            "log_every": 1,
            "out": tmp_path / name,
        }
        return TrainConfig(**{**base, **changes})

    return make


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, because matrices of this size are slower on two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
