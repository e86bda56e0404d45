"""A cache of keys and values: a new token attends to the stored prefix instead of computing it again.

Without a cache, token n costs a forward over n tokens. With one, it costs a forward over one token, whose
query attends to n stored keys. The results are equal, because a causal model's keys and values at a position
depend on earlier positions only. Keys are stored after the rotation at their absolute position.

    bytes = 2 · num_layers · num_kv_heads · head_dim · tokens · bytes of an element

The factor 2 counts keys and values; grouped-query attention stores ``num_kv_heads`` heads, not ``num_heads``.

Paper: N. Shazeer, Fast Transformer Decoding (arXiv:1911.02150); GQA (arXiv:2305.13245).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from dlo_lib.base.errors import UserError, require_count
from dlo_lib.models.llama import Block, Llama, LlamaConfig, rotation_at

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Of a layer's number, q (tokens, num_heads, head_dim), k and v (tokens, num_kv_heads, head_dim); returns
(tokens, num_heads, head_dim)."""


def cache_bytes(config: LlamaConfig, tokens: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Return the bytes of the keys and values of ``tokens`` tokens in all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * tokens * dtype.itemsize


def forward_tokens(model: Llama, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
    """Return the output of the last norm, (tokens, hidden), of a flat list of tokens of any sequences.

    The linear layers treat all tokens together, and ``attend`` treats each sequence alone: the selective
    batching of Orca. The model is not changed.

    Args:
        tokens: (tokens,) int64.
        positions: (tokens,) int64, the absolute position of each token in its sequence.
        attend: stores the new keys and values, and returns the result of the attention.
    """
    config = model.config
    x = model.embed_tokens(tokens).unsqueeze(0)  # (1, tokens, hidden)
    if not tokens.shape[0]:
        return x[0]
    cos, sin = rotation_at(config, positions, x)
    heads = (1, tokens.shape[0], -1, config.head_dim)
    for layer, module in enumerate(model.layers):
        block = cast(Block, module)
        attention = block.self_attn
        normed = block.input_layernorm(x)
        q = attention.rotate(attention.q_proj(normed).view(heads).transpose(1, 2), cos, sin)
        k = attention.rotate(attention.k_proj(normed).view(heads).transpose(1, 2), cos, sin)
        v = attention.v_proj(normed).view(heads)[0]  # (tokens, num_kv_heads, head_dim)
        out = attend(layer, q[0].transpose(0, 1), k[0].transpose(0, 1), v)
        x = x + attention.o_proj(out.reshape(1, tokens.shape[0], -1))
        x = x + block.mlp(block.post_attention_layernorm(x))
    return model.norm(x)[0]


def attend_to_past(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return the attention of the last positions of a sequence, (new, num_heads, head_dim).

    Args:
        q: (new, num_heads, head_dim), the queries of the last ``new`` positions.
        keys, values: (length, num_kv_heads, head_dim) of all positions; length ≥ new.
    """
    new, length = q.shape[0], keys.shape[0]
    seen = torch.ones(new, length, dtype=torch.bool, device=q.device).tril(length - new)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=seen,
        enable_gqa=q.shape[1] != keys.shape[1],
    )
    return out[0].transpose(0, 1)


class KVCache:
    """Contiguous keys and values of a batch, with room for ``capacity`` tokens of each row.

    ``keys`` and ``values`` have a tensor for each layer, (batch, capacity, num_kv_heads, head_dim);
    ``lengths`` has the number of stored tokens of each row.

    Args:
        config: the sizes of the model.
        batch: rows, one for each sequence.
        capacity: tokens of a row, prompt and continuation.
        dtype, device: those of the model.

    Raises:
        UserError: a size is not a positive whole number, or the model has fewer positions.
    """

    def __init__(
        self,
        config: LlamaConfig,
        batch: int,
        capacity: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        require_count("batch", batch)
        require_count("capacity", capacity)
        require_positions(config, capacity)
        shape = (batch, capacity, config.num_kv_heads, config.head_dim)
        self.capacity = capacity
        self.lengths = [0] * batch
        layers = range(config.num_layers)
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in layers]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in layers]

    def cut(self, row: int, length: int) -> None:
        """Forget the tokens of a row from position ``length`` on.

        Raises:
            UserError: the row has fewer tokens.
        """
        if not 0 <= length <= self.lengths[row]:
            raise UserError(f"row {row} has {self.lengths[row]} tokens: cut it to at most that, not {length}")
        self.lengths[row] = length


def require_positions(config: LlamaConfig, tokens: int) -> None:
    """Check that a sequence of ``tokens`` tokens has no more positions than the model.

    Raises:
        UserError: it has more.
    """
    if tokens > config.max_positions:
        raise UserError(
            f"the sequence may have {tokens} tokens and the model has {config.max_positions} positions: "
            "shorten the prompt or ask for fewer tokens"
        )


@torch.no_grad()
def forward_cached(model: Llama, tokens: Sequence[Tensor], cache: KVCache) -> list[Tensor]:
    """Append new tokens to each row of a cache, and return their logits, (new, vocab_size) for each row.

    Args:
        model: the model.
        tokens: for each row the new tokens, (new,) int64; rows may have different numbers, also none.
        cache: what the rows have stored; its lengths grow.

    Raises:
        UserError: the number of rows differs, or a row exceeds the capacity.
    """
    if len(tokens) != len(cache.lengths):
        raise UserError(
            f"{len(tokens)} rows of tokens for a cache of {len(cache.lengths)}: give one for each"
        )
    counts = [int(row.shape[0]) for row in tokens]
    starts = list(cache.lengths)
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        if start + count > cache.capacity:
            raise UserError(
                f"row {row} needs {start + count} tokens of a cache of {cache.capacity}: "
                "use a larger capacity"
            )

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs = []
        parts = (q.split(counts), k.split(counts), v.split(counts))
        for row, (own_q, own_k, own_v) in enumerate(zip(*parts, strict=True)):
            end = starts[row] + counts[row]
            cache.keys[layer][row, starts[row] : end] = own_k
            cache.values[layer][row, starts[row] : end] = own_v
            if counts[row]:
                past = cache.keys[layer][row, :end], cache.values[layer][row, :end]
                outs.append(attend_to_past(own_q, *past))
        return torch.cat(outs) if outs else torch.empty_like(q)

    spans = [torch.arange(s, s + c) for s, c in zip(starts, counts, strict=True)]
    flat = torch.cat(list(tokens))
    hidden = forward_tokens(model, flat, torch.cat(spans).to(flat.device), attend)
    cache.lengths = [s + c for s, c in zip(starts, counts, strict=True)]
    return list(model.lm_head(hidden).split(counts))
