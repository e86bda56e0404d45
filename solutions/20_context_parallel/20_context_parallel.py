# %% [markdown] id="title"
# # 20 · Context parallelism
#
# **What you will do.** You divide a long sequence over ranks. Only attention connects its tokens, so you write attention over ranks: blocks
# that are merged by the online softmax, a ring in which keys and values travel, its backward, and an order of the tokens that gives all ranks the same
# work. Then you train a Llama on shards of a sequence, write the all-to-all form (Ulysses), and compare the bytes that both forms send.
#
# You need no GPU: ranks are processes on this machine (gloo), and the 3B model is measured at true size on tensors without memory.
#
# Builds on labs 10 (messages, rings) and 19 (autograd functions that communicate). The core exercises, predictions and the quiz take about
# 93 minutes; with the text and the demos plan two hours. One optional exercise takes 7 minutes more. Each exercise has a check that answers at once;
# `lab.hint("name")` gives a nudge, then a pointer, then a sketch. If you are stuck, `lab.use_reference("name")` lets you continue without its points.
#
# Words: context parallelism (*parallélisme de contexte*), ring attention (*attention en anneau*), online softmax (*softmax en ligne*), causal
# mask (*masque causal*), load balance (*équilibre de charge*), all-to-all (*échange total*).

# %% id="setup"
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

from dlo_lib.grading import Lab
from dlo_lib.models.llama import Llama, LlamaConfig, rotation

MODEL = os.environ.get("DLO_MODEL", "llama-3.2-3b")
SEQ = int(os.environ.get("DLO_SEQ", 131072))  # tokens of a sequence at true size
LENGTH = int(os.environ.get("DLO_LENGTH", 512))  # tokens of a sequence in the small measurements
STEPS = int(os.environ.get("DLO_STEPS", 12))  # of the training near the end
REPEATS = int(os.environ.get("DLO_REPEATS", 10))  # of a measured step
lab = Lab(globals())

# %% [markdown] id="why"
# ## Why: one sequence is too long
#
# Llama 3.1 and 3.2 read 131,072 tokens: a whole novel. Weights, gradients and optimiser state of Llama 3.2 3B have 16 bytes for each parameter. FSDP
# on 512 ranks leaves 0.1 GiB of them on each rank, but each rank computes at least one *whole* sequence.
#
# **Predict** how many GiB the forward of one sequence of this length keeps for backward. Activations have 16 bits. The loss is computed in fp32, and keeps one
# tensor of the size of the logits. With activation checkpointing only the input of each block is kept. The model has 28 blocks of width 3072 and a vocabulary of 128,256. And how many with the loss of lab 05, which computes
# the logits in chunks? Replace `None` by your numbers; they are not graded. The next cell measures both at true size, on tensors without memory (device `meta`), and 1/16 of the sequence as well.

# %% id="predict_kept" tags=["prediction"]
kept_guess = {"all logits, GiB": None, "chunked loss, GiB": None}

# %% id="show_why" tags=["demo", "nbval-check-output"]
from dataclasses import replace

import figures

from dlo_lib.kernels import linear_cross_entropy
from dlo_lib.labkit.predictions import compared, require_numbers
from dlo_lib.models import model_config

require_numbers(kept_guess)


def kept_for_backward(tokens: int, chunked: bool) -> dict[str, int]:
    """Bytes that the forward of one sequence keeps for backward: of the blocks their inputs, of the rest all."""
    config = model_config(MODEL)
    model = Llama(replace(config, num_layers=0), device="meta", dtype=torch.bfloat16)
    weights, saved = {weight.untyped_storage()._cdata for weight in model.parameters()}, {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    sequence = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        x = model.embed_tokens(sequence)
        if chunked:
            linear_cross_entropy(model.norm(x), model.lm_head.weight, sequence)
        else:
            F.cross_entropy(model.lm_head(model.norm(x)).float().flatten(0, 1), sequence.flatten())
    rest = sum(tensor.untyped_storage().nbytes() for storage, tensor in saved.items() if storage not in weights)
    return {"inputs of the blocks": config.num_layers * x.nbytes, "norm, logits and loss": rest}


kept = {"all logits": kept_for_backward(SEQ, False), "chunked loss": kept_for_backward(SEQ, True), "chunked, 1/16 of the tokens": kept_for_backward(SEQ // 16, True)}
print(compared(kept_guess, {f"{form}, GiB": sum(kept[form].values()) / 2**30 for form in ("all logits", "chunked loss")}))
figures.kept(kept)

# %% [markdown] id="why_after"
# With all logits, an H100 of 80 GB cannot compute this sequence. With the chunked loss it can, and no further rank is needed. The limits that remain are the inputs of the blocks, which
# grow with the tokens and with the model, and the time: one rank computes the whole sequence, and attention grows with its square. (6 operations for each parameter and token, and
# $6s^2h$ for the causal attention of a layer of width $h$, forward and backward.)

# %% id="show_limits" tags=["demo"]
for name, tokens in (("llama-3.2-3b", 2**17), ("llama-3.2-3b", 2**20), ("llama-3.1-70b", 2**17)):
    config = model_config(name)
    one = Llama(replace(config, num_layers=1, vocab_size=8), device="meta").layers[0]
    weights = sum(weight.numel() for weight in one.parameters())
    flops = 6 * tokens * (config.num_layers * weights + config.vocab_size * config.hidden)
    flops += 6 * tokens**2 * config.num_heads * config.head_dim * config.num_layers
    inputs = 2 * tokens * config.hidden * config.num_layers
    gathered = 2 * 2 * tokens * config.num_kv_heads * config.head_dim
    print(
        f"{name:13} {tokens:9,} tokens: inputs of the blocks {inputs / 2**30:4.0f} GiB, "
        f"{flops / 400e12:5.0f} s at 400 TFLOP/s; "
        f"keys and values of a layer {gathered / 2**30:.1f} GiB"
    )

# %% [markdown] id="why_division"
# So the *tokens* are divided: with 1/16 of them, a rank keeps 1/16 of the inputs and computes 1/16. (Of the last bar, most is the gradient of the output matrix, which the loss keeps whole.) Most layers allow this without any message: embedding, norms,
# MLP and loss treat each token by itself. Only attention connects tokens: each query needs the keys and values of all tokens before it.
#
# The simplest form **gathers** the keys and values, one layer at a time. With grouped-query attention they are small, as the last column shows, and Llama 3 was trained in this way; PyTorch's `context_parallel` does it by
# default. Two costs remain: a rank holds the keys and values of the whole sequence, however many ranks there are, and attention begins when the gather has ended. A **ring** avoids both, and you write one.
#
# ## The idea: queries stay, keys and values travel
#
# N ranks form a ring. Each keeps its queries. In each of N steps it computes attention of its queries to *one block* of keys and values, merges the result
# with what it has, and passes the block on to the next rank. The figure shows which block is computed in which step. In a causal model the
# upper triangle is empty. Press ▶: where is the block of rank 0 in step 2, and who uses it?

# %% id="show_idea" tags=["demo"]
from dlo_lib.labkit.explore import explore

explore(figures.ring, ranks=[2, 3, 4, 6], step=lambda ranks: range(ranks))

# %% [markdown] id="block_text"
# Two questions remain: how are softmaxes of different blocks merged, and what does the backward need? You begin with one block.
#
# ## 1 · Attention to one block
#
# **Core · 7 min · ●●○**
#
# Write `block_attention(q, k, v, mask)` for one block of keys, without `F.scaled_dot_product_attention`, because you need two results:
#
# - `out` (batch, heads, queries, d): $\mathrm{softmax}(S)\, V$ with the scores $S = Q K^T / \sqrt{d}$;
# - `lse` (batch, heads, queries): the logarithm of the sum of the exponentials of each row of S (log-sum-exp), over the keys that the query sees.
#
# `mask` (queries, keys) is True where a query sees a key. Scores may be large (1000). A query that sees *no* key of this block gets the output 0 and
# the `lse` -inf, and no NaN. `torch.logsumexp` is allowed.

# %% nbgrader={"grade_id": "block", "solution": true}
def block_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q (batch, heads, queries, d), k and v (batch, heads, keys, d), mask (queries, keys)
    -> out like q, lse (batch, heads, queries)."""
    ### BEGIN SOLUTION
    scores = q @ k.mT / q.shape[-1] ** 0.5
    scores = scores.masked_fill(~mask, -math.inf)
    lse = scores.logsumexp(-1)
    shift = lse.masked_fill(lse == -math.inf, 0)  # -inf - -inf is no number
    return (scores - shift.unsqueeze(-1)).exp() @ v, lse
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_block", "grade": true}
lab.check("block")

# %% [markdown] id="merge_text"
# ## 2 · Merge two blocks: the online softmax
#
# The softmax of a row divides by the sum over *all* keys. A block knows the sum over its keys only, so its weights are too large, by a factor that is
# different in each row. The mean of two blocks is therefore wrong:

# %% id="show_mean" tags=["demo"]
random = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(1, 1, 64, 16, generator=random) for _ in range(3))
parts = zip(k.chunk(2, 2), v.chunk(2, 2))
halves = [F.scaled_dot_product_attention(q, keys, values) for keys, values in parts]
right = F.scaled_dot_product_attention(q, k, v)
apart = float((sum(halves) / 2 - right).norm() / right.norm())
print(f"the mean of two halves differs from attention by {apart:.0%}")

# %% [markdown] id="merge_exercise"
# **Core · 9 min · ●●○**
#
# `lse` is what is missing: exp(lse) is the sum by which the block has divided. Write
# `merge(out, lse, block_out, block_lse)`: the output and the `lse` of *both* sets of keys together.
#
# - Derive it: $\mathrm{out} = \sum e^{s} v / \sum e^{s}$. What is the numerator of each part, from its `out` and `lse`?
# - `lse` may be 1000 or -1000: form differences before exponentials. (`torch.logaddexp`)
# - -inf means no key. A row of two such parts stays at the output 0 and `lse` -inf.

# %% nbgrader={"grade_id": "merge", "solution": true}
def merge(
    out: torch.Tensor, lse: torch.Tensor, block_out: torch.Tensor, block_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """out, block_out (batch, heads, queries, d); lse, block_lse (batch, heads, queries)
    -> out and lse over the keys of both."""
    ### BEGIN SOLUTION
    total = torch.logaddexp(lse, block_lse)
    shift = total.masked_fill(total == -math.inf, 0)
    first, second = ((part - shift).exp().unsqueeze(-1) for part in (lse, block_lse))
    return first * out + second * block_out, total
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_merge", "grade": true}
lab.check("merge")

# %% [markdown] id="rounding_text"
# So blocks may be added one after another, in any order, and the result is exact. A GPU kernel such as FlashAttention does the same inside one
# device, with blocks that fit into its fast memory.
#
# Exact means up to rounding. Real models have q, k and v in 16 bits. The cell merges more and more blocks, with `out` and `lse` kept in fp32, and with both
# rounded to bf16 after each merge:

# %% id="show_rounding" tags=["demo"]
random = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(1, 4, 256, 32, generator=random) for _ in range(3))
right = F.scaled_dot_product_attention(q, k, v)
for blocks in (2, 8, 32):
    mask, errors = torch.ones(256, 256 // blocks, dtype=torch.bool), []
    for dtype in (torch.float32, torch.bfloat16):
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -math.inf)
        for keys, values in zip(k.chunk(blocks, 2), v.chunk(blocks, 2)):
            merged = merge(out, lse, *block_attention(q, keys, values, mask))
            out, lse = (part.to(dtype).float() for part in merged)
        errors.append(float((out - right).norm() / right.norm()))
    print(f"{blocks:2} blocks: error with fp32 {errors[0]:.1e}, with bf16 {errors[1]:.1e}")

# %% [markdown] id="visible_text"
# In bf16 the error grows with the number of blocks. So a real ring keeps `out` and `lse` in fp32, whatever the dtype of q, k and v. The tensors of your ring have
# 32 or 64 bits, so their dtype is enough.
#
# ## 3 · What must be computed at all
#
# In a causal model the query at position i sees the keys at the positions 0 to i. A table `positions` (N, local) has in row r the positions of the tokens of
# rank r, in ascending order. The obvious order gives each rank a contiguous part:

# %% id="given_contiguous"
def contiguous(seq: int, world: int) -> torch.Tensor:
    """The positions of the tokens of each rank, (world, seq / world): rank r has the r-th part."""
    return torch.arange(seq).view(world, -1)


# %% [markdown] id="visible_exercise"
# **Core · 9 min · ●●○**
#
# Write `visible(q_positions, k_positions)`, the part of a block that must be computed. Because both arguments are ascending, it is a rectangle: the queries `first:`
# and the keys `:last`. Return `(first, last)`, two ints of Python, of the smallest rectangle that contains all pairs in which the query sees the key; `None` if there is no such pair.
# Both may have gaps. For example, with queries at 0, 1, 6, 7 and keys at 2, 3, 4, 9, the answer is `(2, 3)`: the queries 0 and 1 see nothing, and no
# query sees the key 9.
#
# Which is the first query that sees *any* key? How many keys does *any* query see?

# %% nbgrader={"grade_id": "visible", "solution": true}
def visible(q_positions: torch.Tensor, k_positions: torch.Tensor) -> tuple[int, int] | None:
    """q_positions (queries), k_positions (keys), ascending
    -> (first, last): the queries first: and the keys :last; or None."""
    ### BEGIN SOLUTION
    first = int((q_positions < k_positions[0]).sum())  # these queries are before all keys
    last = int((k_positions <= q_positions[-1]).sum())
    return (first, last) if last else None
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_visible", "grade": true}
lab.check("visible")

# %% [markdown] id="ring_text"
# ## 4 · The ring, forward
#
# The next cell gives you the message. `start_shift(tensor)` starts to send a tensor to the next rank and to receive one of the same size from the
# previous rank; it returns at once. `.wait()` returns what has arrived.

# %% id="given_shift"
class Shift:
    """A message to the next rank of the ring, and one from the previous rank, on their way."""

    def __init__(self, tensor: torch.Tensor) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self.sent = tensor.contiguous()  # must live until the message has left
        self.received, self.works = torch.empty_like(self.sent), []
        if world == 1:  # gloo sends nothing from a rank to itself
            self.received.copy_(self.sent)
            return
        send = dist.P2POp(dist.isend, self.sent, (rank + 1) % world)
        receive = dist.P2POp(dist.irecv, self.received, (rank - 1) % world)
        self.works = dist.batch_isend_irecv([send, receive])

    def wait(self) -> torch.Tensor:
        for work in self.works:
            work.wait()
        return self.received


def start_shift(tensor: torch.Tensor) -> Shift:
    """Start to send a tensor to the next rank, and to receive one from the previous rank.

    Both have the same size.
    """
    return Shift(tensor)


# %% [markdown] id="ring_exercise"
# **Core · 18 min · ●●●**
#
# Write `ring_forward(q, k, v, positions)`. All tensors are those of this rank; `positions` is the whole table.
#
# - Begin with the output 0 and `lse` -inf, both in the dtype of `q`, which has 32 or 64 bits here. In step i, the block on this rank is that of the rank `owner = (rank - i) % world`.
# - Compute only what `visible` says: the queries `first:` and the keys `:last`. The mask of this rectangle is
#   `positions[rank][first:, None] >= positions[owner][:last]`. `merge` changes only these queries.
# - Send k and v as one message, `torch.stack((k, v))`. $N - 1$ messages are enough: after the last step no rank needs the block.
# - **Every rank shifts in every step**, also one that computes nothing, because the other ranks wait for its message.
#
# If you start the shift *before* you compute and wait for it *after*, the message travels while the rank computes. The results are the same.
#
# The first check may take 15 s, because it starts the processes of the ranks.

# %% nbgrader={"grade_id": "ring", "solution": true}
def ring_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k, v (batch, heads, local, d), positions (world, local)
    -> out like q, lse (batch, heads, local), over the keys of all ranks."""
    ### BEGIN SOLUTION
    rank, world = dist.get_rank(), dist.get_world_size()
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -math.inf)
    kv = torch.stack((k, v))
    for step in range(world):
        owner = (rank - step) % world
        shift = start_shift(kv) if step < world - 1 else None
        part = visible(positions[rank], positions[owner])
        if part is not None:
            first, last = part
            mask = positions[rank][first:, None] >= positions[owner][:last]
            block = block_attention(q[:, :, first:], kv[0][:, :, :last], kv[1][:, :, :last], mask)
            out[:, :, first:], lse[:, :, first:] = merge(out[:, :, first:], lse[:, :, first:], *block)
        if shift is not None:
            kv = shift.wait()
    return out, lse
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_ring", "grade": true}
lab.check("ring")

# %% [markdown] id="gradient_text"
# ## 5 · The gradients of one block
#
# Autograd would keep the scores of every block for backward, up to $\mathrm{seq}^2/N$ numbers for each head. Instead, backward computes them again. For that it needs
# no block of the forward, only `out` and `lse`: with the `lse` of the *whole* row, the probabilities of each block are those of the whole softmax,
#
# $$P = e^{S - \mathrm{lse}}, \qquad S = Q K^T / \sqrt{d}$$
#
# With the gradient $dO$ of the output, and $D = \sum dO \cdot O$ for each query (a sum over $d$), the gradients that a block contributes are
#
# $$dV = P^T dO, \qquad dS = P \odot (dO\, V^T - D), \qquad dQ = dS\, K / \sqrt{d}, \qquad dK = dS^T Q / \sqrt{d}$$
#
# The sign $\odot$ multiplies element by element, and $D$ is subtracted from each element of its row; the other products are matrix products. $D$ is the same for all blocks, because $O$ is the output over all keys.
#
# **Core · 10 min · ●●○**
#
# Write `block_backward`. `out` and `lse` are those over all keys. Keys that the mask hides have $P = 0$, also if their score is large (1000).

# %% nbgrader={"grade_id": "gradient", "solution": true}
def block_backward(
    grad, q, k, v, out, lse, mask
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """grad, q, out (batch, heads, queries, d), k, v (batch, heads, keys, d),
    lse (batch, heads, queries) -> dq, dk, dv of this block."""
    ### BEGIN SOLUTION
    scale = q.shape[-1] ** -0.5
    scores = (q @ k.mT * scale).masked_fill(~mask, -math.inf)
    probabilities = (scores - lse.unsqueeze(-1)).exp()
    row_sums = (grad * out).sum(-1, keepdim=True)
    grad_scores = probabilities * (grad @ v.mT - row_sums) * scale
    return grad_scores @ k, grad_scores.mT @ q, probabilities.mT @ grad
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_gradient", "grade": true}
lab.check("gradient")

# %% [markdown] id="backward_text"
# ## 6 · The ring, backward
#
# dQ belongs to this rank's queries: it stays, and grows in each step. dK and dV of a block get a contribution from *every* rank that used the block. So
# they **travel with their block**, each rank adds its contribution, and after N shifts they are at home, on the rank that owns the keys.
#
# **Core · 10 min · ●●○**
#
# Complete `ring_backward(grad, q, k, v, out, lse, positions)`: the gradients of this rank's q, k and v. The loop is that of your forward, and
# is given. `travelling` is one tensor of four: k, v, dk and dv of the block that is on this rank. `keys, values, dk, dv` are views of it, so
# `dk[:, :, :last] += ...` changes what travels. Three places are yours; each has a line `raise NotImplementedError()`, which you replace:
#
# - add what this rank contributes, by `block_backward`, to dq, and to the dk and dv of the block, *before* the shift;
# - shift in every step. k and v are needed $N - 1$ times, dk and dv travel $N$ times: the last message has only two of the four;
# - return dq, and dk and dv of this rank's keys.

# %% nbgrader={"grade_id": "backward", "solution": true}
def ring_backward(
    grad, q, k, v, out, lse, positions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """grad, q, k, v, out (batch, heads, local, d), lse (batch, heads, local),
    positions (world, local) -> dq, dk, dv of this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dq = torch.zeros_like(q)
    travelling = torch.stack((k, v, torch.zeros_like(k), torch.zeros_like(v)))
    for step in range(world):
        owner = (rank - step) % world
        keys, values, dk, dv = travelling
        part = visible(positions[rank], positions[owner])
        if part is not None:
            first, last = part
            mask = positions[rank][first:, None] >= positions[owner][:last]
            ### BEGIN SOLUTION
            block = keys[:, :, :last], values[:, :, :last], out[:, :, first:], lse[:, :, first:], mask
            terms = block_backward(grad[:, :, first:], q[:, :, first:], *block)
            dq[:, :, first:] += terms[0]
            dk[:, :, :last] += terms[1]
            dv[:, :, :last] += terms[2]
            ### END SOLUTION
        ### BEGIN SOLUTION
        travelling = start_shift(travelling if step < world - 1 else travelling[2:]).wait()
        ### END SOLUTION
    ### BEGIN SOLUTION
    return dq, travelling[0], travelling[1]
    ### END SOLUTION


# %% id="given_ring_attention"
class RingAttention(torch.autograd.Function):
    """Your two functions as one operation of autograd."""

    @staticmethod
    def forward(ctx, q, k, v, positions):
        out, lse = ring_forward(q, k, v, positions)
        ctx.save_for_backward(q, k, v, out, lse, positions)
        return out

    @staticmethod
    def backward(ctx, grad):
        return *ring_backward(grad, *ctx.saved_tensors), None


def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Causal attention of this rank's queries to all keys, (batch, heads, local, d)."""
    return RingAttention.apply(q, k, v, positions)


# %% nbgrader={"grade_id": "test_backward", "grade": true}
lab.check("backward")

# %% [markdown] id="balance_text"
# ## 7 · The last rank does most of the work
#
# The figure shows the causal triangle of 16 tokens; each row is a query, in the colour of its rank.

# %% id="show_triangle" tags=["demo"]
figures.triangle(contiguous(16, 4).tolist())

# %% [markdown] id="balance_predict_text"
# In each step all ranks wait for each other, because each needs the block of its neighbour. A step takes as long as its busiest rank.
#
# **Predict, then measure.** The work of a rank in a step is the size of the rectangle of your `visible`. The unit is one full block (local × local scores), so a
# diagonal block counts as 1, although the mask hides half of it, and a block of which nothing is visible counts as 0. How long does the ring of 4 ranks take with the contiguous order?
# How long would it take if every rank computed a full block in the first step, and half a block in each later step?

# %% id="predict_balance" tags=["prediction"]
balance_guess = {"contiguous": None, "balanced": None}  # blocks

# %% id="run_balance" tags=["demo"]
def work(positions: torch.Tensor) -> list[list[float]]:
    """The part of a block that each rank computes in each step, by your `visible`: a list for each step."""
    world, local = positions.shape

    def area(rank: int, owner: int) -> float:
        part = visible(positions[rank], positions[owner])
        return 0.0 if part is None else (local - part[0]) * part[1] / local**2

    return [[area(rank, (rank - step) % world) for rank in range(world)] for step in range(world)]


def duration(steps: list[list[float]]) -> float:
    """The time of the ring: in each step all ranks wait for the busiest one."""
    return sum(map(max, steps))


print(compared({"contiguous": balance_guess["contiguous"]}, {"contiguous": duration(work(contiguous(64, 4)))}))
figures.busy({"contiguous": work(contiguous(64, 4))})

# %% [markdown] id="zigzag_exercise"
# From step 1 on, some ranks wait, and one always computes a full block. The remedy is the **zig-zag** order (Llama 3 uses these parts): cut the sequence into $2N$ chunks; rank $r$ gets
# the chunks $r$ and $2N - 1 - r$, one early and one late.
#
# **Core · 5 min · ●○○**
#
# Write `zigzag(seq, world)`: the table of positions, as `contiguous` returns it; each row in ascending order. $2N$ divides `seq`.

# %% nbgrader={"grade_id": "zigzag", "solution": true}
def zigzag(seq: int, world: int) -> torch.Tensor:
    """The positions of the tokens of each rank, (world, seq / world).

    Rank r has the chunks r and 2 * world - 1 - r.
    """
    ### BEGIN SOLUTION
    chunks = torch.arange(seq).view(2 * world, -1)
    return torch.cat((chunks[:world], chunks.flip(0)[:world]), dim=1)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_zigzag", "grade": true}
lab.check("zigzag")

# %% id="show_zigzag" tags=["demo", "nbval-check-output"]
require_numbers(balance_guess)
steps = {"contiguous": work(contiguous(64, 4)), "zig-zag": work(zigzag(64, 4))}
durations = {"contiguous": duration(steps["contiguous"]), "balanced": duration(steps["zig-zag"])}
print(compared(balance_guess, durations))
for world in (2, 4, 8, 32):
    faster = duration(work(contiguous(4 * world, world))) / duration(work(zigzag(4 * world, world)))
    print(f"{world:2} ranks: with the zig-zag the ring is {faster:.2f} times as fast")
figures.busy(steps)

# %% id="show_triangles" tags=["demo"]
figures.triangle(zigzag(16, 4).tolist())

# %% [markdown] id="zigzag_after"
# After the first step every rank computes half a block in every step, and no rank waits. A third order, *striped* (rank $r$ has the tokens $r$, $r + N$, $r + 2N$, ...), is
# nearly balanced as well, but all its blocks are triangles: a rectangle of your `visible` saves nothing there.

# %% [markdown] id="loss_text"
# ## 8 · Inputs, labels and loss on shards
#
# **Core · 8 min · ●●○**
#
# The rest of the model is unchanged, if three things are right.
#
# - `shard_batch(tokens, cos, sin, own_positions)`: what this rank's model gets. `tokens` is (batch, seq + 1), whole; cos and sin (seq, d) are the angles of
#   all positions (rotary embedding). `own_positions` (local) is this rank's row of the table. Return `(inputs, targets, cos, sin)` of these positions.
#   The target of position $i$ is the token $i + 1$. *It may be on another rank*, so take it from the whole sequence.
# - `context_loss(logits, targets)`: targets of -100 do not count (padding, prompts; `F.cross_entropy` ignores them by default), so ranks have different numbers of valid tokens; some may
#   have none. The mean of the means of the ranks would be wrong. Return the sum of the losses of this rank's tokens, divided by the number of valid
#   tokens of **all** ranks (one all-reduce of one number). Do not divide by the number of ranks.
#
# The sum of these shares over the ranks is the loss of one process, so the gradients of the weights are *summed* over the ranks. (DDP and FSDP average: with them,
# multiply the loss by N.)

# %% nbgrader={"grade_id": "loss", "solution": true}
def shard_batch(
    tokens: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, own_positions: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """tokens (batch, seq + 1), cos and sin (seq, d), own_positions (local)
    -> inputs, targets (batch, local), cos, sin (local, d)."""
    ### BEGIN SOLUTION
    return tokens[:, own_positions], tokens[:, own_positions + 1], cos[own_positions], sin[own_positions]
    ### END SOLUTION


def context_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """logits (batch, local, vocabulary), targets (batch, local)
    -> this rank's share of the mean loss, a scalar."""
    ### BEGIN SOLUTION
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    valid = (targets != -100).sum()
    dist.all_reduce(valid)
    return total / valid
    ### END SOLUTION


# %% id="given_context_step"
def context_step(
    model: Llama, tokens: torch.Tensor, positions: torch.Tensor, padding: int = -100
) -> torch.Tensor:
    """Forward and backward of this rank's tokens of whole sequences (batch, seq + 1).

    Returns the loss over all ranks.

    A target that is the token `padding` does not count.
    """
    angles = rotation(model.config, tokens.shape[1] - 1, model.embed_tokens.weight)
    inputs, targets, cos, sin = shard_batch(tokens, *angles, positions[dist.get_rank()])
    targets = targets.masked_fill(targets == padding, -100)
    x = model.embed_tokens(inputs)
    for block in model.layers:
        block.self_attn.attend = lambda q, k, v, **_: ring_attention(q, k, v, positions)
        x = block(x, cos, sin)
    loss = context_loss(model.lm_head(model.norm(x)), targets)
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss


# %% nbgrader={"grade_id": "test_loss", "grade": true}
lab.check("loss")

# %% [markdown] id="train_text"
# Do they learn the same? The cell trains a small Llama in float64 on one rank, and on 4 ranks in the zig-zag order. It may take 20 s.

# %% id="run_training" tags=["demo"]
from dlo_lib.launch import run_ranks

SMALL = LlamaConfig(vocab_size=128, hidden=64, intermediate=128, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=16)


def train(steps: int) -> list[float]:
    """The loss of each step in the zig-zag order."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Llama(SMALL).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    tokens = torch.randint(128, (2, 17)).repeat(1, 4)[:, :65]
    losses = []
    for _ in range(steps):
        losses.append(float(context_step(model, tokens, zigzag(64, dist.get_world_size()))))
        optimizer.step()
        optimizer.zero_grad()
    return losses


curves = {"one rank": run_ranks(train, 1, STEPS)[0], "4 ranks": run_ranks(train, 4, STEPS)[0]}
apart = max(abs(a - b) for a, b in zip(*curves.values()))
print(f"largest difference of a loss to that of one rank: {apart:.1e}")
figures.losses(curves)

# %% [markdown] id="ulysses_text"
# ## 9 · The other form: exchange sequences for heads
#
# Heads do not interact inside attention (lab 19). So there is a second way to compute attention on a divided sequence, without blocks: before attention,
# an **all-to-all** turns "all heads of a part of the sequence" into "a part of the heads of the whole sequence"; after it, a second one
# restores the parts of the sequence. It is called Ulysses (DeepSpeed).

# %% id="show_ulysses" tags=["demo"]
figures.ulysses(3)

# %% [markdown] id="ulysses_exercise"
# **Core · 9 min · ●●○**
#
# `exchanged(parts)` is given: `parts[j]` goes to rank j, and of the result, row j is what came from rank j. Here rank r has the r-th part
# of the sequence (the contiguous order). `sequence_to_heads` is given too; read the shapes in its comments. Write
#
# - the backward of `AllToAll`: row j of the result came from rank j. Where does its gradient belong?
# - `heads_to_sequence(x)`, the inverse of `sequence_to_heads`: (batch, heads/N, seq, d) → (batch, heads, local, d);
# - `ulysses_attention(q, k, v)`: causal attention of this rank's queries, by `F.scaled_dot_product_attention`.

# %% id="given_exchanged"
def exchanged(parts: torch.Tensor) -> torch.Tensor:
    """All-to-all: (N, ...) -> (N, ...); parts[j] goes to rank j, result[j] comes from rank j."""
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, parts.contiguous())
    return received


# %% nbgrader={"grade_id": "ulysses", "solution": true}
class AllToAll(torch.autograd.Function):
    """An all-to-all that autograd knows."""

    @staticmethod
    def forward(ctx, parts):
        return exchanged(parts)

    @staticmethod
    def backward(ctx, grad):
        ### BEGIN SOLUTION
        return exchanged(grad)
        ### END SOLUTION


def sequence_to_heads(x: torch.Tensor) -> torch.Tensor:
    """(batch, heads, local, d): a part of the sequence
    -> (batch, heads / N, seq, d): a part of the heads."""
    # Both are (N, batch, heads / N, local, d). Row j of parts goes to rank j; row j of received
    # is the j-th part of the sequence.
    parts = x.unflatten(1, (dist.get_world_size(), -1)).movedim(1, 0)
    received = AllToAll.apply(parts)
    # The parts in their order, in front of their tokens:
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


def heads_to_sequence(x: torch.Tensor) -> torch.Tensor:
    """(batch, heads / N, seq, d) -> (batch, heads, local, d), the inverse."""
    ### BEGIN SOLUTION
    parts = x.unflatten(2, (dist.get_world_size(), -1)).movedim(2, 0)  # (N, batch, heads / N, local, d)
    return AllToAll.apply(parts).movedim(0, 1).flatten(1, 2)  # row j has the j-th group of heads
    ### END SOLUTION


def ulysses_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of this rank's queries to all keys, (batch, heads, local, d)."""
    ### BEGIN SOLUTION
    q, k, v = (sequence_to_heads(tensor) for tensor in (q, k, v))
    return heads_to_sequence(F.scaled_dot_product_attention(q, k, v, is_causal=True))
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_ulysses", "grade": true}
lab.check("ulysses")

# %% [markdown] id="bytes_text"
# Ulysses needs no zig-zag: each rank computes whole sequences. But N is at most the number of heads, and nothing of its messages can hide behind the
# computation, because attention starts when the exchange has ended.
#
# ## Which form sends less?
#
# **Predict, then measure.** L is the number of elements of this rank's k (batch · heads · local · d); q and v have as many. On 4 ranks, how many times L
# does a rank *send*, forward and backward together? Count the shifts of your ring, and the exchanges of Ulysses (a part of each tensor stays on its rank).

# %% id="predict_sent" tags=["prediction"]
sent_guess = {"ring": None, "Ulysses": None}  # times L

# %% id="run_sent" tags=["demo", "nbval-check-output"]
from dlo_lib.comm.calls import Kind

require_numbers(sent_guess)


def both_forms(length: int) -> int:
    """Forward and backward in both forms; the elements of this rank's k."""
    world = dist.get_world_size()
    q, k, v = (torch.randn(1, 4, length // world, 8, requires_grad=True) for _ in range(3))
    ring_attention(q, k, v, zigzag(length, world)).sum().backward()
    ulysses_attention(q, k, v).sum().backward()
    return k.numel()


run = run_ranks(both_forms, 4, LENGTH, trace=True)
sent = {"ring": run.trace.bytes(Kind.SEND, 0), "Ulysses": run.trace.ring_bytes(Kind.ALL_TO_ALL, 0)}
print(compared(sent_guess, {form: nbytes / (4 * run[0]) for form, nbytes in sent.items()}))

# %% [markdown] id="bytes_after"
# In the ring all keys and values pass through every rank, so a rank sends nearly the same on any number of ranks. In Ulysses it sends less and less with more ranks. With grouped-query
# attention, keys and values are small beside q and the output, which only Ulysses sends, so the ring sends less on few ranks (the optional exercise finds on how many).
# The ring has no limit for $N$, and its messages can hide behind the computation, if a rank has enough tokens: a step sends the keys and values of its $l$ local tokens, $4\,l\,h_{kv}\,d$ bytes in 16 bits,
# and computes half a block, $2\,l^2 h\,d$ operations, for $h$ heads of $d$ numbers and $h_{kv}$ heads of keys and values. With $F$ operations and $B$ bytes a second, sending takes no longer than computing from $l = 2\,(F/B)\,h_{kv}/h$ tokens on. With fewer, each step
# waits for its message. The cell computes this number for $F = 400$ TFLOP/s.

# %% id="show_enough_tokens" tags=["demo"]
for name in ("llama-3.2-3b", "llama-3.1-70b"):
    config = model_config(name)
    enough = []
    for link, bandwidth in (("NVLink, 450 GB/s", 450e9), ("network, 50 GB/s", 50e9)):
        tokens = 2 * 400e12 / bandwidth * config.num_kv_heads / config.num_heads
        enough.append(f"{link}: from {tokens:,.0f} tokens a rank on")
    print(f"{name:13} " + ", ".join(enough))

# %% [markdown] id="combined_text"
# Both forms are combined: Ulysses inside a node, where links are fast, and the ring between nodes (`ContextKind.COMBINED` in `dlo_lib.parallel.context`).
#
# ## At scale
#
# How long does one layer take on GPUs? The function below measures it for your ring. On a cluster it is a job; here the same
# function runs on two processes with a short sequence.

# %% id="run_at_scale" tags=["demo"]
from dlo_lib import cluster
from dlo_lib.labkit import at_scale


def ring_seconds(length: int, heads: int, head_dim: int, repeats: int, device: str = "cpu") -> float:
    """The shortest forward and backward of one layer of ring attention in the zig-zag order."""
    world = dist.get_world_size()
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    q, k, v = (torch.randn(1, heads, length // world, head_dim, device=device, requires_grad=True) for _ in range(3))
    positions = zigzag(length, world).to(device)
    times = []
    for _ in range(repeats + 1):
        dist.barrier()
        began = time.perf_counter()
        ring_attention(q, k, v, positions).sum().backward()
        float(q.grad[0, 0, 0, 0])  # waits for the GPU
        times.append(time.perf_counter() - began)
    return min(times[1:])


large = {"length": 32768, "heads": 32, "head_dim": 128, "repeats": 10, "device": "cuda"}
script = cluster.submit(ring_seconds, large, gpus=4, site="jean-zay-h100", account="abc", dry_run=True)
print("For SLURM, 4 ranks:", at_scale.directives(script), sep="\n")
print(f"here, 2 ranks: {1e3 * max(run_ranks(ring_seconds, 2, LENGTH, 4, 16, REPEATS)):.1f} ms")

# %% [markdown] id="bytes_exercise"
# ## Optional exercise
#
# Nothing later needs it.
#
# ## 10 · The formulas
#
# **Optional · 7 min · ●●○**
#
# From how many ranks on does Ulysses send less? The answer depends on grouped-query attention (GQA), which has fewer heads of keys and values than
# query heads. Write how many *elements* a rank sends for one layer with batch 1, forward and backward together, on `world` ranks:
#
# - `ring_sent(seq, kv_heads, head_dim, world)` of the ring of exercises 4 and 6: only keys, values and their gradients travel;
# - `ulysses_sent(seq, heads, kv_heads, head_dim, world)`: q, k, v and the output are exchanged, and all four again in backward. With fewer than
#   `world` heads of keys, each rank needs a copy of one: count `world` of them.

# %% nbgrader={"grade_id": "bytes", "solution": true}
def ring_sent(seq: int, kv_heads: int, head_dim: int, world: int) -> float:
    """The elements that a rank sends in the ring, forward and backward."""
    ### BEGIN SOLUTION
    own = kv_heads * seq / world * head_dim
    return 2 * own * (2 * (world - 1) + world)
    ### END SOLUTION


def ulysses_sent(seq: int, heads: int, kv_heads: int, head_dim: int, world: int) -> float:
    """The elements that a rank sends in the all-to-all form, forward and backward."""
    ### BEGIN SOLUTION
    own = (2 * heads + 2 * max(kv_heads, world)) * seq / world * head_dim
    return 2 * own * (world - 1) / world
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_bytes", "grade": true}
lab.check("bytes")

# %% [markdown] id="bytes_figure_text"
# The lines are your formulas for 131,072 tokens of 64 heads of 128, in 16 bits. The points are measured on 4 ranks with `dlo_lib.parallel.context`, at a small size and scaled; its
# ring sends less than yours, because it does not send keys that no later rank uses, nor the owner's gradients. Move the slider: where do the lines cross?

# %% id="show_sent" tags=["demo"]
from dlo_lib.parallel.context import ContextKind, ContextParallel, SequencePlacement


def measured_forms(length: int, kv_heads: tuple[int, ...]) -> None:
    """Forward and backward with dlo_lib: the ring, then Ulysses, for each number of heads of keys."""
    world = dist.get_world_size()
    for kind in (ContextKind.RING, ContextKind.ULYSSES):
        context = ContextParallel(dist.group.WORLD, kind.layout(world, SequencePlacement.ZIGZAG))
        for heads in kv_heads:
            q, k, v = (torch.randn(1, count, length // world, 2, requires_grad=True) for count in (64, heads, heads))
            context.attend(q, k, v, is_causal=True, enable_gqa=heads < 64).sum().backward()


points = {}  # (form, heads of keys) -> elements for each token and each element of a head, the mean of 4 ranks
trace = run_ranks(measured_forms, 4, 32, (64, 8), trace=True).trace
for form, kind in (("ring", Kind.SEND), ("Ulysses", Kind.ALL_TO_ALL)):
    calls = [[call.ring_bytes / 4 / (32 * 2 * 4) for call in trace.calls(rank) if call.kind is kind] for rank in range(4)]
    points[form, 64] = sum(sum(own[: len(own) // 2]) for own in calls)
    points[form, 8] = sum(sum(own[len(own) // 2 :]) for own in calls)


def sent_by_rank(kv_heads: int = 8):
    worlds = [2, 4, 8, 16, 32, 64]
    lines = {"ring": [ring_sent(131072, kv_heads, 128, world) for world in worlds]}
    lines["Ulysses"] = [ulysses_sent(131072, 64, kv_heads, 128, world) for world in worlds]
    shown = {form: 131072 * 128 * value for (form, heads), value in points.items() if heads == kv_heads}
    return figures.sent_by_rank(worlds, lines, shown)


explore(sent_by_rank, kv_heads=[64, 32, 8, 1])

# %% [markdown] id="standard_text"
# ## The same with what you will use on Monday
#
# PyTorch has a context manager. It cuts the listed tensors in place (in the zig-zag order), and inside it `F.scaled_dot_product_attention` is ring attention:
#
# ```python
# from torch.distributed.tensor.experimental import context_parallel
#
# mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("cp",))
# with context_parallel(mesh, buffers=(inputs, targets, cos, sin), buffer_seq_dims=(1, 1, 0, 0)):
#     loss = loss_of(model(inputs, cos, sin), targets)
#     loss.backward()
# ```
#
# It knows the attention kernels of GPUs only. The ring below it takes any kernel, also that of the CPU. These functions are private
# and change: `torch_compat` finds them in each release of PyTorch. Here they pass your checks of exercise 6, in both orders.

# %% id="check_standard" tags=["demo", "read"]
from dlo_lib.base.torch_compat import pytorch_ring, pytorch_ring_backward


class PyTorchRing(torch.autograd.Function):
    """The ring attention of PyTorch, with its kernel for the CPU."""

    @staticmethod
    def options(balanced: bool):
        pytorch_ring()._cp_options.enable_load_balance = balanced
        pytorch_ring()._cp_options.convert_to_f32 = False  # the checks use float64
        pytorch_ring().set_rotate_method("alltoall")  # the default gathers all keys and values
        return dist.group.WORLD, 2

    @staticmethod
    def forward(ctx, q, k, v, balanced):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        where = PyTorchRing.options(balanced)
        out, lse = pytorch_ring()._templated_ring_attention(*where, kernel, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.balanced = balanced
        return out

    @staticmethod
    def backward(ctx, grad):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        where = PyTorchRing.options(ctx.balanced)
        saved = ctx.saved_tensors
        options = {"is_causal": True, "dropout_p": 0.0}
        grads = pytorch_ring_backward(*where, kernel, grad, "grad_out", *saved, **options)
        return *grads, None


def with_pytorch(q, k, v, positions):
    balanced = bool(positions[0].diff().gt(1).any())  # the zig-zag has a gap
    return PyTorchRing.apply(q, k, v, balanced)


lab.check("backward", instead={"ring_attention": with_pytorch})

# %% [markdown] id="standard_table_text"
# The table compares the forms on 2 ranks, for one layer in the zig-zag order: the shortest forward and backward of several, the bytes that a rank sends, and the lines
# that you write. For PyTorch these are the four lines of the context manager; the class in the last cell is longer, because it calls private functions. `dlo_lib.parallel.context` changes a whole model with one line, `parallelize_context(model, group)`.

# %% id="show_standard" tags=["demo", "read", "nbval-check-output"]
from dlo_lib.labkit.side_by_side import Form, lines_of, table
from dlo_lib.parallel.context import ContextKind, ContextParallel, SequencePlacement


def seconds_of(form: str, length: int, repeats: int) -> float:
    """The shortest forward and backward after the first."""
    torch.set_num_threads(1)
    world = dist.get_world_size()
    q, k, v = (torch.randn(1, 4, length // world, 32, requires_grad=True) for _ in range(3))
    positions = zigzag(length, world)
    layout = ContextKind.RING.layout(world, SequencePlacement.ZIGZAG)
    context = ContextParallel(dist.group.WORLD, layout)
    attention = {
        "yours": ring_attention,
        "PyTorch": with_pytorch,
        "dlo_lib": lambda q, k, v, _: context.attend(q, k, v, is_causal=True),
    }
    times = []
    for _ in range(repeats + 1):
        dist.barrier()
        began = time.perf_counter()
        attention[form](q, k, v, positions).sum().backward()
        times.append(time.perf_counter() - began)
    return min(times[1:])


yours = (block_attention, merge, visible, ring_forward, block_backward, ring_backward)
yours += (RingAttention.forward, RingAttention.backward, ring_attention)
forms = []
for form, lines in (("yours", lines_of(*yours)), ("PyTorch", 4), ("dlo_lib", 1)):
    ran = run_ranks(seconds_of, 2, form, LENGTH, REPEATS, trace=True)
    kinds = (Kind.SEND, Kind.ALL_TO_ALL)
    sent = sum(call.payload_bytes for call in ran.trace.calls(0) if call.kind in kinds)
    forms.append(Form(form, lines, max(ran), sent / (1 + REPEATS)))
print(table(forms, measured="forward and backward"))

# %% [markdown] id="standard_lesson"
# PyTorch sends what your ring sends. `dlo_lib` sends less: the second half of a zig-zag block is not sent to ranks that do not use it, and a rank's gradients of
# its own block never travel. Your form writes out the scores of each block; the other two call a fused kernel, which does not.

# %% [markdown] id="quiz_text"
# ## Quiz
#
# **Core · 5 min · ●○○**
#
# Answer with the letter, for example `{"q1": "a", ...}`. The check here tests only that every question has an
# answer; grading counts the right ones.

# %% id="show_quiz" tags=["demo"]
lab.quiz()

# %% nbgrader={"grade_id": "quiz", "solution": true}
### BEGIN SOLUTION: quiz = {"q1": "", "q2": "", "q3": "", "q4": "", "q5": "", "q6": ""}
quiz = {"q1": "b", "q2": "d", "q3": "c", "q4": "a", "q5": "c", "q6": "b"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true}
lab.check("quiz")

# %% [markdown] id="further"
# ## Go further
#
# - In the zig-zag, the late half of a block is used by the ranks before its owner only. In which direction must blocks travel so that it need not be sent to the others?
# - In your backward, dk and dv travel N times. The owner's contribution need not travel. How many messages remain?
# - Let the gradients travel one step behind their block, so that no rank waits for a message before it computes.
# - Add grouped-query attention to your ring: k and v have fewer heads, and travel as they are.
# - Packed documents: a token sees only tokens of its document. Which rectangles does `visible` then save, and what happens to the balance?
# - Combine both forms: Ulysses inside groups of 2 ranks, a ring of 2 groups.
# - Read `dlo_lib/parallel/context/`: where does it differ from yours, and why?
#
# ## References
#
# - H. Liu, M. Zaharia, P. Abbeel, *Ring Attention with Blockwise Transformers for Near-Infinite Context* (2023), [arXiv:2310.01889](https://arxiv.org/abs/2310.01889)
# - M. Milakov, N. Gimelshein, *Online normalizer calculation for softmax* (2018), [arXiv:1805.02867](https://arxiv.org/abs/1805.02867)
# - T. Dao et al., *FlashAttention* (2022), [arXiv:2205.14135](https://arxiv.org/abs/2205.14135)
# - W. Brandon et al., *Striped Attention* (2023), [arXiv:2311.09431](https://arxiv.org/abs/2311.09431)
# - A. Dubey et al., *The Llama 3 Herd of Models* (2024; context parallelism in section 3.3), [arXiv:2407.21783](https://arxiv.org/abs/2407.21783)
# - S. A. Jacobs et al., *DeepSpeed Ulysses* (2023), [arXiv:2309.14509](https://arxiv.org/abs/2309.14509)
# - J. Fang, S. Zhao, *USP: A Unified Sequence Parallelism Approach for Long Context Generative AI* (2024), [arXiv:2405.07719](https://arxiv.org/abs/2405.07719)
# - The course this lab follows: IDRIS, *Deep Learning Optimisé – Jean Zay* (DLO-JZ), day 4
