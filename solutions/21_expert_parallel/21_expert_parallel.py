# %% [markdown] id="title"
# # 21 · Mixture of experts and expert parallelism
#
# **What you will do.** You write a mixture of experts, in which each token uses two of many small networks: the router, the order of the rows, a
# capacity, and two remedies against a router that prefers a few experts. Then you put the experts on different ranks:
# tokens travel to their experts and back by all-to-all. You count the messages, average the gradients over the right ranks, and at the end
# PyTorch's `grouped_mm` passes the same checks.
#
# You need no GPU: ranks are processes on this machine (gloo).
#
# Builds on labs 10 (collectives, groups) and 15 (FSDP, with which the last part compares). The core exercises,
# predictions and the quiz take about 95 minutes; with the text and the demos plan 114. An optional exercise takes 18 minutes
# more. Each exercise has a check that answers at once; `lab.hint("name")` gives a nudge, then a pointer, then a sketch. If you are
# stuck, `lab.use_reference("name")` lets you continue without its points.
#
# Words: mixture of experts (*mélange d'experts*), router (*routeur*), expert parallelism (*parallélisme d'experts*), capacity (*capacité*), load balance (*équilibre de charge*).

# %% id="setup"
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

from dlo_lib.grading import Lab

TOKENS = int(os.environ.get("DLO_TOKENS", 1024))  # of a rank, in the measurements
WIDTH = int(os.environ.get("DLO_WIDTH", 256))  # of a token
STEPS = int(os.environ.get("DLO_STEPS", 150))  # of the training in section 5
REPEATS = int(os.environ.get("DLO_REPEATS", 10))  # of a measured step
lab = Lab(globals())

# %% [markdown] id="why"
# ## Why: more parameters for the same computation
#
# A larger model learns more, and costs more: each token is multiplied by every weight. A **mixture of experts** (MoE) breaks this rule. In place of
# one MLP, a block has E of them, the *experts*, and a small *router* chooses k of them for each token. The block has the parameters of E
# experts, and computes with k.
#
# Mixtral 8x7B is a Llama with $E = 8$ and $k = 2$ in each of its 32 blocks. Its width is 4096, and an expert has 3 matrices of 4096 by 14,336. It has 46.7 billion parameters.
#
# **Predict** how many of them a token uses, and how many GiB a training needs for weights, gradients and AdamW in fp32 (16 bytes for each
# parameter). Replace `None` by your numbers; they are not graded.

# %% id="predict_active" tags=["prediction"]
active_guess = {"billions used by a token": None, "GiB of state": None}

# %% id="show_why" tags=["demo", "nbval-check-output"]
import figures

from dlo_lib.labkit.predictions import compared, require_numbers
from dlo_lib.models import LlamaConfig
from dlo_lib.models.counts import active_parameters, parameters
from dlo_lib.models.router import MoEConfig

require_numbers(active_guess)

sizes = {"vocab_size": 32_000, "hidden": 4096, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
models = {f"dense, width {width:,}": LlamaConfig(intermediate=width, **sizes) for width in (14_336, 8 * 14_336)}
models["8 experts, k = 2"] = LlamaConfig(intermediate=14_336, moe=MoEConfig(num_experts=8, top_k=2, intermediate=14_336), **sizes)
counted = {name: (parameters(config), active_parameters(config)) for name, config in models.items()}
whole, used = counted["8 experts, k = 2"]
print(compared(active_guess, {"billions used by a token": used / 1e9, "GiB of state": 16 * whole / 2**30}))
figures.stored_and_used(counted)

# %% [markdown] id="why_after"
# The mixture stores as many parameters as a dense model with MLPs of 8 times the width, and computes with 28 % of them. This has a price:
#
# - The experts need memory that no single GPU has.
# - A token must get to its experts, wherever they are.
# - The router chooses as it likes: one expert may get most of the tokens, another one none.
#
# This lab solves all three. The figure shows what follows the router in one layer: the *dispatch* of tokens to the experts that it has chosen, and the
# *combine* of their results.

# %% id="show_idea" tags=["demo"]
figures.layer([[0, 2], [2, 1], [0, 1], [2, 3], [2, 0]], num_experts=4)

# %% [markdown] id="route_text"
# ## 1 · The router
#
# **Core · 9 min · ●○○**
#
# Write `route(x, weight, k, bias)`. T tokens x (T, h) meet the router's weight (E, h):
#
# - *probabilities* (T, E) are the softmax over the experts of x Wᵀ.
# - *experts* (T, k), int64, are the k experts with the largest probabilities, the largest one first. If there is a `bias` (E), it is added to the
#   probabilities **for this choice only**, so the first one has the largest sum of both. Exercise 5 says what it is for.
# - *weights* (T, k) are the probabilities of the chosen experts, divided by their sum, so that they add up to 1. The bias is not in them.
#
# The choice has no gradient, because a small change of x does not change it. The router learns through the weights.
#
# The first check may take 15 s, because it starts the processes of the ranks.

# %% nbgrader={"grade_id": "route", "solution": true}
def route(x: torch.Tensor, weight: torch.Tensor, k: int, bias: torch.Tensor | None = None):
    """x (T, h), weight (E, h), bias (E) or None
    -> experts (T, k) int64, weights (T, k), probabilities (T, E)."""
    ### BEGIN SOLUTION
    probabilities = F.linear(x, weight).softmax(-1)
    scores = probabilities if bias is None else probabilities + bias
    experts = scores.topk(k, dim=-1).indices
    weights = probabilities.gather(-1, experts)
    return experts, weights / weights.sum(-1, keepdim=True), probabilities
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_route", "grade": true}
lab.check("route")

# %% [markdown] id="order_text"
# ## 2 · The order of the rows
#
# Two loops, over tokens and over their experts, would make $Tk$ tiny products. It is faster to sort: all rows of expert 0 first, then those of expert 1, and so
# on. Then each expert makes one product. A token with two experts becomes two rows.
#
# **Core · 5 min · ●○○**
#
# Write `sort_choices(experts, num_experts)`. Number the choices of `experts` (T, k) as `experts.flatten()` does: choice c belongs to token c // k.
#
# - *order* (T·k), int64: the numbers of the choices, sorted by expert. Choices of the same expert stay in their order (a *stable* sort).
# - *counts* (E), int64: how many choices each expert has; 0 for an expert that no token has chosen.

# %% nbgrader={"grade_id": "order", "solution": true}
def sort_choices(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """experts (T, k) int64 -> order (T * k) int64, counts (num_experts) int64."""
    ### BEGIN SOLUTION
    flat = experts.flatten()
    return flat.argsort(stable=True), flat.bincount(minlength=num_experts)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_order", "grade": true}
lab.check("order")

# %% [markdown] id="experts_text"
# ## 3 · Experts, and the sum of their results
#
# **Core · 11 min · ●●○**
#
# - `run_experts(rows, counts, first, second)`: rows (R, h) are sorted by expert, `counts[e]` of them for expert e. Return the results (R, h) in the same order. Expert e
#   is `expert(its rows, first[e], second[e])`, given in the next cell. An expert computes only its rows, all at once and not row by row, and it may have none. New tensors have the dtype of
#   their input (`rows.new_zeros`): the checks use float64.
# - `combine(rows, order, weights)`: the inverse of the dispatch. Row i of `rows` (R, h) is the result for choice `order[i]`. The result (T, h) of a token is the sum
#   of its rows, each times the weight of its choice. $R$ may be less than $Tk$: a choice without a row adds nothing.
#
# `index_add` adds rows at given places, and autograd knows its backward.

# %% id="given_expert"
def expert(rows: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """One expert: rows (..., n, h), first (..., h, f), second (..., f, h) -> (..., n, h)."""
    return F.silu(rows @ first) @ second


# %% nbgrader={"grade_id": "experts", "solution": true}
def run_experts(
    rows: torch.Tensor, counts: torch.Tensor, first: torch.Tensor, second: torch.Tensor
) -> torch.Tensor:
    """rows (R, h) sorted by expert, counts (E), first (E, h, f), second (E, f, h) -> (R, h)."""
    ### BEGIN SOLUTION
    parts = rows.split(counts.tolist())
    return torch.cat([expert(*each) for each in zip(parts, first, second)])
    ### END SOLUTION


def combine(rows: torch.Tensor, order: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """rows (R, h) of the choices order (R), weights (T, k)
    -> (T, h): the weighted sum of the rows of each token."""
    ### BEGIN SOLUTION
    tokens, k = weights.shape
    weighted = rows * weights.flatten()[order].unsqueeze(-1)
    return rows.new_zeros(tokens, rows.shape[1]).index_add(0, order // k, weighted)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_experts", "grade": true}
lab.check("experts")

# %% [markdown] id="capacity_text"
# ## 4 · Capacity
#
# So far the layer is **drop-less**: each expert computes all rows that it gets, few or many. Early systems needed the same shape in each step, and a limit on memory. They gave each expert a **capacity**
#
# $$C = \lceil \mathrm{factor} \cdot Tk / E \rceil$$
#
# rows: `factor` times its share of the $Tk$ choices. What exceeds $C$ is *dropped*. A token whose choices are all dropped passes the layer unchanged, by its residual connection.
#
# **Core · 8 min · ●●○**
#
# - `capacity_of(factor, tokens, k, num_experts)` returns $C$, an int.
# - `keep_within(order, counts, capacity)` returns the new `order` and `counts`: each expert keeps its *first* `capacity` rows. `order` and `counts` are as
#   `sort_choices` returns them, and stay unchanged.

# %% nbgrader={"grade_id": "capacity", "solution": true}
def capacity_of(factor: float, tokens: int, k: int, num_experts: int) -> int:
    """Return the largest number of rows of an expert."""
    ### BEGIN SOLUTION
    return math.ceil(factor * tokens * k / num_experts)
    ### END SOLUTION


def keep_within(
    order: torch.Tensor, counts: torch.Tensor, capacity: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return order and counts without the rows that exceed the capacity of their expert."""
    ### BEGIN SOLUTION
    starts = (counts.cumsum(0) - counts).repeat_interleave(counts)  # of each row, where its expert begins
    place = torch.arange(len(order), device=order.device) - starts
    return order[place < capacity], counts.clamp(max=capacity)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_capacity", "grade": true}
lab.check("capacity")

# %% [markdown] id="moe_text"
# The next cell has the whole layer in one process, made of your functions. Without a `factor`, it is drop-less.

# %% id="given_moe"
def moe(x, router, first, second, k: int, bias=None, factor: float | None = None) -> torch.Tensor:
    """The whole layer in one process.

    x (T, h), router (E, h), first (E, h, f), second (E, f, h) -> (T, h).
    """
    experts, weights, _ = route(x, router, k, bias)
    order, counts = sort_choices(experts, len(router))
    if factor is not None:
        order, counts = keep_within(order, counts, capacity_of(factor, len(x), k, len(router)))
    return combine(run_experts(x[order // k], counts, first, second), order, weights)


# %% [markdown] id="capacity_predict"
# **Predict, then measure.** 2048 tokens choose 2 of 8 experts, and the factor is 1.25. What share of the choices is dropped if the router is a random
# matrix and tokens are random vectors? And if all tokens have a large common part, as hidden states of a transformer have?

# %% id="predict_drops" tags=["prediction"]
drop_guess = {"random tokens": None, "with a common part": None}  # between 0 and 1

# %% id="show_drops" tags=["demo"]
require_numbers(drop_guess)
def drawn(common: float, tokens: int = 2048, hidden: int = 16, num_experts: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens with a common part of this size, and a random router."""
    random = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, hidden, generator=random) + common * torch.randn(hidden, generator=random)
    return x, 0.3 * torch.randn(num_experts, hidden, generator=random)


def dropped(x: torch.Tensor, router: torch.Tensor, factor: float, k: int = 2) -> float:
    """The share of choices that a capacity drops."""
    order, counts = sort_choices(route(x, router, k)[0], len(router))
    kept, _ = keep_within(order, counts, capacity_of(factor, len(x), k, len(router)))
    return 1 - len(kept) / len(order)


factors = [1, 1.25, 1.5, 2, 3, 4]
shares = {name: [dropped(*drawn(common), factor) for factor in factors] for name, common in (("random tokens", 0.0), ("with a common part", 3.0))}
print(compared(drop_guess, {name: share[1] for name, share in shares.items()}))
figures.drops(factors, shares, drop_guess)

# %% [markdown] id="balance_text"
# A common part moves the logits of all tokens in the same direction, so they prefer the same experts. Either many choices are dropped, or the
# buffers are several times too large. Drop-less dispatch drops nothing, but then a rank with a popular expert works while the others wait.
# The cause must be removed: the loads should be equal.
#
# ## 5 · Balance
#
# **Core · 13 min · ●●●**
#
# *The balance loss* (Switch Transformer). With $f_e$, the share of the choices that expert $e$ has, and $P_e$, its mean probability,
#
# $$\mathrm{loss} = E \cdot \sum_e f_e \cdot P_e$$
#
# It is 1 for equal loads, and grows up to $E/k$, because the $k$ experts of a token are distinct. $f$ comes from counts and has no gradient; the gradient passes
# through $P$, and lowers the probability of experts that have many tokens.
#
# Each rank of a data-parallel training has other tokens. The mean of a product is not the product of the means, so **$f$ is of the choices of
# all ranks**; $P$ is of this rank's tokens. Then the mean of the losses over the ranks is the loss of the whole batch. All ranks have the same number of tokens.
#
# *The balance bias* (DeepSeek-V3). No loss that disturbs the gradients: after each step, the bias of exercise 1 grows by `rate` for experts with less than
# the mean load over all ranks, and falls by `rate` for those with more.
#
# - `balance_loss(probabilities, experts, group)`: a scalar. One all-reduce of E numbers, the counts; backward communicates nothing.
# - `update_bias(bias, counts, rate, group)`: bias + rate · sign(mean load - load), a new tensor, the same on every rank. `counts` (E) are those of this rank, and stay
#   unchanged.
#
# `group` contains the ranks that train together; the checks use a part of all ranks. Pass it to the collective: with `group=None`, a collective is over all ranks.
#
# Counts are integers: convert them to the dtype of `probabilities`, or of `bias` (`counts.to(bias.dtype)`).

# %% nbgrader={"grade_id": "balance", "solution": true}
def balance_loss(
    probabilities: torch.Tensor, experts: torch.Tensor, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """probabilities (T, E), experts (T, k) of this rank -> this rank's part of the loss.

    The mean over the ranks is the loss.
    """
    ### BEGIN SOLUTION
    num_experts = probabilities.shape[1]
    counts = experts.flatten().bincount(minlength=num_experts)
    dist.all_reduce(counts, group=group)
    shares = counts.to(probabilities) / counts.sum()
    return num_experts * (shares * probabilities.mean(0)).sum()
    ### END SOLUTION


def update_bias(
    bias: torch.Tensor, counts: torch.Tensor, rate: float, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """bias (E), counts (E) int64 of this rank -> the bias of the next step."""
    ### BEGIN SOLUTION
    load = counts.clone()
    dist.all_reduce(load, group=group)
    load = load.to(bias)
    return bias + rate * torch.sign(load.mean() - load)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_balance", "grade": true}
lab.check("balance")

# %% [markdown] id="balance_predict"
# **Predict, then measure.** The next cell trains a layer with 8 experts on tokens with a common part, three times: without a remedy, with the loss (times 0.5), with the bias
# (rate 0.01). Each token should get the result of a matrix that depends on its kind; there are 16 kinds. How many experts have less than
# 1 % of the choices in the last steps?

# %% id="predict_idle" tags=["prediction"]
# Experts with less than 1 %
idle_guess = {"no remedy": None, "balance loss": None, "balance bias": None}

# %% id="run_balance" tags=["demo"]
from dlo_lib.launch import run_ranks

require_numbers(idle_guess)
REMEDIES = ("no remedy", "balance loss", "balance bias")



def train(remedy: str, steps: int, num_experts: int = 8, k: int = 2, hidden: int = 16, rate: float = 0.01) -> tuple[torch.Tensor, ...]:
    """For each step: the share of the choices of each expert (steps, E), the error, and the share of the tokens whose last chosen
    expert and the next one differ by less than two steps of the bias."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    common, kinds, maps = 3 * torch.randn(hidden), torch.randn(16, hidden), torch.randn(16, hidden, hidden) / hidden**0.5
    shapes = ((num_experts, hidden), 0.3), ((num_experts, hidden, 32), 0.25), ((num_experts, 32, hidden), 0.18)
    router, first, second = ((std * torch.randn(shape)).requires_grad_() for shape, std in shapes)
    optimizer = torch.optim.Adam([router, first, second], lr=0.02)
    bias = torch.zeros(num_experts)
    shares, errors, close = [], [], []
    for _ in range(steps):
        kind = torch.randint(16, (256,))
        x = common + kinds[kind] + 0.5 * torch.randn(256, hidden)
        experts, _, probabilities = route(x, router, k, bias)
        error = F.mse_loss(moe(x, router, first, second, k, bias), (x.unsqueeze(1) @ maps[kind]).squeeze(1))
        loss = error + 0.5 * balance_loss(probabilities, experts) if remedy == "balance loss" else error
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        counts = experts.flatten().bincount(minlength=num_experts)
        best = (probabilities.detach() + bias).topk(k + 1).values
        close.append((best[:, k - 1] - best[:, k] < 2 * rate).float().mean())
        if remedy == "balance bias":
            bias = update_bias(bias, counts, rate)
        shares.append(counts / counts.sum())
        errors.append(error.detach())
    return torch.stack(shares), torch.stack(errors), torch.stack(close)


def train_all(steps: int) -> dict:
    """The three trainings."""
    return {remedy: train(remedy, steps) for remedy in REMEDIES}


trained = run_ranks(train_all, 1, STEPS)[0]
print(compared(idle_guess, {name: int((shares[-20:].mean(0) < 0.01).sum()) for name, (shares, *_) in trained.items()}))
for name, (shares, errors, close) in trained.items():
    last = shares[-20:]
    print(f"{name}: the largest share is {last.mean(0).max():.0%}, the error {errors[-20:].mean():.2f}; from one step to the next")
    print(f"  a share changes by {last.diff(dim=0).abs().mean(0).max():.0%}; close choices: {close[-20:].mean():.0%} of the tokens")
figures.collapse({name: shares for name, (shares, *_) in trained.items()})

# %% [markdown] id="exchange_text"
# This is a **collapsed router**: rows without colour are experts that learn nothing, because no token comes to them. They use memory, and the error is larger. Both
# remedies keep all experts at work. At the beginning the bias needs some steps, because it moves only by `rate` in each.
#
# The bias disturbs no gradient, but it disturbs the choice. With it two experts take turns in each step until the end, and the error is larger than with the
# loss: for about half of the tokens, the last chosen expert and the next one differ by less than two steps of the bias (the close choices), so each step sends
# many tokens to another expert. DeepSeek-V3 trains with a `rate` of 0.001, and with 0 at the end.
#
# ## 6 · All-to-all
#
# Now the experts move to $t$ ranks: rank $r$ *stores* experts $rE/t$ to $(r+1)E/t - 1$, and each rank has other tokens, as in data parallelism. The rows
# that `sort_choices` has sorted by expert are sorted by rank as well, so an **all-to-all** can send them: each rank sends a part to every rank.

# %% id="show_exchange" tags=["demo"]
figures.exchange([[3, 1, 0, 2], [1, 2, 2, 1]])

# %% [markdown] id="exchange_exercise"
# **Core · 14 min · ●●○**
#
# The parts have different sizes, and a rank does not know how many rows it will get. So the ranks exchange the counts first.
#
# - `exchange_counts(counts, group)`: `counts` (E) are this rank's rows for each expert. Return (t, E/t), int64: entry [s, e] is the number of rows that rank s sends to
#   the e-th expert of *this* rank. One all-to-all of the counts; the equal parts need no sizes.
# - `AllToAll`: `send[r]` rows go to rank r, and `receive[r]` rows come from rank r (lists of ints). The received rows are in the order of the ranks. Its backward is
#   the same exchange read backwards: the gradient of a row travels to the rank that the row came from. `backward` returns a gradient for each argument
#   of `forward`, and `None` for the arguments that have none: the two lists and the group.
#
# `dist.all_to_all_single(output, input, output_split_sizes, input_split_sizes, group=group)` fills `output`; the sizes are numbers of rows. The input must be
# contiguous, and gradients sometimes are not.

# %% nbgrader={"grade_id": "exchange", "solution": true}
def exchange_counts(counts: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """counts (E) int64 of this rank's rows
    -> (t, E / t) int64: the rows from each rank for each expert of this rank."""
    ### BEGIN SOLUTION
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    return received.view(dist.get_world_size(group), -1)
    ### END SOLUTION


class AllToAll(torch.autograd.Function):
    """Send rows (sum of send, h) to the ranks; return the received ones (sum of receive, h)."""

    @staticmethod
    def forward(ctx, rows, send, receive, group):
        ### BEGIN SOLUTION
        ctx.send, ctx.receive, ctx.group = send, receive, group
        out = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
        return out
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad):
        ### BEGIN SOLUTION
        back = grad.new_empty(sum(ctx.send), grad.shape[1])
        dist.all_to_all_single(back, grad.contiguous(), ctx.send, ctx.receive, group=ctx.group)
        return back, None, None, None
        ### END SOLUTION


# %% nbgrader={"grade_id": "test_exchange", "grade": true}
lab.check("exchange")

# %% [markdown] id="layer_text"
# ## 7 · The layer on several ranks
#
# **Core · 18 min · ●●●**
#
# Write `expert_parallel`. It returns on each rank what `moe` returns for this rank's tokens with all experts, and each rank has only its own experts: first (E/t, h, f) and
# second (E/t, f, h). The router (E, h) is whole on every rank.
#
# 1. Route and sort this rank's tokens.
# 2. Exchange the counts. Rank r gets `counts.view(t, -1)[r].sum()` of this rank's rows.
# 3. Send the rows.
# 4. Sort the received rows by expert. They arrive sorted by *source* first: with two sources and two experts, their experts are 0 0 1 | 0 1 1, and `run_experts` needs
#    0 0 0 1 1 1. The counts say which expert each row is for (`repeat_interleave` writes it down), and `sort_choices` gives the order.
# 5. Run the experts, put the results back into the order in which the rows came, send them back, and combine.
#
# That makes three all-to-alls in forward (counts, rows, results) and two in backward. Experts never travel.

# %% nbgrader={"grade_id": "layer", "solution": true}
def expert_parallel(
    x, router, first, second, k: int, group: dist.ProcessGroup | None = None, bias=None
) -> torch.Tensor:
    """x (T, h) of this rank, router (E, h), first (E / t, h, f) and second (E / t, f, h)
    of this rank -> (T, h)."""
    ### BEGIN SOLUTION
    experts, weights, _ = route(x, router, k, bias)
    order, counts = sort_choices(experts, len(router))
    received = exchange_counts(counts, group)
    send, receive = counts.view(len(received), -1).sum(1).tolist(), received.sum(1).tolist()
    rows = AllToAll.apply(x[order // k], send, receive, group)
    own = torch.arange(len(first), device=received.device).repeat(len(received)).repeat_interleave(received.flatten())  # of each row, its expert
    by_expert, loads = sort_choices(own.unsqueeze(-1), len(first))
    results = run_experts(rows[by_expert], loads, first, second)
    as_received = torch.empty_like(results).index_copy(0, by_expert, results)
    return combine(AllToAll.apply(as_received, receive, send, group), order, weights)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_layer", "grade": true}
lab.check("layer")

# %% [markdown] id="traffic_text"
# **Predict, then measure.** Each of $t$ ranks has $T$ tokens of $h$ numbers, $k = 2$, and the loads are about equal. How many times $Th$ numbers leave a rank for one layer, forward
# and backward together, with $t = 2$ and with $t = 4$? And how many rows does the busiest of 4 ranks compute, in multiples of the mean, if the tokens have a
# common part?

# %% id="predict_traffic" tags=["prediction"]
traffic_guess = {"t = 2": None, "t = 4": None, "busiest of 4": None}

# %% id="run_traffic" tags=["demo"]
from dlo_lib.comm.calls import Kind

require_numbers(traffic_guess)


def one_layer(common: float, num_experts: int = 8, k: int = 2) -> tuple[int, int]:
    """Forward and backward; the bytes of this rank's experts, and the rows that they compute."""
    rank, world = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(0)
    router = torch.randn(num_experts, WIDTH, generator=random) / WIDTH**0.5
    shift = common * torch.randn(WIDTH, generator=random)
    x = shift + torch.randn(TOKENS, WIDTH, generator=random.manual_seed(rank + 1))
    own = [torch.randn(num_experts // world, WIDTH, WIDTH) / WIDTH**0.5 for _ in range(2)]
    leaves = [tensor.requires_grad_() for tensor in (x, router, *own)]
    expert_parallel(*leaves, k).sum().backward()
    loads = sort_choices(route(x, router, k)[0], num_experts)[1]
    dist.all_reduce(loads)
    return sum(tensor.nbytes for tensor in own), int(loads.chunk(world)[rank].sum())


def both_layers() -> list[tuple[int, int]]:
    """A layer with random tokens, then one whose tokens have a common part."""
    torch.set_num_threads(1)
    return [one_layer(0.0), one_layer(1.0)]


def rows_that_leave(run, rank: int) -> float:
    """Numbers that the rank sends to other ranks for the first layer, without the counts, in units of T h."""
    calls = [call for call in run.trace.calls(rank) if call.kind is Kind.ALL_TO_ALL and len(call.shape) > 1]
    return sum(sum(call.send_splits) - call.send_splits[rank] for call in calls[: len(calls) // 2]) / (TOKENS * WIDTH)


runs = {world: run_ranks(both_layers, world, trace=True) for world in (1, 2, 4)}
sent = {world: sum(rows_that_leave(run, rank) for rank in range(world)) / world for world, run in runs.items()}
held = {world: run[0][0][0] for world, run in runs.items()}
rows = {name: [layers[place][1] for layers in runs[4]] for place, name in enumerate(("random tokens", "with a common part"))}
busiest = 4 * max(rows["with a common part"]) / sum(rows["with a common part"])
print(compared(traffic_guess, {"t = 2": sent[2], "t = 4": sent[4], "busiest of 4": busiest}))
figures.traffic(sent, held, rows)

# %% [markdown] id="traffic_after"
# About $(t-1)/t$ of the choices are of experts on other ranks, and each row makes four trips: there and back, in forward and in backward. So a rank sends $4kTh(t-1)/t$
# numbers, whatever the size of the experts, and it stores $1/t$ of them. The right panel shows why balance matters: all ranks wait for the busiest one in each all-to-all.
#
# FSDP (lab 15) would send the weights instead: all experts, gathered twice and reduced once, whatever the number of tokens. The figure compares both for one layer of
# Mixtral, with 3 matrices in each expert, on 8 ranks.

# %% id="show_against_fsdp" tags=["demo"]
figures.against_fsdp(hidden=4096, intermediate=14_336, num_experts=8, k=2, world=8)

# %% [markdown] id="gradients_text"
# ## 8 · Gradients: experts × data parallel
#
# With more ranks than parts, several ranks store the same experts. Ranks form a grid: a row is an **expert group**, which has all experts together; a column has the *same* experts,
# its **replicas**. All ranks have other tokens, and everything besides the experts is the same on all ranks.

# %% id="show_grid" tags=["demo"]
figures.grid(ep=2, replicas=2)

# %% [markdown] id="gradients_exercise"
# **Core · 8 min · ●●○**
#
# The loss of the training is the mean over all N ranks of the loss of each rank. Write `reduce_gradients(shared, experts, replicas)`, in place:
#
# - The parameters in `shared` (router, attention, …): the mean of the gradients over all N ranks.
# - The parameters in `experts`: a rank computed the rows of *all* ranks of its expert group. So its gradient is a sum over them already, and what remains is the **sum** over `replicas`. Then divide
#   by N, as for the shared parameters: not by the number of replicas.
#
# A parameter without gradient (`None`) is skipped. The next cell gives the groups, as in lab 19.

# %% id="given_groups"
def make_groups(ep: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the expert group of this rank (a row of the grid) and its replicas (a column)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = [list(range(start, start + ep)) for start in range(0, world, ep)]
    columns = [list(range(column, world, ep)) for column in range(ep)]
    # All ranks make every group.
    groups = {tuple(ranks): dist.new_group(ranks) for ranks in rows + columns}
    return groups[tuple(rows[rank // ep])], groups[tuple(columns[rank % ep])]


# %% nbgrader={"grade_id": "gradients", "solution": true}
def reduce_gradients(shared, experts, replicas: dist.ProcessGroup) -> None:
    """Replace the gradients of this rank by those of the mean loss over all ranks."""
    ### BEGIN SOLUTION
    for own, group in ((shared, None), (experts, replicas)):
        for parameter in own:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= dist.get_world_size()
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_gradients", "grade": true}
lab.check("gradients")

# %% [markdown] id="scale_text"
# ## At scale
#
# Which t is best? A larger expert group stores less and gives each expert more rows, but its all-to-alls cross nodes. On a cluster the function below is a job for each t. The cell prints what it asks SLURM for, and
# calls the same function here, on two ranks with a small layer. (In `dlo_lib.train`, expert parallelism is the option `--ep`.)

# %% id="run_at_scale" tags=["demo"]
from dlo_lib import cluster
from dlo_lib.labkit import at_scale


def layer_seconds(hidden: int, inner: int, tokens: int, repeats: int, device: str = "cpu") -> float:
    """The shortest forward and backward of a layer with 64 experts, over all ranks as one expert group."""
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    torch.manual_seed(dist.get_rank())
    shapes = (tokens, hidden), (64, hidden), (64 // dist.get_world_size(), hidden, inner), (64 // dist.get_world_size(), inner, hidden)
    leaves = [(torch.randn(shape, device=device) / shape[-1] ** 0.5).requires_grad_() for shape in shapes]
    times = []
    for _ in range(repeats + 1):
        dist.barrier()
        began = time.perf_counter()
        expert_parallel(*leaves, 8).sum().backward()
        float(leaves[0].grad[0, 0])  # waits for the GPU
        times.append(time.perf_counter() - began)
    return min(times[1:])


large = {"hidden": 7168, "inner": 2048, "tokens": 8192, "repeats": 10, "device": "cuda"}
asked = {}
for gpus in (4, 16):
    script = cluster.submit(layer_seconds, large, gpus=gpus, site="jean-zay-h100", account="abc", dry_run=True)
    asked[gpus] = at_scale.directives(script).splitlines()
print("For SLURM, t = 4:", *asked[4], "With t = 16, these lines differ:", *(line for line in asked[16] if line not in asked[4]), sep="\n")
seconds = run_ranks(layer_seconds, 2, hidden=64, inner=32, tokens=64, repeats=REPEATS)
print(f"here, t = 2: {1e3 * max(seconds):.1f} ms")

# %% [markdown] id="padded_text"
# ## Optional exercise
#
# Nothing later needs it. Do it, or continue with the section on `grouped_mm`.
#
# ## 9 · Fixed shapes
#
# In `expert_parallel`, the processor waits for the counts before it can send a row, and each step has other shapes. GShard and Switch Transformer use the capacity instead: each rank sends exactly C rows to each expert,
# and fills what is missing with zeros. No counts are exchanged, and the shapes never change, which compilers like.
#
# **Optional · 18 min · ●●●**
#
# Write `padded_expert_parallel`. Each rank keeps at most `capacity` of its rows for each expert.
#
# 1. Route, sort, and keep within the capacity. Put the rows into a buffer of zeros (E, capacity, h): row i of expert e at [e, i].
# 2. One all-to-all of equal parts. The received buffer is (t, E/t, capacity, h): source, expert, row.
# 3. `expert` also takes (E/t, n, h) with all experts at once. Zeros give zeros.
# 4. The way back, and `combine` with the rows that are no padding.
#
# Exactly two all-to-alls of E·capacity rows in forward, and two in backward.

# %% nbgrader={"grade_id": "padded", "solution": true}
def padded_expert_parallel(
    x, router, first, second, k: int, capacity: int, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """As expert_parallel, in buffers of a fixed shape.

    They have at most `capacity` rows of this rank for each expert.
    """
    ### BEGIN SOLUTION
    experts, weights, _ = route(x, router, k)
    order, counts = sort_choices(experts, len(router))
    order, counts = keep_within(order, counts, capacity)
    owner = torch.arange(len(router), device=counts.device).repeat_interleave(counts)
    slot = owner * capacity + torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[owner]
    buffer = x.new_zeros(len(router) * capacity, x.shape[1]).index_copy(0, slot, x[order // k])
    world = dist.get_world_size(group)
    equal = [len(buffer) // world] * world
    received = AllToAll.apply(buffer, equal, equal, group).view(world, len(first), capacity, -1)
    results = expert(received.transpose(0, 1).flatten(1, 2), first, second)
    results = results.unflatten(1, (world, capacity)).transpose(0, 1).reshape(len(buffer), -1)
    return combine(AllToAll.apply(results, equal, equal, group)[slot], order, weights)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_padded", "grade": true}
lab.check("padded")

# %% [markdown] id="standard_text"
# ## The same with what you will use on Monday
#
# PyTorch has the two parts that matter. `F.grouped_mm(rows, weights, offs=ends)` makes the products of all experts in one kernel, where your `run_experts` has a loop; `ends[e]` is the last row of expert e,
# plus one. (PyTorch 2.8 and 2.9 have none: there, the cell below computes the same in a loop.) The all-to-all of `torch.distributed._functional_collectives` has a backward, as your `AllToAll`. They pass the checks of exercise 7.

# %% id="check_standard" tags=["demo", "read"]
from torch.distributed._functional_collectives import all_to_all_single_autograd

from dlo_lib.base.torch_compat import grouped_mm  # F.grouped_mm, or a loop


def with_grouped_mm(x, router, first, second, k: int, group=None, bias=None):
    group = group or dist.group.WORLD
    experts, weights, _ = route(x, router, k, bias)
    order, counts = sort_choices(experts, len(router))
    received = exchange_counts(counts, group)
    send, receive = counts.view(len(received), -1).sum(1).tolist(), received.sum(1).tolist()
    rows = all_to_all_single_autograd(x[order // k], receive, send, group)
    experts = torch.arange(len(first), device=received.device).repeat(len(received))
    own = experts.repeat_interleave(received.flatten())
    by_expert = own.argsort(stable=True)
    ends = received.sum(0).cumsum(0).int()
    inner = F.silu(grouped_mm(rows[by_expert], first, offs=ends))
    results = grouped_mm(inner, second, offs=ends)[by_expert.argsort()]
    return combine(all_to_all_single_autograd(results, send, receive, group), order, weights)


lab.check("layer", instead={"expert_parallel": with_grouped_mm})

# %% [markdown] id="standard_table_text"
# The table compares them, on 2 ranks with 8 experts, with the layer of this library: `parallelize_experts(model)` cuts the experts of every `MoELayer` of a model in place. (Its experts have three
# matrices; they are narrower here, so that all forms have about the same parameters.) Time is the shortest of several forward and backward passes, in turns. Lines are those
# of all functions that a form needs. Memory is that of a rank's experts and their gradients, and the bytes are the messages of rank 0 in its first step.

# %% id="show_standard" tags=["demo", "read"]
from dlo_lib.labkit.side_by_side import Form, lines_of, table
from dlo_lib.models.moe import MoELayer
from dlo_lib.parallel.expert import parallelize_experts


def layer_of(form: str):
    """A function of tokens, and the parameters of the experts."""
    if form == "dlo_lib":
        layer = MoELayer(MoEConfig(8, 2, 2 * WIDTH // 3, balance_loss=0.0), WIDTH)
        parallelize_experts(layer)
        return layer, list(layer.experts.parameters())
    router, each = (torch.randn(8, WIDTH) / WIDTH**0.5).requires_grad_(), 8 // dist.get_world_size()
    own = [(torch.randn(each, WIDTH, WIDTH) / WIDTH**0.5).requires_grad_() for _ in range(2)]
    call = with_grouped_mm if form == "grouped_mm" else expert_parallel
    return lambda x: call(x, router, *own, 2), own


both = route, sort_choices, exchange_counts, combine  # grouped_mm uses them too
yours = lines_of(*both, expert, run_experts, AllToAll.forward, AllToAll.backward, expert_parallel)
FORMS = {
    "yours": yours,
    "grouped_mm": lines_of(*both, with_grouped_mm),
    "dlo_lib": lines_of("parallelize_experts(layer)"),
}


def measured(repeats: int) -> list[tuple[float, int]]:
    """The shortest step of each form, in turns, and the bytes of its experts and gradients."""
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    layers, x = [layer_of(form) for form in FORMS], torch.randn(TOKENS, WIDTH)
    times = [[] for _ in layers]
    for _ in range(repeats + 1):
        for (call, _), own in zip(layers, times):
            dist.barrier()
            began = time.perf_counter()
            call(x).sum().backward()
            own.append(time.perf_counter() - began)
    memory = [sum(each.nbytes + each.grad.nbytes for each in held) for _, held in layers]
    return [(min(own[1:]), nbytes) for own, nbytes in zip(times, memory)]


run = run_ranks(measured, 2, REPEATS, trace=True)
passed = [0]  # before the first barrier, then between two of them: a step
for call in run.trace.calls(0):
    if call.kind is Kind.BARRIER:
        passed.append(0)
    else:
        passed[-1] += call.payload_bytes
forms = []
for place, (name, lines) in enumerate(FORMS.items()):
    seconds, memory = (max(column) for column in zip(*(each[place] for each in run)))
    forms.append(Form(name, lines, seconds, passed[1 + place], memory))
print(table(forms, measured="forward and backward"))

# %% [markdown] id="standard_lesson"
# All three send about the same bytes; their routers differ, and so do the numbers of rows. The times say little here, because two ranks share the cores of this machine and the
# matrices are small. On a processor `grouped_mm` is a loop too. On a GPU in bf16 it is one kernel for all
# experts, where a loop starts E small ones. The library starts its all-to-alls and computes the shared expert meanwhile, and it needs no copy that sorts the received rows.

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
### BEGIN SOLUTION: quiz = {"q1": "", "q2": "", "q3": "", "q4": "", "q5": ""}
quiz = {"q1": "b", "q2": "d", "q3": "a", "q4": "c", "q5": "b"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true}
lab.check("quiz")

# %% [markdown] id="further"
# ## Go further
#
# - With $k = 1$, the weight divided by its sum is always 1. What is the gradient of the router? (Question 1 of the quiz; Switch Transformer uses the probability itself.)
# - GShard gives first choices priority: no second choice takes the place of a first one. Which order of the choices does this?
# - A *shared expert* computes every token. It can compute while the rows are on their way: start the all-to-all with `async_op=True`, and wait for it afterwards.
# - Tokens are sent k times, also if several of their experts are on one rank. How would you send them once for each *rank*?
# - Clip the norm of the gradients under expert parallelism: which squares are summed over which group?
# - Read `dlo_lib/parallel/expert/` and `dlo_lib/models/experts.py`: which copy replaces that of step 4, and how much memory does it need?
#
# ## References
#
# - N. Shazeer et al., *Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer* (2017), [arXiv:1701.06538](https://arxiv.org/abs/1701.06538)
# - D. Lepikhin et al., *GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding* (2020), [arXiv:2006.16668](https://arxiv.org/abs/2006.16668)
# - W. Fedus et al., *Switch Transformers: Scaling to Trillion Parameter Models with Simple and Efficient Sparsity* (2021), [arXiv:2101.03961](https://arxiv.org/abs/2101.03961)
# - T. Gale et al., *MegaBlocks: Efficient Sparse Training with Mixture-of-Experts* (2022; drop-less), [arXiv:2211.15841](https://arxiv.org/abs/2211.15841)
# - A. Jiang et al., *Mixtral of Experts* (2024), [arXiv:2401.04088](https://arxiv.org/abs/2401.04088)
# - L. Wang et al., *Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts* (2024), [arXiv:2408.15664](https://arxiv.org/abs/2408.15664)
# - DeepSeek-AI, *DeepSeek-V3 Technical Report* (2024), [arXiv:2412.19437](https://arxiv.org/abs/2412.19437)
# - The course this lab follows: IDRIS, *Deep Learning Optimisé – Jean Zay* (DLO-JZ), day 4
