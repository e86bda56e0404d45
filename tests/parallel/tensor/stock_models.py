"""Models of transformers, for ``test_stock_training``, and the logits and gradients of a Llama."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dlo_lib.models import LlamaConfig
from dlo_lib.parallel.tensor import TensorParallel, parallelize_tensor
from dlo_lib.parallel.tensor.style import ColumnParallel, RowParallel, SharedInput
from dlo_lib.parallel.tensor.styles import llama_styles

CONFIG = LlamaConfig(
    vocab_size=61, hidden=32, intermediate=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
)


def llama_of_transformers() -> Any:
    import transformers  # seconds, and inside the ranks

    config = transformers.LlamaConfig(
        vocab_size=CONFIG.vocab_size,
        hidden_size=CONFIG.hidden,
        intermediate_size=CONFIG.intermediate,
        num_hidden_layers=CONFIG.num_layers,
        num_attention_heads=CONFIG.num_heads,
        num_key_value_heads=CONFIG.num_kv_heads,
        head_dim=CONFIG.head_dim,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).double().eval()


def vit_of_transformers() -> Any:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=8,
        patch_size=4,
    )
    torch.manual_seed(0)
    return transformers.ViTForImageClassification(config).double().eval()


def check_llama(group: dist.ProcessGroup) -> None:
    """Logits and gradients of a Llama that is cut over two ranks."""
    tokens = torch.arange(16).view(2, 8) * 3
    twin = llama_of_transformers()
    logits = twin(tokens).logits
    logits.square().sum().backward()
    model = llama_of_transformers()
    kind = type(model)
    layout = parallelize_tensor(model, group, llama_styles(CONFIG, "model."))
    spread = TensorParallel(model, layout)
    assert type(model) is kind
    found = spread(tokens).logits
    assert layout.head is not None
    torch.testing.assert_close(found, logits.narrow(-1, layout.head[0], found.shape[-1]), atol=1e-10, rtol=0)
    found.square().sum().backward()
    for name, param in model.named_parameters():
        whole = twin.get_parameter(name).grad
        torch.testing.assert_close(param.grad, layout.parts[name].of(whole), atol=1e-10, rtol=0)


def vit_styles(model: nn.Module) -> dict[str, Any]:
    """By the type and the size of each linear of a block, because releases of transformers name them
    differently."""
    styles: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "layer" in name:
            last = name.rpartition(".")[2]
            if last in ("query", "key", "value", "q_proj", "k_proj", "v_proj"):
                styles[name] = ColumnParallel(4)
            elif module.out_features == 48:
                styles[name] = ColumnParallel()
            else:
                styles[name] = RowParallel(4 if module.in_features == 32 else None)
    for name in list(styles):
        parent, _, last = name.rpartition(".")
        if last in ("query", "q_proj"):
            children = ("query", "key", "value") if last == "query" else ("q_proj", "k_proj", "v_proj")
            styles[parent] = SharedInput(children)
    return styles
