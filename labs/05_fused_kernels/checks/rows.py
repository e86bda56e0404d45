"""The visible checks of kernels whose programs have a block or a row: vector add, softmax, RMSNorm,
cross-entropy."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from dlo_lib.grading.checks.contract import check

from . import scenarios, twins
from .launches import Launched, empty, holds_small_tiles, launched, moves, right
from .twins import block_of, cross_entropy, not_rescaled

EPS = 1e-3
SIGN = (
    "the log-sum-exp is NaN: in the first block m is -inf, so exp(m' - m) is infinite. The factor of the "
    "earlier sum is exp(m - m'), the old maximum first"
)
STAYS = "the log-sum-exp is -inf: m is still -inf after the loop. Set m to m' at the end of each block"
WITHOUT_MAXIMUM = "the log-sum-exp is the logarithm of the sum only: add the maximum, lse = m + log l"
NUMBER_OF_A_LANE = (
    "the target is compared with the number of the lane: compare it with start + the lane, the number of "
    "the word"
)
A_MAXIMUM_OF_A_LANE = (
    "the log-sum-exp is not finite. If whole blocks pass, there is one maximum for each lane: a lane after "
    "the end has only -inf, and -inf - (-inf) is NaN. tl.max(x, 0) is one number for the row"
)
OVERFLOW = (
    "exp overflows, or the maximum is missing in the result: subtract the largest logit so far, and add it "
    "to the logarithm"
)
NOT_RESCALED = (
    "the sum of the earlier blocks is not rescaled: when the maximum grows from m to m', multiply the sum "
    "by exp(m - m')"
)
BEGINS_AT_MINUS_INF = (
    "the result is infinite, because each exponential is 0: all numbers of a row can be far below 0, so the "
    'maximum begins at float("-inf")'
)

# -- add


def add_run(student, t, n: int, block: int) -> Launched:
    """x + y of n elements, compared."""
    x, y = t.normal(n), t.normal(n)
    args = {"x_ptr": x, "y_ptr": y, "out_ptr": empty(n), "n": n, "BLOCK": block}
    run = launched(student, t, scenarios.text_of_add, (-(-n // block),), args, {"out_ptr": block})
    right(t, run, "out_ptr", x + y, "x + y", {"the kernel copies x, it does not add y": x})
    return run


@check("add", points=1)
def check_whole_blocks(student, t):
    "The sum, of whole blocks"
    block = t.choice((16, 32, 64))
    add_run(student, t, block * t.integer(2, 4), block)


@check("add", points=1)
def check_last_block(student, t):
    "Any size: the last block is not full"
    for n in (t.integer(65, 127), t.integer(2, 15)):
        add_run(student, t, n, 16)


@check("add", points=1)
def check_add_traffic(student, t):
    "Two tensors are read once, one is written once"
    n = 32 * t.integer(2, 4)
    run = add_run(student, t, n, 32)
    for name in ("x_ptr", "y_ptr"):
        moves(t, run, name, 4 * n, "each element is read once")


# -- softmax


def softmax_run(
    student,
    t,
    x: Tensor,
    y: Tensor | None = None,
    mistakes: dict[str, Tensor] | None = None,
    overflow: str = "",
) -> Launched:
    """The softmax of each row of x, compared."""
    y = empty(*x.shape, dtype=x.dtype) if y is None else y
    args = {"x_ptr": x, "y_ptr": y, "x_stride": x.stride(0), "y_stride": y.stride(0)}
    args |= {"columns": x.shape[1], "BLOCK": block_of(x.shape[1])}
    run = launched(student, t, scenarios.text_of_softmax, (len(x),), args, {"y_ptr": x.shape[1]})
    what = "the softmax of {} rows of {}".format(*x.shape)
    right(t, run, "y_ptr", twins.softmax(x), what, mistakes, overflow)
    return run


@check("softmax", points=2)
def check_softmax(student, t):
    "The softmax of rows that fill the block"
    columns = t.choice((16, 32, 64))
    x = t.normal(t.integer(2, 5), columns)
    message = "each column adds up to 1: a program has one row, so take maximum and sum over all of its lanes"
    softmax_run(student, t, x, mistakes={message: twins.softmax(x.T.contiguous()).T.contiguous()})


@check("softmax", points=1)
def check_softmax_lanes(student, t):
    "Any number of columns: the lanes after the end do not count"
    message = (
        "the sum has the lanes after the end of the row, which count as exp(0 - maximum): other=0.0 is not "
        "neutral here"
    )
    for columns in (t.integer(33, 60), t.integer(17, 31)):
        x = t.normal(3, columns)
        softmax_run(student, t, x, mistakes={message: twins.softmax_with_lanes(x)})


@check("softmax", points=1)
def check_softmax_low(student, t):
    "Rows far below 0: the lanes after the end do not count"
    lowest = (
        "all numbers of a row can be far below 0, and then a lane after the end is its maximum: `other` has "
        "to be lower than every number"
    )
    undefined = "each exponential of the row is 0, and 0 / 0 is NaN: subtract the maximum of the row first"
    rounded = (
        "exp(x - lse) has the rounding error of lse, which is as large as the numbers of the row: divide "
        "exp(x - maximum) by the sum of these"
    )
    for level in (t.integer(500, 900), t.integer(30_000, 60_000), 1e30):
        x = t.normal(2, t.integer(17, 31)) - level
        mistakes = {lowest: torch.zeros_like(x), rounded: twins.softmax_by_lse(x)}
        softmax_run(student, t, x, mistakes=mistakes, overflow=undefined)


@check("softmax", points=1)
def check_softmax_large(student, t):
    "Large numbers do not overflow"
    x = 100 * t.normal(3, 32)
    place = t.integer(0, 30)
    x[:, place] = x[:, place + 1] = 1000 + 50 * t.normal(3).abs()  # two equal maxima: the sum is not 1
    overflow = "exp overflows: exp(89) is too large for float32. Subtract the maximum of the row first"
    softmax_run(student, t, x, overflow=overflow)


@check("softmax", points=1)
def check_softmax_strides(student, t):
    "Rows that are not next to each other in memory"
    rows, columns = t.integer(3, 5), 16
    x = t.normal(rows, columns + t.integer(3, 9))[:, :columns]
    y = empty(rows, columns + t.integer(11, 20))[:, :columns]
    softmax_run(student, t, x, y)


@check("softmax", points=1)
def check_softmax_16bit(student, t):
    "16-bit rows are computed in float32"
    for dtype in t.shuffled([torch.float16, torch.bfloat16]):
        softmax_run(student, t, (8 * t.normal(3, 32)).to(dtype))


@check("softmax", points=1)
def check_softmax_traffic(student, t):
    "A row is read once and written once"
    x = t.normal(t.integer(2, 5), 32)
    run = softmax_run(student, t, x)
    why = "the row stays in registers between the maximum, the sum and the quotient"
    moves(t, run, "x_ptr", x.nbytes, why)


# -- norm


def norm_run(student, t, x: Tensor, weight: Tensor, overflow: str = "") -> Launched:
    """RMSNorm of x and what it keeps for backward, compared."""
    rows, columns = x.shape
    args = {"x_ptr": x, "w_ptr": weight, "y_ptr": empty(rows, columns, dtype=x.dtype)}
    args |= {"rstd_ptr": empty(rows), "columns": columns, "eps": EPS, "BLOCK": block_of(columns)}
    share = {"y_ptr": columns, "rstd_ptr": 1}
    run = launched(student, t, scenarios.text_of_norm, (rows,), args, share)
    y, rstd = twins.rms_norm(x, weight, EPS, columns)
    by_block, _ = twins.rms_norm(x, weight, EPS, block_of(columns))
    outside = x.float() * weight.float() / (x.float().square().mean(1, keepdim=True).sqrt() + EPS)
    known = {
        "eps is added outside of the root: rstd = 1 / sqrt(mean + eps), not 1 / (sqrt(mean) + "
        "eps)": outside.to(x.dtype),
        "the mean is the sum over columns divided by BLOCK: divide it by columns": by_block,
    }
    if overflow:
        known[overflow] = torch.zeros_like(y)  # the root of an infinite sum
    right(t, run, "y_ptr", y, "the normalised rows", known, overflow)
    right(t, run, "rstd_ptr", rstd, "rstd, the reciprocal of the root mean square")
    return run


@check("norm", points=2)
def check_norm(student, t):
    "The normalised rows, and rstd"
    columns = t.choice((16, 32, 64))
    norm_run(student, t, 0.3 * t.normal(t.integer(2, 5), columns), t.normal(columns))


@check("norm", points=1)
def check_norm_lanes(student, t):
    "Any number of columns"
    columns = t.integer(33, 60)
    norm_run(student, t, 0.3 * t.normal(3, columns), t.normal(columns))


@check("norm", points=1)
def check_norm_zeros(student, t):
    "A row of zeros: eps is inside of the root"
    x = t.normal(3, 32)
    x[t.integer(0, 2)] = 0
    overflow = "a row of zeros is divided by zero: add eps before the root"
    norm_run(student, t, x, t.normal(32), overflow)


@check("norm", points=1)
def check_norm_16bit(student, t):
    "16-bit rows: squares and sums in float32"
    x = (300 + 50 * t.normal(3, 32)).half()  # the square of 256 is too large for float16
    overflow = "the squares overflow in float16, above 65504: convert x to tl.float32 after the load"
    norm_run(student, t, x, t.normal(32).half(), overflow)


@check("norm", points=1)
def check_norm_traffic(student, t):
    "x is read once"
    x = 0.3 * t.normal(t.integer(2, 5), 32)
    moves(t, norm_run(student, t, x, t.normal(32)), "x_ptr", x.nbytes, "the row stays in registers")


# -- norm_backward


def norm_backward_run(student, t, rows: int, columns: int, each: int) -> Launched:
    """The gradients of RMSNorm, with ``each`` rows for a program, compared."""
    grad, x, weight = t.normal(rows, columns), 2 * t.normal(rows, columns), t.normal(columns)
    (_, rstd), programs = twins.rms_norm(x, weight, EPS, columns), -(-rows // each)
    args = {"grad_ptr": grad, "x_ptr": x, "w_ptr": weight, "rstd_ptr": rstd}
    args |= {"dx_ptr": empty(rows, columns), "dw_ptr": empty(programs, columns)}
    args |= {"rows": rows, "columns": columns, "ROWS": each, "BLOCK": block_of(columns)}
    share = {"dx_ptr": each * columns, "dw_ptr": columns}
    run = launched(student, t, scenarios.text_of_norm_backward, (programs,), args, share)
    dx, dw = twins.rms_norm_gradients(grad, x, weight, EPS)
    without_weight, _ = twins.rms_norm_gradients(grad, x, torch.ones(columns), EPS)
    scale = rstd[:, None]
    normed, direct = x * scale, scale * grad * weight
    mean = (grad * weight * normed).mean(1, keepdim=True)
    mean_without_weight = (grad * normed).mean(1, keepdim=True)
    known = {
        "rstd is missing in dx: it is the factor of both terms": dx / scale,
        "the second term of dx has the wrong sign: w g - x̂ mean(w g x̂)": direct + scale * normed * mean,
        "the mean in dx is the sum over columns divided by BLOCK: divide it by columns": direct
        - scale * normed * mean * (columns / block_of(columns)),
        "dx is the direct part only: rstd depends on x too, subtract the mean of w g x̂": direct,
        "the factor w is missing in dx": without_weight,
        "the mean in dx is not multiplied by x̂": direct - scale * mean,
        "the mean in dx has no w": direct - scale * normed * mean_without_weight,
        "the mean in dx is a sum: divide it by columns": direct - scale * normed * mean * columns,
    }
    right(t, run, "dx_ptr", dx, "the gradient of x", known)
    parts, raw = (
        torch.stack([part.sum(0) for part in (grad * factor).split(each)]) for factor in (normed, x)
    )
    known = {
        "w is in dw: it is the sum of g x̂, because y = x̂ w has the gradient g x̂ for w": parts * weight,
        "dw is the sum of g x: multiply it by rstd of each row, dw is the sum of g x̂": raw,
    }
    right(t, run, "dw_ptr", parts, "the part of dw of each program", known)
    t.close(run.args["dw_ptr"].sum(0), dw, "the gradient of the weight", atol=1e-4)
    return run


@check("norm_backward", points=3)
def check_norm_gradients(student, t):
    "The gradients of x and of the weight"
    columns, each = t.choice((16, 32)), t.integer(2, 3)
    norm_backward_run(student, t, each * t.integer(2, 3), columns, each)


@check("norm_backward", points=1)
def check_norm_backward_sizes(student, t):
    "Any number of rows and columns"
    each = t.integer(3, 4)
    norm_backward_run(student, t, 2 * each + 1, t.integer(17, 31), each)


@check("norm_backward", points=1)
def check_norm_backward_traffic(student, t):
    "Gradient and x are read once"
    run = norm_backward_run(student, t, 2 * t.integer(2, 4), 16, 2)
    for name in ("grad_ptr", "x_ptr"):
        moves(t, run, name, run.args[name].nbytes, "both gradients come from one pass over the row")


# -- loss


def growing(t, rows: int, vocab: int, block: int) -> Tensor:
    """Logits whose maximum grows with each block."""
    return t.normal(rows, vocab) + 2 * (torch.arange(vocab) // block)


def keeps_a_sum(t, run: Launched) -> None:
    """The log-sum-exp of moderate numbers is finite; if it is not, the online softmax is wrong."""
    lse = run.args["lse_ptr"]
    if run.traffic.written.get("lse_ptr", 0) == lse.nbytes and not run.traffic.undefined:
        t.that(not bool(lse.isnan().any()), SIGN)
        t.that(not bool((lse == -torch.inf).any()), STAYS)


def loss_run(student, t, logits: Tensor, block: int, overflow: str = "") -> Launched:
    """The loss and the log-sum-exp of each row, compared."""
    rows, vocab = logits.shape
    targets = t.integers(0, vocab - 1, rows)
    targets[0] = t.integer(0, min(block, vocab) - 1)
    targets[-1] = t.integer(min(block, vocab - 1), vocab - 1)  # of the first block, and of another one
    args = {"logits_ptr": logits, "targets_ptr": targets, "loss_ptr": empty(rows), "lse_ptr": empty(rows)}
    args |= {"vocab": vocab, "BLOCK": block}
    share = {"loss_ptr": 1, "lse_ptr": 1}
    run = launched(student, t, scenarios.text_of_loss, (rows,), args, share)
    loss, lse = cross_entropy(logits, targets)
    lanes = pad(logits, (0, -vocab % block))
    shifted, counted = (overlapping(logits, block, starts) for starts in (vocab, lanes.shape[1] // block))
    known = {
        "lse_ptr has the losses: the two results are stored in each other's tensor": loss,
        "each row has the log-sum-exp of row 0: row i begins at i * vocab": lse[:1].expand(rows).clone(),
        "the blocks overlap, because `start` grows by 1: range(0, vocab, BLOCK)": shifted,
        "the blocks overlap: if `start` counts blocks, the words begin at start * BLOCK": counted,
    }
    if not overflow:
        keeps_a_sum(t, run)
        known |= {NOT_RESCALED: not_rescaled(logits, block), WITHOUT_MAXIMUM: lse - logits.amax(1)}
    if vocab % block:
        message = "lanes after the end of the row count as logits of 0: load them with other=float('-inf')"
        known[message] = torch.logsumexp(lanes, 1)
    right(t, run, "lse_ptr", lse, "the log-sum-exp of each row", known, overflow)
    of_lane = lanes.view(rows, -1, block).sum(1).gather(1, (targets % block)[:, None])[:, 0]
    known = {
        "the loss has the wrong sign: it is lse - the logit of the target": -loss,
        "the logit of the target is read in row 0: row i begins at i * vocab": lse - logits[0, targets],
        NUMBER_OF_A_LANE: lse - of_lane * (targets < block),
        "the logit of the target is missing: the loss is lse - x[target]": lse,
        "loss_ptr has the logit of the target: the loss is lse - x[target]": lse - loss,
    }
    right(t, run, "loss_ptr", loss, "the loss of each row", known)
    return run


def overlapping(logits: Tensor, block: int, blocks: int) -> Tensor:
    """The log-sum-exp of each row if the blocks begin at the words 0, 1, 2, ..., ``blocks`` - 1."""
    word = torch.arange(logits.shape[1])
    times = (word.clamp(max=blocks - 1) - (word - block + 1).clamp(min=0) + 1).clamp(min=0)
    return torch.logsumexp(logits.double() + times.double().log(), 1).float()


@check("loss", points=2)
def check_loss(student, t):
    "Loss and log-sum-exp, over several blocks"
    loss_run(student, t, growing(t, t.integer(2, 4), 16 * t.integer(3, 5), 16), 16)


@check("loss", points=1)
def check_loss_sizes(student, t):
    "Any size of the vocabulary"
    for vocab in (t.integer(33, 47), t.integer(5, 15)):
        loss_run(student, t, growing(t, 3, vocab, 16) - 8, 16, overflow=A_MAXIMUM_OF_A_LANE)


@check("loss", points=1)
def check_loss_large(student, t):
    "Large logits do not overflow, and a row can be far below 0"
    loss_run(student, t, 100 + 10 * growing(t, 3, 48, 16).abs(), 16, overflow=OVERFLOW)
    loss_run(student, t, growing(t, 3, 48, 16) - t.integer(200, 300), 16, overflow=BEGINS_AT_MINUS_INF)


@check("loss", points=1)
def check_loss_traffic(student, t):
    "The logits are read once; small blocks are enough"
    block, rows = t.choice((16, 32)), t.integer(2, 3)
    # A row is far more than what a program needs. Its maximum grows a few times.
    logits = growing(t, rows, block * t.integer(40, 44), 10 * block)
    run = loss_run(student, t, logits, block)
    why = "maximum and sum come from one pass, and the logit of the target is one element"
    moves(t, run, "logits_ptr", logits.nbytes + 4 * rows, why)
    why = "a row of the vocabulary does not fit into the registers of a program, in one tile or in many"
    holds_small_tiles(t, run, block, why, together=16 * block)


# -- loss_backward


def loss_backward_run(
    student, t, rows: int, vocab: int, block: int = 16, dtype: torch.dtype = torch.float32
) -> Launched:
    """The gradient of the logits, written over them, compared."""
    logits = (2 * t.normal(rows, vocab)).to(dtype)
    targets, grad = t.integers(0, vocab - 1, rows), 0.25 + t.normal(rows).abs()
    want, of_row = twins.cross_entropy_gradient(grad, logits, targets), grad[:, None]
    one_hot, of_lane = ((torch.arange(vocab) % size == targets[:, None]).float() for size in (vocab, block))
    softmax = torch.softmax(logits.float(), 1)
    mistakes = {
        "the gradient is the softmax: subtract 1 at the target": of_row * softmax,
        "grad is ignored: multiply by the gradient of the loss of this row": want / of_row,
        "the gradient has the wrong sign: it is softmax - 1 at the target": -want,
        "1 is subtracted after the product with grad: it belongs to the softmax": of_row * softmax - one_hot,
        "grad is read for row 0 only: grad_ptr + row": want / of_row * grad[0],
        NUMBER_OF_A_LANE: of_row * (softmax - of_lane),
    }
    args = {"grad_ptr": grad, "logits_ptr": logits, "targets_ptr": targets}
    args |= {"lse_ptr": cross_entropy(logits, targets)[1], "vocab": vocab, "BLOCK": block}
    run = launched(student, t, scenarios.text_of_loss_backward, (rows,), args, {"logits_ptr": vocab})
    right(t, run, "logits_ptr", want, "the gradient of the logits", mistakes)
    return run


@check("loss_backward", points=2)
def check_loss_gradient(student, t):
    "The gradient of the logits replaces them"
    loss_backward_run(student, t, t.integer(2, 4), 16 * t.integer(2, 3))


@check("loss_backward", points=1)
def check_loss_gradient_sizes(student, t):
    "Any size of the vocabulary, and 16-bit logits"
    vocab = t.integer(17, 31)
    # One row first: a store without a mask leaves the tensor, and its line is named.
    loss_backward_run(student, t, 1, vocab)
    for dtype in t.shuffled([torch.float32, torch.bfloat16]):
        loss_backward_run(student, t, 3, t.integer(33, 60), block=32, dtype=dtype)


@check("loss_backward", points=1)
def check_loss_gradient_traffic(student, t):
    "The logits are read once and written once"
    run = loss_backward_run(student, t, t.integer(2, 4), 48)
    nbytes = run.args["logits_ptr"].nbytes
    moves(t, run, "logits_ptr", 2 * nbytes, "lse is known, so one pass is enough")
