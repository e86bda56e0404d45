"""Sizes of tensors in a training step of a Llama, in bytes: the weights, and the activations that forward
saves for backward.

Notation: T = batch * seq tokens; e bytes per element of the matrix products (2 for bf16 and fp16, 4 for
fp32); hidden size h, intermediate size f, query size q = num_heads * head_dim and key size k = num_kv_heads *
head_dim. With autocast, a block saves for each token:

    attention   4h + 4h + 3eh + e(2q + 2k) + ...    the input and its norm in fp32; a copy for each of q_proj,
                                                    k_proj and v_proj; queries, keys, values and output
                                                    (flash attention saves no scores: arXiv:2205.14135)
    MLP         4h + 4h + 2eh + 4ef + ...           the input and its norm; a copy for gate_proj and up_proj;
                                                    gate, silu(gate), up and their product

The sum is T(26h + 4q + 4k + 8f) bytes per block in bf16. In addition, 1 / rms of a norm and the log-sum-exp
of attention need 4 bytes per row.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from dlo_lib.models import LlamaConfig
from dlo_lib.models.counts import parameters_by_part
from dlo_lib.optim import Precision
from dlo_lib.profiling.settings import StepSettings

FP32 = 4


def parameter_shapes(config: LlamaConfig) -> Counter[tuple[int, ...]]:
    """Return the shapes of the parameters of a Llama without experts, and how many have each."""
    hidden, layers = config.hidden, config.num_layers
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: Counter[tuple[int, ...]] = Counter()
    for shape, count in (
        *embedding_shapes(config).items(),
        ((queries, hidden), layers),
        ((keys, hidden), 2 * layers),
        ((hidden, queries), layers),
        ((config.intermediate, hidden), 2 * layers),
        ((hidden, config.intermediate), layers),
        ((hidden,), 2 * layers + 1),
    ):
        shapes[shape] += count
    return shapes


def embedding_shapes(config: LlamaConfig) -> Counter[tuple[int, ...]]:
    """Return the shape of the embedding, and whether it is one tensor or two with the output layer."""
    return Counter({(config.vocab_size, config.hidden): 1 if config.tied_embeddings else 2})


@dataclass(frozen=True)
class WeightSizes:
    """The bytes of the fp32 weights, and of their low-precision copies with autocast (0 without)."""

    all: int
    block: int
    """The seven matrices of a block."""
    vocabulary: int
    """The embedding. The output projection has the same size; if it is tied, it is the same tensor."""
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
    """The bytes of activations for all tokens of the batch."""

    residual: int
    """(batch, seq, hidden) in fp32."""
    queries: int
    """(batch, num_heads, seq, head_dim)."""
    keys: int
    """(batch, num_kv_heads, seq, head_dim)."""
    scores: int
    """(batch, num_heads, seq, seq) if attention writes the scores to memory, otherwise the log-sum-exp of
    each row, (batch, num_heads, seq)."""
    wide: int
    """(batch, seq, intermediate)."""
    logits: int
    """(batch, seq, vocab_size) in fp32."""
    attention_kept: int
    """The bytes that the attention of a block saves, including its input."""
    mlp_kept: int
    """The bytes that the MLP of a block saves, including its input."""
    last_norm_kept: int
    head_input: int
    """The copy of the input of the output projection that autocast creates."""

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
        # With autocast, each matrix product casts its input. Without, the products share the input.
        cast = autocast(chosen)
        for_qkv, for_gate_up, for_head = (
            (3 * copy, 2 * copy, copy) if cast else (residual, residual, residual)
        )
        # If the scores are written, keys and values are expanded for every query head.
        per_query = queries if chosen.writes_scores else keys
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
    """Return whether matrix products have a lower precision than the weights."""
    return chosen.precision is not Precision.FP32


def grouped(config: LlamaConfig) -> bool:
    """Return whether several query heads share a key head."""
    return config.num_heads != config.num_kv_heads
