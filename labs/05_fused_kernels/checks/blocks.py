"""The visible checks of kernels that multiply tiles: a linear layer with cross-entropy, and attention."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from dlo_lib.grading.checks.contract import check

from . import scenarios
from .launches import CLOSE, Launched, empty, holds_small_tiles, launched, moves, right
from .rows import BEGINS_AT_MINUS_INF, NOT_RESCALED, NUMBER_OF_A_LANE, WITHOUT_MAXIMUM, keeps_a_sum
from .twins import attention, attention_gradients, cross_entropy, not_rescaled

D = 64
"""The dimension of a head: neither BLOCK_M nor BLOCK_N."""
LOW_CLOSE = 1e-3
"""Of results whose scores are sums with terms of 1280 in float32."""
MINUS_INF_LOADED = (
    "the log-sum-exp is NaN. If whole blocks pass, -inf was loaded into a tile, and tl.dot makes NaN of it "
    "(0 · -inf): load 0 there, and set the logits or scores to -inf *after* the product"
)
IN_THE_BLOCK = (
    "the causal mask compares the key with the number of the query in its block: the query is i BLOCK_M + "
    "the lane"
)
MASKED_WITH_0 = "keys after the query count with the score 0: set their scores to -inf"
ENDS_EARLY = (
    "the loop ends before the last keys that the program sees: program i has BLOCK_M queries, and its last "
    "one sees (i + 1) BLOCK_M keys"
)
BEGINS_LATE = (
    "the loop begins after the first queries that see a key of the program: its keys begin at i BLOCK_N, "
    "and the first block of queries is the one that holds this number"
)

# -- linear_loss

BLOCKS = [(16, 32, 16), (32, 16, 32)]
"""Of rows, words and columns: no size is right in both."""


D, SCALE = 64, 0.125


"""The dimension of a head, neither BLOCK_M nor BLOCK_N, and the factor of the scores, 1 / sqrt(D)."""


ALL_MASKED = (
    "the result holds NaN: a row whose keys are all masked so far has the maximum -inf, and -inf - (-inf) "
    "is NaN. If the first check passes, the causal mask is wrong: query r sees key r"
)


LAST_COLUMNS = "the logits are those of the last block of columns: add the products up, logits += tl.dot(...)"


WORDS_AFTER_THE_END = "words after the end of the vocabulary count as logits of 0: set these to -inf first"


LAST_WORDS = (
    "the logit of the target is that of the last block of words: it is in one of the blocks, so add up "
    "over them"
)


def linear_loss_run(
    student,
    t,
    rows: int,
    hidden: int,
    vocab: int,
    x: Tensor | None = None,
    w: Tensor | None = None,
    overflow: str = "",
    atol: float = 1e-5,
    blocks: tuple[int, int, int] = (16, 32, 16),
) -> Launched:
    """The loss of x Wᵀ, compared; ``blocks`` of rows, words and columns."""
    block_m, block_v, block_k = blocks
    x = t.normal(rows, hidden) if x is None else x
    w = t.normal(vocab, hidden) if w is None else w
    targets = t.integers(0, vocab - 1, rows)
    targets[0] = t.integer(0, min(block_v, vocab) - 1)
    targets[-1] = t.integer(min(block_v, vocab - 1), vocab - 1)  # of the first and of another block
    args = {"x_ptr": x, "w_ptr": w, "targets_ptr": targets, "loss_ptr": empty(rows), "lse_ptr": empty(rows)}
    args |= {"rows": rows, "hidden": hidden, "vocab": vocab}
    args |= {"BLOCK_M": block_m, "BLOCK_V": block_v, "BLOCK_K": block_k}
    share = {"loss_ptr": block_m, "lse_ptr": block_m}
    run = launched(student, t, scenarios.text_of_linear_loss, (-(-rows // block_m),), args, share)
    logits = x.double() @ w.double().T
    loss, lse = cross_entropy(logits, targets)
    lanes = pad(logits, (0, -vocab % block_v))
    known = {}
    if vocab % block_v or hidden % block_k:
        no_infinity_loaded(t, run)
    if vocab % block_v:
        known[WORDS_AFTER_THE_END] = torch.logsumexp(lanes, 1).float()
    if not overflow:
        keeps_a_sum(t, run)
        known |= {NOT_RESCALED: not_rescaled(logits, block_v)} if vocab > block_v else {}
        begin = (hidden - 1) // block_k * block_k
        known[LAST_COLUMNS] = cross_entropy(x[:, begin:].double() @ w[:, begin:].double().T, targets)[1]
        known["lse_ptr has the losses: the two results are stored in each other's tensor"] = loss
        known[WITHOUT_MAXIMUM] = lse - logits.amax(1).float()
    right(t, run, "lse_ptr", lse, "the log-sum-exp of each row", known, overflow, atol)
    in_last = (lse - loss) * (targets >= (vocab - 1) // block_v * block_v)
    in_first = lanes.view(rows, -1, block_v).sum(1).gather(1, (targets % block_v)[:, None])[:, 0]
    losses = {
        "the loss has the wrong sign: it is lse - the logit of the target": -loss,
        NUMBER_OF_A_LANE: lse - (in_first * (targets < block_v)).float(),
        LAST_WORDS: lse - in_last,
        "the logit of the target is missing: the loss is lse - the logit of the target": lse,
    }
    right(t, run, "loss_ptr", loss, "the loss of each row", {} if overflow else losses, atol=atol)
    return run


def no_infinity_loaded(t, run: Launched) -> None:
    """Where some lanes are masked, the log-sum-exp that is written is not NaN."""
    lse = run.args["lse_ptr"]
    whole = run.traffic.written.get("lse_ptr", 0) == lse.nbytes
    t.that(not whole or run.traffic.undefined or not bool(lse.isnan().any()), MINUS_INF_LOADED)


@check("linear_loss", points=2, seconds=20)
def check_linear_loss(student, t):
    "The loss of whole blocks"
    for blocks in t.shuffled(BLOCKS):
        linear_loss_run(student, t, 32 * t.integer(1, 2), 32, 96, blocks=blocks)


@check("linear_loss", points=1, seconds=20)
def check_linear_loss_sizes(student, t):
    "Any number of rows, columns and words"
    for blocks in t.shuffled(BLOCKS):
        rows, hidden, vocab = t.integer(33, 60), t.integer(33, 47), 2 * t.integer(33, 45) + 1
        x = 0.3 * t.normal(rows, hidden)  # small logits, so that words after the end would count
        linear_loss_run(student, t, rows, hidden, vocab, x=x, blocks=blocks)


@check("linear_loss", points=1, seconds=20)
def check_linear_loss_16bit(student, t):
    "16-bit inputs, and logits in float32"
    rows, vocab, dtype = 32, 64, torch.float16
    # 16 products of 80 x 80 exceed 65504; the second half of the columns removes them.
    high = 80 + 5 * t.normal(rows, 16).abs()
    x = torch.cat([high, t.normal(rows, 16)], 1).to(dtype)
    x = torch.cat([x, -x], 1)
    rest = t.normal(vocab, 32) * 0.004  # logits below atol, so no mistake is told from another
    half = torch.cat([80 + 5 * t.normal(vocab, 16).abs(), t.normal(vocab, 16)], 1)
    w = torch.cat([half, half + rest * (torch.arange(32) >= 16)], 1).to(dtype)
    overflow = (
        "a partial sum overflows in float16, whose largest number is 65504: tl.dot gives float32, so keep "
        "it in float32"
    )
    for blocks in t.shuffled(BLOCKS):  # atol: sums of 100,000 in float32
        linear_loss_run(student, t, rows, 64, vocab, x, w, overflow, atol=0.1, blocks=blocks)


@check("linear_loss", points=1, seconds=20)
def check_linear_loss_negative(student, t):
    "Logits far below 0"
    x, w = t.normal(32, 32), t.normal(64, 32)
    x[:, 0], w[:, 0] = 16, -t.integer(16, 20)  # at least -256 in each logit, of which exp is 0 in float32
    for blocks in t.shuffled(BLOCKS):
        linear_loss_run(student, t, 32, 32, 64, x, w, BEGINS_AT_MINUS_INF, atol=1e-3, blocks=blocks)


@check("linear_loss", points=2, seconds=20)
def check_no_logits(student, t):
    "The logits are not stored, and small tiles are enough"
    size = 32
    rows, hidden, vocab = size * t.integer(1, 2), 32, 16 * t.integer(40, 44)
    run = linear_loss_run(student, t, rows, hidden, vocab, blocks=(size, 16, 16))
    why = "BLOCK_M x BLOCK_V logits at a time, not a whole row of the vocabulary, in one tile or in many"
    holds_small_tiles(t, run, size * 16, why, together=12 * size * 16)
    once, targets = rows // size * run.args["w_ptr"].nbytes, rows * hidden * 4
    again = (
        "a program reads W once, and its rows of the targets again: the logit of a target is in a tile "
        "already, select it with tl.where"
    )
    t.that(run.moved("w_ptr") != once + targets, again)
    moves(t, run, "w_ptr", once, "a program reads W once: update maximum and sum after each block of words")


# -- attention


def heads_of(
    t, heads: int, group: int, queries: int, keys: int, extra: int = 0, growth: float = 16
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw q, k and v; with ``extra`` columns they are views. The maximum of a score grows with the keys, by
    its first size every ``growth`` keys."""
    q = t.normal(heads, queries, D + extra)
    k, v = (t.normal(heads // group, keys, D + extra) for _ in range(2))
    k = k * (1 + torch.arange(keys)[:, None] / growth)
    return q[..., :D], k[..., :D], v[..., :D]


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.repeat_interleave(len(q) // len(k), 0).mT * SCALE


def attention_run(
    student,
    t,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    blocks: tuple[int, int] = (16, 32),
    infinite_lse: str = "",
    infinite_out: str = "",
    close: float = CLOSE["atol"],
) -> Launched:
    """Attention with ``blocks`` of queries and of keys, compared.

    The three sizes of a tile differ, so that tiles whose dimensions are exchanged do not fit.

    Args:
        infinite_lse: the cause of infinities and NaN in the log-sum-exp, and ``infinite_out`` in the output.
    """
    (heads, queries, _), keys, group = q.shape, k.shape[1], len(q) // len(k)
    block_m, block_n = blocks
    args = {"q_ptr": q, "k_ptr": k, "v_ptr": v}
    args |= {"o_ptr": empty(heads, queries, D), "lse_ptr": empty(heads, queries)}
    args |= {"q_head": q.stride(0), "q_row": q.stride(1), "kv_head": k.stride(0), "kv_row": k.stride(1)}
    args |= {"queries": queries, "keys": keys, "group": group, "scale": SCALE}
    args |= {"CAUSAL": causal, "D": D, "BLOCK_M": block_m, "BLOCK_N": block_n}
    share = {"o_ptr": block_m * D, "lse_ptr": block_m}
    run = launched(student, t, scenarios.text_of_attention, (-(-queries // block_m), heads), args, share)
    out, lse = attention(q, k, v, SCALE, causal)
    known_out: dict[str, Tensor] = {}
    known_lse: dict[str, Tensor] = {}
    if keys % block_n and not causal:
        no_infinity_loaded(t, run)
    if not (causal or infinite_lse or infinite_out):
        keeps_a_sum(t, run)
        known_lse, known_out = mistakes_online(scores_of(q, k), v, out, lse, block_n)
    if causal:
        known_lse |= mistakes_of_mask(scores_of(q, k), blocks)
    if group > 1:
        other = "query head h reads keys and values of head h // group: neighbours share a head"
        order = torch.arange(heads) % len(k)
        known_lse[other] = attention(q, k[order], v[order], SCALE, causal)[1]
    if keys % block_n and not causal:
        message = "keys after the end count with the score 0: set their scores to -inf"
        known_lse[message] = torch.logsumexp(pad(scores_of(q, k), (0, -keys % block_n)), -1)
    cause = ALL_MASKED if causal else infinite_lse
    right(t, run, "lse_ptr", lse, "the log-sum-exp of each query", known_lse, cause, close)
    if q.dtype == torch.float32:
        right(t, run, "o_ptr", out, "the output", known_out, infinite_out, close)
    else:
        got = run.args["o_ptr"]
        t.that(bool(torch.isfinite(got).all()), infinite_out)
        t.close(got, out, "the output", rtol=5e-3, atol=0.1)
    return run


def mistakes_online(
    scores: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The log-sum-exps and the outputs that mistakes in the online softmax give."""
    largest = scores.amax(-1)
    of_lse = {
        WITHOUT_MAXIMUM: lse - largest,
        "the scores are not multiplied by scale": torch.logsumexp(scores / SCALE, -1),
        "lse_ptr has the sum, or the maximum: it is the maximum + log of the sum": torch.exp(lse),
        NOT_RESCALED: not_rescaled(scores.flatten(0, 1), block).view(scores.shape[:-1]),
    }
    total = torch.exp(lse - largest)[..., None]
    of_blocks = [part.amax(-1, keepdim=True).expand(part.shape) for part in scores.split(block, -1)]
    so_far = torch.cat(of_blocks, -1).cummax(-1).values
    values = v.repeat_interleave(len(scores) // len(v), 0)
    of_out = {
        "the output is not divided by the sum of the weights": out * total,
        "the weighted sum of the earlier blocks is not rescaled: multiply acc by exp(m - m'), as the "
        "sum": torch.exp(scores - so_far) @ values / total,
    }
    return of_lse, of_out


def mistakes_of_mask(scores: Tensor, blocks: tuple[int, int]) -> dict[str, Tensor]:
    """The log-sum-exps that mistakes in the causal mask give."""
    queries, keys = scores.shape[1:]
    block_m, block_n = blocks
    scores = pad(scores, (0, -keys % block_n))  # lanes after the end are after the query too
    row, column = torch.arange(queries)[:, None], torch.arange(scores.shape[-1])
    needed = (row // block_m + 1) * block_m  # the keys that the program of a query needs
    read = column < -(-needed // block_n) * block_n

    def seen(mask: Tensor, scores: Tensor = scores) -> Tensor:
        return torch.logsumexp(scores.masked_fill(~mask, -torch.inf), -1)

    with_0 = scores.masked_fill(column > row, 0.0)
    found = {
        "a query reads keys after it: the mask is missing or reversed": seen(column < keys),
        IN_THE_BLOCK: seen(column <= row % block_m),
        MASKED_WITH_0: seen(read, with_0),
        f"all blocks are read, and {MASKED_WITH_0}": seen(column < keys, with_0),
    }
    if block_m > block_n:
        found[ENDS_EARLY] = seen((column <= row) & (column < (row // block_m + 1) * block_n))
    return found


@check("attention", points=3, seconds=20)
def check_attention(student, t):
    "Output and log-sum-exp over several blocks of keys"
    for blocks in t.shuffled([(16, 32), (32, 16)]):
        attention_run(student, t, *heads_of(t, 2, 1, 32, 64), blocks=blocks)


@check("attention", points=1, seconds=20)
def check_attention_sizes(student, t):
    "Any number of queries and keys"
    for blocks in t.shuffled([(16, 32), (32, 16)]):
        attention_run(student, t, *heads_of(t, 1, 1, t.integer(33, 47), t.integer(33, 47)), blocks=blocks)


@check("attention", points=2, seconds=20)
def check_attention_causal(student, t):
    "Causal: no query reads a key after it"
    for blocks in t.shuffled([(32, 16), (16, 32)]):
        size = t.integer(37, 47)
        attention_run(student, t, *heads_of(t, 1, 1, size, size), causal=True, blocks=blocks)


@check("attention", points=1, seconds=20)
def check_attention_skips(student, t):
    "Causal: blocks of keys after the last query of a program are not read"
    blocks = t.integer(3, 4)
    tensors = heads_of(t, 1, 1, 32 * blocks, 32 * blocks)
    run = attention_run(student, t, *tensors, causal=True, blocks=(32, 16))
    most = blocks * (blocks + 1) // 2 * 32 * D * 4
    for name in ("k_ptr", "v_ptr"):
        moves(t, run, name, most, "program i needs the keys before (i + 1) BLOCK_M only, half of all blocks")


@check("attention", points=1, seconds=20)
def check_attention_groups(student, t):
    "Grouped queries, and heads that are views: use the strides"
    attention_run(student, t, *heads_of(t, 4, 2, 16, 64, extra=8))


@check("attention", points=1, seconds=20)
def check_attention_no_keys(student, t):
    "No key: the output is 0 and lse is -inf, no NaN"
    run = attention_run(student, t, *heads_of(t, 1, 1, 16, 64))
    t.that(len(run.args["o_ptr"]) == 1, "not tested yet: see the first checks")
    nothing = "0 / 0 is NaN: a query without a key has the sum 0, and its output is 0. Divide by 1 there"
    attention_run(student, t, *heads_of(t, 1, 1, t.integer(3, 16), 0), infinite_out=nothing)


@check("attention", points=1, seconds=20)
def check_attention_16bit(student, t):
    "16-bit inputs, and sums in float32"
    overflow = "the weighted sum overflows in float16, above 65504: keep the accumulator in float32"
    q, k, v = heads_of(t, 1, 1, 16, 64)
    equal, large = torch.zeros_like(k).half(), 100 * (100 + v).half()  # all keys have the same weight
    attention_run(student, t, q.half(), equal, large, infinite_out=overflow)


@check("attention", points=1, seconds=20)
def check_attention_negative(student, t):
    "Scores far below 0"
    q, k, v = heads_of(t, 1, 1, t.integer(10, 16), 64)
    k = k / 2
    q[..., 0], k[..., 0] = 32, -40  # -160 in each score, of which exp is 0 in float32
    attention_run(student, t, q, k, v, infinite_lse=BEGINS_AT_MINUS_INF, close=LOW_CLOSE)


@check("attention", points=1, seconds=20)
def check_attention_memory(student, t):
    "No scores are stored, small tiles are enough, and each query is read once"
    keys = 32 * t.integer(40, 44)
    run = attention_run(student, t, *heads_of(t, 1, 1, 32, keys, growth=400))
    why = "BLOCK_M x BLOCK_N scores at a time, not the scores of all keys, in one tile or in many"
    holds_small_tiles(t, run, 32 * D, why, together=8 * 32 * D)
    moves(t, run, "q_ptr", run.args["q_ptr"].nbytes, "the queries of a program stay in registers")
    for name in ("k_ptr", "v_ptr"):
        moves(t, run, name, 2 * run.args[name].nbytes, "each of the two programs reads a key once")


# -- keys_backward


def keys_backward_run(student, t, heads: int, size: int, blocks: tuple[int, int]) -> Launched:
    """The gradients of k and v of causal attention, with ``blocks`` of queries and of keys, compared."""
    block_m, block_n = blocks
    q, k, v, grad = (t.normal(heads, size, D) for _ in range(4))
    out, lse = attention(q, k, v, SCALE, True)
    delta = (grad * out).sum(-1)
    args = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "grad_ptr": grad, "lse_ptr": lse, "delta_ptr": delta}
    args |= {"dk_ptr": empty(heads, size, D), "dv_ptr": empty(heads, size, D), "size": size, "scale": SCALE}
    args |= {"D": D, "BLOCK_M": block_m, "BLOCK_N": block_n}
    share = {"dk_ptr": block_n * D, "dv_ptr": block_n * D}
    run = launched(student, t, scenarios.text_of_keys_backward, (-(-size // block_n), heads), args, share)
    scores = scores_of(q, k)
    weights, unscaled = (torch.exp(each - lse[..., None]) for each in (scores, scores / SCALE))
    row, column = torch.arange(size)[:, None], torch.arange(size)
    read = row >= column // block_n * block_n // block_m * block_m  # the queries that the program reads
    late = weights.tril() * (row >= column // block_n * block_m)
    known = {
        "the scores are not multiplied by scale in P = exp(scale · q kᵀ - lse)": unscaled.tril(),
        "P has weights of queries before the key: set them to 0, query r sees the keys c ≤ r": weights * read,
    }
    known |= {BEGINS_LATE: late} if block_m > block_n else {}
    known = {message: wrong.mT @ grad for message, wrong in known.items()}
    dk, dv = attention_gradients(grad, q, k, v, SCALE)
    right(t, run, "dv_ptr", dv, "the gradient of v", known)
    of_delta = (weights.tril() * delta[..., None]).mT @ q * SCALE
    known = {
        "the factor scale is missing in dk": dk / SCALE,
        "delta is missing: dS = P (dP - delta), with delta of the query": dk + of_delta,
    }
    right(t, run, "dk_ptr", dk, "the gradient of k", known)
    return run


@check("keys_backward", points=3, seconds=20)
def check_keys_backward(student, t):
    "The gradients of k and v"
    for blocks in ((16, 32), (32, 16)):
        keys_backward_run(student, t, 2, 64, blocks)


@check("keys_backward", points=1, seconds=20)
def check_keys_backward_sizes(student, t):
    "Any number of tokens"
    for blocks in t.shuffled([(32, 16), (16, 32)]):
        keys_backward_run(student, t, 1, t.integer(33, 47), blocks)


@check("keys_backward", points=1, seconds=20)
def check_keys_backward_memory(student, t):
    "Blocks of queries before the keys are not read, and small tiles are enough"
    blocks = t.integer(3, 4)
    run = keys_backward_run(student, t, 1, 32 * blocks, (16, 32))
    holds_small_tiles(t, run, 32 * D, "BLOCK_M x BLOCK_N weights at a time")
    most = blocks * (blocks + 1) // 2 * 32 * D * 4
    moves(t, run, "q_ptr", most, "queries before the first key of a program do not read it")
