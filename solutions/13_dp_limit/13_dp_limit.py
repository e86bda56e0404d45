# %% [markdown] id="title"
# # 13 · The limit of data parallelism
#
# **What you will do.** You write functions that predict how much memory one training step of **Llama 3.2 3B**
# takes on each GPU of a data-parallel job. You compare every part of the prediction with a measurement at
# true size, and find out how far more GPUs help.
#
# You need no GPU. The measurements run the real training step on *fake tensors*: they have shapes, dtypes and sizes, but no data.
#
# Builds on lab 11 (DDP). You can skip lab 12, which compresses gradients before they are sent: that saves bytes on the links. This lab asks
# what a rank must hold, and counts gradients that are not compressed.
#
# The core exercises, predictions and the quiz take about 96 minutes; with the text and the demos
# plan 1 h 50. Each exercise has a check that answers at once; `lab.hint("name")` gives a nudge, then a pointer,
# then a sketch. If you are stuck, `lab.use_reference("name")` lets you continue without its points.
#
# Words: memory footprint (*empreinte mémoire*), optimiser state (*état de l'optimiseur*), mixed precision
# (*précision mixte*), data parallelism (*parallélisme de données*), training step (*pas d'apprentissage*).
# Memory is given in **GiB** = $2^{30}$ bytes, as CUDA reports it.

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
SMALL_SEQ = int(os.environ.get("DLO_SMALL_SEQ", 64))  # tokens of a sequence whose memory is counted
config = model_config(MODEL)
GPUS = int(os.environ.get("DLO_GPUS", 2))  # ranks of the small job near the end
ON_GPU = os.environ.get("DLO_ON_GPU", "llama-3.2-1b")  # the model whose step a GPU runs at the end
lab = Lab(globals())

# %% [markdown] id="why"
# ## Why: a small model that does not fit
#
# A model of 3.2 billion parameters in fp32 takes 12 GiB. An A100 has 40 or 80 GB (those of Jean Zay have 80),
# an H100 80 GB. One sequence of 2048 tokens is a small batch. Does it fit easily?
#
# The cell below runs **one training step** and records every allocation: AdamW as PyTorch runs it by default
# on a GPU, bf16 autocast over fp32 weights, batch 1. The dashed line is the memory that an A100 of 40 GB has
# for tensors. First write down what you expect, in GiB; a None is no prediction.

# %% id="predict_first" tags=["prediction"]
expected_first = {"largest during backward": None, "largest during the optimiser's step": None}

# %% id="show_step" tags=["demo"]
from functools import cache

import figures

from dlo_lib.labkit import predictions
from dlo_lib.optim import Phase
from dlo_lib.profiling import OptimizerStep, Part, measure_memory, plot_memory


@cache
def remembered(*settings):
    batch, step, checkpointing, bucket_view, world_size = settings
    more = {"checkpointing": checkpointing, "bucket_view": bucket_view, "world_size": world_size}
    return measure_memory(MODEL, batch, SEQ, fused=OptimizerStep(step), **more)


def measured(batch=1, step="fused", checkpointing=False, bucket_view=True, world_size=1):
    """Measure the memory of one rank over a training step of MODEL, on fake tensors (each setting runs once)."""
    return remembered(batch, step, checkpointing, bucket_view, world_size)


first = measured(step="foreach")
plot_memory(first, limit_bytes=gpu("a100-40").usable_bytes, title=f"{MODEL}, batch 1 × {SEQ}, AdamW")

# %% id="show_first_peak" tags=["demo", "nbval-check-output"]
predictions.require_numbers(expected_first)
weights = first.peak_by_part[Part.WEIGHTS]
print(
    f"weights {weights / GIB:.1f} GiB, peak {first.peak_bytes / GIB:.1f} GiB: "
    f"{first.peak_bytes / weights:.1f} times the weights"
)
for phase, held in first.peak_by_phase.items():
    when = "after the step" if phase is Phase.END else f"during {phase.value}"
    print(f"  largest {when:16} {held / GIB:6.1f} GiB")
phases = zip(expected_first, (Phase.BACKWARD, Phase.OPTIMIZER))
found_first = {name: first.peak_by_phase[phase] / GIB for name, phase in phases}
print(predictions.compared(expected_first, found_first, "{:.1f} GiB".format))

# %% [markdown] id="why_questions"
# The peak is five times the weights, and it is in the *optimiser's* step, not in backward.
#
# Look at the figure again before you continue.
#
# - What is in memory when the step begins?
# - What grows during forward and shrinks during backward? What grows while it shrinks?
# - What is the block on top at the end?
# - Which names in the legend do you not know yet? (Step 5 explains *cast weights* and *logits and loss*.)

# %% [markdown] id="idea"
# ## The idea: every rank holds everything
#
# Data parallelism copies the model to every rank. Each rank takes its share of the batch; all ranks average
# their gradients (an all-reduce), and all take the same optimiser step. So every rank holds the whole
# **state** (weights, gradients, optimiser state). Only the **activations**, which belong to the sequences of
# a rank, are divided.
#
# The figure stacks the *largest* size of each part. They are not all in memory at one moment (step 5), so a bar
# is higher than the peak.

# %% id="show_idea" tags=["demo"]
figures.replicas(first.peak_by_part, ranks=4)

# %% [markdown] id="predict_ranks_text"
# **Predict.** Step 8 divides a global batch of 64 sequences over the ranks; above 64 ranks each still takes one
# sequence. How many GiB does a rank need at its peak with 8, with 64 and with 512 ranks? Write it down now, before
# the next figures give it away.

# %% id="predict_ranks" tags=["prediction"]
expected_ranks = {"8 ranks": None, "64 ranks": None, "512 ranks": None}

# %% [markdown] id="parameters_text"
# ## 1 · Count the parameters
#
# **Core · 10 min · ●○○**
#
# The whole prediction depends on the number of parameters. Compute it from the configuration, part by part.
#
# | part | what it is |
# |---|---|
# | `embedding` | one vector of size `hidden` for each of the `vocab_size` tokens |
# | `attention` | in each block, `q_proj`, `k_proj`, `v_proj`, `o_proj`, without biases. There are `num_heads` query heads but only `num_kv_heads` key and value heads (grouped-query attention, GQA); each head is `head_dim` wide, and `head_dim` need not be `hidden / num_heads` |
# | `mlp` | in each block, three matrices between `hidden` and `intermediate` (SwiGLU: gate, up, down) |
# | `norms` | RMSNorm has one vector of size `hidden`; each block has two, and one follows the last block |
# | `head` | the output projection, as large as the embedding; 0 when `tied_embeddings`, because it then *is* the embedding |

# %% id="show_config" tags=["demo"]
config

# %% nbgrader={"grade_id": "parameters", "solution": true}
def count_parameters(config: LlamaConfig) -> dict[str, int]:
    """Return the parameters of a Llama by part, all blocks together.

    The parts are "embedding", "attention", "mlp", "norms" and "head".
    """
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


# %% nbgrader={"grade_id": "test_parameters", "grade": true}
lab.check("parameters")

# %% [markdown] id="parameters_after"
# Your count for three models of the family. The last column builds the model on the `meta` device, where
# parameters have no storage, and counts its parameters.

# %% id="show_parameters" tags=["demo", "nbval-check-output"]
family = ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b")
counts = {name: count_parameters(model_config(name)) for name in family}
for name, parts in counts.items():
    built = sum(p.numel() for p in Llama(model_config(name), device="meta").parameters())
    print(f"{name:14} yours {sum(parts.values()):>14,}   built {built:>14,}")
figures.parameters(counts)

# %% [markdown] id="state_text"
# ## 2 · The state, and what the optimiser's step needs
#
# **Core · 12 min · ●○○**
#
# Training holds more than weights. In this lab (fp32 weights with autocast) **every number below has 4
# bytes**:
#
# - `weights` and `gradients`: one number a parameter each;
# - `optimizer`: AdamW keeps two moments a parameter. SGD with momentum keeps one velocity, plain SGD keeps no
#   state;
# - `temporaries`: memory that the *step itself* allocates and frees. AdamW computes a denominator $\sqrt{v} + \epsilon$
#   before it updates a weight. PyTorch has three implementations of the same arithmetic:
#
# | step | how | temporaries of AdamW at the worst moment |
# |---|---|---|
# | `"for-loop"` | parameter after parameter | $\sqrt{v}$ and its quotient, both as large as the **largest parameter tensor** |
# | `"foreach"` (CUDA's default) | one kernel per operation, over **all** parameters at once | the denominators of all parameters together |
# | `"fused"` | one kernel does everything | none: every value is computed in a register |
#
# SGD needs no denominator: it updates in place, without temporaries in any of the three. The largest tensor
# of a language model is its embedding, `vocab_size × hidden`.

# %% nbgrader={"grade_id": "state", "solution": true}
def state_bytes(
    config: LlamaConfig, optimizer: str = "adamw", step: str = "foreach"
) -> dict[str, int]:
    """Return the bytes of "weights", "gradients", "optimizer" and "temporaries".

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


# %% nbgrader={"grade_id": "test_state", "grade": true}
lab.check("state")

# %% [markdown] id="state_after"
# The figure compares the three implementations on the 3B model at true size (about 10 s). Bars are your
# prediction, diamonds the measurement. The dotted line is the peak of forward and backward, which does not
# depend on the optimiser step.

# %% id="show_state" tags=["demo"]
steps = ("for-loop", "foreach", "fused")
state_of_steps = {step: state_bytes(config, "adamw", step) for step in steps}
peaks_of_steps = {step: measured(step=step).peak_by_phase for step in steps}
figures.optimizer_steps(state_of_steps, peaks_of_steps)

# %% [markdown] id="state_lesson"
# One argument of the optimiser (`fused=True`) saves 12 GiB in the optimiser's step: with `foreach`, the peak
# of the whole step is in the optimiser; with `fused`, it is in backward. The three compute the same update,
# except for rounding:

# %% id="show_same_update" tags=["demo"]
start, updated = torch.randn(1000), {}
for step in OptimizerStep:
    weight = torch.nn.Parameter(start.clone())
    chosen = {"fused": step is OptimizerStep.FUSED, "foreach": step is OptimizerStep.FOREACH}
    adamw = torch.optim.AdamW([weight], **chosen)
    for _ in range(10):
        weight.grad = weight.detach().sin()
        adamw.step()
    updated[step.value] = weight.detach()
for name, found in updated.items():
    moved, apart = ((found - other).abs().max() for other in (start, updated["fused"]))
    print(f"{name:9} moved by {moved:.4f}, differs from fused by {apart:.1e}")

# %% [markdown] id="state_remember"
# Remember: weights, gradients and AdamW's state take 16 bytes a parameter. Other recipes reach 16 in other
# ways: the classic mixed-precision count is 2 (bf16 weight) + 2 (bf16 gradient) + 12 (fp32 copy and two
# moments).

# %% [markdown] id="block_text"
# ## 3 · What one block keeps for backward
#
# **Core · 15 min · ●●○**
#
# Backward needs tensors of forward: the input of each matrix, the factors of each product. Autograd saves
# them. Which ones? **Look** instead of guessing: PyTorch calls a hook for every tensor that it saves. The
# cell runs one real block on 20 tokens, with sizes such that you recognise each tensor by its shape.

# %% id="show_saved" tags=["demo"]
heads = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 16}
probe = LlamaConfig(vocab_size=257, hidden=48, intermediate=112, num_layers=1, **heads)
figures.saved_by_block(probe, tokens=20)

# %% [markdown] id="block_exercise"
# Read the table. Some rows are fp32 (4 bytes), others bf16 (2 bytes). The copies of *weights* do not grow
# with the batch: they are not activations, and step 5 counts them. All other rows are a number of bytes **per
# token**. Every row has its own memory, also rows that look the same: a tensor that autograd saves twice has only
# one row.
#
# Compute the sum for any configuration. Leave out the rows below one percent (one number per head or per
# token), and `cos` and `sin` of the rotary positions, because the whole model shares them.

# %% nbgrader={"grade_id": "block", "solution": true}
def block_bytes(config: LlamaConfig, batch: int, seq: int) -> int:
    """Return the bytes that a block keeps for backward under bf16 autocast.

    batch: sequences. seq: tokens of each.
    """
    ### BEGIN SOLUTION
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    norms = 2 * (4 + 4) * config.hidden  # each half: its input and its normalised input, in fp32
    copies = 2 * (3 + 2) * config.hidden  # one bf16 copy for each of q, k, v, gate, up
    attention = 2 * (2 * queries + 2 * keys)  # queries, keys, values and the output
    mlp = 2 * 4 * config.intermediate  # gate, silu(gate), up and their product
    return batch * seq * (norms + copies + attention + mlp)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_block", "grade": true}
lab.check("block")

# %% [markdown] id="activations_text"
# ## 4 · The activations of the whole model, and the logits
#
# **Core · 8 min · ●○○**
#
# **Blocks.** Without activation checkpointing, every block keeps the tensors that you just counted. With
# checkpointing, a block keeps only its **input**, the residual stream `(batch, seq, hidden)` in **fp32**, and
# is recomputed during backward.
#
# **The last norm** comes after the blocks and is not checkpointed: it keeps its input and its normalised input, both in fp32.
#
# **Logits.** `(batch, seq, vocab_size)`. Cross-entropy needs them in fp32. Here `"logits"` means one such
# tensor; step 5 counts how many of them are in memory at once.

# %% nbgrader={"grade_id": "activations", "solution": true}
def activation_bytes(
    config: LlamaConfig, batch: int, seq: int, checkpointing: bool = False
) -> dict[str, int]:
    """Return the bytes at the end of forward.

    "activations": of the blocks and the last norm. "logits": one fp32 tensor.
    """
    ### BEGIN SOLUTION
    residual = 4 * batch * seq * config.hidden
    kept = residual if checkpointing else block_bytes(config, batch, seq)
    return {"activations": config.num_layers * kept + 2 * residual, "logits": 4 * batch * seq * config.vocab_size}
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_activations", "grade": true}
lab.check("activations")

# %% [markdown] id="activations_after"
# At batch 1 the state is nine tenths of the total, so a total that agrees says little about activations.
# Compare **part by part**: lines are your prediction for the end of forward; markers are measured at true size, and
# are the largest value of each part in the whole step. The right plot also shows 2 and 3 times your logits: the
# markers should lie on 3, and step 5 explains why.

# %% id="show_activations" tags=["demo"]
points = [
    (batch, checkpointing, measured(batch, checkpointing=checkpointing))
    for batch in (1, 4)
    for checkpointing in (False, True)
]
figures.activations(
    {(b, c): activation_bytes(config, b, SEQ, c) for b in (1, 2, 4, 8) for c in (False, True)},
    {(b, c): report.peak_by_part for b, c, report in points},
)

# %% [markdown] id="activations_lesson"
# The figure shows two results. Checkpointing divides what is kept at the end of forward by twelve (your lines). The
# measured peak of the activations is divided by almost nine only, because backward recomputes one block at a time
# in full, beside the inputs of all blocks. Checkpointing does not change the logits: with a vocabulary of 128,256
# they exceed all that a checkpointed model keeps of its blocks.

# %% [markdown] id="peak_text"
# ## 5 · The peak of the step
#
# **Core · 20 min · ●●●**
#
# The parts are not all in memory at the same time. Four moments can be the peak; a step needs the largest.
# `weights` and `optimizer` are in memory at each of them.
#
# | moment | gradients | temporaries | weights in bf16 | activations | logits (fp32 tensors) |
# |---|---|---|---|---|---|
# | `"loss"`: the loss has just been computed | none yet | | all matrices, with and without checkpointing | all | 2½: bf16 logits, their fp32 copy, log-probabilities |
# | `"loss gradient"`: backward has just begun | none yet | | all matrices; with checkpointing only the output projection's | all | 3: log-probabilities, their gradient, the logits' gradient |
# | `"last gradient"`: backward reaches the embedding | all, and a copy: see below | | | | |
# | `"optimizer step"` | all | the step's | | | |
#
# **Weights in bf16.** Autocast makes a bf16 copy of every matrix that multiplies: attention, MLP, output
# projection (also a tied one), not the norms and not the embedding's look-up. Autocast remembers the copies until
# its `with` block ends, which is after the loss. So at `"loss"` all copies are in memory, **with and without
# checkpointing**. Then only those stay that autograd has saved for backward: all of them without checkpointing. A
# checkpointed block has saved none; it makes its copies again when it is recomputed.
#
# **The last gradient.** A *tied* embedding gets one gradient from each of its two uses, and a third tensor
# holds their sum: **two more** tensors of its size at that moment. When it is *not* tied, DDP copies the
# embedding's gradient into its communication bucket: **one more**.
#
# **DDP's buckets.** Gradients are sent in buckets. With `gradient_as_bucket_view=True` the gradients *are*
# the buckets. With `False`, PyTorch's default, the buckets are a second copy of all gradients, in memory **at
# every moment**; an untied embedding's gradient then needs no extra copy.

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
    """Return the bytes that a rank holds at four moments.

    They are "loss", "loss gradient", "last gradient" and "optimizer step".
    """
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


# %% nbgrader={"grade_id": "test_peak", "grade": true}
lab.check("peak")

# %% [markdown] id="peak_after"
# The figure shows your four moments, and the measured peak at the largest of them.

# %% id="show_peak" tags=["demo"]
SETTINGS = {
    "foreach (default)": {"step": "foreach"},
    "for-loop": {"step": "for-loop"},
    "fused": {"step": "fused"},
    "fused, checkpointing": {"step": "fused", "checkpointing": True},
    "fused, buckets copied": {"step": "fused", "bucket_view": False},
}
moments_of = {name: step_peak(config, 1, SEQ, **chosen) for name, chosen in SETTINGS.items()}
peaks_of = {name: measured(1, **chosen).peak_bytes for name, chosen in SETTINGS.items()}
figures.moments(moments_of, peaks_of)

# %% [markdown] id="fits_text"
# ## 6 · Does it fit?
#
# **Core · 5 min · ●○○**
#
# A GPU of "80 GB" does not have 80 GB for your tensors. Vendors count 10⁹ bytes; ECC and the driver keep a
# part; the CUDA context and NCCL's buffers take more. `gpu(name)` gives the rest, in bytes.

# %% id="show_gpus" tags=["demo", "nbval-check-output"]
print(f"{'GPU':10} {'CUDA sees':>12} {'usable':>12}")
for name, card in gpus().items():
    print(f"{name:10} {card.memory_bytes / GIB:8.1f} GiB {card.usable_bytes / GIB:8.1f} GiB")

# %% nbgrader={"grade_id": "fits", "solution": true}
def fits(config: LlamaConfig, card, batch: int, seq: int, **settings) -> bool:
    """Return whether a step fits `card` (`card.usable_bytes`, `card.memory_bytes`).

    settings: as for `step_peak`.
    """
    ### BEGIN SOLUTION
    return max(step_peak(config, batch, seq, **settings).values()) <= card.usable_bytes
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_fits", "grade": true}
lab.check("fits")

# %% id="show_fits" tags=["demo"]
figures.fitting({name: max(moments.values()) for name, moments in moments_of.items()}, gpus())

# %% [markdown] id="fits_lesson"
# Batch 1 is the smallest batch. On V100s and on the A100-40 no row fits: with AdamW, none of these settings
# helps the 3B model there. (The V100 columns show the bf16 figures, although a V100 has no bf16: it uses
# fp16, whose numbers are as large, and loss scaling. The A100 of Jean Zay are the a100-80.)

# %% [markdown] id="largest_text"
# ## 7 · The largest batch, by bisection
#
# **Core · 10 min · ●●○**
#
# On a cluster, each test of a batch is a job that may end with *CUDA out of memory*, so make few tests.
# `fits(batch)` is a function of the batch only. If a batch fits, all smaller ones do.
#
# First find a batch that does not fit, by doubling. Then halve the gap between the largest batch known to fit
# and the smallest known not to fit. This calls `fits` about 2 log₂(n) times; counting up from 1 calls it n
# times. Return 0 if even one sequence does not fit.

# %% nbgrader={"grade_id": "largest", "solution": true}
def largest_batch(fits) -> int:
    """Return the largest batch for which `fits(batch)` is true, 0 if there is none."""
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


# %% nbgrader={"grade_id": "test_largest", "grade": true}
lab.check("largest")

# %% id="show_largest" tags=["demo"]
from functools import partial


def batch_fits(card, setting, batch):
    return fits(config, card, batch, SEQ, **SETTINGS[setting])


names = ("foreach (default)", "fused", "fused, checkpointing")
print(f"Largest batch of {MODEL}, sequences of {SEQ} tokens, AdamW")
print(f"{'GPU':12}", *(f"{name:>22}" for name in names))
for name, card in gpus().items():
    print(f"{name:12}", *(f"{largest_batch(partial(batch_fits, card, key)):>22}" for key in names))

# %% [markdown] id="ranks_text"
# ## 8 · More ranks
#
# **Core · 7 min · ●○○**
#
# Now add GPUs. A recipe asks for a **global batch**; each rank takes its share, rounded up. How many ranks are needed?
#
# - The share must fit one GPU. So the number of ranks follows from the largest batch.
# - If one sequence does not fit, no number of ranks helps. This is **the limit of data parallelism**; return
#   `None` then.

# %% nbgrader={"grade_id": "ranks", "solution": true}
def ranks_needed(config: LlamaConfig, card, global_batch: int, seq: int, **settings) -> int | None:
    """Return the fewest data-parallel ranks for `global_batch` sequences a step.

    None if no number is enough.
    """
    ### BEGIN SOLUTION
    largest = largest_batch(lambda batch: fits(config, card, batch, seq, **settings))
    return math.ceil(global_batch / largest) if largest else None
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_ranks", "grade": true}
lab.check("ranks")

# %% [markdown] id="ranks_after"
# The figure shows the memory of each rank for a global batch of 64 sequences, from 8 to 512 ranks: computed by your
# `step_peak` for all of them, and measured for 8, 64 and 512 (one rank runs, the others are simulated).
# Above 64 ranks the global batch has to grow, because a rank takes at least one sequence. The cell compares the
# measurement with what you predicted after "The idea".

# %% id="show_ranks" tags=["demo"]
predictions.require_numbers(expected_ranks)
WORLDS = (8, 16, 32, 64, 128, 256, 512)
per_rank = {world: math.ceil(64 / world) for world in WORLDS}
state = state_bytes(config, "adamw", "fused")
peaks = {world: max(step_peak(config, batch, SEQ, step="fused").values()) for world, batch in per_rank.items()}
measured_ranks = {world: measured(per_rank[world], world_size=world).peak_bytes for world in (8, 64, 512)}
print(predictions.compared(expected_ranks, {f"{world} ranks": held / GIB for world, held in measured_ranks.items()}, "{:.1f} GiB".format))
figures.ranks(
    peaks,
    measured_ranks,
    floor=sum(state.values()),
    gpus=gpus(),
    expected=expected_ranks,
)

# %% [markdown] id="ranks_lesson"
# The curve falls to a floor. The floor is the state: 16 bytes a parameter on every rank, the same numbers 512
# times. ZeRO and FSDP (labs 14 to 16) remove these copies.

# %% [markdown] id="loss_text"
# ## 9 · The loss of a rank
#
# **Optional · 15 min · ●●○**
#
# You can skip the code: no later cell needs it, and lab 15 states the formula again. But read up to the two numbers
# that the next cell prints, because the quiz asks about them.
#
# Data parallelism can also compute the wrong gradient. DDP **averages** the gradients: it divides their sum
# by the number of ranks. Which loss must each rank use so that the result is the gradient of the mean loss
# over **all valid tokens of all ranks**, as on one GPU with the whole batch?
#
# The next cell has two ranks with sentences of unequal length (padding has the target -100, which
# `F.cross_entropy` ignores):

# %% id="show_loss" tags=["demo", "nbval-check-output"]
torch.manual_seed(0)
# Rank 0 has 90 valid tokens, rank 1 has 10 harder ones
token_losses = [torch.rand(90) + 1, torch.rand(10) + 3]
means = torch.stack([losses.mean() for losses in token_losses])
print(f"mean over all tokens   {torch.cat(token_losses).mean():.3f}")
print(f"mean of the rank means {means.mean():.3f}")

# %% [markdown] id="loss_exercise"
# The mean of means gives a token of rank 1 nine times the weight of a token of rank 0. Dividing the loss by
# the number of ranks is a second mistake, because DDP divides already.
#
# Write the loss on which a rank calls `backward()`. `dist` is initialised; every rank calls your function
# once a step, with its logits and targets. A rank may hold no valid token; at least one rank holds one.

# %% nbgrader={"grade_id": "loss", "solution": true}
def rank_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return this rank's loss, a scalar.

    After DDP's average, the gradient is that of the mean loss over all valid tokens of all ranks.
    logits: (batch, seq, vocab). targets: (batch, seq) int64, -100 where there is nothing to learn.
    """
    ### BEGIN SOLUTION
    valid = (targets != -100).sum()
    dist.all_reduce(valid)
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return total * dist.get_world_size() / valid
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_loss", "grade": true}
lab.check("loss")

# %% [markdown] id="real_text"
# ## 10 · For real: DDP on 1, 2 and 4 ranks
#
# So far the other ranks were simulated. Now a small Llama, `tiny`, trains with DDP in real processes, on a real text
# (the sources of the Python that runs this notebook). The ranks use GPUs if there is one for each, else the
# CPU. Then each rank counts the memory of one step of a second, wider model, `small`, with the same counter as before,
# but on real tensors.
#
# The global batch is 16 sequences. Predict three ratios: a part of the memory of a rank at its peak, with 4
# ranks, divided by the same part with 1 rank.

# %% id="predict_real" tags=["prediction"]
# With 4 ranks, divided by the same with 1 rank
expected_real = {"optimiser state": None, "activations": None, "peak": None}

# %% id="run_training" tags=["demo"]
import tempfile

from dlo_lib.launch import run_ranks
from dlo_lib.train import TrainConfig, read_metrics

small = LlamaConfig(
    vocab_size=2048, hidden=128, intermediate=384, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, tied_embeddings=True
)
GLOBAL_BATCH = 16


def train_and_count(options: dict) -> dict[str, int]:
    """On each rank: train `tiny`, then count the memory of one DDP step of `small`, by part and at its peak."""
    import contextlib
    import io

    from dlo_lib.launch import place
    from dlo_lib.profiling.measure import record_step
    from dlo_lib.profiling.settings import StepSettings
    from dlo_lib.profiling.tracker import MemoryTracker
    from dlo_lib.train import train

    torch.set_num_threads(1)  # one core a rank, so that 1, 2 and 4 ranks compare
    with contextlib.redirect_stdout(io.StringIO()):  # the figures below show the results
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
predictions.require_numbers(expected_real)
predicted = {world: step_peak(small, GLOBAL_BATCH // world, SMALL_SEQ) for world in memory}
at_peak = {world: by_rank[0] for world, by_rank in memory.items()}
parts = {"optimiser state": Part.OPTIMIZER_STATE, "activations": Part.ACTIVATIONS}
ratios = {name: at_peak[4][part.value] / at_peak[1][part.value] for name, part in parts.items()}
ratios["peak"] = sum(at_peak[4].values()) / sum(at_peak[1].values())
print(predictions.compared(expected_real, ratios, "{:.2f}".format))
figures.training(curves, memory, {world: max(held.values()) for world, held in predicted.items()})

# %% [markdown] id="real_lesson"
# - **Loss:** the three curves are equal. The same global batch gives the same gradients for any number of
#   ranks, because they are those of the mean loss over all tokens of all ranks.
# - **Throughput:** without GPUs each rank computes on one core. More ranks than free cores cannot help, so
#   this plot shows no scaling law. On GPUs, one per rank, throughput is the reason to use data parallelism.
# - **Memory:** activations and logits are divided by the number of ranks; weights and optimiser state are
#   not. (The peak is the moment `"loss gradient"`: no gradient of a weight exists yet.) Your prediction uses
#   the functions that you wrote for 3.2 billion parameters.

# %% [markdown] id="scale_text"
# ## 11 · At scale
#
# On a cluster the same program trains the full model, with one process per GPU. `cluster.submit` is one call
# for both cases: with `dry_run` it returns the script for SLURM; without SLURM it runs the job on this
# machine, here with the *same options*, two processes and a small model. It returns immediately; the results
# are read from the job's metrics, not from its log. A second identical call finds the same job.
# In the dashboard, the peak memory without a GPU is that of the whole process, with Python and PyTorch.
#
# Before you submit a job, use your functions to choose the GPU.

# %% id="run_at_scale" tags=["demo"]
from dlo_lib import cluster
from dlo_lib.labkit import at_scale

flags = ["--parallel", "ddp", "--precision", "bf16", "--optimizer-step", "fused", "--batch", "1"]
large = ["--model", MODEL, "--seq", str(SEQ), "--steps", "100"]
little = ["--model", "tiny", "--seq", "64", "--steps", str(min(40, 5 * STEPS)), "--log-every", "5"]

script = cluster.submit(
    "dlo_lib.train", [*large, *flags], gpus=8, site="jean-zay-a100", account="abc", dry_run=True
)
print("For SLURM, on 8 GPUs:", at_scale.directives(script), sep="\n")
print("GPUs that it fits:", ", ".join(name for name, card in gpus().items() if fits(config, card, 1, SEQ, step="fused")) or "none")
job = cluster.submit("dlo_lib.train", [*little, *flags], gpus=GPUS).wait()
print(at_scale.steps(job))
job.dashboard()

# %% [markdown] id="standard_text"
# ## 12 · The same with what you will use on Monday
#
# PyTorch has tools for the same questions:
#
# - `FakeTensorMode` runs a step without data, and `MemTracker` (`torch.distributed._tools`) counts its memory by
#   kind. Both need no GPU.
# - On a GPU, `torch.cuda.max_memory_allocated()` returns the peak of a real step.
#   `torch.cuda.memory._record_memory_history()` and `torch.cuda.memory._dump_snapshot("snapshot.pickle")` write every
#   allocation with its line of code; <https://pytorch.org/memory_viz> draws the file.
#
# The cell measures one step of the small Llama of step 10, with 1 layer, by `MemTracker`, and compares it with the
# counter of this course and with your `step_peak`. The second step counts, because AdamW makes its state in the first.

# %% id="run_standard" tags=["demo", "read"]
import time
from dataclasses import replace

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from dlo_lib.labkit import columns
from dlo_lib.labkit.figures import ms, size
from dlo_lib.labkit.side_by_side import lines_of


def tracked_peak(config, batch, seq, checkpointing=False, **options) -> int:
    """Return the peak of a training step, by MemTracker; `options` are those of AdamW."""
    with FakeTensorMode(), MemTracker() as tracker:
        model = Llama(config, checkpointing=checkpointing)
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        tracker.track_external(model, optimizer)
        tokens = torch.zeros(batch, seq, dtype=torch.int64)
        for _ in range(2):
            tracker.reset_mod_stats()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    (held,) = tracker.get_tracker_snapshot("peak").values()
    return held["Total"]


def timed(function, *args, **options) -> tuple[int, float]:
    began = time.perf_counter()
    return function(*args, **options), time.perf_counter() - began


def formula_peak(config, batch, seq, step) -> int:
    return max(step_peak(config, batch, seq, step=step).values())


smaller = replace(small, num_layers=1)


def counted_peak(*sizes, **chosen) -> int:
    return measure_memory(*sizes, parallel="none", **chosen).peak_bytes


rows = [("", "time to obtain it", "peak", "lines of code")]
for name, function, settings in (
    ("your formulas", formula_peak, {"step": "fused"}),
    ("measure_memory", counted_peak, {"fused": True}),
    ("MemTracker", tracked_peak, {"fused": True}),
):
    peak, seconds = timed(function, smaller, GLOBAL_BATCH, SMALL_SEQ, **settings)
    lines = str(lines_of(tracked_peak) or "-") if function is tracked_peak else "-"
    rows.append((name, ms(seconds), size(peak), lines))
print(columns(rows))

# %% [markdown] id="standard_lesson"
# `MemTracker` looks at every live tensor after each
# operation, so it is slow for large models. At true size it is stored here, not run: for Llama 3.2 3B, batch 1 × 2048
# (torch 2.13, two CPU cores, 23 November 2026, several minutes for each), it gave 60.3 GiB with `foreach` and
# 54.0 GiB with `fused`. That run kept a reference to the bf16 logits, which have 0.5 GiB: the figures of step 5 are 59.8 and 53.5 GiB.
#
# Is all of this true on a GPU? The cell trains Llama 3.2 1B for two steps on the GPU of this machine and reads
# `max_memory_allocated()`. Without a GPU of 27 GiB it shows what it gave on one.

# %% id="run_on_gpu" tags=["demo"]
from dlo_lib.labkit.stored_results import StoredResult, measured_or_stored
from dlo_lib.optim import Precision, train_step


def allocated(checkpointing: bool) -> float:
    """Return the bytes that PyTorch has allocated at the peak of the second step: batch 1 x 2048, bf16, fused AdamW."""
    model = Llama(model_config(ON_GPU), checkpointing=checkpointing, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(model.config.vocab_size, (1, 2048), device="cuda")
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        train_step(model, optimizer, [(tokens, tokens)], precision=Precision.BF16)
    return torch.cuda.max_memory_allocated()


on_h100 = StoredResult(
    "an NVIDIA H100 80GB", "2026-11-22", "torch 2.11, CUDA 13.0", {"activations kept": 23.09 * 2**30, "activations checkpointed": 19.47 * 2**30}
)
found = measured_or_stored(
    {"activations kept": partial(allocated, False), "activations checkpointed": partial(allocated, True)}, on_h100, gib=27
)
rows = [(f"{ON_GPU}, batch 1 x 2048", "allocated by the GPU", "measure_memory")]
for (name, peak), checkpointing in zip(found.items(), (False, True)):
    computed = measure_memory(ON_GPU, 1, 2048, checkpointing=checkpointing, fused=True, parallel="none")
    rows.append((name, size(peak), size(computed.peak_bytes)))
print(columns(rows))

# %% [markdown] id="quiz_text"
# ## 13 · Quiz
#
# **Core · 6 min · ●○○**
#
# Answer with the letter, for example `{"q1": "a", ...}`. The check here tests only that every question has an
# answer; grading counts the right ones.

# %% id="show_quiz" tags=["demo"]
lab.quiz()

# %% nbgrader={"grade_id": "quiz", "solution": true}
### BEGIN SOLUTION: quiz = {"q1": "", "q2": "", "q3": "", "q4": "", "q5": "", "q6": ""}
quiz = {"q1": "b", "q2": "c", "q3": "a", "q4": "d", "q5": "b", "q6": "c"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true}
lab.check("quiz")

# %% [markdown] id="further"
# ## Go further
#
# - Set `MODEL = "llama-3.1-8b"` in the first cell and run the notebook again. On which GPUs does it fit?
# - `max_positions` of this model is 131,072. Plot your `step_peak` against the sequence length with one
#   sequence. From which length are the logits larger than the state?
# - Cross-entropy can be computed in chunks of tokens, so that not all logits are in memory at once. How much
#   smaller is `step_peak` then? (Lab 05 writes the kernel.)
# - Replace AdamW by SGD with momentum in the table of step 6, then by plain SGD. Which cells change?
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
