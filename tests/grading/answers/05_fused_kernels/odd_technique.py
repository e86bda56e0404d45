# Right and unusual kernels.

# == add_with_a_grid_stride: a loop over the blocks of a program, of which there is one
# %% add
@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        lane = start + tl.arange(0, BLOCK)
        y = tl.load(y_ptr + lane, mask=lane < n, other=0.0)
        tl.store(out_ptr + lane, tl.load(x_ptr + lane, mask=lane < n, other=0.0) + y, mask=lane < n)


# == add_in_halves: two halves of a block, one after the other
# %% add
@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    for half in range(0, 2):
        lane = tl.program_id(0) * BLOCK + half * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
        x = tl.load(x_ptr + lane, mask=lane < n, other=0.0)
        tl.store(out_ptr + lane, x + tl.load(y_ptr + lane, mask=lane < n, other=0.0), mask=lane < n)


# == loss_by_lanes: a maximum and a sum for each lane, merged at the end
# %% loss
@triton.jit
def loss_kernel(logits_ptr, targets_ptr, loss_ptr, lse_ptr, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    here = logits_ptr + row * vocab
    tops = tl.full((BLOCK,), -1e30, tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        word = start + tl.arange(0, BLOCK)
        x = tl.load(here + word, mask=word < vocab, other=-1e30)
        new = tl.maximum(tops, x)
        sums = sums * tl.exp(tops - new) + tl.where(word < vocab, tl.exp(x - new), 0.0)
        tops = new
    top = tl.max(tops, 0)
    lse = top + tl.log(tl.sum(sums * tl.exp(tops - top), 0))
    tl.store(lse_ptr + row, lse)
    tl.store(loss_ptr + row, lse - tl.load(here + tl.load(targets_ptr + row)))


# == loss_with_a_pair: maximum and sum are a tuple, which the loop replaces by one of its form
# %% loss
@triton.jit
def loss_kernel(logits_ptr, targets_ptr, loss_ptr, lse_ptr, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    state = (float("-inf"), 0.0)
    for start in range(0, vocab, BLOCK):
        word = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * vocab + word, mask=word < vocab, other=float("-inf"))
        top, total = state
        new = tl.maximum(top, tl.max(x, 0))
        state = (new, total * tl.exp(top - new) + tl.sum(tl.exp(x - new), 0))
    top, total = state
    lse = top + tl.log(total)
    tl.store(lse_ptr + row, lse)
    tl.store(loss_ptr + row, lse - tl.load(logits_ptr + row * vocab + tl.load(targets_ptr + row)))


# == linear_loss_transposed: words are the rows of the tile, powers of two
# %% linear_loss
@triton.jit
def linear_loss_kernel(
    x_ptr,
    w_ptr,
    targets_ptr,
    loss_ptr,
    lse_ptr,
    rows,
    hidden,
    vocab,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    targets = tl.load(targets_ptr + row, mask=row < rows, other=0)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    own = tl.zeros((BLOCK_M,), tl.float32)
    for first in range(0, tl.cdiv(vocab, BLOCK_V)):
        word = first * BLOCK_V + tl.arange(0, BLOCK_V)
        tile = tl.zeros((BLOCK_V, BLOCK_M), tl.float32)
        for start in range(0, hidden, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            w = tl.load(
                w_ptr + word[:, None] * hidden + k[None, :],
                mask=(word < vocab)[:, None] & (k < hidden)[None, :],
                other=0.0,
            )
            x = tl.load(
                x_ptr + row[:, None] * hidden + k[None, :],
                mask=(row < rows)[:, None] & (k < hidden)[None, :],
                other=0.0,
            )
            tile = tl.dot(w, tl.trans(x), tile)
        own += tl.sum(tl.where(word[:, None] == targets[None, :], tile, 0.0), 0)
        tile = tl.where((word < vocab)[:, None], tile, float("-inf"))
        new = tl.maximum(top, tl.max(tile, 0))
        total = total * tl.exp2((top - new) * 1.4426950408889634) + tl.sum(
            tl.exp2((tile - new[None, :]) * 1.4426950408889634), 0
        )
        top = new
    tl.store(lse_ptr + row, top + tl.log(total), mask=row < rows)
    tl.store(loss_ptr + row, top + tl.log(total) - own, mask=row < rows)


# == attention_transposed: keys are the rows of the tile of scores
# %% attention
@triton.jit
def attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    lse_ptr,
    q_head,
    q_row,
    kv_head,
    kv_row,
    queries,
    keys,
    group,
    scale,
    CAUSAL: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    first, head = tl.program_id(0) * BLOCK_M, tl.program_id(1)
    row = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    inside = row < queries
    q = tl.load(q_ptr + head * q_head + row[:, None] * q_row + d[None, :], mask=inside[:, None], other=0.0)
    across = tl.trans(q)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    last = tl.minimum(keys, first + BLOCK_M) if CAUSAL else keys
    for start in range(0, last, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        where = (head // group) * kv_head + key[:, None] * kv_row + d[None, :]
        k = tl.load(k_ptr + where, mask=(key < keys)[:, None], other=0.0)
        v = tl.load(v_ptr + where, mask=(key < keys)[:, None], other=0.0)
        seen = (key < keys)[:, None] & (row >= 0)[None, :]
        if CAUSAL:
            seen = seen & (key[:, None] <= row[None, :])
        s = tl.where(seen, tl.dot(k, across) * scale, float("-inf"))
        new = tl.maximum(m, tl.max(s, 0))
        p = tl.exp(s - new[None, :])
        grown = tl.exp(m - new)
        l = l * grown + tl.sum(p, 0)
        acc = tl.dot(tl.trans(p).to(v.dtype), v, acc * grown[:, None])
        m = new
    out = acc / tl.where(l > 0, l, 1.0)[:, None]
    tl.store(o_ptr + (head * queries + row)[:, None] * D + d[None, :], out, mask=inside[:, None])
    tl.store(lse_ptr + head * queries + row, m + tl.log(l), mask=inside)


# == norm_by_a_mean: the sum of squares is divided at the end, x is loaded once
# %% norm
@triton.jit
def rms_norm_kernel(x_ptr, w_ptr, y_ptr, rstd_ptr, columns, eps, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    at = tl.program_id(0) * columns + lane
    x = tl.load(x_ptr + at, mask=lane < columns, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x / columns, 0) + eps)
    w = tl.load(w_ptr + lane, mask=lane < columns, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, w * (rstd * x), mask=lane < columns)
    tl.store(rstd_ptr + tl.program_id(0), rstd)
