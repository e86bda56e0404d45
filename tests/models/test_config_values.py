"""A size of the wrong type is refused in one line when the configuration is made, not later in a kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.models import LlamaConfig, model_config
from dlo_lib.models.hf_config import config_from_hf, config_to_hf
from dlo_lib.profiling import measure_memory

TINY = model_config("tiny")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("hidden", None, "hidden is None: it should be a whole number, at least 1"),
        ("hidden", 1.5, "hidden is 1.5: it should be a whole number"),
        ("hidden", "8", "hidden is '8': it should be a whole number"),
        ("num_layers", LlamaConfig, "num_layers is <class"),
        ("num_layers", True, "num_layers is True"),
        ("num_heads", -1, "num_heads is -1: use at least 1"),
        ("rope_theta", "x", "rope_theta is 'x': it should be a number"),
        ("norm_eps", None, "norm_eps is None: it should be a number"),
        ("tied_embeddings", "yes", "tied_embeddings is 'yes': it should be True or False"),
    ],
)
def test_a_wrong_size_of_a_llama_is_refused(name: str, value: Any, says: str) -> None:
    with pytest.raises(UserError) as error:
        replace(TINY, **{name: value})
    assert str(error.value).startswith(says)


def test_integers_of_numpy_and_whole_floats_of_settings_are_numbers() -> None:
    config = replace(TINY, hidden=np.int64(64), rope_theta=10_000)
    assert (config.hidden, config.rope_theta) == (64, 10_000)


def test_a_wrong_size_in_a_config_file_names_the_file() -> None:
    import torch

    table = config_to_hf(TINY, torch.float32)
    with pytest.raises(UserError, match=r"config\.json has inconsistent sizes: hidden is '64'"):
        config_from_hf({**table, "hidden_size": "64", "head_dim": 16})


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("batch", None, "batch is None: it should be a whole number"),
        ("batch", 1.5, "batch is 1.5: it should be a whole number"),
        ("seq", "8", "seq is '8': it should be a whole number"),
        ("seq", 0, "seq is 0: use at least 1"),
        ("fused", "yes", "fused is 'yes': it should be True, False or an OptimizerStep"),
        ("checkpointing", 1, "checkpointing is 1: it should be True or False"),
    ],
)
def test_a_wrong_argument_of_measure_memory_is_refused(name: str, value: Any, says: str) -> None:
    with pytest.raises(UserError) as error:
        measure_memory(TINY, **{"batch": 1, "seq": 8, name: value})
    assert str(error.value).startswith(says)
