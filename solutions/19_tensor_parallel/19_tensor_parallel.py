# %% [markdown] id="title"
# # 19 · Tensor parallelism
#
# **What you will do.** You divide the matrices of a transformer over ranks, so that every rank computes a part of each layer:
# two small autograd functions, the linear layers, the MLP, the embedding, attention and the loss. You assemble them
# into a Llama whose loss and gradients are those of one process, and combine it with data parallelism. You count its
# messages, and at the end PyTorch's `parallelize_module` passes the same checks.
#
# You need no GPU: ranks are processes on this machine (gloo), and the 3B model is measured at true size on fake tensors.
#
# Builds on labs 10 (collectives, groups) and 15 (FSDP: each rank *stores* a part, and computes everything). The core exercises,
# predictions and the quiz take about 88 minutes; with the text and the demos plan 110. Three optional exercises take 34 minutes
# more. Each exercise has a check that answers at once; `lab.hint("name")` gives a nudge, then a pointer, then a sketch. If you are
# stuck, `lab.use_reference("name")` lets you continue without its points.
#
# Words: tensor parallelism (*parallélisme de tenseur*), column parallel (*découpage par colonnes*), row parallel (*découpage par lignes*),
# conjugate functions (*fonctions conjuguées*), sequence parallelism (*parallélisme de séquence*), attention head (*tête d'attention*).

# %% id="setup"
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dlo_lib.grading import Lab
from dlo_lib.models import Llama, LlamaConfig
from dlo_lib.models.llama import apply_rope, rotation

MODEL = os.environ.get("DLO_MODEL", "llama-3.2-3b")
SEQ = int(os.environ.get("DLO_SEQ", 8192))  # tokens of a sequence at true size
RANKS = int(os.environ.get("DLO_RANKS", 512))  # of the measurement at true size
WIDTH = int(os.environ.get("DLO_WIDTH", 256))  # of the small model
STEPS = int(os.environ.get("DLO_STEPS", 12))  # of the training near the end
REPEATS = int(os.environ.get("DLO_REPEATS", 10))  # of a measured step
lab = Lab(globals())

# %% [markdown] id="why"
# ## Why: what FSDP does not divide
#
# On 512 ranks, FSDP leaves a rank of Llama 3.2 3B with $16\Psi/512 = 0.1$ GiB of weights, gradients and optimiser state. Is a GPU
# of 16 GB enough for *one* sequence of 8192 tokens, with activation checkpointing?
#
# **Predict** how many GiB a rank holds at the peak of a step: with the logits of all tokens, and with the loss of lab 05, which computes
# them in chunks. Replace `None` by your numbers; they are not graded. The next cell measures both at true size, on fake tensors (about 15 s).

# %% id="predict_peak" tags=["prediction"]
peak_guess = {"all logits, GiB": None, "chunked loss, GiB": None}

# %% id="show_why" tags=["demo", "nbval-check-output"]
import figures

from dlo_lib.kernels import FusedOperation
from dlo_lib.labkit.predictions import compared, require_numbers
from dlo_lib.profiling import measure_memory

require_numbers(peak_guess)

peaks = {}
for form, kernels in (("all logits", "eager"), ("chunked loss", {FusedOperation.LOSS})):
    peaks[form] = measure_memory(MODEL, 1, SEQ, checkpointing=True, parallel="fsdp", world_size=RANKS, kernels=kernels).at_peak
print(compared(peak_guess, {f"{form}, GiB": sum(peak.values()) / 2**30 for form, peak in peaks.items()}))
figures.not_divided(peaks, RANKS)

# %% [markdown] id="why_after"
# FSDP divides what is *stored*. Each rank still *computes* whole layers for its own sequence. The largest part of what that needs are the logits, one number for
# each token and each of 128,256 words, and they need no further ranks: the chunked loss removes that bar. What remains is whole on each rank too, and more
# ranks change none of it:
#
# - **A block is whole** while it is computed, and so are its gradients.
# - **One sequence is on one rank**, with its activations. With 512 ranks the batch has at least 512 sequences; a larger batch is not always
#   useful (lab 13).
# - **One rank computes its whole sequence.** On more ranks the step becomes no shorter.
#
# For Llama 3.2 3B these limits are far away. The cell computes them for larger models.

# %% id="show_limits" tags=["demo"]
from dataclasses import replace

from dlo_lib.models import model_config

large = model_config("llama-3.1-70b")
larger = replace(large, hidden=16384, intermediate=53248, num_heads=128, num_layers=126)
models = {"Llama 3.2 3B": model_config("llama-3.2-3b")}
models |= {"Llama 3.1 70B": large, "Llama 3.1 405B": larger}
for name, config in models.items():
    one = Llama(replace(config, num_layers=1, vocab_size=8), device="meta").layers[0]
    in_block = sum(weight.numel() for weight in one.parameters())
    # Without the scores of attention:
    flops = 6 * 8192 * (config.num_layers * in_block + config.hidden * config.vocab_size)
    print(
        f"{name:14}: one block, weights and gradients in bf16, {4 * in_block / 2**30:4.1f} GiB; "
        f"8192 tokens take {flops / 400e12:5.1f} s at 400 TFLOP/s"
    )

# %% [markdown] id="why_division"
# **Tensor parallelism** divides the computation itself: all ranks of a group work on the *same* tokens, and each
# computes a part of every matrix product.
#
# ## The idea: columns, then rows
#
# For $Y = XA$ there are two ways to cut the matrix $A$. By **columns**: each rank has all of $X$ and some columns of $A$, and gets the
# same columns of $Y$, complete. By **rows**: each rank has some columns of $X$ and the same rows of $A$, and gets a matrix of
# the full size of $Y$ that holds *partial sums*; $Y$ is their sum over the ranks.
#
# The figure shows one product after the other, as in Megatron-LM: $A$ by columns, then $B$ by rows. A colour is a rank.

# %% id="show_idea" tags=["demo"]
figures.column_then_row(2)

# %% [markdown] id="idea_after"
# What leaves the first product, the columns of H on each rank, is just what the second one needs. So two layers need a *single*
# communication, the sum at the end. An element-wise function such as GELU may stand between them: a rank has its columns of H
# complete. The other order fails at this place: after a row-parallel layer each rank has partial sums only, and

# %% id="show_gelu" tags=["demo"]
parts = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
wrong, right = F.gelu(parts).sum(0), F.gelu(parts.sum(0))
apart = float((wrong - right).norm() / right.norm())
print(f"GELU(a) + GELU(b) differs from GELU(a + b) by {apart:.0%}")

# %% [markdown] id="conjugate_text"
# ## 1 · Two conjugate functions
#
# In forward, X is the same on all ranks, and the partial sums are added at the end. And in backward? The gradient of X is a sum
# of the contributions of all columns of A, and each rank has only the contribution of its columns. So it needs a sum
# over the ranks as well. The upper row is forward, the lower one is backward:

# %% id="show_conjugate" tags=["demo"]
figures.conjugate()

# %% [markdown] id="conjugate_exercise"
# **Core · 10 min · ●●○**
#
# Write both ends as autograd functions (Megatron-LM calls them *f* and *g*). Each is the other one read backwards:
#
# | | forward | backward |
# |---|---|---|
# | `CopyToRanks` | the input, no communication | **all-reduce** of the gradient |
# | `SumOverRanks` | **all-reduce** of the input | the gradient, no communication |
#
# - The ranks are those of `group`, as in lab 10: `dist.all_reduce(tensor, group=group)`. `None` means all ranks.
# - `dist.all_reduce` works in place on a contiguous tensor. Neither the input nor the gradient that you receive may change: other
#   functions use them too.
# - `backward` returns one value for each input of `forward`; that of the group is `None`. What backward needs, forward
#   stores in `ctx`.

# %% nbgrader={"grade_id": "conjugate", "solution": true}
class CopyToRanks(torch.autograd.Function):
    """Identity in forward; in backward, the sum of the gradients of all ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ### BEGIN SOLUTION
        ctx.group = group
        return x.view_as(x)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad):
        ### BEGIN SOLUTION
        summed = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=ctx.group)
        return summed, None
        ### END SOLUTION


class SumOverRanks(torch.autograd.Function):
    """The sum over all ranks in forward; identity in backward."""

    @staticmethod
    def forward(ctx, x, group):
        ### BEGIN SOLUTION
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad):
        ### BEGIN SOLUTION
        return grad, None
        ### END SOLUTION


def copy_to_ranks(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Begin a parallel region.

    x is the same on all ranks of the group, and each uses it in its way.
    """
    return CopyToRanks.apply(x, group)


def sum_over_ranks(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """End a parallel region: the sum of the x of all ranks of the group, the same on each."""
    return SumOverRanks.apply(x, group)


# %% nbgrader={"grade_id": "test_conjugate", "grade": true}
lab.check("conjugate")

# %% [markdown] id="conjugate_after"
# `torch.distributed.nn.functional.all_reduce` looks like `SumOverRanks`, but its backward is another all-reduce. That is right if each
# rank has a separate loss and the losses are added. Here all ranks compute *one and the same* loss, so every rank already has the whole
# gradient of the sum; adding these again would make it t times too large on t ranks.
#
# ## 2 · A part of a weight
#
# **Core · 4 min · ●○○**
#
# Write `shard(weight, dim, group)`: this rank's part of a weight that every rank has whole, cut into equal parts along `dim`. The
# rank in the group is `dist.get_rank(group)`, and `dist.get_world_size(group)` is their number t, which divides the size.
#
# The part must have *separate memory*. A view (`chunk`, `narrow`, a slice) keeps the whole weight alive, and then nothing is saved.

# %% nbgrader={"grade_id": "shard", "solution": true}
def shard(weight: torch.Tensor, dim: int, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return this rank's part of a weight along `dim`, as a contiguous copy."""
    ### BEGIN SOLUTION
    return weight.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].clone(memory_format=torch.contiguous_format)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_shard", "grade": true}
lab.check("shard")

# %% [markdown] id="linear_text"
# ## 3 · Linear layers
#
# **Core · 10 min · ●●○**
#
# `nn.Linear` stores its weight as (out, in) and computes x Wᵀ + b. So the *columns* of the figure are `dim` 0 of the weight, and the
# rows are `dim` 1. Write both layers with your two functions and `F.linear`:
#
# - `column_linear(x, weight, bias, group)`: x is whole; weight (out/t, in) and bias (out/t) are this rank's parts. The result has this
#   rank's columns of the output. The gradient of x must be whole on every rank.
# - `row_linear(x, weight, bias, group)`: x (..., in/t) and weight (out, in/t) are this rank's parts; the bias (out) is whole on every
#   rank. The result is the whole output on every rank, and the bias is in it **once**.
#
# `bias` may be `None`. Each of them makes one all-reduce: the column layer in backward, the row layer in forward.

# %% nbgrader={"grade_id": "linear", "solution": true}
def column_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group=None
) -> torch.Tensor:
    """x (..., in), weight (out / t, in) -> (..., out / t): this rank's columns of the output."""
    ### BEGIN SOLUTION
    return F.linear(copy_to_ranks(x, group), weight, bias)
    ### END SOLUTION


def row_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group=None
) -> torch.Tensor:
    """x (..., in / t), weight (out, in / t) -> (..., out): the whole output, on every rank."""
    ### BEGIN SOLUTION
    out = sum_over_ranks(F.linear(x, weight), group)
    return out if bias is None else out + bias
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_linear", "grade": true}
lab.check("linear")

# %% [markdown] id="mlp_text"
# ## 4 · The MLP, with one all-reduce
#
# **Core · 8 min · ●●○**
#
# The MLP of a Llama is down(silu(gate(x)) · up(x)): three matrices, of which `gate` and `up` use the same input. Write
# `parallel_mlp` with **exactly one all-reduce in forward and exactly one in backward**. gate and up (intermediate/t, hidden) are cut
# by columns, down (hidden, intermediate/t) by rows; there is no bias.
#
# Before you write: how many all-reduces would two calls of `column_linear` make in backward?

# %% nbgrader={"grade_id": "mlp", "solution": true}
def parallel_mlp(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, group=None
) -> torch.Tensor:
    """x (..., hidden), whole on every rank -> (..., hidden), whole on every rank."""
    ### BEGIN SOLUTION
    x = copy_to_ranks(x, group)  # once for both: their gradients are added before the all-reduce
    return row_linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down, None, group)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_mlp", "grade": true}
lab.check("mlp")

# %% [markdown] id="embedding_text"
# ## 5 · The embedding
#
# The table of Llama 3.2 3B has 128,256 rows of 3072 numbers: 1.5 GiB in fp32, more than three of its blocks. It is cut along the vocabulary. Rank $r$ has
# the rows of the words from $rV/t$, and looks up only those tokens that are its own.

# %% id="show_vocabulary" tags=["demo"]
figures.vocabulary([3, 7, 0, 5, 2], size=8, world=4)

# %% [markdown] id="embedding_exercise"
# **Core · 8 min · ●●○**
#
# Write `parallel_embedding(tokens, weight, group)`. On every rank, the result has the embedding of *every* token. For the tokens
# of other ranks this rank contributes zeros. (`F.embedding` accepts only numbers below `len(weight)`, so such tokens need some valid number first;
# what they look up must not count.) One all-reduce of the result is enough; the table is never gathered.

# %% nbgrader={"grade_id": "embedding", "solution": true}
def parallel_embedding(tokens: torch.Tensor, weight: torch.Tensor, group=None) -> torch.Tensor:
    """tokens (batch, seq), weight (V / t, hidden) -> (batch, seq, hidden), on every rank.

    tokens: from 0 to V - 1. weight: this rank's rows.
    """
    ### BEGIN SOLUTION
    rows = tokens - dist.get_rank(group) * len(weight)
    own = (rows >= 0) & (rows < len(weight))
    found = F.embedding(rows.where(own, 0), weight)
    return sum_over_ranks(found.where(own.unsqueeze(-1), 0), group)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_embedding", "grade": true}
lab.check("embedding")

# %% [markdown] id="attention_text"
# ## 6 · Attention, by heads
#
# The heads of attention do not interact until the output projection, which adds what they found. So attention is the pattern of the
# MLP: q, k, v are cut by columns, *at the borders of heads*, and o by rows. With grouped-query attention (GQA), several query
# heads share a head of keys and values. They stay together as long as t divides the number of these heads. Move the sliders: which t
# break this rule?

# %% id="show_heads" tags=["demo"]
from dlo_lib.labkit.explore import explore


def heads(ranks: int = 2, kv_heads: int = 4):
    return figures.heads(8, kv_heads, ranks)


explore(heads, ranks=[1, 2, 4, 8], kv_heads=[1, 2, 4, 8])

# %% [markdown] id="attention_exercise"
# **Core · 8 min · ●●○**
#
# Write `parallel_attention`, again with exactly one all-reduce in forward and one in backward. The rank's parts q (heads/t · d, hidden),
# k and v (kv_heads/t · d, hidden), and o (hidden, heads/t · d) are weights; t divides both numbers of heads. d is the size of a head, the last dimension of `cos`. The next cell
# gives `attend`, which is the same with and without tensor parallelism: it takes projected q, k, v (batch, seq, heads · d) for any number of heads.

# %% id="given_attend"
def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Causal attention of projected q, k, v.

    Each is (batch, seq, its heads * d) -> (batch, seq, query heads * d).
    """
    # (batch, heads, seq, d):
    q, k, v = (part.unflatten(-1, (-1, cos.shape[-1])).transpose(1, 2) for part in (q, k, v))
    q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return out.transpose(1, 2).flatten(2)


# %% nbgrader={"grade_id": "attention", "solution": true}
def parallel_attention(
    x: torch.Tensor, q, k, v, o, cos: torch.Tensor, sin: torch.Tensor, group=None
) -> torch.Tensor:
    """x (batch, seq, hidden), whole on every rank -> (batch, seq, hidden), whole on every rank."""
    ### BEGIN SOLUTION
    x = copy_to_ranks(x, group)
    found = attend(F.linear(x, q), F.linear(x, k), F.linear(x, v), cos, sin)
    return row_linear(found, o, None, group)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_attention", "grade": true}
lab.check("attention")

# %% [markdown] id="loss_text"
# ## 7 · The loss, without the logits
#
# The output projection is column parallel: each rank has the logits of $V/t$ words for all tokens. If the ranks gathered them, each would hold
# the largest bar of the first figure again. The cross-entropy of one token with logits $z$ and target $y$ needs less:
#
# $$\mathrm{loss} = \log \sum_j e^{z_j - m} - (z_y - m), \qquad m = \max_j z_j, \text{ so that no exponential overflows}$$
#
# Of each token, a rank needs from the others only three numbers: the maximum, the sum of exponentials, and the logit of the target, which
# one of the ranks has.
#
# **Core · 13 min · ●●●**
#
# Write `parallel_cross_entropy(logits, targets, group)`: the mean of the loss over all tokens, the same on every rank.
#
# - Communicate at most three numbers for each token, by all-reduce. The logits are never gathered.
# - Logits may be large (1000): subtract the maximum over *all* ranks. `dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)` computes
#   it. It is a constant for the gradient (`detach`), because it cancels.
# - The gradient of this rank's logits is that of the whole loss. With `sum_over_ranks` for the two sums, autograd finds it, and
#   backward communicates nothing.

# %% nbgrader={"grade_id": "loss", "solution": true}
def parallel_cross_entropy(logits: torch.Tensor, targets: torch.Tensor, group=None) -> torch.Tensor:
    """logits (batch, seq, V / t), targets (batch, seq) -> the mean loss, a scalar.

    logits: of this rank's words. targets: from 0 to V - 1.
    """
    ### BEGIN SOLUTION
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    logits = logits - largest.unsqueeze(-1)
    total = sum_over_ranks(logits.exp().sum(-1), group)
    words = targets - dist.get_rank(group) * logits.shape[-1]
    own = (words >= 0) & (words < logits.shape[-1])
    found = logits.gather(-1, words.where(own, 0).unsqueeze(-1)).squeeze(-1)
    return (total.log() - sum_over_ranks(found.where(own, 0), group)).mean()
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_loss", "grade": true}
lab.check("loss")

# %% [markdown] id="model_text"
# ## 8 · The whole Llama
#
# **Core · 9 min · ●●○**
#
# Everything is there. Two functions join it:
#
# - `shard_dim(name)` is the plan: along which dimension is the parameter of this name cut? 0, 1, or `None` if every rank keeps all of it. The
#   names end in `embed_tokens.weight`, `q_proj.weight`, `k_proj.weight`, `v_proj.weight`, `o_proj.weight`, `gate_proj.weight`, `up_proj.weight`,
#   `down_proj.weight`, `lm_head.weight` (vocabulary, hidden), and in `layernorm.weight` or `norm.weight`. Norms need all of x, and are whole.
# - `parallel_block(x, block, cos, sin, group)` is x + attention(norm(x)), then x + MLP(norm(x)). `block` has the parts of a Llama block:
#   `block.input_layernorm`, `block.self_attn.q_proj.weight` and so on, `block.post_attention_layernorm`, `block.mlp.gate_proj.weight` and so on.
#
# The gradient of a norm's weight needs no communication: the gradient of its output has passed `CopyToRanks`, so it is whole and the same on every rank.

# %% nbgrader={"grade_id": "model", "solution": true}
def shard_dim(name: str) -> int | None:
    """Return the dimension along which a parameter of a Llama is cut, or None."""
    ### BEGIN SOLUTION
    layer = name.split(".")[-2]
    if layer in ("o_proj", "down_proj"):
        return 1
    return None if "norm" in layer else 0
    ### END SOLUTION


def parallel_block(
    x: torch.Tensor, block: nn.Module, cos: torch.Tensor, sin: torch.Tensor, group=None
) -> torch.Tensor:
    """One transformer block with this rank's parts.

    x (batch, seq, hidden) -> (batch, seq, hidden), both whole.
    """
    ### BEGIN SOLUTION
    own = block.self_attn
    weights = own.q_proj.weight, own.k_proj.weight, own.v_proj.weight, own.o_proj.weight
    x = x + parallel_attention(block.input_layernorm(x), *weights, cos, sin, group)
    mlp = block.mlp
    normed = block.post_attention_layernorm(x)
    return x + parallel_mlp(normed, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight, group)
    ### END SOLUTION


# %% id="given_tensor_parallel"
def tensor_parallel(model: Llama, group: dist.ProcessGroup | None = None):
    """Replace each weight by this rank's part.

    Return step(tokens, targets), which runs forward and backward and returns the loss.
    """
    parts = {}  # tied weights stay one parameter
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        dim = shard_dim(name)
        if dim is not None:
            if parameter not in parts:
                parts[parameter] = nn.Parameter(shard(parameter.detach(), dim, group))
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, parts[parameter])

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = parallel_embedding(tokens, model.embed_tokens.weight, group)
        cos, sin = rotation(model.config, tokens.shape[1], x)
        for block in model.layers:
            x = parallel_block(x, block, cos, sin, group)
        logits = column_linear(model.norm(x), model.lm_head.weight, None, group)
        loss = parallel_cross_entropy(logits, targets, group)
        loss.backward()
        return loss.detach()

    return step


# %% nbgrader={"grade_id": "test_model", "grade": true}
lab.check("model")

# %% [markdown] id="bytes_text"
# **Predict, then measure.** A block handles $b$ sequences of $s$ tokens with $h$ numbers each. How many times $bsh$ *numbers* does a rank send for one
# block, forward and backward together, on 2 and on 4 ranks? (Ring all-reduce, lab 10: $2(t-1)/t$ of the tensor.) Does it depend on the
# size of the weights?

# %% id="predict_bytes" tags=["prediction"]
bytes_guess = {"2 ranks": None, "4 ranks": None}  # times b s h

# %% id="run_bytes" tags=["demo", "nbval-check-output"]
from dlo_lib.launch import run_ranks

require_numbers(bytes_guess)

SMALL = LlamaConfig(
    vocab_size=512, hidden=WIDTH, intermediate=11 * WIDTH // 4, num_layers=4, num_heads=8, num_kv_heads=4, head_dim=WIDTH // 8
)
BATCH, LENGTH = 4, 64


def batch(seed: int, share: int = 0, shares: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets: this share of BATCH sequences that repeat a short pattern."""
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(SMALL.vocab_size, (BATCH, 16), generator=random).repeat(1, LENGTH // 16 + 1)[:, : LENGTH + 1]
    own = tokens.chunk(shares)[share]
    return own[:, :-1], own[:, 1:]


def one_block() -> None:
    """Forward and backward of a block."""
    model = Llama(SMALL)
    tensor_parallel(model)
    x = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    parallel_block(x, model.layers[0], *rotation(SMALL, LENGTH, x)).sum().backward()


sent = {}
for world in (1, 2, 4):
    trace = run_ranks(one_block, world, trace=True).trace
    sent[world] = trace.ring_bytes(rank=0) / (4 * BATCH * LENGTH * WIDTH)
    print(f"{world} rank(s): {trace.count(rank=0)} all-reduces, {sent[world]:.2f} b s h sent")
print(compared(bytes_guess, {f"{world} ranks": sent[world] for world in (2, 4)}))
figures.sent_by_block(sent, bytes_guess)

# %% [markdown] id="bytes_after"
# Four all-reduces of $bsh$ numbers: $8bsh(t-1)/t$, whatever the size of the weights. FSDP is the other way round: it sends 3 times the
# parameters of the block, whatever the number of tokens. The next figure compares both for a block of the real model in 16 bits.

# %% id="show_against_fsdp" tags=["demo"]
real = model_config(MODEL)
in_block = sum(weight.numel() for weight in Llama(real, device="meta").layers[0].parameters())
figures.against_fsdp(in_block, real.hidden, world=8)

# %% [markdown] id="grid_text"
# With many tokens on a rank, tensor parallelism sends more. And the next layer needs each sum, so in the form of this lab nothing is computed during a message. With the sequence
# parallelism of exercise 10 it can be: **asynchronous tensor parallelism** cuts the product and its message into $t$ pieces of the sequence, and computes one
# piece while the next one travels (`dlo_lib.parallel.tensor.async_tp`; in PyTorch `torch.distributed._symmetric_memory`). This hides the messages only if a piece takes longer to
# compute than to send. The cell divides both times, for the all-gather in front of gate and up: $2sh(t-1)/t$ bytes, and $4shi/t$ operations. The number of tokens $s$ and
# the width $h$ cancel.

# %% id="show_async" tags=["demo"]
for link, bandwidth in (("NVLink of an H100", 450e9), ("network of 400 Gbit/s a GPU", 50e9)):
    ratios = []
    for ranks in (2, 4, 8, 16):
        computing = 4 * large.intermediate / ranks / 400e12
        sending = 2 * (ranks - 1) / ranks / bandwidth
        ratios.append(f"{computing / sending:.1f} (t = {ranks})")
    print(f"Llama 3.1 70B, {link}: computing / sending = " + ", ".join(ratios))

# %% [markdown] id="grid_intro"
# Hidden or not, t is thus at most the number of GPUs that a fast link connects, mostly those of one node (8), and the rest of the ranks is used in another way.
#
# ## 9 · Two dimensions: TP × DP
#
# Ranks form a grid. A row is a **tensor-parallel group**: the same tokens, other parts of the weights. A column is a **data-parallel
# group**: other tokens, the *same* part of the weights. Neighbours share a node, so they form the rows.

# %% id="show_grid" tags=["demo"]
figures.grid(tp=2, dp=3)

# %% [markdown] id="grid_exercise"
# **Core · 11 min · ●●○**
#
# - `make_groups(tp)` returns the two groups of this rank, (its tensor-parallel group, its data-parallel group). With tp = 2 on 6 ranks, the
#   first ones are {0, 1}, {2, 3}, {4, 5}, and the second ones {0, 2, 4}, {1, 3, 5}. As in lab 10, *all* ranks call `dist.new_group(ranks)` for *every* group, in the same
#   order, also for groups to which they do not belong.
# - `average_gradients(parameters, dp_group)` replaces each gradient by its mean over the data-parallel group, in place. A mean over the
#   tensor-parallel group would mix parts of different matrices. A parameter without gradient (`None`) is skipped.

# %% nbgrader={"grade_id": "grid", "solution": true}
def make_groups(tp: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the tensor-parallel and the data-parallel group of this rank.

    `tp` divides the number of ranks.
    """
    ### BEGIN SOLUTION
    rank, world = dist.get_rank(), dist.get_world_size()
    for start in range(0, world, tp):
        group = dist.new_group(list(range(start, start + tp)))
        if start <= rank < start + tp:
            tp_group = group
    for column in range(tp):
        group = dist.new_group(list(range(column, world, tp)))
        if rank % tp == column:
            dp_group = group
    return tp_group, dp_group
    ### END SOLUTION


def average_gradients(parameters, dp_group: dist.ProcessGroup) -> None:
    """Replace the gradient of each parameter by its mean over the group."""
    ### BEGIN SOLUTION
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=dp_group)
            parameter.grad /= dist.get_world_size(dp_group)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_grid", "grade": true}
lab.check("grid")

# %% [markdown] id="train_text"
# Do they all learn the same? The cell trains the small Llama in float64 on one rank, with TP on 4 ranks, and with TP × DP on 2 × 2 ranks, where each
# data-parallel group has half of the batch.

# %% id="run_training" tags=["demo"]
def train(tp: int, steps: int) -> list[float]:
    """The loss of each step, averaged over the data-parallel group."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Llama(SMALL).double()
    tp_group, dp_group = make_groups(tp)
    step = tensor_parallel(model, tp_group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    losses = []
    for _ in range(steps):
        loss = step(*batch(0, dist.get_rank(dp_group), dist.get_world_size(dp_group)))
        average_gradients(model.parameters(), dp_group)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss, group=dp_group)
        losses.append(float(loss) / dist.get_world_size(dp_group))
    return losses


curves = {}
for name, world, tp in (("one rank", 1, 1), ("TP 4", 4, 4), ("TP 2 × DP 2", 4, 2)):
    curves[name] = run_ranks(train, world, tp, STEPS)[0]
apart = max(abs(a - b) for name in ("TP 4", "TP 2 × DP 2") for a, b in zip(curves[name], curves["one rank"]))
print(f"largest difference of a loss to that of one rank: {apart:.1e}")
figures.losses(curves)

# %% [markdown] id="scale_text"
# ## At scale
#
# Which t is best on a node? The function below measures your block. On a cluster it is a job; here the same function
# runs on two processes with a small block. (In `dlo_lib.train`, tensor parallelism is the option `--tp`.)

# %% id="run_at_scale" tags=["demo"]
from dlo_lib import cluster
from dlo_lib.labkit import at_scale


def block_seconds(width: int, tokens: int, repeats: int, device: str = "cpu") -> float:
    """The shortest forward and backward of a block with all ranks as one tensor-parallel group."""
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    config = LlamaConfig(512, width, 7 * width // 2, 1, num_heads=32, num_kv_heads=8, head_dim=width // 32)
    model = Llama(config)
    tensor_parallel(model)
    block = model.layers[0].to(device)
    x = torch.randn(1, tokens, width, device=device, requires_grad=True)
    cos, sin = rotation(config, tokens, x)
    times = []
    for _ in range(repeats + 1):
        dist.barrier()
        began = time.perf_counter()
        parallel_block(x, block, cos, sin).sum().backward()
        float(x.grad[0, 0, 0])  # waits for the GPU
        times.append(time.perf_counter() - began)
    return min(times[1:])


large = {"width": 8192, "tokens": 8192, "repeats": 10, "device": "cuda"}
for gpus in (2, 4):
    script = cluster.submit(block_seconds, large, gpus=gpus, site="jean-zay-h100", account="abc", dry_run=True)
    print(f"For SLURM, t = {gpus}:", at_scale.directives(script), sep="\n")
seconds = run_ranks(block_seconds, 2, width=256, tokens=64, repeats=min(3, REPEATS))
print(f"here, t = 2: {1e3 * max(seconds):.1f} ms")

# %% [markdown] id="sequence_text"
# ## Optional exercises
#
# Nothing later needs these three. Choose, or continue with the section on `parallelize_module`.
#
# ## 10 · Sequence parallelism
#
# Between the parallel regions, at norms, dropout and residual additions, every rank has the same x (batch, seq, hidden), and keeps it for backward: t copies of
# the same numbers. **Sequence parallelism** keeps a part of the *sequence* on each rank there. An all-reduce is a reduce-scatter followed by an
# all-gather (lab 10). Between the two, each rank has 1/t of the result: that is where the norm goes.
#
# **Optional · 15 min · ●●●**
#
# Here x has the shape (seq/t, batch, hidden): with the sequence first, as in Megatron-LM, gathering is a concatenation. `gathered` and `scattered` are given.
#
# - `GatherSequence`: all-gather in forward, reduce-scatter in backward. `ScatterSequence` is its conjugate.
# - `sequence_mlp(x, norm, gate, up, down, group)`: the norm (`F.rms_norm(x, x.shape[-1:], weight, 1e-5)`) on this rank's tokens, then the
#   MLP, and the result for this rank's tokens. What is gathered is the *result of the norm*: no rank gathers x, or the result of the MLP.
# - The weight of the norm is whole on every rank, but each rank sees only its tokens, so their gradients must be *summed* over the
#   ranks. You have a function that does this in backward. (It works for weights as well.)

# %% id="given_sequence"
def gathered(x: torch.Tensor, group) -> torch.Tensor:
    """All-gather along the first dimension: (n, ...) -> (t * n, ...)."""
    whole = x.new_empty(dist.get_world_size(group) * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
    return whole


def scattered(x: torch.Tensor, group) -> torch.Tensor:
    """Reduce-scatter along the first dimension: (t * n, ...) -> (n, ...).

    The result is this rank's part of the sum.
    """
    own = x.new_empty(len(x) // dist.get_world_size(group), *x.shape[1:])
    dist.reduce_scatter_tensor(own, x.contiguous(), group=group)
    return own


# %% nbgrader={"grade_id": "sequence", "solution": true}
class GatherSequence(torch.autograd.Function):
    """All-gather of the parts of a sequence in forward.

    In backward, reduce-scatter of the gradients.
    """

    @staticmethod
    def forward(ctx, x, group):
        ### BEGIN SOLUTION
        ctx.group = group
        return gathered(x, group)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad):
        ### BEGIN SOLUTION
        return scattered(grad, ctx.group), None
        ### END SOLUTION


class ScatterSequence(torch.autograd.Function):
    """Reduce-scatter of partial sums in forward; in backward, all-gather of the gradients."""

    @staticmethod
    def forward(ctx, x, group):
        ### BEGIN SOLUTION
        ctx.group = group
        return scattered(x, group)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad):
        ### BEGIN SOLUTION
        return gathered(grad, ctx.group), None
        ### END SOLUTION


def sequence_mlp(x: torch.Tensor, norm: torch.Tensor, gate, up, down, group=None) -> torch.Tensor:
    """x (seq / t, batch, hidden): this rank's tokens -> MLP(norm(x)) of the same tokens."""
    ### BEGIN SOLUTION
    normed = F.rms_norm(x, x.shape[-1:], copy_to_ranks(norm, group), 1e-5)
    whole = GatherSequence.apply(normed, group)
    partial = F.linear(F.silu(F.linear(whole, gate)) * F.linear(whole, up), down)
    return ScatterSequence.apply(partial, group)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_sequence", "grade": true}
lab.check("sequence")

# %% [markdown] id="sequence_predict"
# **Predict, then measure.** Of a norm and an MLP on 4 ranks: how many times the bytes of tensor parallelism does sequence parallelism send? And how many
# times its bytes does a rank keep for backward?

# %% id="predict_sequence" tags=["prediction"]
sequence_guess = {"sent": None, "kept for backward": None}  # times those of tensor parallelism

# %% id="run_sequence" tags=["demo", "nbval-check-output"]
require_numbers(sequence_guess)
def kept_by(form: str) -> int:
    """Bytes of activations that forward of norm and MLP keeps for backward on this rank."""
    hidden, inner, world = 256, 1024 // dist.get_world_size(), dist.get_world_size()
    weights = [torch.randn(shape, requires_grad=True) for shape in ((hidden,), (inner, hidden), (inner, hidden), (hidden, inner))]
    x = torch.randn(512 // world if form == "sequence" else 512, 2, hidden, requires_grad=True)
    kept = {}

    def keep(tensor):
        if not any(tensor.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr() for weight in weights):
            kept[tensor.untyped_storage().data_ptr()] = tensor  # alive, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if form == "sequence":
            out = sequence_mlp(x, *weights)
        else:
            out = parallel_mlp(F.rms_norm(x, x.shape[-1:], weights[0], 1e-5), *weights[1:])
    out.sum().backward()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


kept, passed = {}, {}
for form in ("tensor", "sequence"):
    run = run_ranks(kept_by, 4, form, trace=True)
    kept[form], passed[form] = run[0], run.trace.ring_bytes(rank=0)
print(compared(sequence_guess, {"sent": passed["sequence"] / passed["tensor"], "kept for backward": kept["sequence"] / kept["tensor"]}))
figures.sequence_form(passed, kept)

# %% [markdown] id="sequence_after"
# The bytes are the same, up to the gradient of the norm's weight. What is kept falls: the input of the norm and its
# output are kept for 1/t of the tokens. What remains whole is the *gathered* input of the MLP. Megatron-LM keeps only the rank's part of it and gathers again in
# backward, which costs one more all-gather; then everything that is kept is divided by t.
#
# ## 11 · More ranks than heads of keys and values
#
# **Optional · 10 min · ●●○**
#
# Llama 3.2 3B has 24 query heads and 8 heads of keys and values. On 24 ranks there are fewer of these than ranks, so several ranks have a copy of
# the same one.
#
# - `own_kv_heads(num_kv_heads, rank, world)`: (start, stop) of the heads of keys and values that this rank needs. Either `world` divides their
#   number, or their number divides `world`, and neighbours share a head.
# - `shared_kv_attention`: as `parallel_attention`, but k and v are copies of one head, which the ranks of the group `sharing` have as well. Each of these ranks
#   gets only the gradient from *its* query heads. Without a sum over `sharing`, the copies would drift apart. (One more use of a function that you have.)

# %% nbgrader={"grade_id": "kv", "solution": true}
def own_kv_heads(num_kv_heads: int, rank: int, world: int) -> tuple[int, int]:
    """Return start and stop of the heads of keys and values that this rank needs."""
    ### BEGIN SOLUTION
    if num_kv_heads >= world:
        each = num_kv_heads // world
        return rank * each, (rank + 1) * each
    head = rank // (world // num_kv_heads)
    return head, head + 1
    ### END SOLUTION


def shared_kv_attention(
    x: torch.Tensor, q, k, v, o, cos, sin, group=None, sharing=None
) -> torch.Tensor:
    """parallel_attention, where the ranks of `sharing` all have a copy of k and v (d, hidden)."""
    ### BEGIN SOLUTION
    return parallel_attention(x, q, copy_to_ranks(k, sharing), copy_to_ranks(v, sharing), o, cos, sin, group)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_kv", "grade": true}
lab.check("kv")

# %% [markdown] id="dropout_text"
# ## 12 · Dropout: one mask, or one for each rank
#
# Dropout draws a random mask. Which masks must be equal?
#
# - On the residual stream of tensor parallelism, every rank has the *same* tensor. With different masks, the copies would become different tensors.
# - Inside attention and MLP each rank has other heads or features, and with sequence parallelism it has other tokens at the norms too. With one mask
#   on all ranks, the same places would be dropped in every part.
#
# **Optional · 8 min · ●●○**
#
# Write `dropout_on_ranks(x, p, differs, generator, group)`: each element of x is 0 with probability p, and divided by 1 - p otherwise. `generator`, a
# `torch.Generator`, has the same state on all ranks of the group when the function is called.
#
# - `differs=False`: all ranks have the same mask, whatever their x is. From the same state of `generator` it is drawn again.
# - `differs=True`: each rank has another mask.
# - Each call draws a new mask, and after each call the state of `generator` is the same on all ranks. Nothing is communicated.
#
# (`torch.rand(shape, generator=generator)` draws from [0, 1). `torch.Generator().manual_seed(number)` creates another generator.)

# %% nbgrader={"grade_id": "dropout", "solution": true}
def dropout_on_ranks(
    x: torch.Tensor, p: float, differs: bool, generator: torch.Generator, group=None
) -> torch.Tensor:
    """Return x with a mask that is the same on all ranks of the group, or different on each."""
    ### BEGIN SOLUTION
    source = generator
    if differs:
        seed = int(torch.randint(2**40, (), generator=generator))  # the same on all ranks, and new in each call
        source = torch.Generator().manual_seed(seed + dist.get_rank(group))
    kept = torch.rand(x.shape, generator=source) >= p
    return x * kept / (1 - p)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_dropout", "grade": true}
lab.check("dropout")

# %% [markdown] id="dropout_after"
# Megatron-LM keeps two generators for this, one for each kind of mask. With activation checkpointing, the forward runs again in backward: it must find
# the same states, or the masks of both passes differ. One number from the common generator, as here, makes it enough to restore that one.

# %% [markdown] id="standard_text"
# ## The same with what you will use on Monday
#
# PyTorch's `parallelize_module` applies a **plan**, a dict from names of modules to styles, to an unchanged model. Weights become
# `DTensor`s, which know how they are cut. `ColwiseParallel` and `RowwiseParallel` are your two layers. `PrepareModuleInput` declares the input of attention
# and MLP once, which makes one all-reduce of several (your exercise 4). `loss_parallel` is your exercise 7. It passes the checks of exercise 8.

# %% id="check_standard" tags=["demo", "read"]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)


def once(others: int) -> PrepareModuleInput:
    """The first input is the same on all ranks; `others` follow that are no activations."""
    layouts = (Replicate(), *[None] * others)
    return PrepareModuleInput(input_layouts=layouts, desired_input_layouts=layouts)


def with_parallelize_module(model: Llama, group=None):
    plan = {"embed_tokens": RowwiseParallel(input_layouts=Replicate())}
    plan["lm_head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    plan |= {"layers.*.self_attn": once(2), "layers.*.mlp": once(0)}
    plan |= {f"layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {f"layers.*.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    rowwise = ("self_attn.o_proj", "mlp.down_proj")
    plan |= {f"layers.*.{name}": RowwiseParallel() for name in rowwise}
    if group is None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    else:
        mesh = DeviceMesh.from_group(group, "cpu")
    # None: each rank cuts its own weights, and sends them to no other rank
    parallelize_module(model, mesh, plan, src_data_rank=None)

    def step(tokens, targets):
        with loss_parallel():
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
        return loss.detach().to_local()

    return step


lab.check("model", instead={"tensor_parallel": with_parallelize_module})

# %% [markdown] id="standard_table_text"
# The table compares both with one process, for a step of the small Llama on 2 ranks: the shortest forward and backward of several, the bytes of parameters and
# gradients that a rank holds, and the bytes that it sends with ring algorithms.

# %% id="show_standard" tags=["demo", "read"]
from dlo_lib.labkit.side_by_side import Form, lines_of, table


def steps_of(form: str, steps: int) -> tuple[float, int]:
    """The shortest step after the first, and the bytes of parameters and gradients of this rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Llama(SMALL)
    make_step = with_parallelize_module if form == "parallelize_module" else tensor_parallel
    step = make_step(model)
    times = []
    for _ in range(steps):
        model.zero_grad()
        dist.barrier()
        began = time.perf_counter()
        step(*batch(0))
        times.append(time.perf_counter() - began)
    held = 0
    for parameter in model.parameters():
        for tensor in (parameter.detach(), parameter.grad):
            held += (tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes
    return min(times[1:]), held


yours = (CopyToRanks.forward, CopyToRanks.backward, SumOverRanks.forward, SumOverRanks.backward)
yours += (copy_to_ranks, sum_over_ranks, shard, column_linear, row_linear, parallel_mlp)
yours += (parallel_embedding, attend, parallel_attention, parallel_cross_entropy)
yours += (shard_dim, parallel_block, tensor_parallel)
forms = []
for name, world, lines in (
    ("one process", 1, 0),
    ("yours", 2, lines_of(*yours)),
    ("parallelize_module", 2, lines_of(once, with_parallelize_module)),
):
    form = "yours" if world == 1 else name
    ran = run_ranks(steps_of, world, form, 1 + REPEATS, trace=True)
    seconds, held = (max(column) for column in zip(*ran))
    sent = ran.trace.ring_bytes("all_reduce", rank=0) / (1 + REPEATS)
    forms.append(Form(name, lines, seconds, sent, held))
print(table(forms, measured="forward and backward"))

# %% [markdown] id="standard_lesson"
# The bytes are equal. In your form the norms are the only weights that are not halved. `parallelize_module` holds more: in this version of PyTorch the
# gradient of its embedding is whole on every rank. The time on this machine says little, because two ranks share its cores and
# the matrices are small. For sequence parallelism the plan changes and the model does not: `SequenceParallel()` for the norms,
# `RowwiseParallel(output_layouts=Shard(1))` for o and down, and `desired_input_layouts=Replicate()` for what comes after a norm. With a
# two-dimensional mesh, `init_device_mesh("cuda", (dp, tp), mesh_dim_names=("dp", "tp"))`, `parallelize_module(model, mesh["tp"], plan)` and then
# `fully_shard(model, mesh=mesh["dp"])` give TP × FSDP.

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
quiz = {"q1": "c", "q2": "a", "q3": "d", "q4": "b", "q5": "c", "q6": "b"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true}
lab.check("quiz")

# %% [markdown] id="further"
# ## Go further
#
# - The all-reduce in the backward of a column layer can run while the gradient of its weight is computed. Write the layer as one autograd
#   function: which product comes first?
# - Your loss keeps three tensors of the size of the logits for backward. Write it as an autograd function that keeps one.
# - Tie the embedding and the output projection (`tied_embeddings=True`). `tensor_parallel` handles it: why do both fit the same part of the vocabulary?
# - Clip the norm of the gradients under TP × DP: which squares are summed over which group, and which are counted once?
# - Llama 3.2 3B has 24 query heads. Which $t$ are possible? What could be done for $t = 16$?
# - Read `dlo_lib/parallel/tensor/`: where does it differ from yours, and why?
#
# ## References
#
# - M. Shoeybi et al., *Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism* (2019), [arXiv:1909.08053](https://arxiv.org/abs/1909.08053)
# - V. Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models* (2022; sequence parallelism), [arXiv:2205.05198](https://arxiv.org/abs/2205.05198)
# - D. Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM* (2021), [arXiv:2104.04473](https://arxiv.org/abs/2104.04473)
# - PyTorch documentation, [`torch.distributed.tensor.parallel`](https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html)
# - The course this lab follows: IDRIS, *Deep Learning Optimisé – Jean Zay* (DLO-JZ), day 4
