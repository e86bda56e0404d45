"""The visible checks of attention with a cache, and through a block table."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import check
from dlo_lib.labkit.compare import EXACT, double, wrong_if

from .twins import attended, one_head

# -- cache


def drawn(t, past: int, new: int, kv_heads: int | None = None, batch: int | None = None) -> dict:
    """Weights of a layer, new tokens, and a past that no tokens have given."""
    batch, head_dim = batch or t.integer(2, 3), 2 * t.integer(2, 4)
    kv_heads = kv_heads or t.integer(2, 3)
    heads, hidden = kv_heads * t.integer(2, 3), t.integer(9, 14)
    shapes = {"q": heads, "k": kv_heads, "v": kv_heads}
    weights = {name: double(t, count * head_dim, hidden) / 3 for name, count in shapes.items()}
    return {
        "x": double(t, batch, new, hidden),
        "weights": weights | {"o": double(t, hidden, heads * head_dim) / 3},
        "head_dim": head_dim,
        "keys": double(t, batch, kv_heads, past, head_dim),
        "values": double(t, batch, kv_heads, past, head_dim),
    }


MISTAKES = {
    "the first new token has the position `past`, not 0": "positions",
    "a new token sees no token after it: the mask is missing": "mask",
    "query i sees the keys j <= past + i: the mask is that of a prompt": "corner",
    "query head h uses the key head h // (heads / key heads): repeat each key head, not their list": "heads",
}


def step_of(student, t, case: dict) -> list[object]:
    return t.items(student.attention_step(*case.values()), 3, "attention_step(...)")


def output_is_right(student, t, case: dict, what: str) -> None:
    got = step_of(student, t, case)[0]
    want = attended(**case)[0]
    wrong_if(t, got, want, {words: attended(**case, mistake=name)[0] for words, name in MISTAKES.items()})
    t.close(got, want, what, **EXACT)


@check("cache", points=1)
def check_prompt(student, t):
    "A prompt without a past: causal attention with fewer key heads"
    output_is_right(student, t, drawn(t, 0, t.integer(4, 7)), "the output for a prompt")


@check("cache", points=2)
def check_token(student, t):
    "One new token and a past: nothing but the cache is known of the past"
    for _ in range(2):
        output_is_right(student, t, drawn(t, t.integer(3, 9), 1), "the output for one new token")


@check("cache", points=1)
def check_several(student, t):
    "Several new tokens after a past"
    case = drawn(t, t.integer(3, 9), t.integer(3, 5))
    output_is_right(student, t, case, "the output for several new tokens after a past")


@check("cache", points=1)
def check_returned(student, t):
    "The returned cache has the past and the new keys, rotated, and values"
    case = drawn(t, t.integer(3, 9), t.integer(2, 4))
    _, keys, values = step_of(student, t, case)
    _, right, also = attended(**case)
    wrong_if(t, keys, right, {"keys are stored rotated": attended(**case, mistake="unturned")[1]})
    wrong_if(t, keys, right, {"the past is missing": right[:, :, case["keys"].shape[2] :]})
    t.close(keys, right, "the keys of the returned cache", **EXACT)
    t.close(values, also, "the values of the returned cache", **EXACT)


# -- paged


def pages(t, full: bool = False) -> tuple[dict, Tensor]:
    """Arguments of paged_attention, and what it should return. Slots without a token hold NaN."""
    size, kv_heads, head_dim = t.integer(3, 5), t.integer(2, 3), t.integer(3, 6)
    lengths = [size * t.integer(2, 3), 1, size * t.integer(1, 3) + t.integer(1, size - 1)]
    if full:
        lengths = [size * t.integer(1, 3) for _ in lengths]
    lengths = t.shuffled(lengths)
    counts = [math.ceil(length / size) for length in lengths]
    total = sum(counts) + t.integer(3, 6)
    places = t.shuffled(range(total))
    q = double(t, len(lengths), kv_heads * t.integer(2, 3), head_dim)
    keys, values = (torch.full((total, size, kv_heads, head_dim), math.nan).double() for _ in "kv")
    tables, want = [], []
    for row, (length, count) in enumerate(zip(lengths, counts)):
        table, places = places[:count], places[count:]
        if count > 1 and table[-1] == max(table):  # the last block should not be the last in the memory
            table.reverse()
        own = double(t, 2, length, kv_heads, head_dim)
        for place in range(length):
            keys[table[place // size], place % size] = own[0, place]
            values[table[place // size], place % size] = own[1, place]
        group = q.shape[1] // kv_heads
        seen = torch.ones(1, length, dtype=torch.bool)
        heads = [
            one_head(q[row, h][None], own[0, :, h // group], own[1, :, h // group], seen)
            for h in range(q.shape[1])
        ]
        tables.append(table)
        want.append(torch.cat(heads))
    return {"q": q, "keys": keys, "values": values, "tables": tables, "lengths": lengths}, torch.stack(want)


@check("paged", points=2)
def check_full_blocks(student, t):
    "Full blocks anywhere in the memory: each sequence attends to the tokens of its table"
    case, want = pages(t, full=True)
    got = student.paged_attention(*case.values())
    t.close(got, want, "the output of attention through full blocks", **EXACT)


@check("paged", points=2)
def check_unused_slots(student, t):
    "Slots of a block that hold no token are not read: they hold NaN"
    case, want = pages(t)
    got = t.tensor(student.paged_attention(*case.values()), "paged_attention(...)", shape=want.shape)
    words = "the output holds NaN: slots after the length of a sequence were read. NaN times 0 is NaN"
    t.that(not bool(got.isnan().any()), words)
    t.close(got, want, "the output of attention through blocks", **EXACT)
