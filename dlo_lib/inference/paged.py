"""Paged attention: keys and values are in blocks anywhere in the memory, and a table leads to them.

The cache is one tensor of keys and one of values in each layer, (num_blocks, block_size, num_kv_heads,
head_dim). Token i of a sequence is in slot i mod block_size of block table[i // block_size]. The attention
gathers the used slots of a sequence through its table; it never reads a slot that was not written. A GPU's
kernel reads the blocks in place, so the gathered copy is a cost of this form only.

Paper: W. Kwon et al., PagedAttention (arXiv:2309.06180).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dlo_lib.base.errors import UserError
from dlo_lib.inference.blocks import BlockPool, BlockTable
from dlo_lib.inference.cache import attend_to_past, forward_tokens
from dlo_lib.models.llama import Llama, LlamaConfig


class PagedCache:
    """The blocks of all layers. ``keys[layer]`` and ``values[layer]`` are (num_blocks, block_size,
    num_kv_heads, head_dim).

    Args:
        config: the sizes of the model.
        pool: the pool whose blocks these are.
        dtype, device: those of the model.
    """

    def __init__(
        self,
        config: LlamaConfig,
        pool: BlockPool,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.block_size = pool.block_size
        shape = (pool.num_blocks, pool.block_size, config.num_kv_heads, config.head_dim)
        layers = range(config.num_layers)
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in layers]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in layers]

    def slots(self, table: BlockTable, start: int, end: int) -> Tensor:
        """Return the flat slots of positions ``start`` to ``end`` of a sequence, (end − start,) int64."""
        places = torch.arange(start, end)
        blocks = torch.tensor(table.blocks, dtype=torch.int64)
        flat = blocks[places // self.block_size] * self.block_size + places % self.block_size
        return flat.to(self.keys[0].device) if self.keys else flat

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values (tokens, num_kv_heads, head_dim) in flat slots (tokens,)."""
        self.keys[layer].flatten(0, 1)[slots] = keys
        self.values[layer].flatten(0, 1)[slots] = values

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, pairs (source, destination) as ``BlockPool.reserve`` returns them."""
        for source, destination in copies:
            for stored in (*self.keys, *self.values):
                stored[destination] = stored[source]


def paged_attention(q: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> Tensor:
    """Return the attention of the last positions of a sequence, (new, num_heads, head_dim).

    Args:
        q: (new, num_heads, head_dim), the queries of the last ``new`` positions.
        keys, values: (num_blocks, block_size, num_kv_heads, head_dim), one layer of the cache.
        slots: (length,) int64, the flat slots of all positions of the sequence.
    """
    return attend_to_past(q, keys.flatten(0, 1)[slots], values.flatten(0, 1)[slots])


@torch.no_grad()
def forward_paged(
    model: Llama, cache: PagedCache, parts: Sequence[tuple[Sequence[int], BlockTable]]
) -> Tensor:
    """Compute the new tokens of several sequences, and return the logits of the last token of each.

    Args:
        model: the model.
        cache: the blocks.
        parts: for each sequence its new tokens, at least one, and its table, whose slots are reserved and
            whose length is that before; the lengths grow.

    Returns:
        (sequences, vocab_size).

    Raises:
        UserError: a sequence has no new token, or its table has too few blocks.
    """
    counts = [len(tokens) for tokens, _ in parts]
    ends = [table.length + count for (_, table), count in zip(parts, counts, strict=True)]
    for (tokens, table), end in zip(parts, ends, strict=True):
        if not tokens:
            raise UserError("a sequence has no new token: leave it out of the step")
        if end > len(table.blocks) * cache.block_size:
            raise UserError(
                f"{len(table.blocks)} blocks hold fewer than {end} tokens: reserve the slots first"
            )
    device = model.embed_tokens.weight.device
    slots = [cache.slots(table, 0, end) for (_, table), end in zip(parts, ends, strict=True)]
    new_slots = torch.cat([all_slots[-count:] for all_slots, count in zip(slots, counts, strict=True)])
    positions = torch.cat([torch.arange(e - c, e) for e, c in zip(ends, counts, strict=True)]).to(device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.write(layer, new_slots, k, v)
        own = zip(q.split(counts), slots, strict=True)
        outs = [paged_attention(query, cache.keys[layer], cache.values[layer], where) for query, where in own]
        return torch.cat(outs)

    flat = torch.tensor([token for tokens, _ in parts for token in tokens], device=device)
    hidden = forward_tokens(model, flat, positions, attend)
    for (_, table), end in zip(parts, ends, strict=True):
        table.length = end
    last = torch.tensor(counts, device=device).cumsum(0) - 1
    return model.lm_head(hidden[last])
