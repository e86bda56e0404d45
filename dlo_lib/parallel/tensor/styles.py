"""The styles of known models.

embedding    rows                              norms, experts   whole; on parts of the sequence if chosen
queries      rows, whole heads                 output           columns, whole heads
keys, values rows, whole heads, which ranks    gate and up      rows
             may share                         down             columns
head         rows, with the parallel loss
"""

from __future__ import annotations

from dlo_lib.models.llama import LlamaConfig
from dlo_lib.parallel.tensor.apply import Styles
from dlo_lib.parallel.tensor.style import (
    ColumnParallel,
    RowParallel,
    SequenceParallel,
    SharedInput,
    TensorStyle,
    VocabParallel,
    VocabParallelHead,
)


def llama_styles(config: LlamaConfig, prefix: str = "") -> Styles:
    """Return the styles of a Llama, ours or that of transformers, for which ``prefix`` is "model.".

    Args:
        config: the sizes; only the numbers of heads are used.
        prefix: the prefix of all names except ``lm_head``.
    """
    block = f"{prefix}layers.*"
    attention = f"{block}.self_attn"
    per_block: dict[str, TensorStyle] = (
        {}
        if not config.num_layers
        else {
            f"{block}.input_layernorm": SequenceParallel(),
            f"{attention}.q_proj": ColumnParallel(config.num_heads),
            f"{attention}.k_proj": ColumnParallel(config.num_kv_heads, repeat=True),
            f"{attention}.v_proj": ColumnParallel(config.num_kv_heads, repeat=True),
            attention: SharedInput(("q_proj", "k_proj", "v_proj")),
            f"{attention}.o_proj": RowParallel(config.num_heads),
            f"{block}.post_attention_layernorm": SequenceParallel(),
        }
    )
    if config.moe is None:
        mlps = _mlp_styles(f"{block}.mlp") if config.num_layers else {}
    else:
        mlps = {}
        for layer in range(config.num_layers):
            mlp = f"{prefix}layers.{layer}.mlp"
            if not config.has_experts(layer):
                mlps |= _mlp_styles(mlp)
                continue
            mlps |= {f"{mlp}.router": SequenceParallel(), f"{mlp}.experts": SequenceParallel()}
            if config.moe.shared_intermediate:
                mlps |= _mlp_styles(f"{mlp}.shared")
    return {
        f"{prefix}embed_tokens": VocabParallel(),
        **per_block,
        **mlps,
        f"{prefix}norm": SequenceParallel(),
        "lm_head": VocabParallelHead(),
    }


def _mlp_styles(name: str) -> dict[str, TensorStyle]:
    """Return the styles of a SwiGLU MLP."""
    return {
        f"{name}.gate_proj": ColumnParallel(),
        f"{name}.up_proj": ColumnParallel(),
        name: SharedInput(("gate_proj", "up_proj")),
        f"{name}.down_proj": RowParallel(),
    }
