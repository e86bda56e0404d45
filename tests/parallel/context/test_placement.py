"""Placements: every token has one rank, every visible pair of tokens is computed once, and the work is
balanced as the closed formulas say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlo_lib.base.errors import UserError
from dlo_lib.parallel.context.documents import document_ids, document_rectangles
from dlo_lib.parallel.context.placement import Rectangle, SequenceLayout, SequencePlacement

CONTIGUOUS, ZIGZAG, STRIPED = SequencePlacement
PLACEMENTS = st.sampled_from(SequencePlacement)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[SequenceLayout, int]:
    inner, ring = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    layout = SequenceLayout(ring * inner, inner, draw(PLACEMENTS))
    return layout, layout.multiple * draw(st.integers(1, 3))


def computed(layout: SequenceLayout, seq: int, rectangles) -> torch.Tensor:
    """How often each (query, key) pair of the whole sequence is computed."""
    counts = torch.zeros(seq, seq, dtype=torch.int64)
    for query in range(layout.ring):
        for key in range(layout.ring):
            for part in rectangles(query, key):
                rows = layout.ring_positions(query, seq)[part.rows]
                columns = layout.ring_positions(key, seq)[part.columns]
                pairs = torch.ones(len(rows), len(columns), dtype=torch.int64)
                pairs = pairs.tril() if part.causal else pairs
                if part.visible is not None:
                    pairs = pairs * part.visible[0, 0]
                counts[rows[:, None], columns[None, :]] += pairs
    return counts


def test_the_ranks_of_sixteen_tokens():
    def ranks(placement: SequencePlacement, inner: int = 1) -> list[int]:
        layout = SequenceLayout(4 * inner, inner, placement)
        owner = torch.empty(16, dtype=torch.int64)
        for rank in range(layout.ranks):
            owner[layout.positions(rank, 16)] = rank
        return owner.tolist()

    assert ranks(CONTIGUOUS) == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    assert ranks(ZIGZAG) == [0, 0, 1, 1, 2, 2, 3, 3, 3, 3, 2, 2, 1, 1, 0, 0]
    assert ranks(STRIPED) == [0, 1, 2, 3] * 4
    assert ranks(ZIGZAG, inner=2) == [0, 0, 2, 2, 4, 4, 6, 6, 7, 7, 5, 5, 3, 3, 1, 1]


@given(layouts())
def test_shards_are_a_permutation_with_an_inverse(drawn):
    layout, seq = drawn
    whole = torch.arange(3 * seq).view(3, seq)
    parts = [layout.shard(whole, rank) for rank in range(layout.ranks)]
    assert all(part.shape == (3, seq // layout.ranks) for part in parts)
    assert torch.equal(layout.unshard(parts), whole)
    assert all(
        (positions.diff() > 0).all() for positions in (layout.positions(r, seq) for r in range(layout.ranks))
    )
    joined = [torch.cat([layout.positions(place * layout.inner + i, seq) for i in range(layout.inner)])
              for place in range(layout.ring)]  # fmt: skip
    assert all(torch.equal(part, layout.ring_positions(place, seq)) for place, part in enumerate(joined))


@given(layouts(), st.booleans())
def test_every_visible_pair_is_computed_once(drawn, causal):
    layout, seq = drawn

    def one(query: int, key: int) -> list[Rectangle]:
        found = layout.rectangle(query, key, seq, causal)
        return [] if found is None else [found]

    expected = torch.ones(seq, seq, dtype=torch.int64)
    assert torch.equal(computed(layout, seq, one), expected.tril() if causal else expected)
    assert sum(map(sum, layout.work(seq, causal))) == (seq * (seq + 1) // 2 if causal else seq * seq)


@given(layouts(), st.booleans(), st.randoms(use_true_random=False))
def test_every_visible_pair_of_packed_documents_is_computed_once(drawn, causal, random):
    layout, seq = drawn
    documents = torch.tensor([sorted(random.randrange(4) for _ in range(seq))])
    expected = (documents[0, :, None] == documents[0, None]).long()
    found = computed(
        layout, seq, lambda query, key: document_rectangles(layout, query, key, documents, causal)
    )
    assert torch.equal(found, expected.tril() if causal else expected)


@pytest.mark.parametrize("ring", [2, 3, 4, 8])
def test_the_balance_is_that_of_the_formulas(ring):
    seq = 2 * ring * 8
    s = seq // ring  # tokens of a rank
    contiguous, zigzag, striped = (
        SequenceLayout(ring, 1, placement).work(seq) for placement in SequencePlacement
    )
    diagonal = s * (s + 1) // 2
    assert contiguous == [
        [diagonal] * ring,
        *([s * s * (place >= step) for place in range(ring)] for step in range(1, ring)),
    ]
    assert zigzag == [[diagonal] * ring, *[[s * s // 2] * ring] * (ring - 1)]
    assert striped == [
        [diagonal] * ring,
        # the blocks travel to the previous rank: the first ranks have keys of later ranks first
        *(
            [diagonal if place >= ring - step else diagonal - s for place in range(ring)]
            for step in range(1, ring)
        ),
    ]
    balances = [SequenceLayout(ring, 1, placement).balance(seq) for placement in SequencePlacement]
    assert balances[0] == pytest.approx(seq * (seq + 1) / 2 / ring / (diagonal + (ring - 1) * s * s))
    assert balances[1] == 1
    assert 0.9 < balances[2] < 1
    assert SequenceLayout(ring, 1, CONTIGUOUS).balance(seq, causal=False) == 1


@pytest.mark.parametrize(
    ("layout", "seq", "near"),
    [
        (SequenceLayout(4, 1, ZIGZAG), 20, "multiple of 8, such as 16 or 24"),
        (SequenceLayout(4, 1, ZIGZAG), 6, "multiple of 8, such as 8"),
        (SequenceLayout(3, 1, STRIPED), 10, "multiple of 3, such as 9 or 12"),
        (SequenceLayout(6, 3, ZIGZAG), 18, "multiple of 12, such as 12 or 24"),
        (SequenceLayout(4, 4, ZIGZAG), 10, "multiple of 4, such as 8 or 12"),
    ],
)
def test_a_sequence_that_cannot_be_divided_is_refused_with_lengths_that_can(layout, seq, near):
    with pytest.raises(UserError, match=near):
        layout.shard(torch.zeros(1, seq), 0)
    with pytest.raises(UserError, match=near):
        layout.positions(0, seq)


def test_other_bad_sizes_are_refused():
    with pytest.raises(UserError, match="one of 1, 2, 3, 6"):
        SequenceLayout(6, 4)
    with pytest.raises(UserError, match="ranks is 0"):
        SequenceLayout(0)
    with pytest.raises(UserError, match="the sum 8"):
        document_ids([3, 4], 8)
    assert document_ids([1, 3, 2], 6).tolist() == [0, 1, 1, 1, 2, 2]


def test_documents_of_one_rank_have_no_mask_and_skip_the_other_blocks():
    layout = SequenceLayout(4, 1, CONTIGUOUS)
    documents = document_ids([4, 4, 4, 4], 16)[None]
    for query in range(4):
        for key in range(4):
            found = document_rectangles(layout, query, key, documents)
            whole = slice(0, 4)
            assert found == ([Rectangle(whole, whole, causal=True)] if query == key else [])
            assert all(part.visible is None for part in found)


def test_short_documents_compute_fewer_pairs():
    """In the zig-zag, the rectangle of the two chunks of a rank is cut into those of each chunk."""
    layout, seq = SequenceLayout(2, 1, ZIGZAG), 32
    documents = document_ids([8] * 4, seq)[None]
    own = document_rectangles(layout, 0, 0, documents)
    assert own == [
        Rectangle(slice(0, 8), slice(0, 8), causal=True),
        Rectangle(slice(8, 16), slice(8, 16), causal=True),
    ]
    assert document_rectangles(layout, 0, 1, documents) == []
