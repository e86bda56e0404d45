"""Configurations of public models by name, each from its ``config.json`` on the Hugging Face hub
(meta-llama/...).
"""

from __future__ import annotations

from typing import Any

from dlo_lib.base.errors import unknown_name
from dlo_lib.models.llama import LlamaConfig, RopeScaling
from dlo_lib.models.router import MoEConfig

_LLAMA_3_VOCABULARY: dict[str, Any] = {"vocab_size": 128_256, "max_positions": 131_072}

CONFIGS: dict[str, LlamaConfig] = {
    "llama-3.2-1b": LlamaConfig(
        hidden=2048, intermediate=8192, num_layers=16, num_heads=32, num_kv_heads=8, head_dim=64,
        rope_scaling=RopeScaling(factor=32.0), tied_embeddings=True, **_LLAMA_3_VOCABULARY,
    ),
    "llama-3.2-3b": LlamaConfig(
        hidden=3072, intermediate=8192, num_layers=28, num_heads=24, num_kv_heads=8, head_dim=128,
        rope_scaling=RopeScaling(factor=32.0), tied_embeddings=True, **_LLAMA_3_VOCABULARY,
    ),
    "llama-3.1-8b": LlamaConfig(
        hidden=4096, intermediate=14_336, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
        rope_scaling=RopeScaling(factor=8.0), **_LLAMA_3_VOCABULARY,
    ),
    "llama-3.1-70b": LlamaConfig(
        hidden=8192, intermediate=28_672, num_layers=80, num_heads=64, num_kv_heads=8, head_dim=128,
        rope_scaling=RopeScaling(factor=8.0), **_LLAMA_3_VOCABULARY,
    ),
    # The sizes of Llama 3.1 70B; what changed is the training.
    "llama-3.3-70b": LlamaConfig(
        hidden=8192, intermediate=28_672, num_layers=80, num_heads=64, num_kv_heads=8, head_dim=128,
        rope_scaling=RopeScaling(factor=8.0), **_LLAMA_3_VOCABULARY,
    ),
    # For laptops and tests: byte tokens (256 and an end-of-text token), with every feature of the family.
    "tiny": LlamaConfig(
        vocab_size=257, hidden=64, intermediate=192, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
        max_positions=1024, tied_embeddings=True,
    ),
    # The same, whose second MLP is a mixture of experts with a shared expert.
    "tiny-moe": LlamaConfig(
        vocab_size=257, hidden=64, intermediate=192, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
        max_positions=1024, tied_embeddings=True,
        moe=MoEConfig(num_experts=8, top_k=2, intermediate=96, shared_intermediate=96, every=2),
    ),
}  # fmt: skip


def model_config(model: str | LlamaConfig) -> LlamaConfig:
    """Return the configuration with this name; a configuration is returned unchanged.

    Raises:
        UserError: the name is unknown; the message suggests the nearest names.
    """
    if isinstance(model, LlamaConfig):
        return model
    if model not in CONFIGS:
        raise unknown_name("model", model, CONFIGS)
    return CONFIGS[model]
