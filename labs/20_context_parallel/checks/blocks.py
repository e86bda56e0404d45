"""The visible checks of what one process computes: blocks, their merge, rectangles, orders, and bytes. All in
float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import check
from dlo_lib.labkit.compare import EXACT, double, explaining, near, same, wrong_if

from .scenarios import block_alone
from .twins import Block, attention, block_gradients, gradients, rectangle, scores


def block_inputs(t, factor: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and a mask of a block with other numbers of queries than of keys. Each query sees the first key
    or more, and not all of them."""
    batch, heads, queries, size = t.integer(1, 2), t.integer(1, 3), t.integer(3, 5), t.integer(2, 4)
    q, k, v = (double(t, batch, heads, tokens, size) for tokens in (queries, queries + 2, queries + 2))
    mask = t.integers(0, 1, queries, queries + 2).bool()
    mask[:, 0], mask[:, -1] = True, False
    return factor * q, k, v, mask


def pair(t, got, what: str) -> tuple[Tensor, Tensor]:
    """An output and its log-sum-exp, as two tensors."""
    out, lse = t.items(got, 2, "what " + what + " returns")
    return t.tensor(out, "out of " + what), t.tensor(lse, "lse of " + what)


def finite(*tensors: Tensor) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def same_pair(t, got: tuple[Tensor, Tensor], want: Block, of: str, **values: object) -> None:
    """An output and its log-sum-exp are right."""
    t.close(got[0], want[0], "out of " + of, **values, **EXACT)
    t.close(got[1], want[1], "lse of " + of, **values, **EXACT)


# -- block

READY = {
    "no ready attention": (
        "The text excludes ready attention such as F.scaled_dot_product_attention: write the scores, their "
        "log-sum-exp, and the product with v"
    )
}


def block_of(student, t, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The student's ``block_attention`` of q, k, v and a mask, which calls no ready attention."""
    with explaining(READY):
        got = student.run(block_alone, **dict(zip(("q", "k", "v", "mask"), inputs)))
    return pair(t, got, "block_attention")


@check("block", points=2)
def check_block_output(student, t):
    "The output of a block"
    for _ in range(2):
        q, k, v, mask = block_inputs(t)
        out, _ = block_of(student, t, q, k, v, mask)
        everything, scale = torch.ones_like(mask), q.shape[-1] ** 0.5
        mistakes = {
            "the scores are not divided by the square root of d": attention(q * scale, k, v, mask)[0],
            "the mask is not used: a query sees only the keys where it is True": attention(
                q, k, v, everything
            )[0],
            "hidden keys count in the sum: hide their scores (-inf) before the softmax, not its result": (
                scores(q, k, everything).softmax(-1) * mask @ v
            ),
        }
        same(t, out, attention(q, k, v, mask)[0], "out of block_attention", mistakes, **EXACT)


@check("block", points=1)
def check_block_lse(student, t):
    "The log-sum-exp of each row"
    q, k, v, mask = block_inputs(t)
    _, lse = block_of(student, t, q, k, v, mask)
    _, want = attention(q, k, v, mask)
    mistakes = {
        "lse is the sum of exponentials: take its logarithm": want.exp(),
        "lse is the largest score: it is the logarithm of the sum of all exponentials": (
            scores(q, k, mask).amax(-1)
        ),
    }
    same(t, lse, want, "lse of block_attention", mistakes, **EXACT)


NAN_OUT = (
    "the output of a query that sees no key is NaN: all its scores are -inf, so is its lse, and -inf - "
    "-inf is no number"
)
FINITE_SCORES = ". A large number such as -1e9 hides no key from a query that sees none: use -inf"
OVERFLOWS = (
    "with scores of some 1000 an exponential overflows: subtract a number of the size of the scores first "
    "(lse)"
)


@check("block", points=1)
def check_block_blind(student, t):
    "A query that sees no key"
    q, k, v, mask = block_inputs(t)
    blind = t.integer(0, len(mask) - 1)
    rows = [row for row in range(len(mask)) if row != blind]
    mask[blind] = False
    out, lse = block_of(student, t, q, k, v, mask)
    want_out, want_lse = attention(q, k, v, mask)
    t.tensor(out, "out of block_attention", shape=want_out.shape, dtype=want_out.dtype)
    t.tensor(lse, "lse of block_attention", shape=want_lse.shape, dtype=want_lse.dtype)
    t.close(out[:, :, rows], want_out[:, :, rows], "out of the queries that see a key", **EXACT)
    t.that(finite(out[:, :, blind]), NAN_OUT)
    every_key = attention(q, k, v, torch.ones_like(mask))[0][:, :, blind]
    mistakes = {
        "the output of a query that sees no key is the mean of v" + FINITE_SCORES: v.mean(2),
        "the output of a query that sees no key is attention to all keys" + FINITE_SCORES: every_key,
    }
    wrong_if(t, out[:, :, blind], want_out[:, :, blind], mistakes, rtol=1e-5)
    t.close(out[:, :, blind], want_out[:, :, blind], "out of a query that sees no key", **EXACT)
    t.that(bool((lse[:, :, blind] == -math.inf).all()), "lse of a query that sees no key should be -inf")
    t.close(lse[:, :, rows], want_lse[:, :, rows], "lse of the queries that see a key", **EXACT)


@check("block", points=1)
def check_block_large(student, t):
    "Large scores"
    q, k, v, mask = block_inputs(t, factor=4000.0)
    found = block_of(student, t, q, k, v, mask)
    t.that(finite(*found), OVERFLOWS)
    same_pair(t, found, attention(q, k, v, mask), "block_attention with large scores")


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


def weighted(shares: Tensor, outs: Tensor) -> Tensor:
    return (shares.unsqueeze(-1) * outs).sum(0)


@check("merge", points=2)
def check_merge(student, t):
    "Two blocks give attention to all keys"
    for _ in range(2):
        (first, second), want = parts_of(t, 2)
        found = pair(t, student.merge(*first, *second), "merge")
        outs, lses = (torch.stack(each) for each in zip(first, second))
        mistakes = {
            "merge returns the sum of the two outputs: each has its share, exp(its lse - the common lse)": (
                outs.sum(0)
            ),
            "merge returns the mean of the two outputs: the block with the larger sum of exponentials counts "
            "more": outs.mean(0),
            "the shares of the two parts are exchanged": weighted(lses.softmax(0).flip(0), outs),
            "the shares of the two parts do not add up to 1: a share is exp(its lse - the common lse), not "
            "minus the larger lse": weighted((lses - lses.amax(0)).exp(), outs),
            "the two lse are added, so out has wrong shares: add their exponentials": weighted(
                (-lses.flip(0)).exp(), outs
            ),
        }
        of_lse = {
            "the two lse are added: add their exponentials": lses.sum(0),
            "the lse of merge is that of one part alone: return the lse over the keys of both": lses[1],
        }
        wrong_if(t, found[0], want[0], mistakes)
        wrong_if(t, found[1], want[1], of_lse)
        same_pair(t, found, want, "merge")


@check("merge", points=1)
def check_merge_many(student, t):
    "Blocks one after another, in any order"
    parts, want = parts_of(t, 4)
    found = parts[0]
    for part in t.shuffled(parts[1:]):
        found = pair(t, student.merge(*found, *part), "merge")
    same_pair(t, found, want, "three merges")


@check("merge", points=1)
def check_merge_large(student, t):
    "Large and small scores"
    for shift in t.shuffled([1000.0, -1000.0]):
        (first, second), want = parts_of(t, 2, shift)
        found = pair(t, student.merge(*first, *second), "merge")
        message = (
            "lse of about {shift}: an exponential overflows, or all of them are 0. Form the differences of "
            "lse before exp"
        )
        t.that(finite(*found), message, shift=shift)
        same_pair(t, found, want, "a merge with lse of about {shift}", shift=shift)


@check("merge", points=1)
def check_merge_nothing(student, t):
    "Parts without a key"
    first = parts_of(t, 2)[0][0]
    empty = torch.zeros_like(first[0]), torch.full_like(first[1], -math.inf)
    for one, other in ((first, empty), (empty, first)):
        found = pair(t, student.merge(*one, *other), "merge")
        same_pair(t, found, first, "a part and a part without a key")
    found = pair(t, student.merge(*empty, *empty), "merge")
    message = "two parts without a key give NaN: their common lse is -inf, and -inf - -inf is no number"
    t.that(not any(bool(torch.isnan(each).any()) for each in found), message)
    t.that(bool((found[1] == -math.inf).all()), "lse of two parts without a key should be -inf")
    same_pair(t, found, empty, "two parts without a key")


# -- visible


def right_rectangle(student, t, queries: Tensor, keys: Tensor) -> None:
    """``visible`` of these positions, where the query sees some key."""
    got = student.visible(queries, keys)
    shown = {"queries": queries.tolist(), "keys": keys.tolist()}
    of = "visible of queries at {queries} and keys at {keys} is "
    t.that(got is not None, of + "None, but some query sees a key", **shown)
    first, last = t.items(got, 2, "visible")
    first, last = t.number(first, "the first query"), t.number(last, "the end of the keys")
    right = rectangle(queries, keys)
    assert right is not None
    of, shown = of + "({first}, {last}): ", shown | {"first": first, "last": last}
    hidden = of + "the query at {query} sees the key at {key}, which is not among the keys :last"
    t.that(last >= right[1], hidden, **shown, query=int(queries[-1]), key=int(keys[right[1] - 1]))
    hidden = of + "the query at {query} sees the key at {key}, and is not among the queries first:"
    t.that(first <= right[0], hidden, **shown, query=int(queries[right[0]]), key=int(keys[0]))
    large = of + "the first of these queries see no key, so the rectangle is too large"
    t.that(first == right[0], large, **shown)
    large = of + "no query sees the last of these keys, so the rectangle is too large"
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
OVERFLOW = (
    "{name} is not finite: the exponential of the large score of a hidden key overflows, and inf · 0 is NaN. "
    "Hide its score (-inf) before exp"
)
OF_BLOCK = "{name}: the probabilities are exp(S - lse) with the given lse, not this block's softmax"
NAN = (
    "{name} of two blocks is NaN: a query sees no key of a block, and exp(-inf - -inf) is NaN. The "
    "probabilities are exp(S - lse) with the given lse, not the softmax of this block"
)


def backward_of(student, t, like: tuple[Tensor, ...], *inputs: Tensor) -> list[Tensor]:
    """dq, dk and dv of the student's ``block_backward``, with the shapes of ``like``."""
    got = t.items(student.block_backward(*inputs), 3, "what block_backward returns")
    for name, mine, right in zip(NAMES, got, like):
        t.tensor(mine, "{name} of block_backward", shape=right.shape, dtype=right.dtype, name=name)
    return got


def same_gradients(
    t, found: list[Tensor], wants: list[Tensor], scale: float, what: str, others: dict[str, list[Tensor]]
) -> None:
    """dq, dk and dv are right; ``others`` are those of mistakes."""
    for place, name in ((2, "dv"), (0, "dq"), (1, "dk")):
        mistakes = {message: value[place] for message, value in others.items()}
        if name != "dv":
            mistakes[UNSCALED] = wants[place] * scale
        if name != "dq":
            mistakes[EXCHANGED] = wants[3 - place]
        same(t, found[place], wants[place], "{name} of " + what, mistakes, name=name, **EXACT)


@check("gradient", points=2)
def check_gradient(student, t):
    "The gradients of all keys as one block"
    inputs, mask, wants = gradient_case(t)
    grad, q, k, v, out, lse = inputs
    found = backward_of(student, t, (q, k, v), *inputs, mask)
    others = {
        UNMASKED: block_gradients(*inputs, torch.ones_like(mask)),
        "{name}: D is not subtracted, dS = P ⊙ (dO Vᵀ - D)": block_gradients(
            grad, q, k, v, torch.zeros_like(out), lse, mask
        ),
    }
    same_gradients(t, found, wants, q.shape[-1] ** 0.5, "block_backward", others)


@check("gradient", points=1)
def check_gradient_hidden(student, t):
    "A hidden key with a large score"
    q, k, v, mask = block_inputs(t)
    first = q[:, :, :1]
    # no query sees the last key; its score is 2000 or more
    k[:, :, -1:] = 4000.0 * first / (first * first).sum(-1, keepdim=True)
    grad = double(t, *q.shape)
    found = backward_of(student, t, (q, k, v), grad, q, k, v, *attention(q, k, v, mask), mask)
    for name, got, want in zip(NAMES, found, gradients(grad, q, k, v, mask)):
        t.that(finite(got), OVERFLOW, name=name)
        t.close(got, want, "{name} where a hidden key has a large score", name=name, **EXACT)


@check("gradient", points=1)
def check_gradient_blocks(student, t):
    "Two blocks with the lse of the whole row"
    (grad, q, k, v, out, lse), mask, wants = gradient_case(t)
    cut = t.integer(1, len(mask[0]) - 2)
    blocks = []
    for keys in (slice(0, cut), slice(cut, None)):
        part, seen = (k[:, :, keys], v[:, :, keys]), mask[:, keys]
        own_out, own_lse = attention(q, *part, seen)
        share, softmax = (own_lse - lse).exp().unsqueeze(-1), own_lse.where(own_lse > -math.inf, 0)
        got = backward_of(student, t, (q, *part), grad, q, *part, out, lse, seen)
        unmasked = block_gradients(grad, q, *part, out, lse, torch.ones_like(seen))
        of_block = block_gradients(grad, q, *part, out, softmax, seen)
        blocks.append((got, unmasked, of_block, block_gradients(grad, q, *part, share * own_out, lse, seen)))
    # dq is the sum over the blocks; dk and dv are those of one block after those of the other
    found, *others = (
        [one[0] + two[0], *(torch.cat(both, 2) for both in zip(one[1:], two[1:]))]
        for one, two in zip(*blocks)
    )
    for name, got in zip(NAMES, found):
        t.that(not bool(torch.isnan(got).any()), NAN, name=name)
    sums = "{name}: D is the sum of grad * out with the given out, over all keys"
    known = dict(zip((UNMASKED, OF_BLOCK, sums), others))
    same_gradients(t, found, wants, q.shape[-1] ** 0.5, "two blocks", known)


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
    of = "zigzag({seq}, {world}): rank {rank} has {got}, "
    for world in t.shuffled([1, 2, 3, 4]):
        half = t.integer(2, 4)
        seq = 2 * half * world
        rows = table_of(student, t, seq, world).tolist()
        chunks = torch.arange(seq).view(-1, half).tolist()
        for rank, got in enumerate(rows):
            want, of_second = chunks[rank] + chunks[-1 - rank], chunks[rank] + chunks[world + rank]
            values = {"rank": rank, "world": world, "seq": seq, "got": got}
            t.that(sorted(got) != want or got == want, of + "and the row should be ascending", **values)
            message = "the chunks r and N + r: the late one is 2N - 1 - r, counted from the end"
            t.that(got != of_second or got == want, of + message, **values)
            t.that(got == want, of + "not its two chunks", **values)


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


def same_number(t, got, want: float, what: str, mistakes: dict[str, float], **values: object) -> None:
    """A number of elements is right; ``mistakes`` are what the message says after it."""
    known = {what + " is {mine:g}: " + message: float(value) for message, value in mistakes.items()}
    same(t, t.number(got, what), float(want), what, known, rtol=1e-9, mine=got, **values)


@check("bytes", points=1)
def check_ring_sent(student, t):
    "The elements of the ring"
    for _ in range(4):
        world, seq, size = sizes(t)
        kv_heads = t.integer(1, 8)
        own = kv_heads * seq // world * size
        want = messages_of_ring(own, world)
        mistakes = {
            "this is the forward alone": 2 * own * (world - 1),
            "a block has keys and values, two tensors": want / 2,
            "a block has the tokens of one rank, seq / world": want * world,
            "dk and dv travel N times, to return to their rank": 6 * own * (world - 1),
            "only dk and dv travel N times in backward, k and v N - 1 times": 2 * own * (3 * world - 1),
        }
        got, what = student.ring_sent(seq, kv_heads, size, world), "ring_sent({seq}, {kv}, {d}, {world})"
        same_number(t, got, want, what, mistakes, seq=seq, kv=kv_heads, d=size, world=world)


@check("bytes", points=1)
def check_ulysses_sent(student, t):
    "The elements of Ulysses"
    for _ in range(4):
        world, seq, size = sizes(t)
        kv_heads = world * t.integer(1, 2)
        heads = kv_heads * t.integer(1, 3)
        each = seq // world * size
        want = messages_of_exchange([heads * each, kv_heads * each, kv_heads * each, heads * each], world)
        mistakes = {
            "this is the forward alone": want / 2,
            "a rank keeps its part, and sends (N - 1)/N of a tensor": want * world / (world - 1),
            "the output is exchanged as well": 2 * (heads + 2 * kv_heads) * each * (world - 1) / world,
        }
        got = student.ulysses_sent(seq, heads, kv_heads, size, world)
        what = "ulysses_sent({seq}, {heads}, {kv}, {d}, {world})"
        values = {"seq": seq, "heads": heads, "kv": kv_heads, "d": size, "world": world}
        same_number(t, got, want, what, mistakes, **values)


@check("bytes", points=1)
def check_few_heads_sent(student, t):
    "Ulysses with fewer heads of keys than ranks"
    world, kv_heads = 8, t.choice([1, 2, 4])
    heads, seq, size = 8 * t.integer(1, 3), 64 * t.integer(1, 4), 8
    each = seq // world * size
    want, without = (
        messages_of_exchange([heads * each, own * each, own * each, heads * each], world)
        for own in (world, kv_heads)
    )
    got = student.ulysses_sent(seq, heads, kv_heads, size, world)
    mistakes = {"each rank needs a copy of one, so {world} of them are sent": without}
    what = "ulysses_sent with {kv} heads of keys on {world} ranks"
    same_number(t, got, want, what, mistakes, kv=kv_heads, world=world)
