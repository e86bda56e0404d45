"""The model of this lab: a small Llama, trained on the sources of Python, with outliers of large models."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlo_lib.compress import plant_outliers
from dlo_lib.data.python_corpus import python_corpus
from dlo_lib.models import Llama, LlamaConfig

SEQ = 64
CHANNELS, FACTOR = (3, 12, 37, 50), 100.0
"""The outlier channels, and how many times larger their activations become."""

CONFIG = LlamaConfig(
    vocab_size=260, hidden=64, intermediate=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16
)


@cache
def _corpus() -> tuple[Tensor, Tensor]:
    """The tokens for the training, and those for the test."""
    tokens = torch.from_numpy(python_corpus().tokens[:4_000_000].astype("int64"))
    cut = len(tokens) * 9 // 10
    return tokens[:cut], tokens[cut:]


def batch(seed: int, size: int = 16, test: bool = False) -> Tensor:
    """Return sequences of tokens, (size, SEQ + 1) int64, drawn from the training part or the test part."""
    tokens = _corpus()[test]
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - SEQ - 1, (size,), generator=generator)
    return torch.stack([tokens[start : start + SEQ + 1] for start in starts.tolist()])


def trained(steps: int) -> Llama:
    """Return a Llama after ``steps`` steps of 16 sequences; its outliers are planted and change no output.

    Every 50 steps it prints the loss.
    """
    with torch.random.fork_rng():
        torch.manual_seed(25)
        model = Llama(CONFIG)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.01, betas=(0.9, 0.98), weight_decay=0.1, fused=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.01, total_steps=steps, pct_start=0.1, cycle_momentum=False
    )
    for step in range(steps):
        loss = _loss(model, batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1} of {steps}: loss {loss.item():.2f}", flush=True)
    return plant_outliers(model.requires_grad_(False), CHANNELS, FACTOR)


def _loss(model: Llama, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def perplexity(model: Llama) -> float:
    """Return exp(loss) on 64 sequences of the test part."""
    with torch.no_grad():
        return math.exp(_loss(model, batch(1, size=64, test=True)))


def linears(model: Llama) -> dict[str, nn.Linear]:
    """Return the linear layers of the blocks by name."""
    return {name: each for name, each in model.layers.named_modules() if isinstance(each, nn.Linear)}


def inputs(model: Llama, tokens: Tensor) -> dict[str, Tensor]:
    """Return the input of each linear layer of the blocks, (tokens, in)."""
    seen: dict[str, Tensor] = {}

    def remember(name: str) -> Callable[..., None]:
        return lambda _, arguments: seen.update({name: arguments[0].flatten(0, -2)})

    hooks = [each.register_forward_pre_hook(remember(name)) for name, each in linears(model).items()]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return seen


def with_weights(model: Llama, change: Callable[[Tensor, Tensor], Tensor]) -> Llama:
    """Return a copy in which ``change(weight, x)`` is the weight of each linear layer of the blocks.

    ``x`` (tokens, in): the input of the layer for one batch of the training part.
    """
    new, seen = copy.deepcopy(model), inputs(model, batch(0)[:, :-1])
    for name, linear in linears(new).items():
        linear.weight.data = change(linear.weight.data, seen[name]).to(linear.weight.dtype)
    return new


class _Product(nn.Module):
    def __init__(self, weight: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.multiply = weight, multiply

    def forward(self, x: Tensor) -> Tensor:
        y = self.multiply(x.flatten(0, -2), self.weight)
        return y.unflatten(0, x.shape[:-1]).to(x.dtype)


def with_product(model: Llama, multiply: Callable[[Tensor, Tensor], Tensor]) -> Llama:
    """Return a copy in which ``multiply(x, weight)`` computes each linear layer of the blocks."""
    new = copy.deepcopy(model)
    for name, linear in linears(new).items():
        parent, _, leaf = name.rpartition(".")
        setattr(new.layers.get_submodule(parent), leaf, _Product(linear.weight.data, multiply))
    return new


def readers(model: Llama) -> list[tuple[nn.Module, list[nn.Linear]]]:
    """Return each norm of the blocks with the linear layers that read it."""
    found: list[tuple[nn.Module, list[nn.Linear]]] = []
    for block in model.layers:
        attention, mlp = block.self_attn, block.mlp
        found.append((block.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj]))
        found.append((block.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj]))
    return found
