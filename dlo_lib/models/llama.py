"""Llama 3.x: a decoder of pre-norm blocks with grouped-query attention (GQA), SwiGLU and rotary positions
(RoPE).

Every block computes  x + Attention(RMSNorm(x))  and then  x + SwiGLU(RMSNorm(x)).  The logits are RMSNorm(x)
@ W_out^T, where W_out is the embedding if the embeddings are tied. Module and parameter names are those of
the checkpoints of Hugging Face, except for the prefix ``model.``.

Papers: Llama 3 (arXiv:2407.21783), GQA (arXiv:2305.13245), SwiGLU (arXiv:2002.05202), RMSNorm
(arXiv:1910.07467), RoPE (arXiv:2104.09864)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dlo_lib.base.errors import UserError, require_count
from dlo_lib.models.experts import Experts
from dlo_lib.models.moe import MoELayer
from dlo_lib.models.router import MoEConfig, Router


@dataclass(frozen=True)
class RopeScaling:
    """The ``llama3`` scaling of rotary frequencies, which extends the context of a model trained on short
    sequences.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a Llama.

    ``hidden`` is the width of the residual stream; ``head_dim`` may differ from hidden / num_heads. With
    ``moe``, the MLP of some blocks is a mixture of experts.
    """

    vocab_size: int
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int = 8192
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tied_embeddings: bool = False
    initializer_std: float = 0.02
    moe: MoEConfig | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int":
                require_count(field.name, value, least=0 if field.name == "num_layers" else 1)
            elif field.type == "float" and (isinstance(value, bool) or not isinstance(value, Real)):
                raise UserError(f"{field.name} is {value!r}: it should be a number")
            elif field.type == "bool" and not isinstance(value, bool):
                raise UserError(f"{field.name} is {value!r}: it should be True or False")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim ({self.head_dim}) must be even: rotary positions rotate pairs of elements"
            )

    def has_experts(self, layer: int) -> bool:
        """Return whether the MLP of block ``layer``, from 0, is a mixture of experts."""
        return self.moe is not None and (layer + 1) % self.moe.every == 0


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last dimension, (..., hidden), computed in fp32 or wider."""
    wide = x if x.dtype == torch.float64 else x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


class RMSNorm(nn.Module):
    """Compute x / rms(x) * weight over the last dimension, in fp32 or wider."""

    normalize: Callable[[Tensor, Tensor, float], Tensor] = staticmethod(rms_norm)
    """The function of input, weight and eps. ``kernels.fuse`` replaces it in an instance."""

    def __init__(self, hidden: int, eps: float, **factory: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden, **factory))

    def forward(self, x: Tensor) -> Tensor:
        return self.normalize(x, self.weight, self.eps)


def rope_frequencies(config: LlamaConfig, device: torch.device | str | None = None) -> Tensor:
    """Return the angle per position of each pair of elements of a head, (head_dim / 2,) fp32.

    With scaling, frequencies whose wavelength exceeds the original context are divided by ``factor``, high
    frequencies are kept, and frequencies in between are interpolated."""
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.int64, device=device).float()
    frequencies = 1.0 / config.rope_theta ** (pairs / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    # full turns within the original context
    turns = scaling.original_max_positions / (2 * math.pi / frequencies)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0, 1)
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (batch, heads, seq, head_dim) by angles with the given cos and sin (seq, head_dim).

    Element i of the first half forms a pair with element i of the second half.
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rotation(config: LlamaConfig, seq: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the angles of positions 0 to seq − 1, as ``rotation_at``."""
    return rotation_at(config, torch.arange(seq, device=like.device), like)


def rotation_at(config: LlamaConfig, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the angles of ``positions`` (n,), each (n, head_dim) in the dtype of ``like``.

    They are computed in fp32.
    """
    # Not a buffer, because the frequencies are cheap and `model.to(torch.bfloat16)` would round a buffer.
    angles = torch.outer(positions.float(), rope_frequencies(config, like.device))
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


class Attention(nn.Module):
    """Causal self-attention; ``num_heads / num_kv_heads`` query heads share one key
    head and one value head."""

    attend: Callable[..., Tensor] = staticmethod(F.scaled_dot_product_attention)
    """The attention function. Context parallelism and ``kernels.fuse`` replace it in an instance."""
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = staticmethod(apply_rope)
    """The rotation of queries and keys. ``kernels.fuse`` replaces it in an instance."""

    def __init__(self, config: LlamaConfig, **factory: Any) -> None:
        super().__init__()
        self.config = config
        self.head_dim = config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden, q_size, bias=False, **factory)
        self.k_proj = nn.Linear(config.hidden, kv_size, bias=False, **factory)
        self.v_proj = nn.Linear(config.hidden, kv_size, bias=False, **factory)
        self.o_proj = nn.Linear(q_size, config.hidden, bias=False, **factory)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        heads = (batch, seq, -1, self.head_dim)
        q = self.q_proj(x).view(heads).transpose(1, 2)  # (batch, num_heads, seq, head_dim)
        k = self.k_proj(x).view(heads).transpose(1, 2)  # (batch, num_kv_heads, seq, head_dim)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        out = self.attend(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.o_proj(out.transpose(1, 2).reshape(batch, seq, -1))  # (batch, seq, hidden)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    activate: Callable[[Tensor, Tensor], Tensor] | None = None
    """Returns silu(gate) * up as one operation; None for two. ``kernels.fuse`` sets it in an instance."""

    def __init__(self, config: LlamaConfig, intermediate: int | None = None, **factory: Any) -> None:
        super().__init__()
        width = config.intermediate if intermediate is None else intermediate
        self.gate_proj = nn.Linear(config.hidden, width, bias=False, **factory)
        self.up_proj = nn.Linear(config.hidden, width, bias=False, **factory)
        self.down_proj = nn.Linear(width, config.hidden, bias=False, **factory)

    def forward(self, x: Tensor) -> Tensor:
        if self.activate is not None:
            return self.down_proj(self.activate(self.gate_proj(x), self.up_proj(x)))
        # One expression, because without gradients the gate is then freed before up exists.
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def make_mlp(config: LlamaConfig, layer: int, **factory: Any) -> nn.Module:
    """Return the MLP of block ``layer``, or its mixture of experts."""
    if config.moe is None or not config.has_experts(layer):
        return MLP(config, **factory)
    width = config.moe.shared_intermediate
    shared = MLP(config, width, **factory) if width else None
    return MoELayer(config.moe, config.hidden, shared, **factory)


class Block(nn.Module):
    """Transformer block ``layer``; input and output are (batch, seq, hidden)."""

    def __init__(self, config: LlamaConfig, layer: int = 0, **factory: Any) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, config.norm_eps, **factory)
        self.self_attn = Attention(config, **factory)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.norm_eps, **factory)
        self.mlp = make_mlp(config, layer, **factory)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """A Llama model: maps tokens (batch, seq) int64 to logits (batch, seq, vocab_size).

    Args:
        config: the sizes.
        checkpointing: save only the input of each block and recompute the block in the backward
            (arXiv:1604.06174).
        device, dtype: of the parameters; ``meta`` creates a model without storage and without random numbers.
    """

    def __init__(
        self,
        config: LlamaConfig,
        checkpointing: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.config = config
        self.checkpointing = checkpointing
        # On meta there is nothing to draw, and torch draws there in Python: 10 ms, and the first time 1.4 s.
        empty = device is not None and torch.device(device).type == "meta"
        rows = torch.empty(config.vocab_size, config.hidden, **factory) if empty else None
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden, _weight=rows, **factory)
        self.layers = nn.ModuleList(Block(config, layer, **factory) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden, config.norm_eps, **factory)
        self.lm_head = nn.Linear(config.hidden, config.vocab_size, bias=False, **factory)
        if empty:
            self.tie_weights()
        else:
            self.init_weights()

    def tie_weights(self) -> None:
        """Share the parameter of the embedding and the output, if they are tied.

        Call this after ``to_empty`` and similar methods, which create two separate parameters.
        """
        if self.config.tied_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def init_weights(self) -> None:
        """Initialise all parameters, also after ``to_empty``: matrices normal with ``initializer_std``, norms
        with ones.
        """
        self.tie_weights()
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=self.config.initializer_std)
            elif isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)
            elif isinstance(module, Experts | Router):
                module.init_weights(self.config.initializer_std)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits.

        With ``targets`` (batch, seq) int64, return the sum of the losses of the valid tokens, (), instead;
        this needs an output projection that computes the loss (``kernels.fuse``)."""
        x = self.embed_tokens(tokens)  # (batch, seq, hidden)
        cos, sin = rotation(self.config, tokens.shape[1], x)
        for block in self.layers:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        x = self.norm(x)
        # (batch, seq, vocab_size), or ()
        return self.lm_head(x) if targets is None else self.lm_head(x, targets)
