"""The visible checks of what one process computes: blocks, their merge, rectangles, orders, and bytes. All in
float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import check
from dlo_lib.labkit.compare import explaining, near, wrong_if

from .scenarios import block_alone
from .twins import Block, attention, block_gradients, gradients, rectangle

DOUBLE = torch.float64
EXACT = {"rtol": 1e-9, "atol": 1e-10}


def double(t, *shape: int) -> Tensor:
    """Standard normal numbers in float64."""
    return t.normal(*shape, dtype=DOUBLE)


def drawn_mask(t, queries: int, keys: int) -> Tensor:
    """A mask in which each query sees the first key or more, and not all of them."""
    mask = t.integers(0, 1, queries, keys).bool()
    mask[:, 0], mask[:, -1] = True, False
    return mask


def block_inputs(t, factor: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and a mask of a block with other numbers of queries than of keys."""
    batch, heads, queries, size = t.integer(1, 2), t.integer(1, 3), t.integer(3, 5), t.integer(2, 4)
    q, k, v = (double(t, batch, heads, tokens, size) for tokens in (queries, queries + 2, queries + 2))
    return factor * q, k, v, drawn_mask(t, queries, queries + 2)


def pair(t, got, what: str) -> tuple[Tensor, Tensor]:
    """An output and its log-sum-exp, as two tensors."""
    out, lse = t.items(got, 2, "what " + what + " returns")
    return t.tensor(out, "out of " + what), t.tensor(lse, "lse of " + what)


# -- block

READY = {
    "no ready attention": (
        "The text excludes ready attention such as F.scaled_dot_product_attention: write the scores, their "
        "log-sum-exp, and the product with v"
    )
}


def block_of(student, q: Tensor, k: Tensor, v: Tensor, mask: Tensor):
    """What the student's ``block_attention`` returns, which calls no ready attention."""
    with explaining(READY):
        return student.run(block_alone, q=q, k=k, v=v, mask=mask)


@check("block", points=2)
def check_block_output(student, t):
    "The output of a block"
    for _ in range(2):
        q, k, v, mask = block_inputs(t)
        out, _ = pair(t, block_of(student, q, k, v, mask), "block_attention")
        want, _ = attention(q, k, v, mask)
        mistakes = {
            "the scores are not divided by the square root of d": attention(
                q * q.shape[-1] ** 0.5, k, v, mask
            )[0],
            "the mask is not used: a query sees only the keys where it is True": attention(
                q, k, v, torch.ones_like(mask)
            )[0],
            "hidden keys count in the sum: hide their scores (-inf) before the softmax, not its result": (
                (torch.einsum("bhqd,bhkd->bhqk", q, k) / q.shape[-1] ** 0.5).softmax(-1) * mask @ v
            ),
        }
        wrong_if(t, out, want, mistakes)
        t.close(out, want, "out of block_attention", **EXACT)


@check("block", points=1)
def check_block_lse(student, t):
    "The log-sum-exp of each row"
    q, k, v, mask = block_inputs(t)
    _, lse = pair(t, block_of(student, q, k, v, mask), "block_attention")
    _, want = attention(q, k, v, mask)
    mistakes = {
        "lse is the sum of exponentials: take its logarithm": want.exp(),
        "lse is the largest score: it is the logarithm of the sum of all exponentials": (
            (torch.einsum("bhqd,bhkd->bhqk", q, k) / q.shape[-1] ** 0.5)
            .masked_fill(~mask, -math.inf)
            .amax(-1)
        ),
    }
    wrong_if(t, lse, want, mistakes)
    t.close(lse, want, "lse of block_attention", **EXACT)


@check("block", points=1)
def check_block_blind(student, t):
    "A query that sees no key"
    q, k, v, mask = block_inputs(t)
    blind = t.integer(0, len(mask) - 1)
    mask[blind] = False
    out, lse = pair(t, block_of(student, q, k, v, mask), "block_attention")
    want_out, want_lse = attention(q, k, v, mask)
    rows = [row for row in range(len(mask)) if row != blind]
    t.tensor(out, "out of block_attention", shape=tuple(q.shape), dtype=DOUBLE)
    t.close(out[:, :, rows], want_out[:, :, rows], "out of the queries that see a key", **EXACT)
    finite = bool(torch.isfinite(out[:, :, blind]).all())
    t.that(
        finite,
        "the output of a query that sees no key is NaN: all its scores are -inf, so is its lse, and -inf - "
        "-inf is no number",
    )
    finite_scores = ". A large number such as -1e9 hides no key from a query that sees none: use -inf"
    mistakes = {
        "the output of a query that sees no key is the mean of v" + finite_scores: v.mean(2),
        "the output of a query that sees no key is attention to all keys" + finite_scores: (
            attention(q, k, v, torch.ones_like(mask))[0][:, :, blind]
        ),
    }
    wrong_if(t, out[:, :, blind], want_out[:, :, blind], mistakes, rtol=1e-5)
    t.close(out[:, :, blind], want_out[:, :, blind], "out of a query that sees no key", **EXACT)
    t.tensor(lse, "lse of block_attention", shape=tuple(q.shape[:-1]), dtype=DOUBLE)
    t.that(bool((lse[:, :, blind] == -math.inf).all()), "lse of a query that sees no key should be -inf")
    t.close(lse[:, :, rows], want_lse[:, :, rows], "lse of the queries that see a key", **EXACT)


@check("block", points=1)
def check_block_large(student, t):
    "Large scores"
    q, k, v, mask = block_inputs(t, factor=4000.0)
    out, lse = pair(t, block_of(student, q, k, v, mask), "block_attention")
    finite = bool(torch.isfinite(out).all() and torch.isfinite(lse).all())
    t.that(
        finite,
        "with scores of some 1000 an exponential overflows: subtract a number of the size of the scores "
        "first (lse)",
    )
    want_out, want_lse = attention(q, k, v, mask)
    t.close(out, want_out, "out of block_attention with large scores", **EXACT)
    t.close(lse, want_lse, "lse of block_attention with large scores", **EXACT)


# -- merge


def parts_of(t, parts: int, shift: float = 0.0) -> tuple[list[Block], Block]:
    """The results of ``parts`` sets of keys, and of all keys together; ``shift`` moves the scores."""
    size, queries, keys = t.integer(2, 4), t.integer(2, 4), 3
    q, k, v = (double(t, 1, 2, tokens, size) for tokens in (queries, parts * keys, parts * keys))
    q[..., -1], k[..., -1] = size**0.5, k[..., -1] + shift
    mask = torch.ones(queries, parts * keys, dtype=torch.bool)
    cut = zip(k.split(keys, 2), v.split(keys, 2))
    found = [attention(q, own_k, own_v, mask[:, :keys]) for own_k, own_v in cut]
    return found, attention(q, k, v, mask)


OUTPUTS_ADDED = "merge returns the sum of the two outputs: each has its share, exp(its lse - the common lse)"
OUTPUTS_AVERAGED = (
    "merge returns the mean of the two outputs: the block with the larger sum of exponentials counts more"
)


@check("merge", points=2)
def check_merge(student, t):
    "Two blocks give attention to all keys"
    for _ in range(2):
        (first, second), want = parts_of(t, 2)
        out, lse = pair(t, student.merge(*first, *second), "merge")
        weights = torch.stack((first[1], second[1])).softmax(0).unsqueeze(-1)
        largest = torch.maximum(first[1], second[1])
        mistakes = {
            OUTPUTS_ADDED: first[0] + second[0],
            OUTPUTS_AVERAGED: (first[0] + second[0]) / 2,
            "the shares of the two parts are exchanged": weights[1] * first[0] + weights[0] * second[0],
            "the shares of the two parts do not add up to 1: a share is exp(its lse - the common lse), not "
            "minus the larger lse": (
                first[0] * (first[1] - largest).exp().unsqueeze(-1)
                + second[0] * (second[1] - largest).exp().unsqueeze(-1)
            ),
            "the two lse are added, so out has wrong shares: add their exponentials": (
                first[0] * (-second[1]).exp().unsqueeze(-1) + second[0] * (-first[1]).exp().unsqueeze(-1)
            ),
        }
        wrong_if(t, out, want[0], mistakes)
        t.close(out, want[0], "out of merge", **EXACT)
        mistakes = {
            "the two lse are added: add their exponentials": first[1] + second[1],
            "the lse of merge is that of one part alone: return the lse over the keys of both": second[1],
        }
        wrong_if(t, lse, want[1], mistakes)
        t.close(lse, want[1], "lse of merge", **EXACT)


@check("merge", points=1)
def check_merge_many(student, t):
    "Blocks one after another, in any order"
    parts, want = parts_of(t, 4)
    out, lse = parts[0]
    for part in t.shuffled(parts[1:]):
        out, lse = pair(t, student.merge(out, lse, *part), "merge")
    t.close(out, want[0], "out after three merges", **EXACT)
    t.close(lse, want[1], "lse after three merges", **EXACT)


@check("merge", points=1)
def check_merge_large(student, t):
    "Large and small scores"
    for shift in t.shuffled([1000.0, -1000.0]):
        (first, second), want = parts_of(t, 2, shift)
        out, lse = pair(t, student.merge(*first, *second), "merge")
        finite = bool(torch.isfinite(out).all() and torch.isfinite(lse).all())
        message = (
            "lse of about {shift}: an exponential overflows, or all of them are 0. Form the differences of "
            "lse before exp"
        )
        t.that(finite, message, shift=shift)
        t.close(out, want[0], "out with lse of about {shift}", shift=shift, **EXACT)
        t.close(lse, want[1], "lse of about {shift}", shift=shift, **EXACT)


@check("merge", points=1)
def check_merge_nothing(student, t):
    "Parts without a key"
    first = parts_of(t, 2)[0][0]
    empty = torch.zeros_like(first[0]), torch.full_like(first[1], -math.inf)
    for one, other in ((first, empty), (empty, first)):
        out, lse = pair(t, student.merge(*one, *other), "merge")
        t.close(out, first[0], "out of a part and a part without a key", **EXACT)
        t.close(lse, first[1], "lse of a part and a part without a key", **EXACT)
    out, lse = pair(t, student.merge(*empty, *empty), "merge")
    message = "two parts without a key give NaN: their common lse is -inf, and -inf - -inf is no number"
    t.that(not bool(torch.isnan(out).any() or torch.isnan(lse).any()), message)
    t.close(out, empty[0], "out of two parts without a key", **EXACT)
    t.that(bool((lse == -math.inf).all()), "lse of two parts without a key should be -inf")


# -- visible


def right_rectangle(student, t, queries: Tensor, keys: Tensor) -> None:
    """``visible`` of these positions, where the query sees some key."""
    got = student.visible(queries, keys)
    where = {"queries": queries.tolist(), "keys": keys.tolist()}
    message = "visible of queries at {queries} and keys at {keys} is None, but some query sees a key"
    t.that(got is not None, message, **where)
    first, last = t.items(got, 2, "visible")
    first, last = t.number(first, "the first query"), t.number(last, "the end of the keys")
    right = rectangle(queries, keys)
    assert right is not None
    shown = where | {"first": first, "last": last}
    where_ = "visible of queries at {queries} and keys at {keys} is ({first}, {last}): "
    hidden = where_ + "the query at {query} sees the key at {key}, which is not among the keys :last"
    t.that(last >= right[1], hidden, **shown, query=int(queries[-1]), key=int(keys[right[1] - 1]))
    hidden = where_ + "the query at {query} sees the key at {key}, and is not among the queries first:"
    t.that(first <= right[0], hidden, **shown, query=int(queries[right[0]]), key=int(keys[0]))
    large = where_ + "the first of these queries see no key, so the rectangle is too large"
    t.that(first == right[0], large, **shown)
    large = where_ + "no query sees the last of these keys, so the rectangle is too large"
    t.that(last == right[1], large, **shown)


def ascending(t, size: int, gaps: int) -> Tensor:
    """Positions with gaps, from 0 to ``gaps`` between neighbours."""
    return (1 + t.integers(0, gaps, size)).cumsum(0)


@check("visible", points=1)
def check_visible_contiguous(student, t):
    "Contiguous parts"
    local = t.integer(3, 6)
    parts = torch.arange(3 * local).view(3, local)
    for query, key in ((0, 0), (1, 0), (2, 1)):
        right_rectangle(student, t, parts[query], parts[key])


@check("visible", points=2)
def check_visible_gaps(student, t):
    "Positions with gaps"
    for at_query in t.shuffled([False, False, False, True, True, True]):
        queries, keys = ascending(t, t.integer(3, 6), 3) + 8, ascending(t, t.integer(3, 6), 3)
        # the last query sees the first key
        begin = int(queries[t.integer(0, len(queries) - 1)]) if at_query else 0
        right_rectangle(student, t, queries, keys - keys[0] + begin)
    half = t.integer(2, 4)
    chunks = torch.arange(4 * half).view(4, half)
    early, late = torch.cat((chunks[0], chunks[3])), torch.cat((chunks[1], chunks[2]))
    right_rectangle(student, t, early, late)
    right_rectangle(student, t, late, early)


@check("visible", points=1)
def check_visible_nothing(student, t):
    "No pair is visible"
    local = t.integer(2, 5)
    parts = torch.arange(2 * local).view(2, local)
    got = student.visible(parts[1], parts[0])
    t.that(got is not None, "not tested yet: visible is None where queries see all keys")
    got = student.visible(parts[0], parts[1])
    message = "all keys are after all queries: visible should be None, and nothing is computed, it is {got}"
    t.that(got is None, message, got=got)


# -- gradient


def gradient_case(t) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """grad, q, k, v, out and lse over all keys, the mask, and the gradients over all keys."""
    q, k, v, mask = block_inputs(t)
    grad = double(t, *q.shape)
    return [grad, q, k, v, *attention(q, k, v, mask)], mask, gradients(grad, q, k, v, mask)


NAMES = ("dq", "dk", "dv")
EXCHANGED = "{name} is the gradient of the other one of k and v: return dq, dk, dv in this order"
UNSCALED = (
    "{name} is not divided by the square root of d: the scores are S = Q Kᵀ / √d, so their gradient is "
    "divided as well"
)
UNMASKED = "{name}: keys that the mask hides have P = 0, so the mask belongs into backward as well"


@check("gradient", points=2)
def check_gradient(student, t):
    "The gradients of all keys as one block"
    inputs, mask, wants = gradient_case(t)
    found = t.items(student.block_backward(*inputs, mask), 3, "what block_backward returns")
    scale = inputs[1].shape[-1] ** 0.5
    grad, q, k, v, out, lse = inputs
    unmasked = block_gradients(*inputs, torch.ones_like(mask))
    without_sums = block_gradients(grad, q, k, v, torch.zeros_like(out), lse, mask)
    for place, (name, got, want, hidden, raw) in enumerate(zip(NAMES, found, wants, unmasked, without_sums)):
        mistakes = {UNMASKED: hidden}
        if name != "dv":
            mistakes |= {UNSCALED: want * scale, "{name}: D is not subtracted, dS = P ⊙ (dO Vᵀ - D)": raw}
        if name != "dq":
            mistakes |= {EXCHANGED: wants[3 - place]}
        wrong_if(t, got, want, mistakes, name=name)
        t.close(got, want, "{name} of block_backward", name=name, **EXACT)


@check("gradient", points=1)
def check_gradient_hidden(student, t):
    "A hidden key with a large score"
    q, k, v, mask = block_inputs(t)
    first = q[:, :, :1]
    # no query sees the last key; its score is 2000 or more
    k[:, :, -1:] = 4000.0 * first / (first * first).sum(-1, keepdim=True)
    grad = double(t, *q.shape)
    found = student.block_backward(grad, q, k, v, *attention(q, k, v, mask), mask)
    found = t.items(found, 3, "what block_backward returns")
    for name, got, want in zip(NAMES, found, gradients(grad, q, k, v, mask)):
        t.tensor(got, "{name} of block_backward", shape=tuple(want.shape), dtype=DOUBLE, name=name)
        message = (
            "{name} is not finite: the exponential of the large score of a hidden key overflows, and inf · "
            "0 is NaN. Hide its score (-inf) before exp"
        )
        t.that(bool(torch.isfinite(got).all()), message, name=name)
        t.close(got, want, "{name} where a hidden key has a large score", name=name, **EXACT)


@check("gradient", points=1)
def check_gradient_blocks(student, t):
    "Two blocks with the lse of the whole row"
    (grad, q, k, v, out, lse), mask, wants = gradient_case(t)
    cut = t.integer(1, len(mask[0]) - 2)
    blocks, unmasked, of_block, own_sums = [], [], [], []
    for keys in (slice(0, cut), slice(cut, None)):
        part = k[:, :, keys], v[:, :, keys]
        got = student.block_backward(grad, q, *part, out, lse, mask[:, keys])
        got = t.items(got, 3, "what block_backward returns")
        shapes = (tuple(tensor.shape) for tensor in (q, *part))
        each = zip(got, NAMES, shapes)
        blocks.append(
            [t.tensor(g, f"{name} of a block", shape=shape, dtype=DOUBLE) for g, name, shape in each]
        )
        own_out, own_lse = attention(q, *part, mask[:, keys])
        share = (own_lse - lse).exp().unsqueeze(-1)
        unmasked.append(block_gradients(grad, q, *part, out, lse, torch.ones_like(mask[:, keys])))
        finite = own_lse.where(own_lse > -math.inf, 0)
        of_block.append(block_gradients(grad, q, *part, out, finite, mask[:, keys]))
        own_sums.append(block_gradients(grad, q, *part, share * own_out, lse, mask[:, keys]))
    scale = q.shape[-1] ** 0.5
    for place, name in ((2, "dv"), (0, "dq"), (1, "dk")):
        got, hidden, softmax, sums = (joined(each, place) for each in (blocks, unmasked, of_block, own_sums))
        message = (
            "{name} of two blocks is NaN: a query sees no key of a block, and exp(-inf - -inf) is NaN. "
            "The probabilities are exp(S - lse) with the given lse, not the softmax of this block"
        )
        t.that(not bool(torch.isnan(got).any()), message, name=name)
        of_this = "{name}: the probabilities are exp(S - lse) with the given lse, not this block's softmax"
        mistakes = {UNMASKED: hidden, of_this: softmax}
        if place != 2:
            mistakes |= {
                UNSCALED: wants[place] * scale,
                "{name}: D is the sum of grad * out with the given out, over all keys": sums,
            }
        if place != 0:
            mistakes |= {EXCHANGED: wants[3 - place]}
        wrong_if(t, got, wants[place], mistakes, name=name)
        t.close(got, wants[place], "{name} of two blocks", name=name, **EXACT)


def joined(blocks: list[list[Tensor]], place: int) -> Tensor:
    """Of the gradients of two blocks, those of all queries (0) or of all keys (1 and 2)."""
    first, second = (block[place] for block in blocks)
    return first + second if place == 0 else torch.cat((first, second), 2)


# -- zigzag


def table_of(student, t, seq: int, world: int) -> Tensor:
    """The student's table, as a tensor of the right shape with each position once."""
    got = student.zigzag(seq, world)
    values = {"seq": seq, "world": world}
    t.tensor(got, "zigzag({seq}, {world})", shape=(world, seq // world), dtype=torch.int64, **values)
    once = bool(torch.equal(got.flatten().sort().values, torch.arange(seq)))
    t.that(once, "zigzag({seq}, {world}) should have each position once", **values)
    return got


@check("zigzag", points=1)
def check_zigzag_chunks(student, t):
    "An early and a late chunk on each rank"
    for world in t.shuffled([1, 2, 3, 4]):
        half = t.integer(2, 4)
        seq = 2 * half * world
        got = table_of(student, t, seq, world)
        for rank in range(world):
            early = range(rank * half, (rank + 1) * half)
            want = [*early, *range(seq - early.stop, seq - early.start)]
            values = {"rank": rank, "world": world, "seq": seq, "got": got[rank].tolist()}
            message = "rank {rank} has {got}: the row should be ascending"
            t.that(sorted(want) != sorted(values["got"]) or values["got"] == want, message, **values)
            second = range((world + rank) * half, (world + rank + 1) * half)
            message = (
                "zigzag({seq}, {world}): rank {rank} has {got}, the chunks r and N + r: the late one is 2N "
                "- 1 - r, counted from the end"
            )
            t.that(values["got"] == want or values["got"] != [*want[:half], *second], message, **values)
            message = "zigzag({seq}, {world}): rank {rank} has {got}, not its two chunks"
            t.that(values["got"] == want, message, **values)


@check("zigzag", points=1)
def check_zigzag_balance(student, t):
    "All ranks see the same number of keys"
    world = t.integer(3, 5)
    seq = 2 * world * t.integer(1, 3)
    got = table_of(student, t, seq, world)
    seen = (got + 1).sum(1)  # of a query at position i, i + 1 keys
    message = (
        "on {world} ranks the queries of the ranks see {seen} keys: in the zig-zag order all ranks see the "
        "same number"
    )
    t.that(bool((seen == seen[0]).all()), message, world=world, seen=seen.tolist())


# -- bytes


def messages_of_ring(kv_elements: int, world: int) -> int:
    """The elements that a rank of the ring sends, message by message: k, v and later their gradients."""
    forward = sum(2 * kv_elements for _ in range(world - 1))
    return forward + sum((4 if step < world - 1 else 2) * kv_elements for step in range(world))


def messages_of_exchange(elements: list[int], world: int) -> int:
    """The elements that a rank sends in an all-to-all of each tensor, forward and backward: all parts except
    its part."""
    return 2 * sum(size // world for size in elements for destination in range(world) if destination)


def sizes(t) -> tuple[int, int, int]:
    """The number of ranks, of tokens and the size of a head."""
    world = t.choice([2, 3, 4, 8])
    return world, 24 * world * t.integer(1, 5), 8 * t.integer(1, 4)


@check("bytes", points=1)
def check_ring_sent(student, t):
    "The elements of the ring"
    for _ in range(4):
        world, seq, size = sizes(t)
        kv_heads = t.integer(1, 8)
        own = kv_heads * seq // world * size
        want = messages_of_ring(own, world)
        got = t.number(student.ring_sent(seq, kv_heads, size, world), "ring_sent")
        values = {"seq": seq, "kv": kv_heads, "d": size, "world": world, "mine": got}
        where = "ring_sent({seq}, {kv}, {d}, {world}) is {mine:g}: "
        all_of_them = 2.0 * own * (3 * world - 1)
        mistakes = {
            where + "this is the forward alone": 2.0 * own * (world - 1),
            where + "a block has keys and values, two tensors": want / 2,
            where + "a block has the tokens of one rank, seq / world": float(want * world),
            where + "dk and dv travel N times, to return to their rank": 6.0 * own * (world - 1),
            where + "only dk and dv travel N times in backward, k and v N - 1 times": all_of_them,
        }
        wrong_if(t, got, float(want), mistakes, **values)
        t.close(got, float(want), "ring_sent({seq}, {kv}, {d}, {world})", rtol=1e-9, **values)


@check("bytes", points=1)
def check_ulysses_sent(student, t):
    "The elements of Ulysses"
    for _ in range(4):
        world, seq, size = sizes(t)
        kv_heads = world * t.integer(1, 2)
        heads = kv_heads * t.integer(1, 3)
        each = seq // world * size
        want = messages_of_exchange([heads * each, kv_heads * each, kv_heads * each, heads * each], world)
        got = t.number(student.ulysses_sent(seq, heads, kv_heads, size, world), "ulysses_sent")
        values = {"seq": seq, "heads": heads, "kv": kv_heads, "d": size, "world": world, "mine": got}
        where = "ulysses_sent({seq}, {heads}, {kv}, {d}, {world}) is {mine:g}: "
        without_output = 2.0 * (heads + 2 * kv_heads) * each * (world - 1) / world
        mistakes = {
            where + "this is the forward alone": want / 2,
            where + "a rank keeps its part, and sends (N - 1)/N of a tensor": want * world / (world - 1),
            where + "the output is exchanged as well": without_output,
        }
        wrong_if(t, got, float(want), mistakes, **values)
        what = "ulysses_sent({seq}, {heads}, {kv}, {d}, {world})"
        t.close(got, float(want), what, rtol=1e-9, **values)


@check("bytes", points=1)
def check_few_heads_sent(student, t):
    "Ulysses with fewer heads of keys than ranks"
    world, kv_heads = 8, t.choice([1, 2, 4])
    heads, seq, size = 8 * t.integer(1, 3), 64 * t.integer(1, 4), 8
    each = seq // world * size
    want = messages_of_exchange([heads * each, world * each, world * each, heads * each], world)
    got = t.number(student.ulysses_sent(seq, heads, kv_heads, size, world), "ulysses_sent")
    without = messages_of_exchange([heads * each, kv_heads * each, kv_heads * each, heads * each], world)
    values = {"kv": kv_heads, "world": world, "mine": got}
    message = (
        "ulysses_sent with {kv} heads of keys on {world} ranks is {mine:g}: each rank needs a copy of one, "
        "so {world} of them are sent"
    )
    wrong_if(t, got, float(want), {message: float(without)}, **values)
    what = "ulysses_sent with {kv} heads of keys on {world} ranks"
    t.close(got, float(want), what, rtol=1e-9, **values)
