# Right and unusual rings and exchanges.

# == ring_by_isend: plain isend and irecv, blocks travel to the previous rank
# %% ring
def ring_forward(q, k, v, positions):
    rank, world = dist.get_rank(), dist.get_world_size()
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -math.inf)
    kv, owner = torch.cat((k, v), -1), rank
    for step in range(world):
        works = []
        if step < world - 1:
            arriving = torch.empty_like(kv)
            works = [dist.irecv(arriving, (rank + 1) % world), dist.isend(kv, (rank - 1) % world)]
        if (part := visible(positions[rank], positions[owner])) is not None:
            first, last = part
            mask = positions[rank][first:, None] >= positions[owner][:last]
            keys, values = kv[:, :, :last].chunk(2, -1)
            block = block_attention(q[:, :, first:], keys, values, mask)
            out[:, :, first:], lse[:, :, first:] = merge(out[:, :, first:], lse[:, :, first:], *block)
        for work in works:
            work.wait()
        if works:
            kv, owner = arriving, (owner + 1) % world
    return out, lse


# %% backward
def ring_backward(grad, q, k, v, out, lse, positions):
    rank, world = dist.get_rank(), dist.get_world_size()
    dq, kv = torch.zeros_like(q), torch.stack((k, v))
    dkv = torch.zeros_like(kv)
    for step in range(world):
        owner = (rank + step) % world
        if (part := visible(positions[rank], positions[owner])) is not None:
            first, last = part
            mask = positions[rank][first:, None] >= positions[owner][:last]
            block = kv[0][:, :, :last], kv[1][:, :, :last], out[:, :, first:], lse[:, :, first:], mask
            terms = block_backward(grad[:, :, first:], q[:, :, first:], *block)
            dq[:, :, first:] += terms[0]
            dkv[:, :, :, :last] += torch.stack(terms[1:])
        for name in ("kv", "dkv") if step < world - 1 else ("dkv",):
            sent = kv if name == "kv" else dkv
            arriving = torch.empty_like(sent)
            works = [dist.isend(sent, (rank - 1) % world), dist.irecv(arriving, (rank + 1) % world)]
            for work in works:
                work.wait()
            kv, dkv = (arriving, dkv) if name == "kv" else (kv, arriving)
    return dq, dkv[0], dkv[1]


# == ring_by_all_to_all: a shift is an uneven all-to-all
# %% ring
def _shifted(x):
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = [[x.numel() if other == (rank + way) % world else 0 for other in range(world)] for way in (1, -1)]
    arriving = torch.empty_like(x)
    dist.all_to_all_single(arriving.view(-1), x.contiguous().view(-1), sizes[1], sizes[0])
    return arriving


def ring_forward(q, k, v, positions):
    rank, world = dist.get_rank(), dist.get_world_size()
    out, lse, kv = torch.zeros_like(q), q.new_full(q.shape[:-1], -math.inf), torch.stack((k, v))
    for step in range(world):
        owner = (rank - step) % world
        if (part := visible(positions[rank], positions[owner])) is not None:
            first, last = part
            mask = positions[rank][first:, None] >= positions[owner][:last]
            block = block_attention(q[:, :, first:], kv[0][:, :, :last], kv[1][:, :, :last], mask)
            out[:, :, first:], lse[:, :, first:] = merge(out[:, :, first:], lse[:, :, first:], *block)
        kv = _shifted(kv) if step < world - 1 else kv
    return out, lse


# == ulysses_by_lists: the lists of all_to_all
# %% ulysses
class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parts):
        received = [torch.empty_like(part, memory_format=torch.contiguous_format) for part in parts]
        dist.all_to_all(received, [part.contiguous() for part in parts])
        return torch.stack(received)

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad)


def sequence_to_heads(x):
    parts = torch.stack(x.chunk(dist.get_world_size(), 1))
    return torch.cat(AllToAll.apply(parts).unbind(), 2)


def heads_to_sequence(x):
    parts = torch.stack(x.chunk(dist.get_world_size(), 2))
    return torch.cat(AllToAll.apply(parts).unbind(), 1)


def ulysses_attention(q, k, v):
    q, k, v = map(sequence_to_heads, (q, k, v))
    scores = (q @ k.mT) / q.shape[-1] ** 0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return heads_to_sequence(scores.masked_fill(hidden, -math.inf).softmax(-1) @ v)


# == ulysses_at_once: q, k and v in one exchange
# %% ulysses
class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parts):
        return exchanged(parts)

    @staticmethod
    def backward(ctx, grad):
        return exchanged(grad)


def sequence_to_heads(x):
    parts = x.unflatten(1, (dist.get_world_size(), -1)).movedim(1, 0)
    return AllToAll.apply(parts).permute(1, 2, 0, 3, 4).flatten(2, 3)


def heads_to_sequence(x):
    parts = x.unflatten(2, (dist.get_world_size(), -1)).movedim(2, 0)
    return AllToAll.apply(parts).movedim(0, 1).flatten(1, 2)


def ulysses_attention(q, k, v):
    batch = len(q)
    q, k, v = sequence_to_heads(torch.cat((q, k, v))).split(batch)
    return heads_to_sequence(F.scaled_dot_product_attention(q, k, v, is_causal=True))


# == loss_by_log_softmax: the shifted sequence is cut, the loss is gathered by hand
# %% loss
def shard_batch(tokens, cos, sin, own_positions):
    shifted = tokens.roll(-1, 1)
    return tuple(each.index_select(1, own_positions) for each in (tokens, shifted)) + tuple(
        each.index_select(0, own_positions) for each in (cos, sin)
    )


def context_loss(logits, targets):
    valid = targets.ne(-100)
    count = valid.sum().to(torch.float64)
    dist.all_reduce(count)
    chosen = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return -(chosen * valid).sum() / count.item()


# == block_by_softmax: the weights by softmax, the log-sum-exp by hand
# %% block
def block_attention(q, k, v, mask):
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
    scores = torch.where(mask, scores, torch.tensor(-math.inf, dtype=q.dtype))
    largest = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).min)
    total = (scores - largest).exp().sum(-1, keepdim=True)
    return scores.softmax(-1).nan_to_num(0.0) @ v, (largest + total.log()).squeeze(-1)
