"""Small Llamas with every variant of the family."""

import pytest
import torch

from dlo_lib.models import LlamaConfig, RopeScaling

_SCALING = RopeScaling(factor=8.0, original_max_positions=32)  # 40 positions reach all three bands

SMALL_CONFIGS = {
    "one-kv-head-untied": LlamaConfig(
        vocab_size=61, hidden=24, intermediate=40, num_layers=2, num_heads=4, num_kv_heads=1, head_dim=6,
        rope_theta=10_000.0
    ),
    "wide-heads-tied-scaled": LlamaConfig(
        vocab_size=50, hidden=24, intermediate=33, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=16,
        rope_scaling=_SCALING, tied_embeddings=True, norm_eps=1e-6,
    ),
    "narrow-heads-untied-scaled": LlamaConfig(
        vocab_size=37, hidden=64, intermediate=17, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8,
        rope_scaling=_SCALING
    ),
    "full-attention-tied": LlamaConfig(
        vocab_size=44, hidden=32, intermediate=48, num_layers=1, num_heads=4, num_kv_heads=4, head_dim=8,
        tied_embeddings=True
    ),
}  # fmt: skip


@pytest.fixture(params=SMALL_CONFIGS)
def config(request: pytest.FixtureRequest) -> LlamaConfig:
    torch.manual_seed(0)
    return SMALL_CONFIGS[request.param]
