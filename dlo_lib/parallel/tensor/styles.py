"""The styles of known models: Llama, ours and that of transformers, and GPT-2 and ViT of transformers.

embedding    rows                              norms, experts   whole; on parts of the sequence if chosen
queries      rows, whole heads                 output           columns, whole heads
keys, values rows, whole heads, which ranks    gate and up      rows
             may share                         down             columns
head         rows, with the parallel loss

The models of transformers take positions and masks from the embeddings, so with sequence parallelism the
embeddings are whole sequences, and the first block splits them. The number of tokens must be a multiple of
tp: a sequence that is not, such as the 197 of a ViT for images of 224 x 224 pixels with tp 2, is refused.
"""

from __future__ import annotations

from dlo_lib.models.llama import LlamaConfig
from dlo_lib.parallel.tensor.apply import Styles
from dlo_lib.parallel.tensor.style import (
    ColumnParallel,
    RowParallel,
    SequenceParallel,
    ShardedActivation,
    ShardedHeads,
    SharedInput,
    SplitSequence,
    TensorStyle,
    VocabParallel,
    VocabParallelHead,
)


def llama_styles(config: LlamaConfig, prefix: str = "") -> Styles:
    """Return the styles of our Llama.

    Args:
        config: the sizes; only the numbers of layers and of heads, and the places of experts, are used.
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
            f"{attention}.o_proj": RowParallel(config.num_heads),
            attention: SharedInput(("q_proj", "k_proj", "v_proj")),
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


def transformers_llama_styles(config: LlamaConfig) -> Styles:
    """Return the styles of the Llama of transformers (``LlamaForCausalLM``).

    Args:
        config: as in ``llama_styles``.
    """
    return {
        **llama_styles(config, "model."),
        "model.layers.*.self_attn": SharedInput(("q_proj", "k_proj", "v_proj"), last="o_proj"),
        "model.embed_tokens": VocabParallel(whole_sequence=True),
        "model.layers.0": SplitSequence(of_input=True),
    }


def vit_styles(num_heads: int, prefix: str = "vit.") -> Styles:
    """Return the styles of the ViT of transformers 5 (``ViTForImageClassification``). The classifier, which
    reads the first token, and the embeddings are whole. One module is the dropout after the attention and
    after the MLP of a block.

    Args:
        num_heads: the number of heads.
        prefix: the prefix of all names except ``classifier``.
    """
    block = f"{prefix}layers.*"
    attention = f"{block}.attention"
    return {
        f"{prefix}layers.0": SplitSequence(of_input=True),
        f"{block}.layernorm_before": SequenceParallel(),
        f"{attention}.q_proj": ColumnParallel(num_heads),
        f"{attention}.k_proj": ColumnParallel(num_heads),
        f"{attention}.v_proj": ColumnParallel(num_heads),
        f"{attention}.o_proj": RowParallel(num_heads),
        attention: SharedInput(("q_proj", "k_proj", "v_proj"), last="o_proj"),
        f"{block}.layernorm_after": SequenceParallel(),
        f"{block}.mlp.fc1": ColumnParallel(),
        f"{block}.mlp.fc2": RowParallel(),
        f"{block}.dropout": ShardedActivation(only_in_sequence=True),
        f"{prefix}layernorm": SequenceParallel(gather_output=True),
    }


def gpt2_styles(num_heads: int, prefix: str = "transformer.") -> Styles:
    """Return the styles of the GPT-2 of transformers (``GPT2LMHeadModel``). One matrix computes the queries,
    keys and values. The model takes the positions from the embeddings and gives its last hidden states the
    shape of the tokens, so with sequence parallelism both are whole.

    Args:
        num_heads: the number of heads.
        prefix: the prefix of all names except ``lm_head``.
    """
    block = f"{prefix}h.*"
    return {
        f"{prefix}wte": VocabParallel(whole_sequence=True),
        f"{prefix}drop": SplitSequence(),
        f"{block}.ln_1": SequenceParallel(),
        f"{block}.attn.c_attn": ColumnParallel(num_heads, sections=3),
        f"{block}.attn.c_proj": RowParallel(num_heads),
        f"{block}.attn": ShardedHeads("c_attn", "c_proj", sizes=("split_size",)),
        f"{block}.attn.resid_dropout": ShardedActivation(only_in_sequence=True),
        f"{block}.ln_2": SequenceParallel(),
        f"{block}.mlp.c_fc": ColumnParallel(),
        f"{block}.mlp.c_proj": RowParallel(),
        f"{block}.mlp.dropout": ShardedActivation(only_in_sequence=True),
        f"{prefix}ln_f": SequenceParallel(gather_output=True),
        "lm_head": VocabParallelHead(whole_sequence=True),
    }


def _mlp_styles(name: str) -> dict[str, TensorStyle]:
    """Return the styles of a SwiGLU MLP."""
    return {
        f"{name}.gate_proj": ColumnParallel(),
        f"{name}.up_proj": ColumnParallel(),
        name: SharedInput(("gate_proj", "up_proj")),
        f"{name}.down_proj": RowParallel(),
    }
