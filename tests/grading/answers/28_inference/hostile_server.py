# Answers that compute the past again, share nothing, or draft nothing.


# == past_forgotten: attention over the new tokens alone, with the cache passed on

# %% cache {"earns": "less"}
# - scores = rotate(q, positions) @ every_key.transpose(2, 3) / head_dim**0.5
# + every_key, every_value = every_key[:, :, past:], every_value[:, :, past:]
# + scores = rotate(q, positions) @ every_key.transpose(2, 3) / head_dim**0.5
# - hidden = torch.arange(past + new) > positions[:, None]
# + hidden = torch.arange(new) > torch.arange(new)[:, None]


# == of_the_name: the numbers of Llama 3.3 70B


# %% memory {"earns": 0}
def cache_bytes(config, tokens):
    return 327680 * tokens


def intensity(config, batch, new, past):
    return float(batch)


def largest_batch(config, memory, tokens):
    return 4


# == a_region_each: every sequence has a fixed region of the pool, and a fork copies nothing


# %% pool {"earns": "less"}
class BlockPool:
    def __init__(self, blocks, size):
        self.blocks, self.size, self.lengths, self.regions = blocks, size, {}, {}

    def append(self, seq):
        region = self.regions.setdefault(seq, len(self.regions) * 8)
        length = self.lengths.get(seq, 0)
        self.lengths[seq] = length + 1
        return region + length // self.size, length % self.size, None

    def fork(self, parent, child):
        self.regions[child], self.lengths[child] = self.regions[parent], self.lengths[parent]

    def release(self, seq):
        del self.lengths[seq]

    def table(self, seq):
        first = self.regions[seq]
        return list(range(first, first - (-self.lengths[seq] // self.size)))

    def free(self):
        return self.blocks - sum(-(-length // self.size) for length in self.lengths.values())


# == zeros_for_nan: the unused slots become zeros, and take part in the softmax

# %% paged {"earns": 2}
# - memory[table].flatten(0, 1)[:length].repeat_interleave(group, 1)
# + memory[table].flatten(0, 1).nan_to_num().repeat_interleave(group, 1)


# == one_at_a_time: one request runs until it ends


# %% plan {"earns": "less"}
def plan(requests, free, size, most, eos):
    ended = [r for r in requests if eos in r["output"] or len(r["output"]) >= r["limit"]]
    rest = [r for r in requests if r not in ended]
    return {"finish": [r["id"] for r in ended], "preempt": [], "run": [r["id"] for r in rest[:1]]}


# == everything_at_once: no budget


# %% chunks {"earns": "less"}
def chunks(requests, budget):
    return [max(request["prompt"] - request["done"], 1) for request in requests]


# == sampled_from_the_target: the drafted tokens are not looked at, and the text is still the target's


# %% verify {"earns": 0}
def verify(p, q, drafted, generator):
    return [int(torch.multinomial(p[0], 1, generator=generator))]


# == never_drafts: one call of the target for each token

# %% speculate {"earns": "less"}
# - while len(tokens) < len(prompt) + count:
# + while len(tokens) < len(prompt) + count:
# +     p = target(tokens, 1)
# +     tokens.append(int(torch.multinomial(p[0], 1, generator=generator)))
# + while len(tokens) < len(prompt) + count:


# == drafts_and_ignores: the draft is called, and each token is the target's

# %% speculate {"earns": "less"}
# - tokens += verify(p, torch.stack(q), drafted, generator)
# + tokens.append(int(torch.multinomial(p[0], 1, generator=generator)))
