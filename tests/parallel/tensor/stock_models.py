"""Models of transformers for ``test_stock_training``, with their styles and batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlo_lib.models import LlamaConfig
from dlo_lib.parallel.tensor.apply import Styles
from dlo_lib.parallel.tensor.styles import gpt2_styles, transformers_llama_styles, vit_styles

SEQ, VOCAB, HEADS = 8, 61, 4
CONFIG = LlamaConfig(
    vocab_size=VOCAB, hidden=32, intermediate=48, num_layers=2, num_heads=HEADS, num_kv_heads=2, head_dim=8
)


@dataclass(frozen=True)
class Stock:
    """A model, for a probability of dropout, with its styles and its batches: inputs and targets of one step
    and one copy of the model."""

    model: Callable[[float], Any]
    styles: Styles
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]


def _prepared(model: Any) -> Any:
    """The model in fp64, with biases other than 0, which hide where a bias is added."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("bias"):
                param.normal_(std=0.1)
    return model.double()


def llama_of_transformers(dropout: float = 0.0) -> Any:
    import transformers  # seconds, and inside the ranks

    config = transformers.LlamaConfig(
        vocab_size=CONFIG.vocab_size,
        hidden_size=CONFIG.hidden,
        intermediate_size=CONFIG.intermediate,
        num_hidden_layers=CONFIG.num_layers,
        num_attention_heads=CONFIG.num_heads,
        num_key_value_heads=CONFIG.num_kv_heads,
        head_dim=CONFIG.head_dim,
        attention_dropout=dropout,
        tie_word_embeddings=True,
        use_cache=False,
    )
    torch.manual_seed(0)
    return _prepared(transformers.LlamaForCausalLM(config))


def gpt2_of_transformers(dropout: float = 0.0) -> Any:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=SEQ,
        n_embd=32,
        n_layer=2,
        n_head=HEADS,
        bos_token_id=0,
        eos_token_id=0,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        resid_pdrop=dropout,
    )
    torch.manual_seed(0)
    return _prepared(transformers.GPT2LMHeadModel(config))


def vit_of_transformers(dropout: float = 0.0) -> Any:
    """Images of 12 x 12 pixels in patches of 4 x 4: with the first token 10 tokens, a multiple of 2."""
    import transformers

    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        intermediate_size=48,
        image_size=12,
        patch_size=4,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    torch.manual_seed(0)
    return _prepared(transformers.ViTForImageClassification(config))


def tokens(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    inputs, targets = torch.randint(VOCAB, (2, 2, SEQ), generator=generator)
    return inputs, targets


def images(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    pixels = torch.randn(2, 3, 12, 12, dtype=torch.float64, generator=generator)
    return pixels, torch.randint(2, (2, 1), generator=generator)


GPT2 = Stock(gpt2_of_transformers, gpt2_styles(HEADS), tokens)
LLAMA = Stock(llama_of_transformers, transformers_llama_styles(CONFIG), tokens)
VIT = Stock(vit_of_transformers, vit_styles(HEADS), images)
STOCK = {"GPT-2": GPT2, "Llama": LLAMA, "ViT": VIT}
