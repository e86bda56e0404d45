"""The visible checks of kernels that read a row block by block: cross-entropy and attention."""

from __future__ import annotations

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import check

from .launches import Launched, empty, holds_small_tiles, launched, moves, right
from .scenarios import (
    text_of_attention,
    text_of_keys_backward,
    text_of_linear_loss,
    text_of_loss,
    text_of_loss_backward,
)
from .twins import attention, attention_gradients, cross_entropy, cross_entropy_gradient, not_rescaled

OVERFLOW = "exp overflows, or the maximum is missing in the result: subtract the largest logit so far, and add it to the logarithm"
NOT_RESCALED = "the sum of the earlier blocks is not rescaled: when the maximum grows from m to m', multiply the sum by exp(m - m')"

# -- loss


def growing(t, rows: int, vocab: int, block: int) -> Tensor:
    """Logits whose maximum grows with each block."""
    return t.normal(rows, vocab) + 2 * (torch.arange(vocab) // block)


def loss_run(student, t, logits: Tensor, block: int, mistakes: bool = False, overflow: str = "") -> Launched:
    """The loss and the log-sum-exp of each row, compared."""
    rows, vocab = logits.shape
    targets = t.integers(0, vocab - 1, rows)
    args = {"logits_ptr": logits, "targets_ptr": targets, "loss_ptr": empty(rows), "lse_ptr": empty(rows), "vocab": vocab, "BLOCK": block}
    run = launched(student, t, text_of_loss, (rows,), args)
    loss, lse = cross_entropy(logits, targets)
    known = {NOT_RESCALED: not_rescaled(logits, block)} if mistakes else {}
    right(t, run, "lse_ptr", lse, "the log-sum-exp of each row", known, overflow)
    right(t, run, "loss_ptr", loss, "the loss of each row", {"the loss has the wrong sign: it is lse - the logit of the target": -loss})
    return run


@check("loss", points=2)
def check_loss(student, t):
    "Loss and log-sum-exp, over several blocks"
    block = 16
    loss_run(student, t, growing(t, t.integer(2, 4), block * t.integer(3, 5), block), block, mistakes=True)


@check("loss", points=1)
def check_loss_sizes(student, t):
    "Any size of the vocabulary"
    for vocab in (t.integer(33, 47), t.integer(5, 15)):
        loss_run(student, t, growing(t, 3, vocab, 16) - 8, 16)


@check("loss", points=1)
def check_loss_large(student, t):
    "Large logits do not overflow"
    loss_run(student, t, 100 + 10 * growing(t, 3, 48, 16).abs(), 16, overflow=OVERFLOW)


@check("loss", points=1)
def check_loss_traffic(student, t):
    "The logits are read once; small blocks are enough"
    block, rows = 16, t.integer(2, 4)
    logits = growing(t, rows, block * t.integer(3, 5), block)
    run = loss_run(student, t, logits, block)
    moves(t, run, "logits_ptr", logits.nbytes + 4 * rows, "maximum and sum come from one pass, and the logit of the target is one element")
    holds_small_tiles(t, run, block, "a row of the vocabulary does not fit into the registers of a program")


# -- loss_backward


def loss_backward_run(student, t, rows: int, vocab: int, block: int, dtype: torch.dtype = torch.float32, known: bool = False) -> Launched:
    """The gradient of the logits, written over them, compared."""
    logits = (2 * t.normal(rows, vocab)).to(dtype)
    targets, grad = t.integers(0, vocab - 1, rows), 0.25 + t.normal(rows).abs()
    want = cross_entropy_gradient(grad, logits, targets)
    mistakes = {}
    if known:
        ones = torch.ones(rows)
        mistakes = {
            "the gradient is the softmax: subtract 1 at the target": grad[:, None] * torch.softmax(logits, 1),
            "grad is ignored: multiply by the gradient of the loss of this row": cross_entropy_gradient(ones, logits, targets),
            "the gradient has the wrong sign: it is softmax - 1 at the target": -want,
            "1 is subtracted after the product with grad: it belongs to the softmax": want
            + (grad[:, None] - 1) * torch.nn.functional.one_hot(targets, vocab),
        }
    args = {"grad_ptr": grad, "logits_ptr": logits, "targets_ptr": targets}
    args |= {"lse_ptr": cross_entropy(logits, targets)[1], "vocab": vocab, "BLOCK": block}
    run = launched(student, t, text_of_loss_backward, (rows,), args)
    right(t, run, "logits_ptr", want, "the gradient of the logits", mistakes)
    return run


@check("loss_backward", points=2)
def check_loss_gradient(student, t):
    "The gradient of the logits replaces them"
    loss_backward_run(student, t, t.integer(2, 4), 16 * t.integer(2, 3), 16, known=True)


@check("loss_backward", points=1)
def check_loss_gradient_sizes(student, t):
    "Any size of the vocabulary, and 16-bit logits"
    for dtype in t.shuffled([torch.float32, torch.bfloat16]):
        loss_backward_run(student, t, 3, t.integer(17, 31), 16, dtype)


@check("loss_backward", points=1)
def check_loss_gradient_traffic(student, t):
    "The logits are read once and written once"
    rows, vocab = t.integer(2, 4), 48
    run = loss_backward_run(student, t, rows, vocab, 16)
    nbytes = run.args["logits_ptr"].nbytes
    moves(t, run, "logits_ptr", 2 * nbytes, "lse is known, so one pass is enough")


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
    loss, lse = cross_entropy(logits, targets)
    run = launched(student, t, text_of_linear_loss, (-(-rows // 16),), args)
    lanes = torch.cat([logits, logits.new_zeros(rows, -vocab % 32)], 1)
    known = {NOT_RESCALED: not_rescaled(logits, 32)} if vocab > 32 and not overflow else {}
    if vocab % 32:
        words = "words after the end of the vocabulary count as logits of 0: set them to -inf before the maximum"
        known = {words: torch.logsumexp(lanes, 1).float()} | known
    right(t, run, "lse_ptr", lse, "the log-sum-exp of each row", known, overflow, atol)
    right(t, run, "loss_ptr", loss, "the loss of each row", atol=atol)
    return run


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


@check("linear_loss", points=2, seconds=20)
def check_no_logits(student, t):
    "The logits are not stored, and small tiles are enough"
    rows, hidden, vocab = 16 * t.integer(1, 2), 32, 128
    run = linear_loss_run(student, t, rows, hidden, vocab)
    holds_small_tiles(t, run, 16 * 32, "BLOCK_M x BLOCK_V logits at a time, not a whole row of the vocabulary")
    moves(
        t, run, "w_ptr", rows // 16 * run.args["w_ptr"].nbytes, "a program reads W once: update maximum and sum after each block of words"
    )


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
    overflow: str = "",
    mistakes: bool = False,
) -> Launched:
    """Attention with head dim 16 and blocks of 16 queries and 16 keys, compared."""
    d, extra = 16, 8 if views else 0
    q = t.normal(heads, queries, d + extra)
    k, v = t.normal(heads // group, keys, d + extra), t.normal(heads // group, keys, d + extra)
    k = k * (1 + torch.arange(keys)[:, None] / 16) * loud  # the maximum grows with the keys
    q, k, v = (tensor.to(dtype)[..., :d] for tensor in (q, k, large + v if large > 1 else v))
    if large > 1:
        v = (v * large).to(dtype)
    scale = d**-0.5
    args = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "o_ptr": empty(heads, queries, d), "lse_ptr": empty(heads, queries)}
    args |= {"q_head": q.stride(0), "q_row": q.stride(1), "kv_head": k.stride(0), "kv_row": k.stride(1)}
    args |= {"queries": queries, "keys": keys, "group": group, "scale": scale}
    args |= {"CAUSAL": causal, "D": d, "BLOCK_M": 16, "BLOCK_N": 16}
    run = launched(student, t, text_of_attention, (-(-queries // 16), heads), args)
    out, lse = attention(q, k, v, scale, causal)
    known_out: dict[str, Tensor] = {}
    known_lse: dict[str, Tensor] = {}
    if mistakes:
        known_lse["the scores are not multiplied by scale"] = attention(q, k, v, 1.0, causal)[1]
        grouped = "lse_ptr has the sum, or the maximum: it is the maximum + log of the sum"
        known_lse[grouped] = torch.exp(lse)
        known_lse |= {NOT_RESCALED: _not_rescaled(q, k, scale)}
        known_out["the output is not divided by the sum of the weights"] = out * _total(q, k, scale)[..., None]
        old = "the weighted sum of the earlier blocks is not rescaled: multiply acc by exp(m - m'), as the sum"
        known_out[old] = _acc_not_rescaled(q, k, v, scale)
    if causal:
        whole = attention(q, k, v, scale, False)
        known_lse["a query reads keys after it: the mask is missing or reversed"] = whole[1]
    if group > 1:
        other = "query head h reads keys and values of head h // group: neighbours share a head"
        order = torch.arange(heads) % (heads // group)
        known_lse[other] = attention(q, k[order], v[order], scale, causal)[1]
    if keys % 16 and not causal:
        lanes = torch.cat([k, k.new_zeros(len(k), -keys % 16, d)], 1)
        known_lse["keys after the end count with the score 0: set their scores to -inf"] = attention(q, lanes, lanes, scale, causal)[1]
    hidden_rows = ""
    if causal:
        hidden_rows = (
            "the result holds NaN: a row whose keys are all masked so far has the maximum -inf, and -inf - (-inf) is NaN. "
            "Query r sees key r, so the causal mask is wrong"
        )
    right(t, run, "lse_ptr", lse, "the log-sum-exp of each query", known_lse, hidden_rows)
    coarse = dtype != torch.float32
    if coarse:
        got = run.args["o_ptr"]
        t.that(bool(torch.isfinite(got).all()), overflow)
        t.close(got, out, "the output", rtol=5e-3, atol=1e-3 * large)
    else:
        right(t, run, "o_ptr", out, "the output", known_out, overflow)
    return run


def _total(q: Tensor, k: Tensor, scale: float) -> Tensor:
    scores = q @ k.repeat_interleave(len(q) // len(k), 0).mT * scale
    return torch.exp(scores - scores.amax(-1, keepdim=True)).sum(-1)


def _acc_not_rescaled(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The output if only the sum is rescaled."""
    group = len(q) // len(k)
    scores = q @ k.repeat_interleave(group, 0).mT * scale
    so_far = torch.cat([part.amax(-1, keepdim=True).expand(part.shape) for part in scores.split(16, -1)], -1).cummax(-1).values
    weights = torch.exp(scores - so_far)
    return weights @ v.repeat_interleave(group, 0) / _total(q, k, scale)[..., None]


def _not_rescaled(q: Tensor, k: Tensor, scale: float) -> Tensor:
    scores = q @ k.repeat_interleave(len(q) // len(k), 0).mT * scale
    return not_rescaled(scores.flatten(0, 1), 16).view(scores.shape[:-1])


@check("attention", points=3, seconds=20)
def check_attention(student, t):
    "Output and log-sum-exp over several blocks of keys"
    attention_run(student, t, 2, 1, 32, 64, mistakes=True)


@check("attention", points=1, seconds=20)
def check_attention_sizes(student, t):
    "Any number of queries and keys"
    attention_run(student, t, 1, 1, t.integer(17, 30), t.integer(33, 47))


@check("attention", points=2, seconds=20)
def check_attention_causal(student, t):
    "Causal: no query reads a key after it"
    size = t.integer(37, 47)
    attention_run(student, t, 1, 1, size, size, causal=True)


@check("attention", points=1, seconds=20)
def check_attention_skips(student, t):
    "Causal: blocks of keys after the last query of a program are not read"
    blocks = t.integer(3, 4)
    size = 16 * blocks
    run = attention_run(student, t, 1, 1, size, size, causal=True)
    most = blocks * (blocks + 1) // 2 * 16 * 16 * 4
    for name in ("k_ptr", "v_ptr"):
        moves(t, run, name, most, "program i needs the keys before (i + 1) BLOCK_M only, half of all blocks")


@check("attention", points=1, seconds=20)
def check_attention_groups(student, t):
    "Grouped queries, and heads that are views: use the strides"
    attention_run(student, t, 4, 2, 16, 32, views=True)


@check("attention", points=1, seconds=20)
def check_attention_no_keys(student, t):
    "No key: the output is 0 and lse is -inf, no NaN"
    run = attention_run(student, t, 1, 1, 16, 32)
    t.that(len(run.args["o_ptr"]) == 1, "not tested yet: see the first checks")
    nothing = "0 / 0 is NaN: a query without a key has the sum 0, and its output is 0. Divide by 1 there"
    attention_run(student, t, 1, 1, t.integer(3, 16), 0, overflow=nothing)


@check("attention", points=1, seconds=20)
def check_attention_16bit(student, t):
    "16-bit inputs, and sums in float32"
    overflow = "the weighted sum overflows in float16, whose largest number is 65504: keep the accumulator in float32"
    attention_run(student, t, 1, 1, 16, 48, dtype=torch.float16, large=100.0, loud=0.0, overflow=overflow)


@check("attention", points=1, seconds=20)
def check_attention_memory(student, t):
    "No scores are stored, small tiles are enough, and each query is read once"
    keys = 16 * t.integer(4, 6)
    run = attention_run(student, t, 1, 1, 32, keys)
    holds_small_tiles(t, run, 16 * 16, "BLOCK_M x BLOCK_N scores at a time, not the scores of all keys")
    moves(t, run, "q_ptr", run.args["q_ptr"].nbytes, "the queries of a program stay in registers")
    for name in ("k_ptr", "v_ptr"):
        moves(t, run, name, 2 * run.args[name].nbytes, "each of the two programs reads a key once")


# -- keys_backward


def keys_backward_run(student, t, heads: int, size: int, mistakes: bool = False) -> Launched:
    """The gradients of k and v of causal attention, compared."""
    d, scale = 16, 0.25
    q, k, v, grad = (t.normal(heads, size, d) for _ in range(4))
    out, lse = attention(q, k, v, scale, True)
    delta = (grad * out).sum(-1)
    dk, dv = attention_gradients(grad, q, k, v, scale)
    args = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "grad_ptr": grad, "lse_ptr": lse, "delta_ptr": delta}
    args |= {"dk_ptr": empty(heads, size, d), "dv_ptr": empty(heads, size, d), "size": size, "scale": scale}
    args |= {"D": d, "BLOCK_M": 16, "BLOCK_N": 16}
    run = launched(student, t, text_of_keys_backward, (-(-size // 16), heads), args)
    known = {"the factor scale is missing in dk": dk / scale} if mistakes else {}
    if mistakes:
        no_delta = "delta is missing: dS = P (dP - delta), with delta of the query"
        known[no_delta] = dk + _with_delta(q, k, lse, delta, scale)
    right(t, run, "dv_ptr", dv, "the gradient of v")
    right(t, run, "dk_ptr", dk, "the gradient of k", known)
    return run


def _with_delta(q: Tensor, k: Tensor, lse: Tensor, delta: Tensor, scale: float) -> Tensor:
    weights = torch.exp(q @ k.mT * scale - lse[..., None]).tril()
    return (weights * delta[..., None]).mT @ q * scale


@check("keys_backward", points=3, seconds=20)
def check_keys_backward(student, t):
    "The gradients of k and v"
    keys_backward_run(student, t, 2, 32, mistakes=True)


@check("keys_backward", points=1, seconds=20)
def check_keys_backward_sizes(student, t):
    "Any number of tokens"
    keys_backward_run(student, t, 1, t.integer(33, 47))


@check("keys_backward", points=1, seconds=20)
def check_keys_backward_memory(student, t):
    "Blocks of queries before the keys are not read, and small tiles are enough"
    blocks = t.integer(3, 4)
    run = keys_backward_run(student, t, 1, 16 * blocks)
    holds_small_tiles(t, run, 16 * 16, "BLOCK_M x BLOCK_N weights at a time")
    most = blocks * (blocks + 1) // 2 * 16 * 16 * 4
    moves(t, run, "q_ptr", most, "queries before the first key of a program do not read it")
