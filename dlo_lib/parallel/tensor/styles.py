"""The styles of known models.

embedding    rows                              norms            whole; on parts of the sequence if chosen
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
    attention, mlp = f"{block}.self_attn", f"{block}.mlp"
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
            f"{mlp}.gate_proj": ColumnParallel(),
            f"{mlp}.up_proj": ColumnParallel(),
            mlp: SharedInput(("gate_proj", "up_proj")),
            f"{mlp}.down_proj": RowParallel(),
        }
    )
    return {
        f"{prefix}embed_tokens": VocabParallel(),
        **per_block,
        f"{prefix}norm": SequenceParallel(),
        "lm_head": VocabParallelHead(),
    }
