"""The masks of packed documents: a token sees the tokens of its document only.

A packed sequence contains several documents, and attention is block-diagonal. Every token has the number of
its document. For each block (queries of one rank, keys of another), the rank computes the smallest rectangle
that contains all visible pairs. If no query sees a key, which is frequent for short documents, the block is
skipped. A rectangle that the documents do not restrict has no mask and is as fast as without documents.

The masks depend on the tokens, but not on the layer: they are computed once per batch. Memory: one byte for
each pair of the rectangles, batch * (seq / ring) * seq bytes at most on each rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlo_lib.base.errors import UserError
from dlo_lib.parallel.context.placement import Rectangle, SequenceLayout, SequencePlacement


def document_ids(lengths: list[int] | Tensor, seq: int) -> Tensor:
    """Return the number of the document of each token, (seq,) int64, of documents with these lengths.

    Raises:
        UserError: the lengths are not positive, or their sum is not ``seq``.
    """
    counts = torch.as_tensor(lengths)
    if (counts < 1).any() or int(counts.sum()) != seq:
        raise UserError(
            f"documents of {counts.tolist()} tokens in a sequence of {seq}: use lengths of at least 1 with "
            f"the sum {seq}"
        )
    return torch.arange(len(counts), device=counts.device).repeat_interleave(counts)


def document_rectangles(
    layout: SequenceLayout, query: int, key: int, documents: Tensor, causal: bool = True
) -> list[Rectangle]:
    """Return the rectangles of the block (queries at place ``query`` of the ring, keys at place ``key``).

    Args:
        documents: the number of the document of each token of the whole sequences, (batch, seq).
        causal: whether a token sees the tokens before it only.
    """
    seq = documents.shape[1]
    rows, columns = (layout.ring_positions(place, seq, documents.device) for place in (query, key))
    visible = documents[:, rows, None] == documents[:, None, columns]  # (batch, rows, columns)
    if causal:
        visible &= rows[:, None] >= columns[None, :]
    # The two chunks of the zig-zag are far from each other: a rectangle around both would be mostly empty.
    cuts = 2 if layout.placement is SequencePlacement.ZIGZAG and layout.ring > 1 else 1
    size = len(rows) // cuts
    chunks = [slice(start, start + size) for start in range(0, len(rows), size)]
    found = [_trimmed(visible, row, column) for row in chunks for column in chunks]
    return [rectangle for rectangle in found if rectangle is not None]


def _trimmed(visible: Tensor, rows: slice, columns: slice) -> Rectangle | None:
    """Return the smallest rectangle inside ``rows`` x ``columns`` with all visible pairs of the batch."""
    pairs = visible[:, rows, columns].any(0)
    used_rows, used_columns = (pairs.any(dim).nonzero().flatten().tolist() for dim in (1, 0))
    if not used_rows:
        return None
    rows = slice(rows.start + used_rows[0], rows.start + used_rows[-1] + 1)
    columns = slice(columns.start + used_columns[0], columns.start + used_columns[-1] + 1)
    inside = visible[:, rows, columns]
    if inside.all():
        return Rectangle(rows, columns, causal=False)
    shape = inside.shape[1:]
    if shape[0] == shape[1] and torch.equal(inside, inside.new_ones(shape).tril().expand_as(inside)):
        return Rectangle(rows, columns, causal=True)
    return Rectangle(rows, columns, causal=False, visible=inside.unsqueeze(1).clone())
