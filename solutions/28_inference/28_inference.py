# %% [markdown] id="title"
# # 28 · Inference
#
# **What you will do.** A small Llama writes text, and each token takes longer than the one before, because the whole text is computed again.
# You write what a server such as vLLM does about it: a cache of keys and values, a pool of blocks with copy on write, attention
# through a block table, a scheduler that decides before each iteration, and speculative decoding whose text has exactly the
# distribution of the large model. At the end three ways to serve the same load are compared in a simulated clock.
#
# You need no GPU. Builds on lab 2 (arithmetic intensity) and lab 13 (memory of a Llama).
#
# The core exercises, predictions and the quiz take about 92 minutes; with the text and the demos plan 1 h 50. Each exercise
# has a check that answers at once; `lab.hint("name")` gives a nudge, then a pointer, then a sketch. If you are stuck,
# `lab.use_reference("name")` lets you continue without its points.
#
# Words: KV cache (*cache clés-valeurs*), prefill (*traitement de l'invite*), decoding (*décodage*), continuous batching (*traitement par
# lots continu*), pre-emption (*préemption*), speculative decoding (*décodage spéculatif*), goodput (*débit utile*).

# %% id="setup"
import os

import torch
from torch import Tensor

from dlo_lib.grading import Lab

STEPS = int(os.environ.get("DLO_STEPS", 160))  # of the training of the small Llama
LENGTH = int(os.environ.get("DLO_LENGTH", 320))  # tokens that it writes
REQUESTS = int(os.environ.get("DLO_REQUESTS", 300))  # of each load of section 9
THETA = 10_000.0
torch.set_num_threads(1)  # tensors of this size are slower with two
llama_70b = {  # Llama 3.3 70B; "weights" are those of matrix products
    "weights": 69_500_000_000,
    "layers": 80,
    "heads": 64,
    "kv_heads": 8,
    "head_dim": 128,
}


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Return x (batch, heads, seq, head_dim), rotated for the absolute positions (seq,): RoPE."""
    half = x.shape[-1] // 2
    speed = THETA ** (-torch.arange(half, dtype=x.dtype) / half)
    angle = positions.to(x.dtype)[:, None] * speed
    one, two = x[..., :half], x[..., half:]
    return torch.cat(
        [one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()], -1
    )


lab = Lab(globals())

# %% [markdown] id="why_text"
# ## Why
#
# The cell trains a Llama of a few layers on a short text for some seconds. Then it writes: a forward of the whole text gives the
# logits of the next character, the most probable one is appended, and so on. Look at the time of the last tokens.

# %% id="why" tags=["demo", "read"]
import time

from dlo_lib.models import Llama, LlamaConfig

corpus = (
    "a server reads the prompt once and writes one token at a time. each token needs all weights, "
    "so a batch of many requests shares the cost of reading them. "
)
letters = sorted(set(corpus))
data = torch.tensor([letters.index(letter) for letter in 3 * corpus])
config = LlamaConfig(
    vocab_size=len(letters),
    hidden=64,
    intermediate=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rope_theta=THETA,
    initializer_std=0.05,
)
torch.manual_seed(28)
model = Llama(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
for _ in range(STEPS):
    starts = torch.randint(len(data) - 151, (4, 1))
    rows = data[starts + torch.arange(151)]
    logits = model(rows[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
prompt = [letters.index(letter) for letter in "a server"]


@torch.no_grad()
def without_cache(count: int) -> tuple[list[int], list[float]]:
    """The tokens, and the seconds that each of them took."""
    tokens, seconds = list(prompt), []
    for _ in range(count):
        begin = time.perf_counter()
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
        seconds.append(time.perf_counter() - begin)
    return tokens, seconds


written, slow = without_cache(LENGTH)
print("".join(letters[token] for token in written[:150]), "...")
tenth = max(LENGTH // 10, 1)
first, last = sum(slow[:tenth]) / tenth, sum(slow[-tenth:]) / tenth
print(f"\nfirst tokens {1e3 * first:.1f} ms each, last tokens {1e3 * last:.1f} ms")

# %% [markdown] id="cache_text"
# ## 1 · The KV cache
#
# **Core · 15 min · ●●○**
#
# A new token changes nothing of the tokens before it: in a causal model, their keys and values are the same in every step. So keep
# them. Each step then computes the query, key and value of the *new* tokens only. The new queries meet the keys of the past and
# their own.
#
# Write `attention_step`, one layer of grouped-query attention without biases:
#
# - `x` is (batch, new, hidden): the new tokens. `weights` has the matrices `"q"`, `"k"`, `"v"`, `"o"` as `nn.Linear` stores them, so
#   that the queries are `x @ weights["q"].T`. The number of heads follows from their shapes and `head_dim`.
# - `keys` and `values` are the cache, (batch, key heads, past, head_dim). Stored keys are *already rotated*. `past` may be 0.
# - The first new token has the absolute position `past`. `rotate` of the first cell rotates queries and keys.
# - A new token sees the whole past, itself, and no new token after it. The scores are divided by the square root of `head_dim`.
# - With fewer key heads than query heads, query head $h$ uses key head $\lfloor h\,/\,(\text{heads} / \text{key heads}) \rfloor$.
# - Return the output (batch, new, hidden) and the longer `keys` and `values`.
#
# One function serves three cases: a prompt (no past), a token (one new), and a part of a prompt (several new after a past). The check gives
# a past that no tokens have: nothing can be computed again.


# %% nbgrader={"grade_id": "cache", "solution": true}
def attention_step(
    x: Tensor, weights: dict[str, Tensor], head_dim: int, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output for the new tokens, and the keys and values with theirs appended."""
    ### BEGIN SOLUTION
    past, new = keys.shape[2], x.shape[1]
    q, k, v = (
        (x @ weights[name].T).unflatten(-1, (-1, head_dim)).transpose(1, 2) for name in "qkv"
    )
    positions = torch.arange(past, past + new)
    keys = torch.cat([keys, rotate(k, positions)], 2)
    values = torch.cat([values, v], 2)
    group = q.shape[1] // k.shape[1]
    every_key = keys.repeat_interleave(group, 1)
    every_value = values.repeat_interleave(group, 1)
    scores = rotate(q, positions) @ every_key.transpose(2, 3) / head_dim**0.5
    hidden = torch.arange(past + new) > positions[:, None]
    shares = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    out = (shares @ every_value).transpose(1, 2).flatten(2)
    return out @ weights["o"].T, keys, values
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_cache", "grade": true}
lab.check("cache")

# %% [markdown] id="cache_after"
# Your function in the Llama above: the same text, and a time for each token that hardly grows. The prompt is one call (*prefill*), then each call has
# one token (*decoding*).

# %% id="show_cache" tags=["demo"]
import figures


@torch.no_grad()
def with_cache(count: int) -> tuple[list[int], list[float]]:
    tokens, seconds, new = list(prompt), [], torch.tensor([prompt])
    caches = [[torch.zeros(1, config.num_kv_heads, 0, config.head_dim)] * 2 for _ in model.layers]
    for _ in range(count):
        begin = time.perf_counter()
        x = model.embed_tokens(new)
        for block, cache in zip(model.layers, caches):
            layer = block.self_attn
            weights = {name: getattr(layer, f"{name}_proj").weight for name in "qkvo"}
            out, *cache[:] = attention_step(
                block.input_layernorm(x), weights, config.head_dim, *cache
            )
            x = x + out
            x = x + block.mlp(block.post_attention_layernorm(x))
        tokens.append(int(model.lm_head(model.norm(x))[0, -1].argmax()))
        seconds.append(time.perf_counter() - begin)
        new = torch.tensor([tokens[-1:]])
    return tokens, seconds


again, _ = with_cache(LENGTH)
print("the same text" if again == written else "another text")
slow, fast = (  # the least of three repetitions: other programs disturb a single one
    list(map(min, *(run(LENGTH)[1] for _ in range(3)))) for run in (without_cache, with_cache)
)
figures.by_position(slow, fast)

# %% [markdown] id="memory_text"
# ## 2 · What the cache costs, and what limits a step
#
# **Core · 10 min · ●●○**
#
# The cache buys time with memory. With $L$ layers, $k$ key heads of size $d$ and 2 bytes for a number, a token keeps its key and its value
# in each layer. **Multi-head attention** (MHA) keeps all heads, **grouped-query attention** (GQA) $k$ of them, **multi-query
# attention** (MQA) one.
#
# The *arithmetic intensity* of an iteration says what limits it: FLOPs divided by the bytes that it reads. `batch` sequences compute `new` tokens each
# after `past` stored ones:
#
# - **FLOPs**: 2 for each weight and new token, and $4\,L\,a\,d$ for each pair of a new token and a key that it sees ($a$ query heads). New token $i$
#   of a sequence (from 0) sees `past` $+\,i + 1$ keys.
# - **Bytes**: the weights *once* for the whole batch, 2 bytes each, and the cache of `past + new` tokens of each sequence.
#
# `largest_batch` is the number of sequences of `tokens` tokens whose caches fit beside the weights into `memory` bytes; 0 if
# there is no room. `config` has the keys of `llama_70b` in the first cell.
#
# **Predict** for Llama 3.3 70B and sequences of 131,072 tokens: the cache of one sequence in GiB, with its 8 key heads and with 64; and how many
# such sequences fit on four H100 (316 GiB in all).

# %% id="predict_cache" tags=["prediction"]
expected_cache = {"GQA, GiB": None, "MHA, GiB": None, "sequences": None}


# %% nbgrader={"grade_id": "memory", "solution": true}
def cache_bytes(config: dict[str, int], tokens: int) -> int:
    """Return the bytes of the keys and values of one sequence, in 16-bit numbers."""
    ### BEGIN SOLUTION
    return 2 * 2 * config["layers"] * config["kv_heads"] * config["head_dim"] * tokens
    ### END SOLUTION


def intensity(config: dict[str, int], batch: int, new: int, past: int) -> float:
    """Return the FLOPs for each byte of an iteration: `new` tokens of each of `batch` sequences."""
    ### BEGIN SOLUTION
    pairs = batch * (new * past + new * (new + 1) // 2)
    attention = 4 * config["layers"] * config["heads"] * config["head_dim"] * pairs
    read = 2 * config["weights"] + batch * cache_bytes(config, past + new)
    return (2 * config["weights"] * batch * new + attention) / read
    ### END SOLUTION


def largest_batch(config: dict[str, int], memory: int, tokens: int) -> int:
    """Return how many sequences of `tokens` tokens fit beside the weights into `memory` bytes."""
    ### BEGIN SOLUTION
    return max(0, (memory - 2 * config["weights"]) // cache_bytes(config, tokens))
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_memory", "grade": true}
lab.check("memory")

# %% id="show_memory" tags=["demo", "nbval-check-output"]
from dlo_lib.hardware import gpu
from dlo_lib.labkit import columns
from dlo_lib.labkit.predictions import compared, require_numbers

require_numbers(expected_cache)
gib, four = 2**30, 316 * 2**30
forms = {"MQA": 1, "GQA": 8, "MHA": 64}
found = {name: cache_bytes(llama_70b | {"kv_heads": k}, 131072) / gib for name, k in forms.items()}
fits = largest_batch(llama_70b, four, 131072)
measured = {"GQA, GiB": found["GQA"], "MHA, GiB": found["MHA"], "sequences": fits}
print(compared(expected_cache, measured))
rows = [("tokens a sequence", *(f"{name}: sequences on 4 H100" for name in forms))]
for tokens in (2048, 8192, 131072):
    batches = (largest_batch(llama_70b | {"kv_heads": k}, four, tokens) for k in forms.values())
    rows.append((f"{tokens:,}", *(f"{batch:,}" for batch in batches)))
print("\n" + columns(rows))
card = gpu("h100-80")
ridge = card.peak("bf16") / card.bandwidth
batches = [2**power for power in range(11)]
lines = {
    f"decoding, {past:,} tokens of past": [intensity(llama_70b, batch, 1, past) for batch in batches]
    for past in (512, 8192)
}
figures.roofline(batches, lines, intensity(llama_70b, 1, 2048, 0), ridge)

# %% [markdown] id="memory_lesson"
# A prefill of 2,048 tokens is limited by arithmetic, and decoding by memory bandwidth, up to batches of several hundred. So decode *many* sequences
# together: they share the weights. They do not share their caches, so that long sequences stay below the ridge
# at every batch, and memory sets the largest batch. The rest of this lab makes the batch larger and keeps it full.
#
# ## 3 · A pool of blocks
#
# **Core · 16 min · ●●●**
#
# How long a sequence becomes is not known. A server that reserves the longest possible cache for each one wastes most of its memory (*reserved* and
# *internal* fragmentation), and pieces of different lengths leave gaps (*external* fragmentation). PagedAttention divides the memory
# into blocks of `size` tokens, as an operating system does with pages. A sequence has a **table** of blocks that may lie anywhere, and takes
# a block when it needs one: less than one block a sequence stays empty.
#
# Two sequences with the same beginning *share* its blocks: several answers to one prompt, or the beams of a beam search. A
# shared block is not written: who writes first gets a copy (**copy on write**).
#
# Write the class `BlockPool(blocks, size)` with blocks 0 … `blocks` − 1. Sequences have whole numbers as names.
#
# | method | |
# |---|---|
# | `append(seq)` | reserve a place for one more token of `seq`, and return `(block, offset, source)`; the first call for a name starts its sequence |
# | `fork(parent, child)` | `child` is a new sequence with the tokens of `parent`; no block is taken |
# | `release(seq)` | the sequence ends; blocks that no other sequence has are free again |
# | `table(seq)` | the list of its blocks, in the order of its tokens |
# | `free()` | the number of blocks that no sequence has |
#
# Token $n$ of a sequence (from 0) has the offset $n$ modulo `size` in its block. `source` is None, except if the last block is partly filled *and* shared: then
# `append` takes a new block for `seq` alone, and `source` is the old one, whose content the server copies. If a block is needed and none
# is free, `append` raises a `MemoryError` and changes nothing.


# %% nbgrader={"grade_id": "pool", "solution": true}
class BlockPool:
    """Blocks of `size` tokens, with reference counts and copy on write."""

    def __init__(self, blocks: int, size: int) -> None:
        ### BEGIN SOLUTION
        self.size, self.unused, self.owners = size, list(range(blocks)), [0] * blocks
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        ### END SOLUTION

    def append(self, seq: int) -> tuple[int, int, int | None]:
        ### BEGIN SOLUTION
        table, length = self.tables.get(seq, []), self.lengths.get(seq, 0)
        offset, source = length % self.size, None
        if not offset or self.owners[table[-1]] > 1:
            if not self.unused:
                raise MemoryError("no block is free")
            block = self.unused.pop()
            self.owners[block] = 1
            if offset:
                source = table[-1]
                self.owners[source] -= 1
                table = table[:-1]
            table = [*table, block]
        self.tables[seq], self.lengths[seq] = table, length + 1
        return table[-1], offset, source
        ### END SOLUTION

    def fork(self, parent: int, child: int) -> None:
        ### BEGIN SOLUTION
        self.tables[child], self.lengths[child] = list(self.tables[parent]), self.lengths[parent]
        for block in self.tables[child]:
            self.owners[block] += 1
        ### END SOLUTION

    def release(self, seq: int) -> None:
        ### BEGIN SOLUTION
        for block in self.tables.pop(seq):
            self.owners[block] -= 1
            if not self.owners[block]:
                self.unused.append(block)
        del self.lengths[seq]
        ### END SOLUTION

    def table(self, seq: int) -> list[int]:
        ### BEGIN SOLUTION
        return self.tables[seq]
        ### END SOLUTION

    def free(self) -> int:
        ### BEGIN SOLUTION
        return len(self.unused)
        ### END SOLUTION


# %% nbgrader={"grade_id": "test_pool", "grade": true}
lab.check("pool")

# %% [markdown] id="paged_text"
# ## 4 · Attention through a table
#
# **Core · 9 min · ●●○**
#
# `keys` and `values` are (blocks, size, key heads, head_dim), the memory of a layer, with blocks of all sequences. Write `paged_attention` for one decoding
# iteration: `q` is (sequences, heads, head_dim), one query for each sequence, already rotated. `tables` and `lengths` are lists: the blocks of
# each sequence, and the number of its tokens, that of the query included. Return (sequences, heads, head_dim).
#
# The last block of a sequence is rarely full. What is in its other slots is not defined: the check puts NaN there.


# %% nbgrader={"grade_id": "paged", "solution": true}
def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, tables: list[list[int]], lengths: list[int]
) -> Tensor:
    """Return the attention of one query for each sequence over its blocks."""
    ### BEGIN SOLUTION
    out, group = [], q.shape[1] // keys.shape[2]
    for query, table, length in zip(q, tables, lengths):
        k, v = (
            memory[table].flatten(0, 1)[:length].repeat_interleave(group, 1)
            for memory in (keys, values)
        )
        shares = (torch.einsum("hd,nhd->hn", query, k) / q.shape[2] ** 0.5).softmax(-1)
        out.append(torch.einsum("hn,nhd->hd", shares, v))
    return torch.stack(out)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_paged", "grade": true}
lab.check("paged")

# %% [markdown] id="plan_text"
# A kernel on a GPU reads the blocks where they are, and copies nothing.
#
# ## 5 · Continuous batching
#
# **Core · 16 min · ●●●**
#
# A *static batch* waits for its longest answer. Orca decides anew before **each iteration**: an answer that has ended leaves, and a waiting
# request takes its place. In the linear layers the tokens of all requests form one batch; attention treats each request alone.
#
# Write the decision as a function of plain data: `plan(requests, free, size, most, eos)`. `requests` are in the order of their arrival, and each is a dict:
#
# | key | |
# |---|---|
# | `id`, `prompt` | its number; the tokens of its prompt |
# | `output` | the list of the tokens that it has written |
# | `limit` | it ends when it has written this number of tokens, or the end token `eos`, also as the first |
# | `blocks` | the blocks that it holds: more than 0 if it runs, 0 if it waits |
#
# In an iteration, a request that runs gets one more token, and needs $\lceil (\text{prompt} + \text{tokens of } \text{output}) / \text{size} \rceil$ blocks in all: the token
# that it writes gets its place in the next iteration. This is also true of a waiting request, which first computes its prompt, and the tokens that it
# had written before a pre-emption. `free` blocks are free. Return a dict of three lists of ids:
#
# 1. `"finish"`: those that have ended. Their blocks are free at once.
# 2. `"preempt"`: if the blocks are too few for the running requests, the newest running one (the last in the list) loses its blocks and
#    waits again; then the next newest, as few as needed.
# 3. `"run"`: the running requests that stay. If none was pre-empted, also waiting ones in their order, while fewer than `most` run and the blocks suffice. The
#    first that does not fit ends the list: no later one overtakes it.
#
# Each request fits into the pool alone.


# %% nbgrader={"grade_id": "plan", "solution": true}
def plan(requests: list[dict], free: int, size: int, most: int, eos: int) -> dict[str, list[int]]:
    """Return the ids that finish, are pre-empted, and run in this iteration."""

    ### BEGIN SOLUTION
    def ended(request: dict) -> bool:
        return eos in request["output"][-1:] or len(request["output"]) == request["limit"]

    def need(request: dict) -> int:
        return -(-(request["prompt"] + len(request["output"])) // size) - request["blocks"]

    finish = [request for request in requests if ended(request)]
    free += sum(request["blocks"] for request in finish)
    left = [request for request in requests if not ended(request)]
    run, preempt = [request for request in left if request["blocks"]], []
    while sum(map(need, run)) > free:
        preempt.append(run.pop())
        free += preempt[-1]["blocks"]
    free -= sum(map(need, run))
    for request in left:
        if request["blocks"]:
            continue
        if preempt or len(run) == most or need(request) > free:
            break
        run.append(request)
        free -= need(request)
    lists = {"finish": finish, "preempt": preempt, "run": run}
    return {name: [request["id"] for request in chosen] for name, chosen in lists.items()}
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_plan", "grade": true}
lab.check("plan")

# %% [markdown] id="predict_plan_text"
# Twelve requests with answers of 1 to 24 tokens, in batches of at most four. A static batch takes the next four requests when all four before have
# ended. **Predict** the iterations of both; the sum of all answers is 96 tokens.

# %% id="predict_plan" tags=["prediction"]
expected_plan = {"static": None, "continuous": None}

# %% id="show_plan" tags=["demo", "nbval-check-output"]
require_numbers(expected_plan)
answers = [3, 24, 6, 2, 12, 1, 9, 4, 20, 5, 3, 7]
waiting = [
    {"id": number, "prompt": 8, "output": [], "limit": tokens, "blocks": 0}
    for number, tokens in enumerate(answers)
]
free, continuous = 24, []
while waiting:
    decided = plan(waiting, free, 4, 4, eos=-1)
    for request in waiting:
        if request["id"] in decided["run"]:
            taken = -(-(8 + len(request["output"])) // 4) - request["blocks"]
            request["blocks"] += taken
            free -= taken
            request["output"].append(1)
        else:
            free += request["blocks"]
            request["blocks"] = 0
    waiting = [request for request in waiting if request["id"] not in decided["finish"]]
    continuous.append(decided["run"])
continuous = [run for run in continuous if run]
static = []
for start in range(0, 12, 4):
    batch = range(start, start + 4)
    longest = max(answers[number] for number in batch)
    static += [[number for number in batch if answers[number] > step] for step in range(longest)]
print(compared(expected_plan, {"static": len(static), "continuous": len(continuous)}))
figures.iterations({"static batches": static, "continuous batching": continuous})

# %% [markdown] id="chunks_text"
# ## 6 · Chunked prefill
#
# **Optional · 8 min · ●●○**
#
# One problem is left. An iteration with a prompt of 8,000 tokens takes a long time, and every request that decodes waits for it: the *time
# between tokens* has a peak. Sarathi-Serve gives each iteration a **budget** of tokens. A prompt is computed in chunks, and the
# decoding requests are never stalled.
#
# Write `chunks(requests, budget)`: the number of tokens that each request computes, a list in the order of `requests`. Each is a dict with `prompt` and `done`, the
# tokens of its prompt that are computed. If they are equal, it decodes: it gets exactly one token, wherever it is in the list. The rest of the budget goes to the
# prompts in their order, the first one as much as it can use. At most `budget` requests decode.


# %% nbgrader={"grade_id": "chunks", "solution": true}
def chunks(requests: list[dict], budget: int) -> list[int]:
    """Return the number of tokens that each request computes in this iteration."""
    ### BEGIN SOLUTION
    rest = [request["prompt"] - request["done"] for request in requests]
    budget -= rest.count(0)
    counts = []
    for tokens in rest:
        counts.append(min(tokens, budget) if tokens else 1)
        if tokens:
            budget -= counts[-1]
    return counts
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_chunks", "grade": true}
lab.check("chunks")

# %% [markdown] id="verify_text"
# ## 7 · Speculative decoding: accept or reject
#
# **Core · 11 min · ●●●**
#
# Decoding of one sequence reads all weights for one token; a forward over five tokens takes nearly the same time. So let a small **draft** model propose $\gamma$
# tokens, and let the **target** compute the probabilities of all of them in one call. Which ones may stay, so that the text has *exactly* the
# distribution of the target?
#
# Token $x$ was drawn from the draft's distribution $q$; the target has $p$. Accept it with probability $\min(1, p(x)/q(x))$. At the first rejection, draw
# from the **residual** $\max(0, p - q)$, divided by its sum, and drop the rest. If all are accepted, the last row of the target gives
# one more token, the **bonus**.
#
# Why the residual? Token $x$ is written if it was drawn and accepted, $q(x) \min(1, p(x)/q(x)) = \min(p(x), q(x))$, or after a rejection. The second case must add
# what is missing from $p(x)$: $\max(0, p(x) - q(x))$.
#
# Write `verify(p, q, drafted, generator)`. `p` is $(\gamma + 1, \text{vocab})$, `q` is $(\gamma, \text{vocab})$, and row $i$ belongs to `drafted[i]`. Return the list of one to
# $\gamma + 1$ tokens (ints). Draw with `torch.rand((), generator=generator)` and `torch.multinomial(weights, 1, generator=generator)`, whose weights need not have the
# sum 1.


# %% nbgrader={"grade_id": "verify", "solution": true}
def verify(p: Tensor, q: Tensor, drafted: list[int], generator: torch.Generator) -> list[int]:
    """Return the accepted tokens, and one more: of the residual, or of the last row of p."""
    ### BEGIN SOLUTION
    for row, token in enumerate(drafted):
        if torch.rand((), generator=generator) >= p[row, token] / q[row, token]:
            residual = (p[row] - q[row]).clamp(min=0)
            return [*drafted[:row], int(torch.multinomial(residual, 1, generator=generator))]
    return [*drafted, int(torch.multinomial(p[-1], 1, generator=generator))]
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_verify", "grade": true}
lab.check("verify")

# %% [markdown] id="speculate_text"
# ## 8 · The loop
#
# **Core · 8 min · ●●○**
#
# Write `speculate`, with `verify`. `draft(tokens)` returns the probabilities of the next token, (vocab,). `target(tokens, rows)` returns those after each of the last `rows`
# beginnings of `tokens`, (rows, vocab): the last row is for the token after all of them. Both take a list of ints.
#
# Return exactly `count` new tokens. Each call of the target checks `gamma` drafted tokens (at the end of the text fewer are fine). Make one generator,
# `torch.Generator().manual_seed(seed)`, for all draws, also those of the drafted tokens. The check answers both models, and counts their calls.


# %% nbgrader={"grade_id": "speculate", "solution": true}
def speculate(prompt: list[int], draft, target, gamma: int, count: int, seed: int) -> list[int]:
    """Return `count` tokens with the distribution of the target."""
    ### BEGIN SOLUTION
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        drafted, q = [], []
        for _ in range(gamma):
            q.append(draft(tokens + drafted))
            drafted.append(int(torch.multinomial(q[-1], 1, generator=generator)))
        p = target(tokens + drafted, gamma + 1)
        tokens += verify(p, torch.stack(q), drafted, generator)
    return tokens[len(prompt) : len(prompt) + count]
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_speculate", "grade": true}
lab.check("speculate")

# %% [markdown] id="predict_calls_text"
# The Llama of the first cell is the target; the draft only counts which letter follows two others in the corpus. If each token is accepted with
# probability $\alpha$, a call of the target yields $1 + \alpha + \dots + \alpha^\gamma$ tokens. Here $\alpha$ is
# about 0.7. **Predict** the tokens for each call of the target with $\gamma = 4$: 5 is the most.

# %% id="predict_calls" tags=["prediction"]
expected_calls = {"tokens a call": None}

# %% id="show_speculate" tags=["demo"]
require_numbers(expected_calls)
pairs = torch.full((len(letters), len(letters), len(letters)), 1e-3)
pairs.index_put_((data[:-2], data[1:-1], data[2:]), torch.ones(len(data) - 2), accumulate=True)
pairs = pairs / pairs.sum(-1, keepdim=True)
calls = 0


@torch.no_grad()
def large(tokens: list[int], rows: int) -> Tensor:
    global calls
    calls += 1
    return model(torch.tensor([tokens]))[0, -rows:].softmax(-1)


text = speculate(prompt, lambda tokens: pairs[tokens[-2], tokens[-1]], large, 4, 120, seed=1)
print("".join(letters[token] for token in prompt + text))
print("\n" + compared(expected_calls, {"tokens a call": 120 / calls}))

# %% [markdown] id="standard_text"
# ## 9 · The same with `dlo_lib.inference`, under a load
#
# The library has all parts; its `judge` passes your check. The second part serves one load in several ways. Requests arrive as a Poisson process. The clock is
# simulated: an iteration of Llama 3.1 8B on an H100 takes the time to read its weights, plus FLOPs at half of the peak, plus the reading of the caches. **TTFT** is
# the time to the first token, **ITL** the time between two tokens. **Goodput** counts the requests a second that keep both limits: TTFT 1 s, and no
# ITL above 50 ms. A single gap above 50 ms is enough to lose a request, even if the quantile 99 % is far below.
#
# Prompts have 100 tokens, every eighth has 6,000.

# %% id="standard" tags=["demo", "read"]
from dlo_lib.inference import BlockPool as Pool
from dlo_lib.inference import SamplingParams, expected_tokens, judge
from dlo_lib.inference.load import DryEngine, IterationCost, poisson_arrivals, serve
from dlo_lib.inference.scheduler import Batching, BatchScheduler


def by_library(p: Tensor, q: Tensor, drafted: list[int], generator: torch.Generator) -> list[int]:
    *uniforms, last = torch.rand(len(drafted) + 1, generator=generator).tolist()
    return judge(p, q, drafted, uniforms, last)[0]


lab.check("verify", instead={"verify": by_library})
llama_8b = {"weights": 7_500_000_000, "layers": 32, "heads": 32, "kv_heads": 8, "head_dim": 128}
cost = IterationCost(
    fixed=2 * llama_8b["weights"] / card.bandwidth,
    per_token=2 * llama_8b["weights"] / (0.5 * card.peak("bf16")),
    per_past=cache_bytes(llama_8b, 1) / card.bandwidth,
)
blocks = (card.usable_bytes - 2 * llama_8b["weights"]) // cache_bytes(llama_8b, 16)
prompts = [[1] * (6000 if number % 8 == 0 else 100) for number in range(REQUESTS)]
limits = [SamplingParams(max_tokens=20 + 37 * number % 230) for number in range(REQUESTS)]
ways = {
    "static batches": {"batching": Batching.STATIC, "max_running": 32},
    "continuous": {},
    "continuous, chunks of 512": {"token_budget": 512},
}
reports, rates = {}, (2, 5, 10, 15, 20)
for name, options in ways.items():
    for rate in rates:
        engine = DryEngine(BatchScheduler(Pool(blocks, 16), share_prefixes=False, **options))
        reports[name, rate] = serve(engine, poisson_arrivals(rate, prompts, limits, seed=1), cost)
head = (f"goodput, {name}" for name in ways)
rows = [("requests a second", *head, "continuous: a gap above 50 ms")]
for rate in rates:
    gaps = [max(each.gaps, default=0.0) for each in reports["continuous", rate].served]
    broken = sum(gap > 0.05 for gap in gaps) / len(gaps)
    goodputs = (f"{reports[name, rate].goodput(1.0, 0.05):.1f}" for name in ways)
    rows.append((f"{rate}", *goodputs, f"{broken:.0%} of requests"))
print(columns(rows))
figures.load({key: (r.ttft(0.95), r.itl(0.99), r.goodput(1.0, 0.05)) for key, r in reports.items()})

# %% [markdown] id="where_text"
# At 2 to 15 requests a second, continuous batching has *less* goodput than static batches. It admits a prompt of 6,000 tokens at once, whose iteration takes
# about 190 ms: this breaks the limit of 50 ms of all requests that decode. The last column counts them. A static batch has all prompts before its tokens,
# but its requests wait too long for the first one. Chunks repair both: no iteration is long, and no prompt waits for the end of a batch.
#
# | | gains | where it loses |
# |---|---|---|
# | KV cache | a token costs one token, not the whole text | memory: it limits the batch |
# | blocks | nearly no empty memory; shared beginnings | a table to read; a kernel that follows it |
# | continuous batching | a full batch at every moment | long prompts delay the tokens of all others; pre-empted requests are computed again |
# | chunked prefill | bounded time between tokens | the prompt's own first token comes later; weights and cache are read once for each chunk |
# | speculation | several tokens for each reading of the weights | at large batches, where arithmetic is the limit: rejected tokens are work without a result |
#
# The last row in numbers: how many times faster is a token, when $\gamma = 4$ tokens are drafted, each in a tenth of the time of the
# target, and 70 % are accepted? With long sequences the caches keep memory the limit, so that speculation gains at each batch that fits into the pool; with
# short ones it loses at large batches.

# %% id="where" tags=["demo", "nbval-check-output"]
rows = [("batch", "gain, 200 tokens each", "gain, 4,000 tokens each")]
for batch in (1, 16, 64, 128, 256):
    gains = []
    for length in (200, 4000):
        if batch * length > 16 * blocks:
            gains.append("does not fit")
            continue
        read = cost.fixed + cost.per_past * length * batch
        plain = read + cost.per_token * batch
        drafting = 4 * 0.1 * plain
        checked = drafting + read + cost.per_token * 5 * batch
        gains.append(f"{plain / (checked / expected_tokens(0.7, 4)):.2f}")
    rows.append((f"{batch:,}", *gains))
print(columns(rows))

# %% [markdown] id="vllm"
# vLLM has the same parts under these names. It decides before each iteration too, and computes prompts in chunks:
#
# ```python
# from vllm import LLM, SamplingParams
#
# llm = LLM(
#     model="meta-llama/Llama-3.1-8B-Instruct",
#     gpu_memory_utilization=0.9,      # the pool takes what the weights leave
#     block_size=16,                   # tokens of a block
#     max_num_seqs=256,                # `most` of section 5
#     max_num_batched_tokens=2048,     # `budget` of section 6
#     enable_prefix_caching=True,      # shared beginnings
#     speculative_config={"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4},
# )
# outputs = llm.generate(["a server"], SamplingParams(temperature=0.8, top_p=0.95, max_tokens=64))
# ```
#
# **Medusa** needs no draft model: extra heads of the target predict several of the next tokens, and a tree-shaped mask checks many
# combinations in one call. Its usual acceptance rule keeps plausible tokens, and so gives up the exact distribution.
#
# **Attention sinks**: models give much attention to the first tokens, even if these say nothing. A cache that keeps some first tokens and a window of the
# last ones stays stable on endless text, though it forgets what left the window.

# %% [markdown] id="quiz_text"
# ## 10 · Quiz
#
# **Core · 4 min · ●○○**

# %% id="show_quiz" tags=["demo"]
lab.quiz()

# %% nbgrader={"grade_id": "quiz", "solution": true}
### BEGIN SOLUTION: quiz = {"q1": "", "q2": "", "q3": "", "q4": ""}
quiz = {"q1": "b", "q2": "d", "q3": "a", "q4": "c"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true}
lab.check("quiz")

# %% [markdown] id="further"
# ## Go further
#
# - Give `speculate` a better draft: count three letters instead of two. How many tokens does a call yield?
# - Use your `BlockPool` for a beam search over the small Llama: `fork` for a beam that is followed twice, `release` for one that is dropped.
# - Lower the limit of the time between tokens to 15 ms. Which budget of tokens is then the best?
#
# ## References
#
# - N. Shazeer, *Fast Transformer Decoding: One Write-Head is All You Need* (2019), [arXiv:1911.02150](https://arxiv.org/abs/1911.02150): multi-query attention
# - J. Ainslie et al., *GQA* (2023), [arXiv:2305.13245](https://arxiv.org/abs/2305.13245)
# - G. Yu et al., *Orca: A Distributed Serving System for Transformer-Based Generative Models* (OSDI 2022)
# - W. Kwon et al., *Efficient Memory Management for Large Language Model Serving with PagedAttention* (2023), [arXiv:2309.06180](https://arxiv.org/abs/2309.06180)
# - A. Agrawal et al., *Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve* (2024), [arXiv:2403.02310](https://arxiv.org/abs/2403.02310)
# - Y. Leviathan et al., *Fast Inference from Transformers via Speculative Decoding* (2022), [arXiv:2211.17192](https://arxiv.org/abs/2211.17192)
# - C. Chen et al., *Accelerating Large Language Model Decoding with Speculative Sampling* (2023), [arXiv:2302.01318](https://arxiv.org/abs/2302.01318)
# - Y. Zhong et al., *DistServe* (2024), [arXiv:2401.09670](https://arxiv.org/abs/2401.09670): goodput
# - T. Cai et al., *Medusa* (2024), [arXiv:2401.10774](https://arxiv.org/abs/2401.10774)
# - G. Xiao et al., *Efficient Streaming Language Models with Attention Sinks* (2023), [arXiv:2309.17453](https://arxiv.org/abs/2309.17453)
# - The course this lab follows: IDRIS, *Deep Learning Optimisé – Jean Zay* (DLO-JZ)
