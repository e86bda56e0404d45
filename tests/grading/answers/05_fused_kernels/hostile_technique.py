# Right values without the technique: one program for all, a row that is kept, accesses that a GPU multiplies.

# == loss_of_a_kept_row: a tuple of tiles holds the row, which is read once and passed twice
# %% loss
@triton.jit
def loss_kernel(logits_ptr, targets_ptr, loss_ptr, lse_ptr, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    kept = (tl.full((BLOCK,), float("-inf"), tl.float32),)
    tiles = kept
    largest = float("-inf")
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * vocab + column, mask=column < vocab, other=float("-inf"))
        largest = tl.maximum(largest, tl.max(x, 0))
        tiles = (x, tiles)
    total = 0.0
    for start in range(0, vocab, BLOCK):
        x, tiles = tiles
        total += tl.sum(tl.exp(x - largest), 0)
    lse = largest + tl.log(total)
    target = tl.load(targets_ptr + row)
    tl.store(lse_ptr + row, lse)
    tl.store(loss_ptr + row, lse - tl.load(logits_ptr + row * vocab + target))


# == attention_of_kept_scores: a tuple of tiles holds the scores of all keys, and the values
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
    head = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    inside = row < queries
    q = tl.load(q_ptr + head * q_head + row[:, None] * q_row + d[None, :], mask=inside[:, None], other=0.0)
    end = keys
    if CAUSAL:
        end = tl.minimum(keys, (tl.program_id(0) + 1) * BLOCK_M)
    kept = (0, 0)
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    for start in range(0, end, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)
        exists = (column < keys)[:, None]
        place = head // group * kv_head + column[:, None] * kv_row + d[None, :]
        k = tl.load(k_ptr + place, mask=exists, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        scores = tl.where((column < keys)[None, :], scores, float("-inf"))
        if CAUSAL:
            scores = tl.where(column[None, :] <= row[:, None], scores, float("-inf"))
        largest = tl.maximum(largest, tl.max(scores, 1))
        kept = (scores, kept)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    blocks = tl.cdiv(end, BLOCK_N)
    for i in range(0, blocks):
        scores, kept = kept
        column = (blocks - 1 - i) * BLOCK_N + tl.arange(0, BLOCK_N)
        place = head // group * kv_head + column[:, None] * kv_row + d[None, :]
        v = tl.load(v_ptr + place, mask=(column < keys)[:, None], other=0.0)
        weights = tl.exp(scores - largest[:, None])
        total += tl.sum(weights, 1)
        acc += tl.dot(weights.to(v.dtype), v)
    divisor = tl.where(total > 0, total, 1.0)
    tl.store(
        o_ptr + (head * queries + row)[:, None] * D + d[None, :], acc / divisor[:, None], mask=inside[:, None]
    )
    tl.store(lse_ptr + head * queries + row, largest + tl.log(total), mask=inside)


# == add_by_program_0: the first program of the grid does it all
# %% add
@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    if tl.program_id(0) == 0:
        for start in range(0, n, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            mask = offsets < n
            x = tl.load(x_ptr + offsets, mask=mask)
            y = tl.load(y_ptr + offsets, mask=mask)
            tl.store(out_ptr + offsets, x + y, mask=mask)


# == add_with_strides: neighbouring lanes read elements that are far apart, eight times the bytes on a GPU
# %% add {"earns": 2}
@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) + tl.num_programs(0) * tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, x + y, mask=mask)


# == loss_by_program_0: the first program has all rows
# %% loss
@triton.jit
def loss_kernel(logits_ptr, targets_ptr, loss_ptr, lse_ptr, vocab, BLOCK: tl.constexpr):
    if tl.program_id(0) == 0:
        for row in range(0, tl.num_programs(0)):
            largest = float("-inf")
            total = 0.0
            for start in range(0, vocab, BLOCK):
                column = start + tl.arange(0, BLOCK)
                x = tl.load(logits_ptr + row * vocab + column, mask=column < vocab, other=float("-inf"))
                new = tl.maximum(largest, tl.max(x, 0))
                total = total * tl.exp(largest - new) + tl.sum(tl.exp(x - new), 0)
                largest = new
            lse = largest + tl.log(total)
            target = tl.load(targets_ptr + row)
            tl.store(lse_ptr + row, lse)
            tl.store(loss_ptr + row, lse - tl.load(logits_ptr + row * vocab + target))


# == linear_loss_with_typed_blocks: the block sizes 16, 32 and 16 are typed in
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
    row = tl.program_id(0) * 16 + tl.arange(0, 16)
    inside = row < rows
    targets = tl.load(targets_ptr + row, mask=inside, other=0)
    largest = tl.full((16,), float("-inf"), tl.float32)
    total = tl.zeros((16,), tl.float32)
    chosen = tl.zeros((16,), tl.float32)
    for start in range(0, vocab, 32):
        word = start + tl.arange(0, 32)
        logits = tl.zeros((16, 32), tl.float32)
        for begin in range(0, hidden, 16):
            column = begin + tl.arange(0, 16)
            real = (column < hidden)[None, :]
            x = tl.load(
                x_ptr + row[:, None] * hidden + column[None, :], mask=inside[:, None] & real, other=0.0
            )
            w = tl.load(
                w_ptr + word[:, None] * hidden + column[None, :],
                mask=(word < vocab)[:, None] & real,
                other=0.0,
            )
            logits += tl.dot(x, tl.trans(w))
        logits = tl.where((word < vocab)[None, :], logits, float("-inf"))
        chosen += tl.sum(tl.where(word[None, :] == targets[:, None], logits, 0.0), 1)
        new = tl.maximum(largest, tl.max(logits, 1))
        total = total * tl.exp(largest - new) + tl.sum(tl.exp(logits - new[:, None]), 1)
        largest = new
    lse = largest + tl.log(total)
    tl.store(lse_ptr + row, lse, mask=inside)
    tl.store(loss_ptr + row, lse - chosen, mask=inside)
