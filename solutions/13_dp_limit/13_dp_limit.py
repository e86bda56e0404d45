# %% [markdown] id="title"
# # 13 · The limit of data parallelism
#
# **What you will do.** Predict, by functions that you write, how much memory one training step of **Llama 3.2 3B** takes on each GPU of a
# data-parallel job; check every part of the prediction against a measurement at true size; and find out what adding GPUs can do about it.
#
# You need no GPU. The measurements run the real training step on *fake tensors*: they have shapes, dtypes and sizes, but no data.
#
# Builds on lab 11 (DDP). It takes about 90 minutes. Each exercise has a check that answers at once; `lab.hint("name")` gives a nudge, then
# a pointer, then a sketch. If a step stays stuck, `lab.use_reference("name")` lets you go on without its points.
#
# Words: memory footprint (*empreinte mémoire*), optimiser state (*état de l'optimiseur*), mixed precision (*précision mixte*), data
# parallelism (*parallélisme de données*), training step (*pas d'apprentissage*).
#
# Memory is written in **GiB** = 2³⁰ bytes, as CUDA does.

# %% id="setup"
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

from dlo_lib.grading import Lab
from dlo_lib.hardware import gpu, gpus
from dlo_lib.models import Llama, LlamaConfig, model_config

GIB = 2**30
MODEL = os.environ.get("DLO_MODEL", "llama-3.2-3b")
SEQ = int(os.environ.get("DLO_SEQ", 2048))
STEPS = int(os.environ.get("DLO_STEPS", 30))  # of the real training near the end
config = model_config(MODEL)
GPUS = int(os.environ.get("DLO_GPUS", 2))  # ranks of the small job near the end
lab = Lab(globals())

# %% [markdown] id="why"
# ## Why: a small model that does not fit
#
# A model of 3.2 billion parameters in fp32 weighs 12 GiB. An A100 has 40 GB, an H100 has 80. One sequence of 2048 tokens is a small batch.
# Plenty of room?
#
# The cell below runs **one training step** and records what lives in memory, allocation by allocation: AdamW as PyTorch runs it by default
# on a GPU, bf16 autocast over fp32 weights, batch 1. The dashed line is what an A100-40 really has left for tensors.

# %% id="show_step" tags=["demo"]
from functools import cache

import figures

from dlo_lib.profiling import OptimizerStep, Part, measure_memory, plot_memory


@cache
def remembered(*settings):
    batch, step, checkpointing, bucket_view, world_size = settings
    more = {"checkpointing": checkpointing, "bucket_view": bucket_view, "world_size": world_size}
    return measure_memory(MODEL, batch, SEQ, fused=OptimizerStep(step), **more)


def measured(batch=1, step="fused", checkpointing=False, bucket_view=True, world_size=1):
    """The memory of one rank over one training step of MODEL, measured on fake tensors (a few seconds; each setting runs once)."""
    return remembered(batch, step, checkpointing, bucket_view, world_size)


first = measured(step="foreach")
plot_memory(first, limit_bytes=gpu("a100-40").usable_bytes, title=f"{MODEL}, batch 1 × {SEQ}, AdamW")

# %% id="show_first_peak" tags=["demo"]
weights = first.peak_by_part[Part.WEIGHTS]
print(f"weights {weights / GIB:.1f} GiB, peak {first.peak_bytes / GIB:.1f} GiB: {first.peak_bytes / weights:.1f} times the weights")
for phase, held in first.peak_by_phase.items():
    print(f"  largest during {phase.value:10} {held / GIB:6.1f} GiB")

# %% [markdown] id="why_questions"
# Five times the weights, and not where one would look for it: the peak is in the *optimiser's* step, not in backward.
#
# Look at the figure again before you go on.
#
# - What is there already when the step begins?
# - What grows during forward and melts during backward? What grows while it melts?
# - What is the block on top of everything at the end?

# %% [markdown] id="idea"
# ## The idea: every rank holds everything
#
# Data parallelism copies the model to every rank. Each rank takes its share of the batch; all ranks average their gradients (an
# all-reduce), and all take the same optimiser step. So the **state** (weights, gradients, optimiser state) is there as many times as there
# are ranks. Only the **activations**, which belong to a rank's own sequences, are divided.

# %% id="show_idea" tags=["demo"]
figures.replicas(first.peak_by_part, ranks=4)

# %% [markdown] id="parameters_text"
# ## 1 · Count the parameters
#
# Everything begins with one number. Write it as a function of the configuration, part by part.
#
# | part | what it is |
# |---|---|
# | `embedding` | one vector of size `hidden` for each of the `vocab_size` tokens |
# | `attention` | in each block, `q_proj`, `k_proj`, `v_proj`, `o_proj`, without biases. There are `num_heads` query heads but only `num_kv_heads` key and value heads (grouped-query attention, GQA); each head is `head_dim` wide, and `head_dim` need not be `hidden / num_heads` |
# | `mlp` | in each block, three matrices between `hidden` and `intermediate` (SwiGLU: gate, up, down) |
# | `norms` | RMSNorm has one vector of size `hidden`; each block has two, and one follows the last block |
# | `head` | the output projection, as large as the embedding; nothing when `tied_embeddings`: then it *is* the embedding |

# %% id="show_config" tags=["demo"]
config

# %% nbgrader={"grade_id": "parameters", "solution": true}
def count_parameters(config: LlamaConfig) -> dict[str, int]:
    """Parameters of a Llama by part, all blocks together: "embedding", "attention", "mlp", "norms", "head"."""
    ### BEGIN SOLUTION
    table = config.vocab_size * config.hidden
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "embedding": table,
        "attention": config.num_layers * config.hidden * (2 * queries + 2 * keys),
        "mlp": config.num_layers * 3 * config.hidden * config.intermediate,
        "norms": (2 * config.num_layers + 1) * config.hidden,
        "head": 0 if config.tied_embeddings else table,
    }
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_parameters", "grade": true, "points": 7}
lab.check("parameters")

# %% [markdown] id="parameters_after"
# Three models of the family, by your count. The last column builds the model (on the `meta` device, where parameters have no storage)
# and counts.

# %% id="show_parameters" tags=["demo"]
counts = {name: count_parameters(model_config(name)) for name in ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b")}
for name, parts in counts.items():
    built = sum(p.numel() for p in Llama(model_config(name), device="meta").parameters())
    print(f"{name:14} yours {sum(parts.values()):>14,}   built {built:>14,}")
figures.parameters(counts)

# %% [markdown] id="state_text"
# ## 2 · The state, and what the optimiser's step needs
#
# Training keeps more than weights. In this lab (fp32 weights with autocast) **every number below has 4 bytes**:
#
# - `weights` and `gradients`: one number a parameter each;
# - `optimizer`: AdamW keeps two moments a parameter. SGD with momentum keeps one velocity, plain SGD nothing;
# - `temporaries`: what the *step itself* allocates and frees. AdamW computes a denominator √v + ε before it updates a weight. PyTorch has three
#   implementations of the same arithmetic:
#
# | step | how | temporaries of AdamW at the worst moment |
# |---|---|---|
# | `"for-loop"` | parameter after parameter | √v and its quotient, both as large as the **largest parameter tensor** |
# | `"foreach"` (CUDA's default) | one kernel per operation, over **all** parameters at once | the denominators of all parameters together |
# | `"fused"` | one kernel does everything | none: each number is computed in a register |
#
# SGD needs no denominator: it updates in place and has no temporaries in any of the three. The largest tensor of a language model is its
# embedding, `vocab_size × hidden`.

# %% nbgrader={"grade_id": "state", "solution": true}
def state_bytes(config: LlamaConfig, optimizer: str = "adamw", step: str = "foreach") -> dict[str, int]:
    """Bytes of "weights", "gradients", "optimizer" and "temporaries".

    optimizer: "adamw", "sgd" or "sgd-momentum". step: "for-loop", "foreach" or "fused".
    """
    ### BEGIN SOLUTION
    all_parameters = 4 * sum(count_parameters(config).values())
    largest = 4 * config.vocab_size * config.hidden
    moments = {"adamw": 2, "sgd-momentum": 1, "sgd": 0}[optimizer]
    temporaries = {"for-loop": 2 * largest, "foreach": all_parameters, "fused": 0}[step]
    return {
        "weights": all_parameters,
        "gradients": all_parameters,
        "optimizer": moments * all_parameters,
        "temporaries": temporaries if optimizer == "adamw" else 0,
    }
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_state", "grade": true, "points": 7}
lab.check("state")

# %% [markdown] id="state_after"
# The same step of the 3B model with each of the three implementations, measured at true size (about 10 s). The bars are your prediction, the
# diamonds the measurement; the dotted line is what forward and backward need, which the choice of optimiser step does not change.

# %% id="show_state" tags=["demo"]
predicted = {step: state_bytes(config, "adamw", step) for step in ("for-loop", "foreach", "fused")}
figures.optimizer_steps(predicted, {step: measured(step=step).peak_by_phase for step in predicted})

# %% [markdown] id="state_lesson"
# One word in the optimiser's constructor (`fused=True`) is worth 12 GiB here: with `foreach`, the optimiser decides the peak of the whole step;
# with `fused`, backward does. And what the three compute is the same, but for rounding:

# %% id="show_same_update" tags=["demo"]
start, updated = torch.randn(1000), {}
for step in OptimizerStep:
    weight = torch.nn.Parameter(start.clone())
    adamw = torch.optim.AdamW([weight], fused=step is OptimizerStep.FUSED, foreach=step is OptimizerStep.FOREACH)
    for _ in range(10):
        weight.grad = weight.detach().sin()
        adamw.step()
    updated[step.value] = weight.detach()
for name, found in updated.items():
    print(f"{name:9} moved by {(found - start).abs().max():.4f}, differs from fused by {(found - updated['fused']).abs().max():.1e}")

# %% [markdown] id="state_remember"
# Sixteen bytes a parameter for weights, gradients and AdamW's state: remember this one. Other recipes reach 16 in other ways; the classic
# mixed-precision count is 2 (bf16 weight) + 2 (bf16 gradient) + 12 (fp32 copy and two moments).

# %% [markdown] id="block_text"
# ## 3 · What one block keeps for backward
#
# Backward needs numbers that forward has seen: the input of each matrix, the factors of each product. Autograd keeps them. Which ones? Do
# not guess, **look**: PyTorch calls a hook for every tensor that it saves. The cell runs one real block on 20 tokens, with sizes chosen so
# that each can be recognised by its shape.

# %% id="show_saved" tags=["demo"]
probe = LlamaConfig(vocab_size=257, hidden=48, intermediate=112, num_layers=1, num_heads=6, num_kv_heads=2, head_dim=16)
figures.saved_by_block(probe, tokens=20)

# %% [markdown] id="block_exercise"
# Read the table. Some rows are fp32 (4 bytes), others bf16 (2 bytes). The copies of *weights* do not grow with the batch: they are not
# activations, and you meet them again in step 5. Everything else is a number of bytes **per token**.
#
# Write the sum for any configuration. Leave out what is below one percent (a number per head or per token), and `cos` and `sin` of the rotary
# positions: the whole model shares them.

# %% nbgrader={"grade_id": "block", "solution": true}
def block_bytes(config: LlamaConfig, batch: int, seq: int) -> int:
    """Bytes that one block keeps for backward under bf16 autocast, for `batch` sequences of `seq` tokens."""
    ### BEGIN SOLUTION
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    norms = 2 * (4 + 4) * config.hidden  # each half: its input and its normalised input, in fp32
    copies = 2 * (3 + 2) * config.hidden  # one bf16 copy for each of q, k, v, gate, up
    attention = 2 * (2 * queries + 2 * keys)  # queries, keys, values and the output
    mlp = 2 * 4 * config.intermediate  # gate, silu(gate), up and their product
    return batch * seq * (norms + copies + attention + mlp)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_block", "grade": true, "points": 6}
lab.check("block")

# %% [markdown] id="activations_text"
# ## 4 · The activations of the whole model, and the logits
#
# **Blocks.** Without activation checkpointing every block keeps what you just counted. With checkpointing a block keeps only its **input**, the
# residual stream `(batch, seq, hidden)` in **fp32**, and is computed again during backward.
#
# **The last norm** comes after the blocks and is not checkpointed: it keeps its input and its normalised input, both in fp32.
#
# **Logits.** `(batch, seq, vocab_size)`. Cross-entropy wants them in fp32. One such tensor is what `"logits"` means here; step 5 asks how many
# of them are alive at once.

# %% nbgrader={"grade_id": "activations", "solution": true}
def activation_bytes(config: LlamaConfig, batch: int, seq: int, checkpointing: bool = False) -> dict[str, int]:
    """Bytes at the end of forward: "activations" (all blocks and the last norm) and "logits" (one fp32 tensor of them)."""
    ### BEGIN SOLUTION
    residual = 4 * batch * seq * config.hidden
    kept = residual if checkpointing else block_bytes(config, batch, seq)
    return {"activations": config.num_layers * kept + 2 * residual, "logits": 4 * batch * seq * config.vocab_size}
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_activations", "grade": true, "points": 5}
lab.check("activations")

# %% [markdown] id="activations_after"
# At batch 1 the state is nine tenths of the total: a total that agrees says little about activations. So compare **part by part**: lines are
# yours, markers are measured at true size.

# %% id="show_activations" tags=["demo"]
points = [(batch, checkpointing, measured(batch, checkpointing=checkpointing)) for batch in (1, 4) for checkpointing in (False, True)]
figures.activations(
    {(b, c): activation_bytes(config, b, SEQ, c) for b in (1, 2, 4, 8) for c in (False, True)},
    {(b, c): report.peak_by_part for b, c, report in points},
)

# %% [markdown] id="activations_lesson"
# Two things to take away. Checkpointing divides the activations of the blocks by more than ten (the measurement lies a little above your
# line: one block at a time is computed again, in full). And it does nothing for the logits: with a vocabulary of 128,256 they overtake what
# a checkpointed model keeps of all its blocks.

# %% [markdown] id="peak_text"
# ## 5 · The peak of the step
#
# The parts are not all there at the same time. Four moments decide; a step needs the largest. In each, `weights` and `optimizer` are there.
#
# | moment | gradients | temporaries | weights in bf16 | activations | logits (fp32 tensors) |
# |---|---|---|---|---|---|
# | `"loss"`: the loss has just been computed | none yet | | all matrices | all | 2½: bf16 logits, their fp32 copy, log-probabilities |
# | `"loss gradient"`: backward has just begun | none yet | | all matrices; with checkpointing only the output projection's | all | 3: log-probabilities, their gradient, the logits' gradient |
# | `"last gradient"`: backward reaches the embedding | all, and a copy: see below | | | | |
# | `"optimizer step"` | all | the step's | | | |
#
# **Weights in bf16.** Autocast makes a bf16 copy of every matrix that multiplies: attention, MLP, output projection (also a tied one), not the
# norms and not the embedding's look-up. The copies stay until backward has used them. A checkpointed block makes its own again when it
# is computed again.
#
# **The last gradient.** A *tied* embedding receives two gradients, one from each of its uses; they are added into a third: **two more** tensors
# of its size at that moment. When it is *not* tied, DDP copies the embedding's gradient into its communication bucket: **one more**.
#
# **DDP's buckets.** Gradients travel in buckets. With `gradient_as_bucket_view=True` the gradients *are* the buckets. With `False`, PyTorch's default,
# the buckets are a second copy of all gradients, there **at every moment**; the embedding's own gradient then needs no extra copy when not tied.

# %% nbgrader={"grade_id": "peak", "solution": true}
def step_peak(
    config: LlamaConfig,
    batch: int,
    seq: int,
    optimizer: str = "adamw",
    step: str = "foreach",
    checkpointing: bool = False,
    bucket_view: bool = True,
) -> dict[str, int]:
    """Bytes held by a rank at four moments: "loss", "loss gradient", "last gradient", "optimizer step"."""
    ### BEGIN SOLUTION
    parts, state = count_parameters(config), state_bytes(config, optimizer, step)
    held = activation_bytes(config, batch, seq, checkpointing)
    table = config.vocab_size * config.hidden
    blocks_in_bf16, head_in_bf16 = 2 * (parts["attention"] + parts["mlp"]), 2 * table
    always = state["weights"] + state["optimizer"] + (0 if bucket_view else state["gradients"])
    copies = 2 if config.tied_embeddings else 1 if bucket_view else 0
    return {
        "loss": always + blocks_in_bf16 + head_in_bf16 + held["activations"] + 5 * held["logits"] // 2,
        "loss gradient": always + (0 if checkpointing else blocks_in_bf16) + head_in_bf16 + held["activations"] + 3 * held["logits"],
        "last gradient": always + state["gradients"] + copies * 4 * table,
        "optimizer step": always + state["gradients"] + state["temporaries"],
    }
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_peak", "grade": true, "points": 8}
lab.check("peak")

# %% [markdown] id="peak_after"
# Your four moments, and the largest of them against the measurement.

# %% id="show_peak" tags=["demo"]
SETTINGS = {
    "foreach (default)": {"step": "foreach"},
    "for-loop": {"step": "for-loop"},
    "fused": {"step": "fused"},
    "fused, checkpointing": {"step": "fused", "checkpointing": True},
    "fused, buckets copied": {"step": "fused", "bucket_view": False},
}
predicted = {name: step_peak(config, 1, SEQ, **chosen) for name, chosen in SETTINGS.items()}
figures.moments(predicted, {name: measured(1, **chosen).peak_bytes for name, chosen in SETTINGS.items()})

# %% [markdown] id="fits_text"
# ## 6 · Does it fit?
#
# A GPU of "80 GB" does not offer 80 GB to your tensors. The number on the box counts 10⁹ bytes; ECC and the driver keep a part; the CUDA
# context and NCCL's buffers take theirs. `gpu(name)` knows what is left, in bytes.

# %% id="show_gpus" tags=["demo"]
print(f"{'GPU':10} {'CUDA sees':>12} {'usable':>12}")
for name, card in gpus().items():
    print(f"{name:10} {card.memory_bytes / GIB:8.1f} GiB {card.usable_bytes / GIB:8.1f} GiB")

# %% nbgrader={"grade_id": "fits", "solution": true}
def fits(config: LlamaConfig, card, batch: int, seq: int, **settings) -> bool:
    """Whether a training step fits the GPU `card` (has `card.usable_bytes`, `card.memory_bytes`); `settings` as for `step_peak`."""
    ### BEGIN SOLUTION
    return max(step_peak(config, batch, seq, **settings).values()) <= card.usable_bytes
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_fits", "grade": true, "points": 4}
lab.check("fits")

# %% id="show_fits" tags=["demo"]
figures.fitting({name: max(moments.values()) for name, moments in predicted.items()}, gpus())

# %% [markdown] id="fits_lesson"
# Batch 1, and nothing smaller exists. On V100s and on the A100-40 no line fits: with AdamW the 3B model leaves no choice that would help there.

# %% [markdown] id="largest_text"
# ## 7 · The largest batch, by bisection
#
# On a cluster each "does it fit?" is a job that may die with *CUDA out of memory*, so ask few times. `fits(batch)` is a function of the
# batch alone. If a batch fits, all smaller ones do.
#
# First find a batch that does not fit, by doubling. Then halve the gap between what fits and what does not. That asks about 2 log₂(n) times;
# counting up from 1 asks n times. Answer 0 if even one sequence does not fit.

# %% nbgrader={"grade_id": "largest", "solution": true}
def largest_batch(fits) -> int:
    """The largest batch for which `fits(batch)` is true, 0 if there is none."""
    ### BEGIN SOLUTION
    too_large = 1
    while fits(too_large):
        too_large *= 2
    largest = too_large // 2
    while too_large - largest > 1:
        middle = (largest + too_large) // 2
        if fits(middle):
            largest = middle
        else:
            too_large = middle
    return largest
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_largest", "grade": true, "points": 5}
lab.check("largest")

# %% id="show_largest" tags=["demo"]
from functools import partial


def batch_fits(card, settings, batch):
    return fits(config, card, batch, SEQ, **settings)


names = ("foreach (default)", "fused", "fused, checkpointing")
print(f"Largest batch of {MODEL}, sequences of {SEQ} tokens, AdamW")
print(f"{'GPU':12}", *(f"{name:>22}" for name in names))
for name, card in gpus().items():
    print(f"{name:12}", *(f"{largest_batch(partial(batch_fits, card, SETTINGS[setting])):>22}" for setting in names))

# %% [markdown] id="ranks_text"
# ## 8 · More ranks
#
# Now add GPUs. A recipe asks for a **global batch**; each rank takes its share, rounded up. How many ranks are needed?
#
# - The share must fit one GPU. So the number of ranks follows from the largest batch.
# - If one sequence does not fit, no number of ranks helps. That is **the limit of data parallelism**; the answer is then `None`.

# %% nbgrader={"grade_id": "ranks", "solution": true}
def ranks_needed(config: LlamaConfig, card, global_batch: int, seq: int, **settings) -> int | None:
    """The fewest data-parallel ranks that can take `global_batch` sequences a step, None if no number of ranks can."""
    ### BEGIN SOLUTION
    largest = largest_batch(lambda batch: fits(config, card, batch, seq, **settings))
    return math.ceil(global_batch / largest) if largest else None
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_ranks", "grade": true, "points": 4}
lab.check("ranks")

# %% [markdown] id="ranks_after"
# The memory of each rank for a global batch of 64 sequences, from 8 to 512 ranks (the measurements pretend the other ranks). Above 64 ranks the
# global batch has to grow: a rank takes at least one sequence.

# %% id="show_ranks" tags=["demo"]
WORLDS = (8, 16, 32, 64, 128, 256, 512)
per_rank = {world: math.ceil(64 / world) for world in WORLDS}
state = state_bytes(config, "adamw", "fused")
figures.ranks(
    {world: max(step_peak(config, batch, SEQ, step="fused").values()) for world, batch in per_rank.items()},
    {world: measured(per_rank[world], world_size=world).peak_bytes for world in (512,)},
    floor=sum(state.values()),
    gpus=gpus(),
)

# %% [markdown] id="ranks_lesson"
# The curve goes down to a floor and stays there. The floor is the state: 16 bytes a parameter on every rank, 512 times the same numbers. That
# is what ZeRO and FSDP (labs 14 to 16) take away.

# %% [markdown] id="loss_text"
# ## 9 · The loss of a rank
#
# There is a second way to lose with data parallelism: train on the wrong gradient. DDP **averages** the gradients of the ranks, it divides
# by the number of ranks. What must each rank's loss be, so that the result is the gradient of the mean loss over **all valid tokens of
# all ranks**, as one GPU with the whole batch would have?
#
# Two ranks with sentences of unequal length (padding has the target -100, which `F.cross_entropy` ignores):

# %% id="show_loss" tags=["demo"]
torch.manual_seed(0)
token_losses = [torch.rand(90) + 1, torch.rand(10) + 3]  # rank 0 has 90 valid tokens, rank 1 has 10, and harder ones
print(f"mean over all tokens   {torch.cat(token_losses).mean():.3f}")
print(f"mean of the rank means {torch.stack([losses.mean() for losses in token_losses]).mean():.3f}")

# %% [markdown] id="loss_exercise"
# The mean of means gives a token of rank 1 nine times the weight of a token of rank 0. Dividing the loss by the number of ranks is no cure,
# it is a second mistake: DDP has divided already.
#
# Write the loss that a rank calls `backward()` on. `dist` is ready; every rank calls your function once a step with its own logits and
# targets. A rank may hold no valid token at all; some rank always holds one.

# %% nbgrader={"grade_id": "loss", "solution": true}
def rank_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """This rank's loss, a scalar: after DDP's average, the gradient is that of the mean loss over all valid tokens of all ranks.

    logits: (batch, seq, vocab). targets: (batch, seq) int64, -100 where there is nothing to learn.
    """
    ### BEGIN SOLUTION
    valid = (targets != -100).sum()
    dist.all_reduce(valid)
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return total * dist.get_world_size() / valid
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_loss", "grade": true, "points": 7}
lab.check("loss")

# %% [markdown] id="real_text"
# ## 10 · For real: DDP on 1, 2 and 4 ranks
#
# Enough predictions on pretended ranks. A small Llama now trains with DDP in real processes, on a real text (the sources of the Python that
# runs this notebook). The ranks use GPUs if there is one for each, else the processor. Each rank also counts the memory of one step, with the
# same counter as before, but on real tensors.
#
# The global batch is 16 sequences: what do you expect for 2 and 4 ranks? **Write down three numbers** before you run the cell: how do the
# optimiser's state, the activations and the peak of a rank change from 1 to 4 ranks?

# %% id="run_training" tags=["demo"]
import tempfile

from dlo_lib.launch import run_ranks
from dlo_lib.train import TrainConfig, read_metrics

small = LlamaConfig(
    vocab_size=2048, hidden=128, intermediate=384, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, tied_embeddings=True
)
GLOBAL_BATCH, SMALL_SEQ = 16, 64


def train_and_count(options: dict) -> dict[str, int]:
    """On each rank: train `tiny` as the cluster would, then count the memory of one DDP step of `small`, by part and at its peak."""
    import contextlib
    import io

    from dlo_lib.launch import place
    from dlo_lib.profiling.measure import record_step
    from dlo_lib.profiling.settings import StepSettings
    from dlo_lib.profiling.tracker import MemoryTracker
    from dlo_lib.train import train

    torch.set_num_threads(1)  # one core a rank, so that 1, 2 and 4 ranks compare
    with contextlib.redirect_stdout(io.StringIO()):  # the figures below say it better
        train(TrainConfig(**options))
    world = dist.get_world_size()
    chosen = StepSettings.of(
        small, GLOBAL_BATCH // world, SMALL_SEQ, "bf16", False, "adamw", OptimizerStep.FOREACH, "ddp", bucket_view=True, world_size=world
    )
    with torch.device(place().device):
        report = record_step(chosen, MemoryTracker(), dist.group.WORLD)
    return {part.value: held for part, held in report.at_peak.items()}


curves, memory = {}, {}
for world in (1, 2, 4):
    with tempfile.TemporaryDirectory() as out:
        options = {"model": "tiny", "parallel": "ddp", "batch": GLOBAL_BATCH // world, "steps": STEPS, "log_every": 2, "out": out}
        memory[world] = run_ranks(train_and_count, world, options)
        curves[world] = read_metrics(out)

# %% id="show_training" tags=["demo"]
predicted = {world: max(step_peak(small, GLOBAL_BATCH // world, SMALL_SEQ).values()) for world in memory}
figures.training(curves, memory, predicted)

# %% [markdown] id="real_lesson"
# - **Loss:** three runs, one curve. The same global batch gives the same gradients however it is cut, because the loss is weighted as in step 9.
# - **Throughput:** without GPUs each rank computes on one core. More ranks than free cores cannot help, so do not read a scaling law from
#   this plot. On GPUs, one per rank, throughput is the reason to use data parallelism at all.
# - **Memory:** activations and logits are divided by the number of ranks; weights and optimiser state are not. (The peak is the moment
#   `"loss gradient"`: no gradient of a weight exists yet.) Your prediction comes from the same functions that you wrote for 3.2 billion
#   parameters.

# %% [markdown] id="scale_text"
# ## 11 · At scale
#
# On a cluster the same program trains the true model, one process per GPU. `cluster.submit` is one call for both: with `dry_run` it shows the
# script that SLURM would get, and without SLURM it runs here, with the *same options*, two processes and a small model. It returns at once; what
# the job writes is read from its metrics, not from its log. The same call made again finds the same job.
#
# Before you send the job, ask your own functions which GPU to ask for.

# %% id="run_at_scale" tags=["demo"]
from dlo_lib import cluster

flags = ["--parallel", "ddp", "--precision", "bf16", "--optimizer-step", "fused", "--batch", "1"]
large = ["--model", MODEL, "--seq", str(SEQ), "--steps", "100"]
little = ["--model", "tiny", "--seq", "64", "--steps", "4", "--log-every", "2"]

script = cluster.submit("dlo_lib.train", [*large, *flags], gpus=8, site="jean-zay-a100", account="abc", dry_run=True)
print("For SLURM, on 8 GPUs:", *(line for line in script.splitlines() if line.startswith(("#SBATCH", "srun"))), sep="\n  ")
print("GPUs that it fits:", ", ".join(name for name, card in gpus().items() if fits(config, card, 1, SEQ, step="fused")) or "none")
job = cluster.submit("dlo_lib.train", [*little, *flags], gpus=GPUS).wait()
for line in job.metrics():
    print(f"  step {line.step}: loss {line.loss:.3f}, {line.tokens_per_second:,.0f} tokens/s, gradient norm {line.grad_norm:.2f}")
job.dashboard()

# %% [markdown] id="quiz_text"
# ## 12 · Quiz
#
# Answer with the letter, for example `{"q1": "a", ...}`. The check here says whether every question has an answer; right answers count in grading.

# %% id="show_quiz" tags=["demo"]
lab.quiz()

# %% nbgrader={"grade_id": "quiz", "solution": true}
### BEGIN SOLUTION: quiz = {"q1": "", "q2": "", "q3": "", "q4": "", "q5": "", "q6": ""}
quiz = {"q1": "b", "q2": "c", "q3": "a", "q4": "d", "q5": "b", "q6": "c"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true, "points": 7}
lab.check("quiz")

# %% [markdown] id="further"
# ## Go further
#
# - Set `MODEL = "llama-3.1-8b"` in the first cell and run the notebook again. Which GPUs are left?
# - `max_positions` of this model is 131,072. Plot your `step_peak` against the sequence length with one sequence. Where do the logits overtake the state?
# - The logits need not exist all at once: cross-entropy can be computed in chunks of tokens. How much would `step_peak` lose? (Lab 05 writes the kernel.)
# - Replace AdamW by SGD with momentum in the table of step 6, then by plain SGD. Which cells change? (Mind that a V100 has no bf16 of its own.)
#
# **What comes next.** Lab 14 divides the optimiser's state over the ranks, then the gradients, then the weights (ZeRO). Lab 15 builds FSDP. Lab 16 makes it fast.
#
# ## References
#
# - S. Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training* (2020), [arXiv:2006.15704](https://arxiv.org/abs/2006.15704)
# - S. Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models* (2020), [arXiv:1910.02054](https://arxiv.org/abs/1910.02054)
# - T. Chen et al., *Training Deep Nets with Sublinear Memory Cost* (2016), [arXiv:1604.06174](https://arxiv.org/abs/1604.06174)
# - I. Loshchilov, F. Hutter, *Decoupled Weight Decay Regularization* (2019), [arXiv:1711.05101](https://arxiv.org/abs/1711.05101)
# - P. Micikevicius et al., *Mixed Precision Training* (2018), [arXiv:1710.03740](https://arxiv.org/abs/1710.03740)
# - A. Grattafiori et al., *The Llama 3 Herd of Models* (2024), [arXiv:2407.21783](https://arxiv.org/abs/2407.21783)
# - J. Ainslie et al., *GQA: Training Generalized Multi-Query Transformer Models* (2023), [arXiv:2305.13245](https://arxiv.org/abs/2305.13245)
# - The course this lab follows: IDRIS, *Deep Learning Optimisé – Jean Zay* (DLO-JZ), day 4
