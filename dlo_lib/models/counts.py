"""The number of parameters of a Llama and its FLOPs per token, computed from the configuration.

A matrix product with a weight of P parameters costs 2 P FLOPs per token in the forward (a multiplication and
an addition each) and twice that in the backward (the gradients of its input and of its weight). Attention
adds the products q k^T and (scores) v: 2 * 2 * num_heads * head_dim FLOPs for every key of a query. A query
has seq keys, or (seq + 1) / 2 on average with a causal mask. Let P be the number of parameters in matrices,
without the embedding look-up. Then
    forward = 2 P + 4 * num_layers * num_heads * head_dim * keys        training = 3 * forward.
These are *model* FLOPs: they do not include the recomputation of activation checkpointing. Norms, rotations
and activation functions are not counted (below 1 %).

Sources: PaLM (arXiv:2204.02311), appendix B: 6 N + 12 L H Q T per token; Megatron-LM (arXiv:2104.04473),
section 5.1, the same count for a batch. Both count all seq keys, while causal kernels skip the future keys;
``AttentionFlops`` selects the convention."""

from __future__ import annotations

import enum

from dlo_lib.models.configs import model_config
from dlo_lib.models.llama import LlamaConfig


class AttentionFlops(enum.Enum):
    """The part of the two attention products that is counted."""

    FULL = "full"
    """All seq keys for every query, as in PaLM and Megatron-LM: the convention of published MFU."""
    CAUSAL = "causal"
    """The past keys and the own key of every query, (seq + 1) / 2 on average: the work of a causal kernel."""
    NONE = "none"
    """No attention products: 6 P, the rule of thumb for short sequences."""


def parameters(model: str | LlamaConfig) -> int:
    """Return the number of parameters; a tied embedding counts once.

    >>> parameters("llama-3.2-3b")
    3212749824
    """
    return sum(parameters_by_part(model).values())


def parameters_by_part(model: str | LlamaConfig) -> dict[str, int]:
    """Return the parameters of all layers by part: ``embedding``, ``attention``, ``mlp``, ``norm``,
    ``output`` (0 if tied). ``mlp`` includes routers, shared experts and all experts.
    """
    config = model_config(model)
    table = config.vocab_size * config.hidden
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "embedding": table,
        "attention": config.num_layers * config.hidden * (2 * q_size + 2 * kv_size),  # q and o, k and v
        "mlp": _mlp_parameters(config, active=False),
        "norm": (2 * config.num_layers + 1) * config.hidden,
        "output": 0 if config.tied_embeddings else table,
    }


def active_parameters(model: str | LlamaConfig) -> int:
    """Return the number of parameters that one token uses: of the experts, only the chosen ``top_k``."""
    config = model_config(model)
    return parameters(config) - _mlp_parameters(config, active=False) + _mlp_parameters(config, active=True)


def _mlp_parameters(config: LlamaConfig, active: bool) -> int:
    """Return the parameters of all MLPs; with ``active``, only those that one token uses."""
    moe = config.moe
    mixed = sum(config.has_experts(layer) for layer in range(config.num_layers))
    total = (config.num_layers - mixed) * 3 * config.hidden * config.intermediate  # gate, up, down
    if moe is not None:
        experts = moe.top_k if active else moe.num_experts
        width = experts * moe.intermediate + moe.shared_intermediate
        total += mixed * config.hidden * (3 * width + moe.num_experts)  # and the router
    return total


def forward_flops_per_token(
    model: str | LlamaConfig, seq: int, attention: AttentionFlops = AttentionFlops.FULL
) -> int:
    """Return the FLOPs of the forward per token, averaged over the positions of a
    sequence of ``seq`` tokens."""
    config = model_config(model)
    parts = parameters_by_part(config)
    output = config.vocab_size * config.hidden  # also a product if the weight is tied
    matrices = parts["attention"] + _mlp_parameters(config, active=True) + output
    doubled_keys = {AttentionFlops.FULL: 2 * seq, AttentionFlops.CAUSAL: seq + 1, AttentionFlops.NONE: 0}[
        attention
    ]
    return 2 * matrices + 2 * config.num_layers * config.num_heads * config.head_dim * doubled_keys


def flops_per_token(
    model: str | LlamaConfig, seq: int, attention: AttentionFlops = AttentionFlops.FULL
) -> int:
    """Return the FLOPs of forward and backward per token, three times the forward.

    MFU = flops_per_token * tokens/s / peak FLOP/s.
    """
    return 3 * forward_flops_per_token(model, seq, attention)
