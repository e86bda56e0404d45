"""The visible checks of kernels that multiply tiles: a linear layer with cross-entropy, and attention."""

from __future__ import annotations

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import check

from .launches import CLOSE, Launched, empty, holds_small_tiles, launched, moves, right
from .rows import BEGINS_AT_MINUS_INF, NOT_RESCALED, NUMBER_OF_A_LANE, WITHOUT_MAXIMUM, keeps_a_sum
from .scenarios import text_of_attention, text_of_keys_backward, text_of_linear_loss
from .twins import attention, attention_gradients, cross_entropy, not_rescaled

D = 64
"""The dimension of a head: neither BLOCK_M nor BLOCK_N."""
LOW_CLOSE = 1e-3
"""Of results whose scores are sums with terms of 1280 in float32."""
MINUS_INF_LOADED = (
    "the log-sum-exp is NaN. If whole blocks pass, -inf was loaded into a tile, and tl.dot makes NaN of it (0 · -inf): "
    "load 0 there, and set the logits or scores to -inf *after* the product"
)
IN_THE_BLOCK = "the causal mask compares the key with the number of the query in its block: the query is i BLOCK_M + the lane"
MASKED_WITH_0 = "keys after the query count with the score 0: set their scores to -inf"
ENDS_EARLY = (
    "the loop ends before the last keys that the program sees: program i has BLOCK_M queries, and its last one sees (i + 1) BLOCK_M keys"
)
BEGINS_LATE = (
    "the loop begins after the first queries that see a key of the program: its keys begin at i BLOCK_N, "
    "and the first block of queries is the one that holds this number"
)

# -- linear_loss


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
) -> Launched:
    """The loss of x Wᵀ, compared; blocks of 16 rows, 32 words and 16 columns."""
    x = t.normal(rows, hidden) if x is None else x
    w = t.normal(vocab, hidden) if w is None else w
    targets = t.integers(0, vocab - 1, rows)
    args = {"x_ptr": x, "w_ptr": w, "targets_ptr": targets, "loss_ptr": empty(rows), "lse_ptr": empty(rows)}
    args |= {"rows": rows, "hidden": hidden, "vocab": vocab, "BLOCK_M": 16, "BLOCK_V": 32, "BLOCK_K": 16}
    logits = x.double() @ w.double().T
    targets[0], targets[-1] = (
        t.integer(0, min(32, vocab) - 1),
        t.integer(min(32, vocab - 1), vocab - 1),
    )  # of the first and of another block
    loss, lse = cross_entropy(logits, targets)
    run = launched(student, t, text_of_linear_loss, (-(-rows // 16),), args)
    lanes = torch.cat([logits, logits.new_zeros(rows, -vocab % 32)], 1)
    known = {NOT_RESCALED: not_rescaled(logits, 32)} if vocab > 32 and not overflow else {}
    if vocab % 32 or hidden % 16:
        no_infinity_loaded(t, run)
    if not overflow:
        keeps_a_sum(t, run)
        begin = (hidden - 1) // 16 * 16
        replaced = "the logits are those of the last block of columns: add the products up, logits += tl.dot(...)"
        known[replaced] = cross_entropy(x[:, begin:].double() @ w[:, begin:].double().T, targets)[1]
        known["lse_ptr has the losses: the two results are stored in each other's tensor"] = loss
        known[WITHOUT_MAXIMUM] = lse - logits.amax(1).float()
    if vocab % 32:
        words = "words after the end of the vocabulary count as logits of 0: set them to -inf before the maximum"
        known = {words: torch.logsumexp(lanes, 1).float()} | known
    right(t, run, "lse_ptr", lse, "the log-sum-exp of each row", known, overflow, atol)
    own = (lse - loss) * (targets >= (vocab - 1) // 32 * 32)
    in_first = torch.nn.functional.pad(logits, (0, -vocab % 32)).view(rows, -1, 32).sum(1).gather(1, (targets % 32)[:, None])[:, 0]
    losses = {
        "the loss has the wrong sign: it is lse - the logit of the target": -loss,
        NUMBER_OF_A_LANE: lse - (in_first * (targets < 32)).float(),
        "the logit of the target is that of the last block of words: it is in one of the blocks, so add up over them": lse - own,
        "the logit of the target is missing: the loss is lse - the logit of the target": lse,
    }
    right(t, run, "loss_ptr", loss, "the loss of each row", losses, atol=atol)
    return run


def no_infinity_loaded(t, run: Launched) -> None:
    """Where some lanes are masked, the log-sum-exp that is written is not NaN."""
    lse = run.args["lse_ptr"]
    whole = run.traffic.written.get("lse_ptr", 0) == lse.nbytes
    t.that(not whole or run.traffic.undefined or not bool(lse.isnan().any()), MINUS_INF_LOADED)


@check("linear_loss", points=2, seconds=20)
def check_linear_loss(student, t):
    "The loss of whole blocks"
    linear_loss_run(student, t, 16 * t.integer(1, 2), 32, 96)


@check("linear_loss", points=1, seconds=20)
def check_linear_loss_sizes(student, t):
    "Any number of rows, columns and words"
    linear_loss_run(student, t, t.integer(17, 30), t.integer(17, 30), t.integer(67, 90))


@check("linear_loss", points=1, seconds=20)
def check_linear_loss_16bit(student, t):
    "16-bit inputs, and logits in float32"
    rows, vocab, dtype = 16, 64, torch.float16
    high = 80 + 5 * t.normal(rows, 16).abs()  # 16 products of 80 x 80 exceed 65504; the second half of the columns removes them
    x = torch.cat([high, t.normal(rows, 16)], 1).to(dtype)
    x = torch.cat([x, -x], 1)
    rest = t.normal(vocab, 32) * 0.01
    half = torch.cat([80 + 5 * t.normal(vocab, 16).abs(), t.normal(vocab, 16)], 1)
    w = torch.cat([half, half + rest * (torch.arange(32) >= 16)], 1).to(dtype)
    overflow = "a partial sum overflows in float16, whose largest number is 65504: tl.dot gives float32, so keep it in float32"
    linear_loss_run(student, t, rows, 64, vocab, x, w, overflow, atol=0.1)  # sums of 100,000 in float32


@check("linear_loss", points=1, seconds=20)
def check_linear_loss_negative(student, t):
    "Logits far below 0"
    x, w = t.normal(16, 32), t.normal(64, 32)
    x[:, 0], w[:, 0] = 16, -t.integer(16, 20)  # at least -256 in each logit, of which exp is 0 in float32
    linear_loss_run(student, t, 16, 32, 64, x, w, BEGINS_AT_MINUS_INF, atol=1e-3)


@check("linear_loss", points=2, seconds=20)
def check_no_logits(student, t):
    "The logits are not stored, and small tiles are enough"
    rows, hidden, vocab = 16 * t.integer(1, 2), 32, 128
    run = linear_loss_run(student, t, rows, hidden, vocab)
    holds_small_tiles(t, run, 16 * 32, "BLOCK_M x BLOCK_V logits at a time, not a whole row of the vocabulary")
    once, targets = rows // 16 * run.args["w_ptr"].nbytes, rows * hidden * 4
    again = "a program reads W once, and its rows of the targets again: the logit of a target is in a tile already, select it with tl.where"
    t.that(run.moved("w_ptr") != once + targets, again)
    moves(t, run, "w_ptr", once, "a program reads W once: update maximum and sum after each block of words")


# -- attention


def attention_run(
    student,
    t,
    heads: int,
    group: int,
    queries: int,
    keys: int,
    causal: bool = False,
    views: bool = False,
    dtype: torch.dtype = torch.float32,
    large: float = 1.0,
    loud: float = 1.0,
    low: bool = False,
    overflow: str = "",
    mistakes: bool = False,
    blocks: tuple[int, int] = (16, 32),
) -> Launched:
    """Attention with head dim 64, and ``blocks`` of queries and of keys, compared.

    The three sizes differ, so that tiles whose dimensions are exchanged do not fit.
    """
    d, extra, (block_m, block_n) = D, 8 if views else 0, blocks
    q = t.normal(heads, queries, d + extra)
    k, v = t.normal(heads // group, keys, d + extra), t.normal(heads // group, keys, d + extra)
    k = k * (1 + torch.arange(keys)[:, None] / 16) * loud  # the maximum grows with the keys
    if low:
        q[..., 0], k[..., 0] = 32, -40  # -160 in each score, of which exp is 0 in float32
    q, k, v = (tensor.to(dtype)[..., :d] for tensor in (q, k, large + v if large > 1 else v))
    if large > 1:
        v = (v * large).to(dtype)
    scale = d**-0.5
    args = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "o_ptr": empty(heads, queries, d), "lse_ptr": empty(heads, queries)}
    args |= {"q_head": q.stride(0), "q_row": q.stride(1), "kv_head": k.stride(0), "kv_row": k.stride(1)}
    args |= {"queries": queries, "keys": keys, "group": group, "scale": scale}
    args |= {"CAUSAL": causal, "D": d, "BLOCK_M": block_m, "BLOCK_N": block_n}
    run = launched(student, t, text_of_attention, (-(-queries // block_m), heads), args)
    out, lse = attention(q, k, v, scale, causal)
    known_out: dict[str, Tensor] = {}
    known_lse: dict[str, Tensor] = {}
    if keys % block_n and not causal:
        no_infinity_loaded(t, run)
    if mistakes:
        keeps_a_sum(t, run)
        known_lse[WITHOUT_MAXIMUM] = lse - _largest(q, k, scale)
        known_lse["the scores are not multiplied by scale"] = attention(q, k, v, 1.0, causal)[1]
        grouped = "lse_ptr has the sum, or the maximum: it is the maximum + log of the sum"
        known_lse[grouped] = torch.exp(lse)
        known_lse |= {NOT_RESCALED: _not_rescaled(q, k, scale, block_n)}
        known_out["the output is not divided by the sum of the weights"] = out * _total(q, k, scale)[..., None]
        old = "the weighted sum of the earlier blocks is not rescaled: multiply acc by exp(m - m'), as the sum"
        known_out[old] = _acc_not_rescaled(q, k, v, scale, block_n)
    if causal:
        whole = attention(q, k, v, scale, False)
        known_lse["a query reads keys after it: the mask is missing or reversed"] = whole[1]
        known_lse[IN_THE_BLOCK] = _seen(q, k, scale, blocks, in_block=True)
        known_lse[MASKED_WITH_0] = _seen(q, k, scale, blocks)
        known_lse[f"all blocks are read, and {MASKED_WITH_0}"] = _seen(q, k, scale, (queries, keys))
        if block_m > block_n:
            known_lse[ENDS_EARLY] = _ends_early(q, k, scale, blocks)
    if group > 1:
        other = "query head h reads keys and values of head h // group: neighbours share a head"
        order = torch.arange(heads) % (heads // group)
        known_lse[other] = attention(q, k[order], v[order], scale, causal)[1]
    if keys % block_n and not causal:
        lanes = torch.cat([k, k.new_zeros(len(k), -keys % block_n, d)], 1)
        known_lse["keys after the end count with the score 0: set their scores to -inf"] = attention(q, lanes, lanes, scale, causal)[1]
    hidden_rows = BEGINS_AT_MINUS_INF if low else ""
    if causal:
        hidden_rows = (
            "the result holds NaN: a row whose keys are all masked so far has the maximum -inf, and -inf - (-inf) is NaN. "
            "If the first check passes, the causal mask is wrong: query r sees key r"
        )
    close = LOW_CLOSE if low else CLOSE["atol"]
    right(t, run, "lse_ptr", lse, "the log-sum-exp of each query", known_lse, hidden_rows, close)
    coarse = dtype != torch.float32
    if coarse:
        got = run.args["o_ptr"]
        t.that(bool(torch.isfinite(got).all()), overflow)
        t.close(got, out, "the output", rtol=5e-3, atol=1e-3 * large)
    else:
        right(t, run, "o_ptr", out, "the output", known_out, overflow, close)
    return run


def _largest(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return (q @ k.repeat_interleave(len(q) // len(k), 0).mT * scale).amax(-1)


def _total(q: Tensor, k: Tensor, scale: float) -> Tensor:
    scores = q @ k.repeat_interleave(len(q) // len(k), 0).mT * scale
    return torch.exp(scores - scores.amax(-1, keepdim=True)).sum(-1)


def _acc_not_rescaled(q: Tensor, k: Tensor, v: Tensor, scale: float, block: int) -> Tensor:
    """The output if only the sum is rescaled."""
    group = len(q) // len(k)
    scores = q @ k.repeat_interleave(group, 0).mT * scale
    so_far = torch.cat([part.amax(-1, keepdim=True).expand(part.shape) for part in scores.split(block, -1)], -1).cummax(-1).values
    weights = torch.exp(scores - so_far)
    return weights @ v.repeat_interleave(group, 0) / _total(q, k, scale)[..., None]


def _not_rescaled(q: Tensor, k: Tensor, scale: float, block: int) -> Tensor:
    scores = q @ k.repeat_interleave(len(q) // len(k), 0).mT * scale
    return not_rescaled(scores.flatten(0, 1), block).view(scores.shape[:-1])


def _seen(q: Tensor, k: Tensor, scale: float, blocks: tuple[int, int], in_block: bool = False) -> Tensor:
    """The log-sum-exp of causal attention if masked scores are 0 in the blocks that are read, or with the number of the query in its block."""
    scores = q @ k.repeat_interleave(len(q) // len(k), 0).mT * scale
    scores = torch.nn.functional.pad(scores, (0, -k.shape[1] % blocks[1]))  # lanes after the end are after the query too
    row, column = torch.arange(q.shape[1])[:, None], torch.arange(scores.shape[-1])
    if in_block:
        return torch.logsumexp(scores.masked_fill(column > row % blocks[0], -torch.inf), -1)
    end = (row // blocks[0] + 1) * blocks[0]  # of the keys that the program needs
    read = column < -(-end // blocks[1]) * blocks[1]
    return torch.logsumexp(scores.masked_fill(column > row, 0.0).masked_fill(~read, -torch.inf), -1)


def _ends_early(q: Tensor, k: Tensor, scale: float, blocks: tuple[int, int]) -> Tensor:
    """The log-sum-exp of causal attention if program i reads the first (i + 1) BLOCK_N keys."""
    scores = q @ k.repeat_interleave(len(q) // len(k), 0).mT * scale
    row, column = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
    seen = (column <= row) & (column < (row // blocks[0] + 1) * blocks[1])
    return torch.logsumexp(scores.masked_fill(~seen, -torch.inf), -1)


@check("attention", points=3, seconds=20)
def check_attention(student, t):
    "Output and log-sum-exp over several blocks of keys"
    attention_run(student, t, 2, 1, 32, 64, mistakes=True)


@check("attention", points=1, seconds=20)
def check_attention_sizes(student, t):
    "Any number of queries and keys"
    attention_run(student, t, 1, 1, t.integer(17, 30), t.integer(33, 47), mistakes=True)


@check("attention", points=2, seconds=20)
def check_attention_causal(student, t):
    "Causal: no query reads a key after it"
    for blocks in t.shuffled([(32, 16), (16, 32)]):
        size = t.integer(37, 47)
        attention_run(student, t, 1, 1, size, size, causal=True, blocks=blocks)


@check("attention", points=1, seconds=20)
def check_attention_skips(student, t):
    "Causal: blocks of keys after the last query of a program are not read"
    blocks = t.integer(3, 4)
    size = 32 * blocks
    run = attention_run(student, t, 1, 1, size, size, causal=True, blocks=(32, 16))
    most = blocks * (blocks + 1) // 2 * 32 * D * 4
    for name in ("k_ptr", "v_ptr"):
        moves(t, run, name, most, "program i needs the keys before (i + 1) BLOCK_M only, half of all blocks")


@check("attention", points=1, seconds=20)
def check_attention_groups(student, t):
    "Grouped queries, and heads that are views: use the strides"
    attention_run(student, t, 4, 2, 16, 64, views=True, mistakes=True)


@check("attention", points=1, seconds=20)
def check_attention_no_keys(student, t):
    "No key: the output is 0 and lse is -inf, no NaN"
    run = attention_run(student, t, 1, 1, 16, 64)
    t.that(len(run.args["o_ptr"]) == 1, "not tested yet: see the first checks")
    nothing = "0 / 0 is NaN: a query without a key has the sum 0, and its output is 0. Divide by 1 there"
    attention_run(student, t, 1, 1, t.integer(3, 16), 0, overflow=nothing)


@check("attention", points=1, seconds=20)
def check_attention_16bit(student, t):
    "16-bit inputs, and sums in float32"
    overflow = "the weighted sum overflows in float16, whose largest number is 65504: keep the accumulator in float32"
    attention_run(student, t, 1, 1, 16, 64, dtype=torch.float16, large=100.0, loud=0.0, overflow=overflow)


@check("attention", points=1, seconds=20)
def check_attention_negative(student, t):
    "Scores far below 0"
    attention_run(student, t, 1, 1, t.integer(10, 16), 64, loud=0.5, low=True)


@check("attention", points=1, seconds=20)
def check_attention_memory(student, t):
    "No scores are stored, small tiles are enough, and each query is read once"
    keys = 32 * t.integer(3, 4)
    run = attention_run(student, t, 1, 1, 32, keys, mistakes=True)
    holds_small_tiles(t, run, 32 * D, "BLOCK_M x BLOCK_N scores at a time, not the scores of all keys")
    moves(t, run, "q_ptr", run.args["q_ptr"].nbytes, "the queries of a program stay in registers")
    for name in ("k_ptr", "v_ptr"):
        moves(t, run, name, 2 * run.args[name].nbytes, "each of the two programs reads a key once")


# -- keys_backward


def keys_backward_run(student, t, heads: int, size: int, blocks: tuple[int, int], mistakes: bool = False) -> Launched:
    """The gradients of k and v of causal attention, with ``blocks`` of queries and of keys, compared."""
    d, scale, (block_m, block_n) = D, 0.125, blocks
    q, k, v, grad = (t.normal(heads, size, d) for _ in range(4))
    out, lse = attention(q, k, v, scale, True)
    delta = (grad * out).sum(-1)
    dk, dv = attention_gradients(grad, q, k, v, scale)
    args = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "grad_ptr": grad, "lse_ptr": lse, "delta_ptr": delta}
    args |= {"dk_ptr": empty(heads, size, d), "dv_ptr": empty(heads, size, d), "size": size, "scale": scale}
    args |= {"D": d, "BLOCK_M": block_m, "BLOCK_N": block_n}
    run = launched(student, t, text_of_keys_backward, (-(-size // block_n), heads), args)
    known_k: dict[str, Tensor] = {}
    known_v: dict[str, Tensor] = {}
    if mistakes:
        known_k["the factor scale is missing in dk"] = dk / scale
        no_delta = "delta is missing: dS = P (dP - delta), with delta of the query"
        known_k[no_delta] = dk + _with_delta(q, k, lse, delta, scale)
    known_v["the scores are not multiplied by scale in P = exp(scale · q kᵀ - lse)"] = torch.exp(q @ k.mT - lse[..., None]).tril().mT @ grad
    known_v["P has weights of queries before the key: set them to 0, query r sees the keys c ≤ r"] = _unmasked(
        q, k, lse, grad, scale, blocks
    )
    if block_m > block_n:
        known_v[BEGINS_LATE] = _begins_late(q, k, lse, grad, scale, blocks)
    right(t, run, "dv_ptr", dv, "the gradient of v", known_v)
    right(t, run, "dk_ptr", dk, "the gradient of k", known_k)
    return run


def _begins_late(q: Tensor, k: Tensor, lse: Tensor, grad: Tensor, scale: float, blocks: tuple[int, int]) -> Tensor:
    """The gradient of v if the loop of program i begins at query i BLOCK_M."""
    row, column = torch.arange(q.shape[1])[:, None], torch.arange(q.shape[1])
    weights = torch.exp(q @ k.mT * scale - lse[..., None]).tril() * (row >= column // blocks[1] * blocks[0])
    return weights.mT @ grad


def _unmasked(q: Tensor, k: Tensor, lse: Tensor, grad: Tensor, scale: float, blocks: tuple[int, int]) -> Tensor:
    """The gradient of v without the causal mask, of the blocks of queries that are read."""
    row, column = torch.arange(q.shape[1])[:, None], torch.arange(q.shape[1])
    begin = column // blocks[1] * blocks[1] // blocks[0] * blocks[0]
    return (torch.exp(q @ k.mT * scale - lse[..., None]) * (row >= begin)).mT @ grad


def _with_delta(q: Tensor, k: Tensor, lse: Tensor, delta: Tensor, scale: float) -> Tensor:
    weights = torch.exp(q @ k.mT * scale - lse[..., None]).tril()
    return (weights * delta[..., None]).mT @ q * scale


@check("keys_backward", points=3, seconds=20)
def check_keys_backward(student, t):
    "The gradients of k and v"
    for blocks in ((16, 32), (32, 16)):
        keys_backward_run(student, t, 2, 64, blocks, mistakes=True)


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
