"""Small models of the tests: grouped-query and multi-head attention, tied heads, experts, odd sizes."""

from __future__ import annotations

import random
from typing import Any

import torch

from dlo_lib.models.llama import Llama, LlamaConfig
from dlo_lib.models.router import MoEConfig

SIZES: dict[str, dict[str, Any]] = {
    "gqa": {"num_heads": 6, "num_kv_heads": 2},
    "mha_tied": {"num_heads": 3, "num_kv_heads": 3, "tied_embeddings": True},
    "mqa": {"num_heads": 5, "num_kv_heads": 1, "num_layers": 1},
    "experts": {
        "num_heads": 4,
        "num_kv_heads": 2,
        "moe": MoEConfig(num_experts=4, top_k=2, intermediate=12, every=2),
    },
}


def model(name: str = "gqa", seed: int = 0, **changed: Any) -> Llama:
    """Return a model in float64 whose continuations vary."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": 23,
        "hidden": 20,
        "intermediate": 28,
        "num_layers": 2,
        "head_dim": 6,
        "max_positions": 64,
        "initializer_std": 0.5,
    }
    return Llama(LlamaConfig(**{**sizes, **SIZES[name], **changed}), dtype=torch.float64)


def prompts(seed: int, lengths: tuple[int, ...] = (9, 1, 3, 7, 12, 5)) -> list[list[int]]:
    """Return prompts of these lengths; the fourth begins like the first."""
    draw = random.Random(seed)
    drawn = [[draw.randrange(23) for _ in range(length)] for length in lengths]
    drawn[3][:6] = drawn[0][:6]
    return drawn
