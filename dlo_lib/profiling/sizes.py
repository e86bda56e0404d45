"""Sizes in a training step of a Llama, in bytes: its weights, and what each part of forward keeps for backward.

With T = batch * seq tokens, e bytes a number of the matrix products (2 for bf16 and fp16, 4 for fp32), hidden h, intermediate f, queries
q = num_heads * head_dim and keys k = num_kv_heads * head_dim, the halves of a block keep per token under autocast
    attention   4h + 4h + 3eh + e(2q + 2k) + ...    its input and its norm in fp32, a copy for each of q_proj, k_proj and v_proj; queries,
                                                    keys, values and output (flash attention keeps no scores: arXiv:2205.14135)
    MLP         4h + 4h + 2eh + 4ef + ...           the same for gate_proj and up_proj; gate, silu(gate), up and their product
which is T(26h + 4q + 4k + 8f) bytes a block in bf16 beside small change (1 / rms of a norm, log-sum-exp of attention: 4 bytes a row).
"""

from __future__ import annotations

from dataclasses import dataclass

from dlo_lib.models import LlamaConfig
from dlo_lib.models.counts import parameters_by_part
from dlo_lib.optim import Precision
from dlo_lib.profiling.settings import StepSettings

FP32 = 4


@dataclass(frozen=True)
class WeightSizes:
    """Bytes of fp32 weights, and of their low-precision copies under autocast (0 without)."""

    all: int
    block: int
    """The seven matrices of a block."""
    vocabulary: int
    """The embedding; the output projection is as large, and the same when tied."""
    cast_block: int
    cast_head: int

    @classmethod
    def of(cls, chosen: StepSettings) -> WeightSizes:
        parts = parameters_by_part(chosen.config)
        every = sum(parts.values())
        block = (parts["attention"] + parts["mlp"]) // chosen.config.num_layers
        vocabulary = parts["embedding"]
        copy = chosen.precision.dtype.itemsize if autocast(chosen) else 0
        return cls(FP32 * every, FP32 * block, FP32 * vocabulary, copy * block, copy * vocabulary)


@dataclass(frozen=True)
class ActivationSizes:
    """Bytes of tensors of all tokens of the batch."""

    residual: int
    """(batch, seq, hidden) in fp32."""
    queries: int
    """(batch, num_heads, seq, head_dim)."""
    keys: int
    """(batch, num_kv_heads, seq, head_dim)."""
    scores: int
    """(batch, num_heads, seq, seq) where attention writes them out; else the log-sum-exp of each row, (batch, num_heads, seq)."""
    wide: int
    """(batch, seq, intermediate)."""
    logits: int
    """(batch, seq, vocab_size) in fp32."""
    attention_kept: int
    """By the first half of a block, its input included."""
    mlp_kept: int
    """By the second half."""
    last_norm_kept: int
    head_input: int
    """Autocast's copy of what the output projection reads."""

    @classmethod
    def of(cls, chosen: StepSettings) -> ActivationSizes:
        c, tokens, e = chosen.config, chosen.batch * chosen.seq, chosen.precision.dtype.itemsize
        residual = FP32 * tokens * c.hidden
        queries = e * tokens * c.num_heads * c.head_dim
        keys = e * tokens * c.num_kv_heads * c.head_dim
        scores = FP32 * tokens * c.num_heads * (chosen.seq if chosen.writes_scores else 1)
        wide = e * tokens * c.intermediate

        normed = residual + FP32 * tokens  # the normalised tensor and 1 / rms
        copy = e * tokens * c.hidden
        # Every matrix under autocast makes its own copy of what it reads; without, they share the tensor.
        for_qkv, for_gate_up, for_head = (3 * copy, 2 * copy, copy) if autocast(chosen) else (residual, residual, residual)
        per_query = queries if chosen.writes_scores else keys  # then keys and values are written out for every query head
        return cls(
            residual=residual,
            queries=queries,
            keys=keys,
            scores=scores,
            wide=wide,
            logits=FP32 * tokens * c.vocab_size,
            attention_kept=residual + normed + for_qkv + 2 * queries + 2 * per_query + scores,
            mlp_kept=residual + normed + for_gate_up + 4 * wide,
            last_norm_kept=residual + normed + (0 if autocast(chosen) else for_head),
            head_input=for_head if autocast(chosen) else 0,
        )


def autocast(chosen: StepSettings) -> bool:
    """Whether matrix products are in lower precision than the weights."""
    return chosen.precision is not Precision.FP32


def grouped(config: LlamaConfig) -> bool:
    """Whether several query heads share a key head."""
    return config.num_heads != config.num_kv_heads
