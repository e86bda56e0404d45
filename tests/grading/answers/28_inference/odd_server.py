# Right answers with another inside.


# == fused_attention: PyTorch's attention with a mask

# %% cache
# - scores = rotate(q, positions) @ every_key.transpose(2, 3) / head_dim**0.5
# - hidden = torch.arange(past + new) > positions[:, None]
# - shares = scores.masked_fill(hidden, float("-inf")).softmax(-1)
# - out = (shares @ every_value).transpose(1, 2).flatten(2)
# + seen = torch.arange(past + new) <= positions[:, None]
# + attend = torch.nn.functional.scaled_dot_product_attention
# + out = attend(rotate(q, positions), every_key, every_value, attn_mask=seen).transpose(1, 2).flatten(2)


# == owners_are_sets: each block knows its sequences, and the lowest free block is taken


# %% pool
class BlockPool:
    def __init__(self, blocks, size):
        self.size, self.users, self.seqs = size, [set() for _ in range(blocks)], {}

    def append(self, seq):
        blocks, length = self.seqs.get(seq, ([], 0))
        source = None
        if length % self.size == 0 or len(self.users[blocks[-1]]) > 1:
            block = next((b for b, users in enumerate(self.users) if not users), None)
            if block is None:
                raise MemoryError
            if length % self.size:
                source = blocks[-1]
                self.users[source].discard(seq)
                blocks = blocks[:-1]
            blocks = blocks + [block]
            self.users[block].add(seq)
        self.seqs[seq] = (blocks, length + 1)
        return [blocks[-1], length % self.size, source]

    def fork(self, parent, child):
        self.seqs[child] = self.seqs[parent]
        for block in self.seqs[child][0]:
            self.users[block].add(child)

    def release(self, seq):
        for block in self.seqs.pop(seq)[0]:
            self.users[block].discard(seq)

    def table(self, seq):
        return tuple(self.seqs[seq][0])

    def free(self):
        return sum(not users for users in self.users)


# == slot_by_slot: one key at a time, with a running maximum


# %% paged
def paged_attention(q, keys, values, tables, lengths):
    out = torch.zeros_like(q)
    size, group = keys.shape[1], q.shape[1] // keys.shape[2]
    for row, (table, length) in enumerate(zip(tables, lengths)):
        for head in range(q.shape[1]):
            best, total, mean = float("-inf"), 0.0, torch.zeros(q.shape[2], dtype=q.dtype)
            for place in range(length):
                where = table[place // size], place % size, head // group
                score = float(q[row, head] @ keys[where]) / q.shape[2] ** 0.5
                new = max(best, score)
                old, share = torch.tensor([best - new, score - new], dtype=q.dtype).exp().tolist()
                total, mean, best = total * old + share, mean * old + share * values[where], new
            out[row, head] = mean / total
    return out


# == another_order: the lists name the same requests from the last to the first

# %% plan
# - return {name: [request["id"] for request in chosen] for name, chosen in lists.items()}
# + return {name: tuple(request["id"] for request in reversed(chosen)) for name, chosen in lists.items()}


# == two_passes: the decoding requests first, in a dict


# %% chunks
def chunks(requests, budget):
    counts = {place: 1 for place, r in enumerate(requests) if r["done"] == r["prompt"]}
    left = budget - len(counts)
    for place, r in enumerate(requests):
        if place not in counts:
            counts[place] = min(left, r["prompt"] - r["done"])
            left -= counts[place]
    return [counts[place] for place in range(len(requests))]


# == all_draws_first: the uniform numbers are drawn together, and the residual by its cumulative sum


# %% verify
def verify(p, q, drafted, generator):
    uniforms = torch.rand(len(drafted) + 1, generator=generator, dtype=torch.float64)
    taken = [bool(u * q[i, x] < p[i, x]) for i, (u, x) in enumerate(zip(uniforms, drafted))]
    kept = taken.index(False) if False in taken else len(drafted)
    weights = p[kept] if kept == len(drafted) else torch.relu(p[kept] - q[kept])
    ends = weights.cumsum(0)
    return drafted[:kept] + [int(torch.searchsorted(ends, uniforms[-1] * ends[-1], right=True))]


# == shorter_at_the_end: no more tokens are drafted than the text needs

# %% speculate
# - for _ in range(gamma):
# + short = min(gamma, len(prompt) + count - len(tokens) - 1)
# + for _ in range(short):
# - p = target(tokens + drafted, gamma + 1)
# - tokens += verify(p, torch.stack(q), drafted, generator)
# + p = target(tokens + drafted, short + 1)
# + tokens += verify(p, torch.stack(q) if q else p[:0], drafted, generator)
