"""The assignment of the tokens of a sequence to ranks, and the blocks of attention that each rank computes.

A causal query sees the keys before it only. If the parts are contiguous, the last rank therefore computes
with the keys of every rank and the first rank with its own only, and the ring waits for the last. The other
placements give every rank early and late tokens. 16 tokens on 4 ranks, the rank of each token:

    contiguous   0 0 0 0 1 1 1 1 2 2 2 2 3 3 3 3
    zig-zag      0 0 1 1 2 2 3 3 3 3 2 2 1 1 0 0      rank r has the chunks r and 2N - 1 - r of 2N
    striped      0 1 2 3 0 1 2 3 0 1 2 3 0 1 2 3

Every block (queries of rank i, keys of rank j) is one rectangle, full or causal, or empty:

                 j < i                       j = i       j > i
    contiguous   full                        causal      empty
    zig-zag      full, first half of keys    causal      full, second half of queries
    striped      causal, with the diagonal   causal      causal, without the diagonal

With s tokens on each rank, the busiest rank computes s^2 scores in each ring step with contiguous parts, and
s^2 / 2 with the others: half the time for many ranks. ``work`` counts the scores of each step and rank.

The all-to-all form (``ulysses``) needs no balance, because each rank computes whole sequences. Both forms
combined divide each part of the ring into ``inner`` contiguous parts.

Papers: Striped Attention (arXiv:2311.09431); zig-zag as in Llama 3 (arXiv:2407.21783)
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dlo_lib.base.errors import UserError, require_count


class SequencePlacement(enum.Enum):
    """The assignment of tokens to the ranks of a ring."""

    CONTIGUOUS = "contiguous"
    ZIGZAG = "zigzag"
    STRIPED = "striped"


@dataclass(frozen=True)
class Rectangle:
    """A rectangle of the block (queries of one rank, keys of another) in which attention is computed.

    Attributes:
        rows: the queries, a range of the local tokens.
        columns: the keys, a range of the local tokens of their rank.
        causal: whether query i of the rectangle sees its keys 0 ... i only. It is then a square.
        visible: whether a query sees a key, (batch, 1, rows, columns) bool; None for all, or all that
            ``causal`` leaves. The masks of packed documents (``documents``).
    """

    rows: slice
    columns: slice
    causal: bool
    visible: Tensor | None = field(default=None, compare=False)

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """Return ``visible`` as a term of the scores: 0, or -inf for keys that the query does not see."""
        if self.visible is None:
            return None
        zeros = torch.zeros(self.visible.shape, dtype=dtype, device=self.visible.device)
        return zeros.masked_fill_(~self.visible, -math.inf)

    @property
    def scores(self) -> int:
        """The number of (query, key) pairs that are computed."""
        rows, columns = _length(self.rows), _length(self.columns)
        return rows * (rows + 1) // 2 if self.causal else rows * columns


@dataclass(frozen=True)
class SequenceLayout:
    """The tokens of each of ``ranks`` ranks.

    Args:
        ranks: the number of context-parallel ranks.
        inner: the number of consecutive ranks that exchange heads by all-to-all; it divides ``ranks``. The
            other factor is the size of the ring.
        placement: the placement over the ring.

    Raises:
        UserError: ``inner`` does not divide ``ranks``.
    """

    ranks: int
    inner: int = 1
    placement: SequencePlacement = SequencePlacement.ZIGZAG

    def __post_init__(self) -> None:
        require_count("ranks", self.ranks)
        require_count("inner", self.inner)
        if self.ranks % self.inner:
            fits = [size for size in range(1, self.ranks + 1) if self.ranks % size == 0]
            raise UserError(
                f"all-to-all over {self.inner} of {self.ranks} context-parallel ranks: "
                f"use a factor of {self.ranks}, one of {', '.join(map(str, fits))}"
            )

    @property
    def ring(self) -> int:
        """The number of ranks of the ring."""
        return self.ranks // self.inner

    @property
    def direction(self) -> int:
        """1 if blocks of keys travel to the next place of the ring in each step, -1 if to the previous one.

        Keys of the zig-zag first visit the places before their own, which need the whole block. The places
        after need its first half only, so that the second half is not sent to them.
        """
        return 1 if self.placement is SequencePlacement.CONTIGUOUS else -1

    @property
    def multiple(self) -> int:
        """Sequences have a multiple of this number of tokens."""
        halves = self.placement is SequencePlacement.ZIGZAG and self.ring > 1
        # A part of the ring consists of 2 chunks in the zig-zag, and is cut into `inner` parts.
        per_part = self.inner if not halves or self.inner % 2 == 0 else 2 * self.inner
        return self.ring * per_part

    def local(self, seq: int) -> int:
        """Return the number of tokens of one rank, of a sequence of ``seq`` tokens.

        Raises:
            UserError: the sequence cannot be divided equally. The message names the nearest lengths that can.
        """
        require_count("seq", seq)
        if seq % self.multiple:
            below = seq - seq % self.multiple
            near = f"{below} or {below + self.multiple}" if below else f"{self.multiple}"
            raise UserError(
                f"a sequence of {seq} tokens cannot be divided over {self.ranks} context-parallel ranks "
                f"({self.placement.value}): use a multiple of {self.multiple}, such as {near}"
            )
        return seq // self.ranks

    def positions(self, rank: int, seq: int, device: torch.device | str | None = None) -> Tensor:
        """Return the positions of the tokens of ``rank`` in the sequence, ascending, (seq / ranks,) int64.

        Raises:
            UserError: the sequence cannot be divided equally.
        """
        local = self.local(seq)
        place, inside = divmod(rank, self.inner)
        part = _ring_positions(self.placement, place, self.ring, seq, device)
        return part[inside * local : (inside + 1) * local]

    def ring_positions(self, place: int, seq: int, device: torch.device | str | None = None) -> Tensor:
        """Return the positions of the tokens of the ``inner`` ranks at ``place`` of the ring, (seq / ring,)
        int64."""
        self.local(seq)
        return _ring_positions(self.placement, place, self.ring, seq, device)

    def shard(self, tensor: Tensor, rank: int, dim: int = 1) -> Tensor:
        """Return the part of ``tensor`` that belongs to ``rank``.

        Args:
            tensor: inputs, targets or document ids of whole sequences, such as (batch, seq).
            dim: the dimension of the sequence.

        Raises:
            UserError: the sequence cannot be divided equally.
        """
        return tensor.index_select(dim, self.positions(rank, tensor.shape[dim], tensor.device))

    def unshard(self, parts: Sequence[Tensor], dim: int = 1) -> Tensor:
        """Return the whole tensor of the parts of all ranks, in the order of the ranks: the inverse of
        ``shard``."""
        joined = torch.cat(list(parts), dim)
        seq = joined.shape[dim]
        order = torch.cat([self.positions(rank, seq, joined.device) for rank in range(self.ranks)])
        return joined.index_select(dim, order.argsort())

    def rectangle(self, query: int, key: int, seq: int, causal: bool = True) -> Rectangle | None:
        """Return the rectangle of the queries at place ``query`` of the ring and the keys at place ``key``,
        or None if no query sees a key."""
        size = self.local(seq) * self.inner
        whole = slice(0, size)
        if not causal:
            return Rectangle(whole, whole, causal=False)
        if query == key:
            return Rectangle(whole, whole, causal=True)
        match self.placement:
            case SequencePlacement.CONTIGUOUS:
                return Rectangle(whole, whole, causal=False) if key < query else None
            case SequencePlacement.ZIGZAG if key < query:
                return Rectangle(whole, slice(0, size // 2), causal=False)
            case SequencePlacement.ZIGZAG:
                return Rectangle(slice(size // 2, size), whole, causal=False)
        if key < query:
            return Rectangle(whole, whole, causal=True)
        return Rectangle(slice(1, size), slice(0, size - 1), causal=True) if size > 1 else None

    def key_of(self, place: int, step: int) -> int:
        """Return the place of the ring whose keys are at ``place`` in ring step ``step``."""
        return (place - self.direction * step) % self.ring

    def keys_used(self, key: int, steps: range, seq: int, causal: bool = True) -> int:
        """Return the number n so that the places which the keys of ``key`` visit in these ring steps use the
        first n of them at most."""
        visited = ((key + self.direction * step) % self.ring for step in steps)
        found = (self.rectangle(place, key, seq, causal) for place in visited)
        return max((int(part.columns.stop) for part in found if part is not None), default=0)

    def work(self, seq: int, causal: bool = True) -> list[list[int]]:
        """Return the number of scores per head that each place of the ring computes in each ring step: one
        list for each step."""
        return [
            [
                0 if found is None else found.scores
                for place in range(self.ring)
                for found in [self.rectangle(place, self.key_of(place, step), seq, causal)]
            ]
            for step in range(self.ring)
        ]

    def balance(self, seq: int, causal: bool = True) -> float:
        """Return the mean work of a rank / the work on the critical path, at most 1.

        All ranks wait for the busiest one in each ring step, so the critical path is the sum of the largest
        values of the steps. 1 means that no rank waits.
        """
        steps = self.work(seq, causal)
        return sum(map(sum, steps)) / (self.ring * sum(map(max, steps)))


def _ring_positions(
    placement: SequencePlacement, place: int, ring: int, seq: int, device: torch.device | str | None
) -> Tensor:
    size = seq // ring
    if placement is SequencePlacement.STRIPED:
        return torch.arange(place, seq, ring, device=device)
    if placement is SequencePlacement.CONTIGUOUS or ring == 1:
        return torch.arange(place * size, (place + 1) * size, device=device)
    half = size // 2
    late = 2 * ring - 1 - place
    first = torch.arange(place * half, (place + 1) * half, device=device)
    return torch.cat((first, torch.arange(late * half, (late + 1) * half, device=device)))


def _length(part: slice) -> int:
    return int(part.stop - part.start)
