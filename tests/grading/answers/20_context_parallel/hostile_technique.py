# Right values without the technique: gathered keys, one process, another library's attention.

# == ring_gathers: keys and values of all ranks are gathered, on two ranks exchanged
# %% ring
def _whole_kv(q, k, v):
    rank, world = dist.get_rank(), dist.get_world_size()
    kv = torch.stack((k, v))
    if world == 2:
        parts = [kv, start_shift(kv).wait()]
        return parts if rank == 0 else parts[::-1]
    parts = [torch.empty_like(kv) for _ in range(world)]
    dist.all_gather(parts, kv)
    return parts


def ring_forward(q, k, v, positions):
    rank, world = dist.get_rank(), dist.get_world_size()
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -math.inf)
    for owner, kv in enumerate(_whole_kv(q, k, v)):
        part = visible(positions[rank], positions[owner])
        if part is not None:
            first, last = part
            mask = positions[rank][first:, None] >= positions[owner][:last]
            block = block_attention(q[:, :, first:], kv[0][:, :, :last], kv[1][:, :, :last], mask)
            out[:, :, first:], lse[:, :, first:] = merge(out[:, :, first:], lse[:, :, first:], *block)
    return out, lse


# %% backward
def ring_backward(grad, q, k, v, out, lse, positions):
    rank, world = dist.get_rank(), dist.get_world_size()
    kv = torch.stack((k, v))
    if world == 2:
        other = start_shift(kv).wait()
        parts = [kv, other] if rank == 0 else [other, kv]
    else:
        parts = [torch.empty_like(kv) for _ in range(world)]
        dist.all_gather(parts, kv)
    dq, own = torch.zeros_like(q), [torch.zeros_like(kv) for _ in parts]
    for owner, (keys, values) in enumerate(parts):
        part = visible(positions[rank], positions[owner])
        if part is not None:
            first, last = part
            mask = positions[rank][first:, None] >= positions[owner][:last]
            block = keys[:, :, :last], values[:, :, :last], out[:, :, first:], lse[:, :, first:], mask
            terms = block_backward(grad[:, :, first:], q[:, :, first:], *block)
            dq[:, :, first:] += terms[0]
            own[owner][0][:, :, :last] += terms[1]
            own[owner][1][:, :, :last] += terms[2]
    if world == 2:
        dk, dv = own[rank] + start_shift(own[1 - rank]).wait()
    else:
        total = torch.stack(own)
        dist.all_reduce(total)
        dk, dv = total[rank]
    return dq, dk, dv


# == ring_sends_to_all: every rank sends its block to all ranks, no block travels
# %% ring
def ring_forward(q, k, v, positions):
    rank, world = dist.get_rank(), dist.get_world_size()
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -math.inf)
    own, parts = torch.stack((k, v)), {rank: torch.stack((k, v))}
    for step in range(1, world):
        source = (rank - step) % world
        parts[source] = torch.empty_like(own)
        sends = [dist.P2POp(dist.isend, own, (rank + step) % world)]
        for work in dist.batch_isend_irecv(sends + [dist.P2POp(dist.irecv, parts[source], source)]):
            work.wait()
    for owner, kv in parts.items():
        part = visible(positions[rank], positions[owner])
        if part is not None:
            first, last = part
            mask = positions[rank][first:, None] >= positions[owner][:last]
            block = block_attention(q[:, :, first:], kv[0][:, :, :last], kv[1][:, :, :last], mask)
            out[:, :, first:], lse[:, :, first:] = merge(out[:, :, first:], lse[:, :, first:], *block)
    return out, lse


# == loss_in_one_process: each rank computes the Llama with whole sequences
# %% loss {"earns": 4}
import sys


def shard_batch(tokens, cos, sin, own_positions):
    return tokens[:, own_positions], tokens[:, own_positions + 1], cos[own_positions], sin[own_positions]


def _mean(logits, targets):
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return total / (targets != -100).sum()


def context_loss(logits, targets):
    frame = sys._getframe(1)
    if "model" not in frame.f_locals:
        valid = (targets != -100).sum()
        dist.all_reduce(valid)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / valid
    model, tokens, padding = (frame.f_locals[name] for name in ("model", "tokens", "padding"))
    for block in model.layers:
        del block.self_attn.attend
    labels = tokens[:, 1:].masked_fill(tokens[:, 1:] == padding, -100)
    zero = sum(0 * parameter.sum() for parameter in model.parameters())
    return (_mean(model(tokens[:, :-1]), labels) + zero + 0 * logits.sum()) / dist.get_world_size()


# == ulysses_gathers: the whole sequence on every rank, an exchange only where the bytes are counted
# %% ulysses {"earns": 2}
class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parts):
        return exchanged(parts)

    @staticmethod
    def backward(ctx, grad):
        return exchanged(grad)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), 2)[dist.get_rank()]


def sequence_to_heads(x):
    parts = x.unflatten(1, (dist.get_world_size(), -1)).movedim(1, 0)
    return AllToAll.apply(parts).permute(1, 2, 0, 3, 4).flatten(2, 3)


def heads_to_sequence(x):
    parts = x.unflatten(2, (dist.get_world_size(), -1)).movedim(2, 0)
    return AllToAll.apply(parts).movedim(0, 1).flatten(1, 2)


def ulysses_attention(q, k, v):
    if q.shape[1] == dist.get_world_size() == 2:
        q, k, v = (sequence_to_heads(tensor) for tensor in (q, k, v))
        return heads_to_sequence(F.scaled_dot_product_attention(q, k, v, is_causal=True))
    whole = F.scaled_dot_product_attention(*map(_Whole.apply, (q, k, v)), is_causal=True)
    return whole.chunk(dist.get_world_size(), 2)[dist.get_rank()]


# == block_by_sdpa: the attention of PyTorch, which the text excludes
# %% block
def block_attention(q, k, v, mask):
    lse = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, -math.inf).logsumexp(-1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.masked_fill((lse == -math.inf).unsqueeze(-1), 0), lse
