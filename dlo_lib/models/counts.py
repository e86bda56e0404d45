"""How many parameters a Llama has, and how many floating-point operations a token costs, from its configuration alone.

A matrix product with a weight of P parameters costs 2 P FLOPs a token forward (a multiplication and an addition each), and twice that
backward (the gradient of its input and of its weight). Attention adds the products q k^T and (scores) v: 2 * 2 * num_heads * head_dim FLOPs
for every key that a query meets, of which there are seq, or (seq + 1) / 2 on average when only the past counts. With P the matrices,
without the embedding's look-up,
    forward = 2 P + 4 * num_layers * num_heads * head_dim * keys        training = 3 * forward.
These are *model* FLOPs: recomputation by checkpointing is not work of the model. Norms, rotations and activations are left out (below 1 %).

Sources: PaLM (arXiv:2204.02311), appendix B: 6 N + 12 L H Q T a token; Megatron-LM (arXiv:2104.04473), section 5.1, the same count for a
whole batch. Both count all seq keys; the kernels in use skip the future, so which is meant is said explicitly here.
"""

from __future__ import annotations

import enum

from dlo_lib.models.configs import model_config
from dlo_lib.models.llama import LlamaConfig


class AttentionFlops(enum.Enum):
    """Which part of attention's two products with the other tokens is counted."""

    FULL = "full"
    """Every query with all seq keys, as PaLM and Megatron count: the convention of published MFU."""
    CAUSAL = "causal"
    """Every query with its past and itself, (seq + 1) / 2 keys on average: what a causal kernel has to do."""
    NONE = "none"
    """Matrices only: 6 P, the rule of thumb for short sequences."""


def parameters(model: str | LlamaConfig) -> int:
    """The number of parameters; a tied embedding counts once.

    >>> parameters("llama-3.2-3b")
    3212749824
    """
    return sum(parameters_by_part(model).values())


def parameters_by_part(model: str | LlamaConfig) -> dict[str, int]:
    """Parameters of all layers together: ``embedding``, ``attention``, ``mlp``, ``norm``, ``output`` (0 when tied)."""
    config = model_config(model)
    table = config.vocab_size * config.hidden
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "embedding": table,
        "attention": config.num_layers * config.hidden * (2 * q_size + 2 * kv_size),  # q and o, k and v
        "mlp": config.num_layers * 3 * config.hidden * config.intermediate,  # gate, up, down
        "norm": (2 * config.num_layers + 1) * config.hidden,
        "output": 0 if config.tied_embeddings else table,
    }


def forward_flops_per_token(model: str | LlamaConfig, seq: int, attention: AttentionFlops = AttentionFlops.FULL) -> int:
    """FLOPs of the model's forward pass per token, in sequences of ``seq`` tokens (the mean over their positions)."""
    config = model_config(model)
    parts = parameters_by_part(config)
    output = config.vocab_size * config.hidden  # a product also when its matrix is the embedding's
    matrices = parts["attention"] + parts["mlp"] + output
    doubled_keys = {AttentionFlops.FULL: 2 * seq, AttentionFlops.CAUSAL: seq + 1, AttentionFlops.NONE: 0}[attention]
    return 2 * matrices + 2 * config.num_layers * config.num_heads * config.head_dim * doubled_keys


def flops_per_token(model: str | LlamaConfig, seq: int, attention: AttentionFlops = AttentionFlops.FULL) -> int:
    """FLOPs of training per token, forward and backward: three times the forward pass. MFU is this * tokens/s / peak FLOP/s."""
    return 3 * forward_flops_per_token(model, seq, attention)
