# %% [markdown] id="title"
# # 22 · The best compromise
#
# **What you will do.** You start from a plan that runs out of memory: **Llama 3.3 70B on 64 nodes of 4 H100**. You turn each
# knob of a parallel plan and see what it costs, derive the three rules for combining them, write the memory and the time of
# any plan, and then `choose`: the plan that trains a model fastest under a memory cap, on clusters that you have not seen.
#
# You need no GPU. Builds on labs 13 (memory of a step), 17 (bubbles) and 19 (tensor parallelism).
#
# The core exercises, predictions and the quiz take about 97 minutes; with the text, the demos and two optional exercises plan
# 2 h 15. Each exercise has a check that answers at once; `lab.hint("name")` gives a nudge, then a pointer, then a sketch. If you
# are stuck, `lab.use_reference("name")` lets you continue without its points.
#
# Words: parallel plan (*plan de parallélisme*), memory cap (*plafond de mémoire*), scatter/gather (*dispersion et rassemblement*).

# %% id="setup"
import itertools
import math
import os

from dlo_lib.grading import Lab
from dlo_lib.models import LlamaConfig, model_config

GIB = 2**30
STEPS = int(os.environ.get("DLO_STEPS", 20))  # of the two small trainings near the end
SMALL_SEQ = int(os.environ.get("DLO_SMALL_SEQ", 512))  # tokens of their sequences
config = model_config("llama-3.3-70b")
SEQ, BATCH = 4096, 1024  # tokens of a sequence, sequences of a step of all GPUs
lab = Lab(globals())

cluster = {
    "gpus": 256,
    "gpus_per_node": 4,
    "flops": 4.2e14,  # FLOP/s that a GPU reaches in a step; the peak of an H100 is 9.9e14
    "inside": 3.15e11,  # bytes/s that a GPU sends to others of its node in a collective
    "between": 3.5e10,  # bytes/s of each GPU to other nodes, if all GPUs of a node send
}
OVERLAP = 0.8  # the part of the computation behind which data parallelism can hide
MESSAGES = 0.25  # a message between two stages reaches this part of the rate of a collective


def link(cluster: dict, stride: int, size: int) -> float:
    """Return the bytes/s of each rank in a ring over `size` ranks that are `stride` apart.

    A ring that leaves a node uses the ports of all its ranks in the node, which are neighbours.
    Here: 4 ranks, 1 apart: 315 GB/s; 16 ranks, 1 apart: 140 GB/s; 64 ranks, 4 apart: 35 GB/s.
    """
    if stride * size <= cluster["gpus_per_node"]:
        return cluster["inside"]
    together = min(max(cluster["gpus_per_node"] / stride, 1), size)
    return min(cluster["inside"], cluster["between"] * together)


def sizes_of(config: LlamaConfig) -> tuple[int, int, int, int]:
    """Return q and k, the widths of queries and keys, and the weights of a block and a table."""
    q, k = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    block = config.hidden * (2 * q + 2 * k + 3 * config.intermediate)
    return q, k, block, config.vocab_size * config.hidden


def most_blocks(config: LlamaConfig, plan: dict, seq: int) -> int:
    """Return the blocks of the fullest rank: the head counts as blocks of the last stage."""
    if plan["pp"] == 1:
        return config.num_layers
    q, _, block, table = sizes_of(config)
    stages, head = plan["pp"] * plan["chunks"], table // (block + seq * q)
    return plan["chunks"] * math.ceil((config.num_layers + head) / stages)


def is_valid(config: LlamaConfig, plan: dict, gpus: int, batch: int) -> bool:
    """Return whether a plan exists: degrees divide what they share, knobs have what they need."""
    pp, tp, dp, b, v = (plan[name] for name in ("pp", "tp", "dp", "micro_batch", "chunks"))
    if pp * tp * dp != gpus or batch % (dp * b) or config.num_kv_heads % tp:
        return False
    chunks = pp * v <= config.num_layers and (v == 1 or 1 < pp <= batch // (dp * b))
    return chunks and (dp > 1 or not plan["sharded"])


# %% [markdown] id="why"
# ## Why: a plan that runs out of memory
#
# A plan says how $n$ GPUs share a model and a batch of $B$ sequences. In this lab it is a dict of seven entries:
#
# | | |
# |---|---|
# | `pp` | $p$, stages of the pipeline |
# | `tp` | $t$, ranks that share each matrix, with sequence parallelism (lab 19) |
# | `dp` | $d$, copies of the model, with different sequences. $n = p \cdot t \cdot d$ |
# | `micro_batch` | $b$, sequences in a micro-batch. Each pipeline has $m = B / (b\,d)$ of them in a step |
# | `chunks` | $v$, stages of a rank: 1 is 1F1B, more are interleaved 1F1B |
# | `sharded` | whether the $d$ copies share weights, gradients and optimiser state (FSDP, lab 15) |
# | `checkpointing` | whether a block keeps its input only, and computes the rest again |
#
# Ranks are numbered so that those of a tensor-parallel group are neighbours, then come the copies, then the stages.
#
# **Predict** what a rank needs, in GiB, with micro-batches of one sequence and checkpointing. An H100 has 77.6 GiB for
# tensors (dashed). Llama 3.3 70B has 70.6 billion parameters, and each needs 16 bytes in training (lab 13). “Measured” is here
# what the planner of this course computes: no GPU runs.

# %% id="predict_memory" tags=["prediction"]
expected_memory = {
    "dp 256": None, "tp 4, dp 64": None, "pp 16, dp 16": None, "dp 256, sharded": None,
}  # fmt: skip

# %% id="show_memory" tags=["demo", "nbval-check-output"]
from dlo_lib.hardware import GpuNodes, gpu
from dlo_lib.hardware import link as fabric
from dlo_lib.labkit.figures import LIMIT
from dlo_lib.labkit.predicted_bars import predicted_bars
from dlo_lib.labkit.predictions import compared, require_numbers
from dlo_lib.planner import PlanRequest, rated

require_numbers(expected_memory)
nodes = GpuNodes(gpu("h100-80"), 4, fabric("ndr"), 4)
request = PlanRequest("llama-3.3-70b", nodes, cluster["gpus"], BATCH, SEQ)
alone = {"pp": 1, "tp": 1, "dp": 256, "micro_batch": 1, "chunks": 1, "sharded": False, "checkpointing": True}
tried = {
    "dp 256": alone,
    "tp 4, dp 64": alone | {"tp": 4, "dp": 64},
    "pp 16, dp 16": alone | {"pp": 16, "dp": 16},
    "dp 256, sharded": alone | {"sharded": True},
}
needs = {name: rated(request, plan).memory / GIB for name, plan in tried.items()}
print(compared(expected_memory, needs, "{:.0f} GiB".format))
bars = predicted_bars(needs, expected_memory, "GiB", text="{:.0f}".format, log=True)
bars.axes[0].axhline(request.limit / GIB, color=LIMIT, linestyle="--")
bars

# %% [markdown] id="panel_text"
# Only one of them fits. Two are larger than 16 bytes × parameters / ranks: the first stage of 16 has 6 of the 80 blocks and the
# embedding, and 16 micro-batches in flight; the sharded plan has 4 GiB of state, but gathers whole blocks, and keeps logits.
#
# ## Feel each knob
#
# The planner's memory of the largest rank and time of a step; `dp` is what is left of the 256 GPUs. Move **one** slider at a time:
#
# - Which knobs make the memory bar shorter? Which of them make the time bar longer, and by which part?
# - What happens from `tp` 4 to 8, where tensor parallelism leaves the node?
# - Make `pp` 32: why does the bubble hardly grow? (`dp` becomes 8.) What does `chunks` 2 trade against the bubble?
# - Try to beat an MFU of 36 % below the dashed line.

# %% id="show_panel" tags=["demo"]
from dlo_lib.labkit.plan_panel import beside_planner, plan_panel

plan_panel(request, pp=16)

# %% [markdown] id="bubble_text"
# ## 1 · Three rules for the bubble
#
# **Core · 13 min · ●○○**
#
# In 1F1B each rank waits while the pipeline fills and drains: $(p-1)$ micro-batches. As a fraction of the time in which it
# computes, $m$ micro-batches, the bubble is $(p-1)/m$ (lab 17). Put $p$ and $m$ in terms of the plan:
#
# - With $p = n/(t\,d)$, what does a larger $t$ do to the bubble? What does a larger $d$ do, which also makes $m$ smaller?
# - A larger micro-batch fills the GPU better, so that its time grows by less than its size. But $m$ becomes smaller.
#
# A published seminar text on this subject has two mistakes: in words, a larger $t$ enlarges the bubble, beside a formula that says the
# contrary; and for $t = 1$ it prints $(n-d)\,d/B$. Trust your derivation.
#
# Write `bubble` and `best_micro_batch`. A step without communication takes the time of $m + p - 1$ micro-batches.

# %% nbgrader={"grade_id": "bubble", "solution": true}
def bubble(gpus: int, tp: int, dp: int, batch: int, micro_batch: int = 1) -> float:
    """Return the bubble of 1F1B as a fraction of the time in which a rank computes."""
    ### BEGIN SOLUTION
    stages = gpus / (tp * dp)
    return (stages - 1) * micro_batch * dp / batch
    ### END SOLUTION


def best_micro_batch(seconds: dict[int, float], pp: int, dp: int, batch: int) -> int:
    """Return the size of a micro-batch with the fastest step.

    seconds: of a micro-batch on one stage, by its size; dp x size must divide the batch.
    """
    ### BEGIN SOLUTION
    possible = [size for size in seconds if batch % (dp * size) == 0]
    return min(possible, key=lambda size: (batch // (dp * size) + pp - 1) * seconds[size])
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_bubble", "grade": true}
lab.check("bubble")

# %% [markdown] id="bubble_after"
# Your bubble for 256 GPUs and 1,024 sequences: one model on more and more tensor-parallel ranks, and more and more copies. With $d$
# copies it is $b(n-d)/B$, which falls from 1/4 to 0; the printed formula rises to 16.

# %% id="show_bubble" tags=["demo"]
from dlo_lib.labkit import columns

rows = [("degree", "t, with d = 1", "d, with t = 1", "d, as printed")]
for n in (1, 4, 16, 64, 128, 256):
    found = bubble(256, n, 1, BATCH), bubble(256, 1, n, BATCH), (256 - n) * n / BATCH
    rows.append((str(n), *(f"{value:.3f}" for value in found)))
print(columns(rows))

# %% [markdown] id="traffic_text"
# ## 2 · What each form sends, and how often
#
# **Core · 13 min · ●●○**
#
# The bubble alone would choose $p = 1$. The traffic decides between $t$ and $p$. Count *elements that one rank sends*:
#
# - **Tensor parallelism**: each block has two all-reduces in forward and two in backward, each of an activation of
#   $b \cdot s \cdot h$ elements (lab 19). A ring all-reduce of $x$ elements over $t$ ranks sends $2x(t-1)/t$ (lab 10). With
#   sequence parallelism it is an all-gather and a reduce-scatter instead: the same number.
# - **Pipeline**: an activation of $b \cdot s \cdot h$ elements for each cut and micro-batch, and its gradient on the way back.
# - **Data parallelism**: an all-reduce of the gradients of the parameters that a rank owns.
#
# The first two happen for every micro-batch, the last once a step. `step_elements` puts this together for a plan that is not
# sharded: an *inner* rank of the pipeline has $L/p$ of the $L$ blocks and 1 / ($p\,t$) of the parameters of all blocks; take
# whole activations for its messages (section 3 makes them smaller), and 1 chunk.

# %% nbgrader={"grade_id": "traffic", "solution": true}
def tensor_elements(micro_batch: int, seq: int, hidden: int, tp: int, blocks: float = 1) -> float:
    """Return what a rank sends for tensor parallelism in forward and backward of a micro-batch."""
    ### BEGIN SOLUTION
    return 8 * micro_batch * seq * hidden * (tp - 1) / tp * blocks
    ### END SOLUTION


def pipeline_elements(micro_batch: int, seq: int, hidden: int) -> float:
    """Return what crosses one cut of a pipeline in one direction, for a micro-batch."""
    ### BEGIN SOLUTION
    return micro_batch * seq * hidden
    ### END SOLUTION


def data_elements(parameters: float, dp: int) -> float:
    """Return what a rank sends for the all-reduce of the gradients of `parameters` parameters."""
    ### BEGIN SOLUTION
    return 2 * parameters * (dp - 1) / dp
    ### END SOLUTION


def step_elements(plan: dict, hidden: int, layers: int, parameters: float, batch: int, seq: int):
    """Return what an inner rank sends in a step: "tensor", "pipeline" (0 for 1 stage), "data"."""
    ### BEGIN SOLUTION
    pp, tp, dp, b = plan["pp"], plan["tp"], plan["dp"], plan["micro_batch"]
    micro_batches = batch // (dp * b)
    return {
        "tensor": micro_batches * tensor_elements(b, seq, hidden, tp, layers / pp),
        "pipeline": 2 * micro_batches * pipeline_elements(b, seq, hidden) if pp > 1 else 0,
        "data": data_elements(parameters / (pp * tp), dp),
    }
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_traffic", "grade": true}
lab.check("traffic")

# %% [markdown] id="predict_links_text"
# **Predict.** A stage of Llama 3.3 70B with 5 blocks, tensor parallelism over 4 ranks: how many times what a cut carries in
# one direction does a rank send for it in a micro-batch? And how many times as long does it take, if tensor parallelism uses the
# links in a node and the cut those between nodes?

# %% id="predict_links" tags=["prediction"]
expected_links = {"elements, tensor / cut": None, "seconds, tensor / cut": None}

# %% id="show_links" tags=["demo", "nbval-check-output"]
require_numbers(expected_links)
ratio = tensor_elements(1, SEQ, config.hidden, 4, 5) / pipeline_elements(1, SEQ, config.hidden)
slower = ratio / (cluster["inside"] / cluster["between"])
print(compared(expected_links, {"elements, tensor / cut": ratio, "seconds, tensor / cut": slower}))

# %% [markdown] id="links_lesson"
# That is why **rule 1** says: tensor parallelism inside a node, up to its number of GPUs; the pipeline between nodes. A rank
# waits for its all-reduces, and it sends many times more of them. **Rule 2**: model parallelism ($t \cdot p$) only as far as the
# model needs it to fit; data parallelism for the rest, because it communicates once a step, and $(d-1)/d$ hardly grows.
# **Rule 3**: the best micro-batch depends on the case: try them. The table compares the forms for four plans with 4 copies.

# %% id="show_traffic" tags=["demo"]
of_blocks = config.num_layers * (sizes_of(config)[2] + 2 * config.hidden)  # parameters
shapes = {"pp 64": (64, 1), "pp 16, tp 4": (16, 4), "pp 8, tp 8": (8, 8), "tp 64": (1, 64)}
rows = [("10⁹ elements a step", "tensor", "pipeline", "data")]
for name, (pp, tp) in shapes.items():
    plan = alone | {"pp": pp, "tp": tp, "dp": 4}
    sent = step_elements(plan, config.hidden, config.num_layers, of_blocks, BATCH, SEQ)
    rows.append((name, *(f"{sent[form] / 1e9:,.1f}" for form in rows[0][1:])))
print(columns(rows))

# %% [markdown] id="crossing_text"
# ## 3 · Where a cut meets tensor parallelism: scatter/gather
#
# **Optional · 8 min · ●●○**
#
# After its last all-reduce, each of the $t$ ranks of a stage has the *same* activation. If each sends it to its partner in
# the next stage, the slow link between nodes carries it $t$ times. **Scatter/gather** (Megatron-LM): each rank sends a
# different $1/t$, and the receiving ranks gather the whole inside their node, on the fast link. In a ring all-gather over $t$ ranks
# each rank sends all parts except one. With **sequence parallelism** an activation is cut along the sequence already: a rank
# sends its part, and nothing needs to be gathered at the cut.

# %% nbgrader={"grade_id": "crossing", "solution": true}
def crossing(elements: int, tp: int, scatter_gather: bool) -> dict[str, float]:
    """Return what one rank sends when an activation of `elements` elements passes a cut.

    "between": to the next stage. "inside": to the ranks of its group, to gather the activation.
    """
    ### BEGIN SOLUTION
    if not scatter_gather:
        return {"between": elements, "inside": 0}
    return {"between": elements / tp, "inside": elements * (tp - 1) / tp}
    ### END SOLUTION


def needs_scatter_gather(pp: int, tp: int, sequence_parallel: bool) -> bool:
    """Return whether scatter/gather changes what a plan sends."""
    ### BEGIN SOLUTION
    return pp > 1 and tp > 1 and not sequence_parallel
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_crossing", "grade": true}
lab.check("crossing")

# %% id="show_crossing" tags=["demo", "nbval-check-output"]
# a cut of Llama 3.3 70B between nodes of 4 ranks
for how in (False, True):
    found = crossing(SEQ * config.hidden, 4, how)
    slow, fast = (2e3 * found[where] / cluster[where] for where in ("between", "inside"))
    print(f"scatter/gather {how!s:5}: {slow:.2f} ms between nodes, {fast:.2f} ms inside")

# %% [markdown] id="memory_text"
# ## 4 · The memory of a rank
#
# **Core · 26 min · ●●●**
#
# Write the memory of the first rank of the pipeline, or of its last one, in four parts. The first lines are given, with the names
# of this section: $h$ hidden, $f$ intermediate, $q$ and $k$ the widths of queries and keys, the parameters of a block and of a table
# (embedding or head; they are not tied here). The fullest rank has $\ell$ = `blocks`; the first also has the embedding, the last the
# head (with one stage: both). It owns 1/$t$ of them.
#
# | part | bytes |
# |---|---|
# | `state` | 16 for each parameter that the rank owns; sharded: divided by $d$ |
# | `copies` | **not sharded**: autocast makes bf16 copies, 2 bytes for each parameter of the blocks of the rank, once *for each micro-batch in flight*. With checkpointing a pipeline or tensor parallelism frees them: at most 2 blocks remain in all. **Sharded, pipeline**: whole parameters in bf16 and sums of gradients in fp32, 6 bytes for each that the rank owns. **Sharded, one stage**: 4 bytes each for two blocks and the larger of a block and a table, 1/$t$ of them |
# | `waiting` | activations: a block keeps $K = ah + (4q+4k+8f)/t$ bytes a token; sharded, $a = 4 + 12/t$; not sharded, $a = 26$ for $t = 1$ (lab 13) and $16/t + 4$ for $t > 1$. With checkpointing it keeps its input only, $4h/t$ (sharded: $2h/t$). Times the blocks, the tokens $b \cdot s$ of a micro-batch, and the micro-batches in flight |
# | `working` | what one micro-batch needs for a moment, the larger of two: the logits, on a rank with the head, 12 bytes (8 for $t > 1$) for each of the `vocab_size`/$t$ scores of a token; and with checkpointing the block that is computed again, $K$ a token |
#
# In flight on rank $r$ (from 0): without a pipeline 1, in 1F1B $\min(m, p-r)$; interleaved $\min(mv,\ (v-1)p + 2(p-r-1) + 1)/v$.

# %% nbgrader={"grade_id": "memory", "solution": true}
def rank_memory(config: LlamaConfig, plan: dict, batch: int, seq: int, last: bool = False) -> dict:
    """Return the bytes of the first or last rank: "state", "copies", "waiting" and "working"."""
    pp, tp, dp, b, v = (plan[name] for name in ("pp", "tp", "dp", "micro_batch", "chunks"))
    h, f, sharded = config.hidden, config.intermediate, plan["sharded"] and dp > 1
    (q, k, block, table), blocks = sizes_of(config), most_blocks(config, plan, seq)
    block, tokens, m = block + 2 * h, b * seq, batch // (dp * b)  # the norms of a block have 2 h
    ### BEGIN SOLUTION
    owned = (blocks * block + (2 if pp == 1 else 1) * table) / tp
    rank = pp - 1 if last else 0
    if pp == 1:
        flight = 1
    elif v == 1:
        flight = min(m, pp - rank)
    else:
        flight = min(m * v, (v - 1) * pp + 2 * (pp - rank - 1) + 1) / v
    if sharded and pp > 1:
        copies = 6 * owned
    elif sharded:
        copies = 4 * (2 * block + max(block, table)) / tp
    elif plan["checkpointing"] and (pp > 1 or tp > 1):
        copies = 2 * min(2, blocks) * block / tp
    else:
        copies = 2 * blocks * block / tp * flight
    inputs = 4 + 12 / tp if sharded else 16 / tp + (4 if tp > 1 else 10)
    kept = inputs * h + (4 * q + 4 * k + 8 * f) / tp
    stored = (2 if sharded else 4) * h / tp if plan["checkpointing"] else kept
    logits = (8 if tp > 1 else 12) * config.vocab_size / tp if last or pp == 1 else 0
    again = kept if plan["checkpointing"] else 0
    return {
        "state": 16 * owned / (dp if sharded else 1),
        "copies": copies,
        "waiting": tokens * stored * blocks * flight,
        "working": tokens * max(logits, again),
    }
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_memory", "grade": true}
lab.check("memory")

# %% [markdown] id="memory_after"
# Your parts for six plans, on the rank that needs more. The diamonds are the planner's peaks, computed moment by moment. Your sum is
# up to 24 % above them where the parts do not peak together (the plans with one stage).

# %% id="show_mine" tags=["demo"]
shown = tried | {"pp 16, tp 4": alone | {"pp": 16, "tp": 4, "dp": 4}}
fitting = {"pp": 4, "tp": 4, "dp": 16, "sharded": True, "checkpointing": False}
shown["pp 4, tp 4, sharded"] = alone | fitting
mine = {}
for name, plan in shown.items():
    ends = [rank_memory(config, plan, BATCH, SEQ, last) for last in (False, True)]
    mine[name] = max(ends, key=lambda parts: sum(parts.values()))
peaks = {name: rated(request, plan).memory for name, plan in shown.items()}
beside_planner(mine, peaks, GIB, 300, "GiB of the rank that needs more (an H100 has 77.6)")

# %% [markdown] id="time_text"
# ## 5 · The time of a step
#
# **Core · 20 min · ●●●**
#
# Now the time, in five parts. `cluster` has what you need, and `link` of the first cell gives the bytes/s of a ring.
#
# | part | seconds |
# |---|---|
# | `compute` | the FLOPs of the $B/d$ sequences of a copy, on the rank with the most blocks, which reaches `flops`. A token takes $6\,(\ell\,(M + 2sq) + V h/p)/t$ FLOPs: $M$ is `matrices`, of a block, $2sq$ its attention, $Vh$ the head, whose time the stages share. With checkpointing the forward runs twice: 4/3 of it |
# | `tensor` | `tensor_elements` of all micro-batches and the $\ell$ blocks of a rank, 2 bytes each, over a ring of $t$ neighbours |
# | `bubble` | the bubble of the *computing and tensor-parallel* time: $(p-1)/(m\,v)$ of it |
# | `messages` | for each micro-batch and each of the $v$ chunks, an activation and its gradient; a rank of $t$ sends its part of 2-byte elements, to a rank that is $d\,t$ away (a ring of 2), at `MESSAGES` of the rate of a collective, because each message waits for both ranks. 0 for one stage |
# | `data` | what computation does not hide of the traffic of the copies, which are $t$ apart |
#
# For `data`, a rank owns $P = (\ell \cdot \text{block} + \text{table}) / t$ parameters (two tables with one stage), and $f = (d-1)/d$:
#
# - not sharded: $8fP$ bytes (an all-reduce in fp32); it hides behind the backward of the last micro-batch, 2/3 of its time;
# - sharded, one stage: $8fP$ bytes *for each micro-batch* (two gathers in bf16, one reduce-scatter in fp32), behind all of them;
# - sharded, pipeline: $6fP$ bytes once (gathered once, kept), behind one micro-batch.
#
# The time of a micro-batch is $(\text{compute} + \text{tensor})/m$, and `OVERLAP` of it can hide traffic. What is hidden cannot become negative.

# %% nbgrader={"grade_id": "time", "solution": true}
def step_time(config: LlamaConfig, plan: dict, batch: int, seq: int, cluster: dict) -> dict:
    """Return the seconds of a step: "compute", "tensor", "bubble", "messages" and "data"."""
    pp, tp, dp, b, v = (plan[name] for name in ("pp", "tp", "dp", "micro_batch", "chunks"))
    q, _, matrices, table = sizes_of(config)
    h, m, blocks = config.hidden, batch // (dp * b), most_blocks(config, plan, seq)
    ### BEGIN SOLUTION
    flops = 6 * (blocks * (matrices + 2 * seq * q) + table / pp) / tp * seq * batch / dp
    compute = flops / cluster["flops"] * (4 / 3 if plan["checkpointing"] else 1)
    sent = 2 * m * tensor_elements(b, seq, h, tp, blocks)
    tensor = sent / link(cluster, 1, tp)
    micro = (compute + tensor) / m
    sent = 2 * m * v * 2 * pipeline_elements(b, seq, h) / tp
    messages = sent / (MESSAGES * link(cluster, dp * tp, 2))
    owned = (blocks * (matrices + 2 * h) + (2 if pp == 1 else 1) * table) / tp
    if not (plan["sharded"] and dp > 1):
        moved, window = 8 * owned, 2 / 3 * micro
    elif pp == 1:
        moved, window = 8 * owned * m, m * micro
    else:
        moved, window = 6 * owned, micro
    traffic = moved * (dp - 1) / dp / link(cluster, tp, dp)
    return {
        "compute": compute,
        "tensor": tensor,
        "bubble": (pp - 1) / v * micro,
        "messages": messages if pp > 1 else 0,
        "data": max(traffic - OVERLAP * window, 0),
    }
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_time", "grade": true}
lab.check("time")

# %% [markdown] id="time_after"
# Your time beside the planner's, for the same plans. The planner also counts kernels between products, tiles that do not fill
# the GPU, and the traffic of shards that does not hide. A model is good enough if it *ranks* plans as the better one does. Does yours?

# %% id="show_time" tags=["demo"]
times = {name: step_time(config, plan, BATCH, SEQ, cluster) for name, plan in shown.items()}
seconds = {name: rated(request, plan).seconds for name, plan in shown.items()}
beside_planner(times, seconds, 1, 1.3 * max(seconds.values()), "seconds of a step")

# %% [markdown] id="choose_text"
# ## 6 · The best compromise
#
# **Core · 16 min · ●●●**
#
# Write `choose`: the plan with the shortest step whose ranks need at most `cap` bytes. The checks rate your plan with the
# planner of the course, which your code cannot use when it is graded, and compare it with the planner's fastest plan of the
# same seven knobs, on models and clusters that you have not seen: with few sequences, with slow or fast links between nodes, without
# NVLink, and with little memory. Several plans are right: the points come in steps. In the mean over the five cases, 2 times the planner's
# time earns the first points, 1.3 times more, 1.12 times all; a faster plan counts too. There is always a plan that fits.
#
# `is_valid` of the first cell says whether a plan exists. Powers of two are enough for $t$, $b$ and $v$, but stages may be any
# divisor of the number of GPUs; and your memory is not exact, so leave a few percent free below the cap: one plan that does not
# fit loses the points of its check.

# %% nbgrader={"grade_id": "choose", "solution": true}
def choose(config: LlamaConfig, cluster: dict, batch: int, seq: int, cap: float) -> dict:
    """Return the plan with the fastest step that fits in `cap` bytes on every rank."""
    ### BEGIN SOLUTION
    best, least = {}, math.inf
    for plan in candidates(config, cluster["gpus"], batch):
        ends = [rank_memory(config, plan, batch, seq, last) for last in (False, True)]
        if max(sum(parts.values()) for parts in ends) > 0.95 * cap:
            continue
        seconds = sum(step_time(config, plan, batch, seq, cluster).values())
        if seconds < least:
            best, least = plan, seconds
    return best


def candidates(config: LlamaConfig, gpus: int, batch: int):
    """Yield the valid plans."""
    names = "pp", "tp", "micro_batch", "chunks", "sharded", "checkpointing"
    stages = [pp for pp in range(1, config.num_layers + 1) if gpus % pp == 0]
    powers, switch = (1, 2, 4, 8), (False, True)
    for values in itertools.product(stages, powers, powers, (1, 2, 4), switch, switch):
        plan = dict(zip(names, values))
        plan["dp"] = gpus // (plan["pp"] * plan["tp"])
        if is_valid(config, plan, gpus, batch):
            yield plan
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_choose", "grade": true}
lab.check("choose")

# %% [markdown] id="choose_after"
# ## 7 · The same with the planner
#
# `dlo_lib.planner` does the same with arrays, and more knobs (context parallelism, ZeRO stages, zero-bubble schedules). The table has
# your plan, its best plan of your knobs, and its best plan of all; the lower cap shows what memory buys. Its words: `dp_shard 16,
# ZeRO 3` is your `dp` 16, sharded; `64 x 1 sequences` are micro-batches × their size.

# %% id="standard" tags=["demo", "read"]
from dataclasses import replace

import numpy as np

from dlo_lib.planner import search
from dlo_lib.planner.explain import in_words
from dlo_lib.planner.rated import in_knobs, plans_of

rows = [("cap", "found by", "plan", "step", "MFU", "memory")]
for cap in (request.limit, 60 * GIB):
    asked, plan = replace(request, memory_bytes=cap), choose(config, cluster, BATCH, SEQ, cap)
    own, found = rated(asked, plan), search(asked)
    lines = [("you", in_words(plans_of(plan, BATCH), 0), own.seconds, own.mfu, own.memory)]
    for who, row in (("planner", int(np.argmax(in_knobs(found.plans)))), ("planner, all knobs", 0)):
        cost = found.cost.seconds[row], found.cost.mfu[row], found.memory[row]
        lines.append((who, in_words(found.plans, row), *cost))
    for who, words, step, mfu, memory in lines:
        needs = f"{memory / GIB:.0f} GiB" + (" (too much)" if memory > cap else "")
        rows.append((f"{cap / GIB:.0f} GiB", who, words, f"{step:.1f} s", f"{mfu:.1%}", needs))
print(columns(rows))

# %% [markdown] id="plan_text"
# From a terminal, the same search is one command; the cell calls its function. It also says why the obvious plans lose, and with
# `--out` it draws the course's heat map and writes the training command and the job script of the row that you choose:

# %% id="show_dlo_plan" tags=["demo", "read"]
from dlo_lib.cli.plan import plan as dlo_plan

# $ dlo plan --model llama-3.3-70b --gpus 256 --batch 1024 --site jean-zay-h100 --rows 3
dlo_plan(model="llama-3.3-70b", gpus=256, batch=1024, site="jean-zay-h100", rows=3)

# %% [markdown] id="configs_text"
# ## 8 · The plan in the words of Megatron-LM and torchtitan
#
# **Optional · 10 min · ●●○**
#
# Write the plan for two trainers: the arguments of Megatron-LM (Megatron Core 0.13, `arguments.py`) and the options of
# torchtitan (`job_config.py` of 2025). Both find $d$ by division; they count micro-batches in different ways. An argument that
# does not apply is absent.
#
# | Megatron-LM | |
# |---|---|
# | `--tensor-model-parallel-size`, `--pipeline-model-parallel-size` | $t$, $p$ |
# | `--num-layers-per-virtual-pipeline-stage` | only if $v > 1$: blocks of one *chunk*, $L/(p\,v)$ |
# | `--micro-batch-size`, `--global-batch-size` | $b$, and $B$ of *all* copies |
# | `--sequence-parallel` | True; only if $t > 1$ |
# | `--use-torch-fsdp2` | True; sharded *without* a pipeline: its help says that it does not work with one |
# | `--use-distributed-optimizer` | True; sharded with a pipeline: the nearest that exists (ZeRO 1) |
# | `--recompute-granularity` | `"full"` with checkpointing, with `--recompute-method` `"uniform"` and `--recompute-num-layers` 1 |
#
# | torchtitan | |
# |---|---|
# | `parallelism.tensor_parallel_degree`, `parallelism.pipeline_parallel_degree` | $t$, $p$ |
# | `parallelism.data_parallel_shard_degree`, `parallelism.data_parallel_replicate_degree` | $d$ and 1 if sharded, otherwise 1 and $d$ |
# | `parallelism.pipeline_parallel_schedule` | with a pipeline: `"1F1B"`, or `"Interleaved1F1B"` for $v > 1$ |
# | `parallelism.pipeline_parallel_microbatch_size` | with a pipeline: $b$ |
# | `training.local_batch_size` | the sequences of *one forward call of a copy*: with a pipeline all of its step, $m\,b$; without, $b$, and it accumulates |
# | `training.global_batch_size`, `training.seq_len` | $B$, $s$ |
# | `activation_checkpoint.mode` | `"full"` or `"none"` |
#
# %% nbgrader={"grade_id": "configs", "solution": true}
def megatron_arguments(plan: dict, config: LlamaConfig, batch: int) -> dict[str, int | bool | str]:
    """Return the arguments of Megatron-LM by name."""
    ### BEGIN SOLUTION
    pp, tp, v = plan["pp"], plan["tp"], plan["chunks"]
    found = {"--tensor-model-parallel-size": tp, "--pipeline-model-parallel-size": pp}
    found |= {"--micro-batch-size": plan["micro_batch"], "--global-batch-size": batch}
    if v > 1:
        found["--num-layers-per-virtual-pipeline-stage"] = config.num_layers // (pp * v)
    if tp > 1:
        found["--sequence-parallel"] = True
    if plan["sharded"]:
        found["--use-distributed-optimizer" if pp > 1 else "--use-torch-fsdp2"] = True
    if plan["checkpointing"]:
        found |= {"--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": 1}
    return found
    ### END SOLUTION


def torchtitan_options(plan: dict, batch: int, seq: int) -> dict[str, int | str]:
    """Return the options of torchtitan by section and name."""
    ### BEGIN SOLUTION
    dp, b, pipelined = plan["dp"], plan["micro_batch"], plan["pp"] > 1
    found = {
        "training.local_batch_size": batch // dp if pipelined else b,
        "training.global_batch_size": batch,
        "training.seq_len": seq,
        "parallelism.data_parallel_shard_degree": dp if plan["sharded"] else 1,
        "parallelism.data_parallel_replicate_degree": 1 if plan["sharded"] else dp,
        "parallelism.tensor_parallel_degree": plan["tp"],
        "parallelism.pipeline_parallel_degree": plan["pp"],
        "activation_checkpoint.mode": "full" if plan["checkpointing"] else "none",
    }
    if pipelined:
        found["parallelism.pipeline_parallel_schedule"] = "Interleaved1F1B" if plan["chunks"] > 1 else "1F1B"
        found["parallelism.pipeline_parallel_microbatch_size"] = b
    return found
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_configs", "grade": true}
lab.check("configs")

# %% id="show_configs" tags=["demo"]
chosen = choose(config, cluster, BATCH, SEQ, request.limit)
arguments = megatron_arguments(chosen, config, BATCH)
options = torchtitan_options(chosen, BATCH, SEQ)
words = [name if value is True else f"{name} {value}" for name, value in arguments.items()]
print("pretrain_gpt.py", *words, "and the sizes of the model\n")
print("-m torchtitan.train", *(f"--{name} {value}" for name, value in options.items()))

# %% [markdown] id="configs_lesson"
# torchtitan refuses copies that are *not* sharded together with tensor parallelism or a pipeline ("DDP has not supported > 1D
# parallelism"): there, shard. Megatron-LM shards a pipeline's optimiser only, so its memory lies between the two plans of this lab.

# %% [markdown] id="scale_text"
# ## 9 · At scale, and here: two plans, predicted and measured
#
# `cluster.submit` sends a plan to SLURM, or runs it on this machine where there is none. The cell shows the request for the 70B
# model, and runs two plans of a small model with two processes and the same 8 sequences a step: two copies, and a pipeline of two
# stages with 4 micro-batches (some minutes on a busy machine; a second run shows the same jobs). **Predict** how many times longer
# a step of the pipeline takes if only your bubble counts.

# %% id="predict_scale" tags=["prediction"]
expected_scale = {"pipeline / copies": None}

# %% id="run_at_scale" tags=["demo"]
from dlo_lib import cluster as slurm
from dlo_lib.labkit import at_scale

require_numbers(expected_scale)
large = ["--model", "llama-3.3-70b", "--seq", str(SEQ), "--parallel", "fsdp", "--pp", "4", "--tp", "4", "--precision", "bf16"]
script = slurm.submit("dlo_lib.train", [*large, "--steps", "100"], gpus=256, site="jean-zay-h100", account="abc", dry_run=True)
print("For SLURM, on 256 GPUs:", at_scale.directives(script), sep="\n")

little = ["--model", "tiny", "--seq", str(SMALL_SEQ), "--steps", str(STEPS), "--log-every", "1"]
forms = {
    "copies": ["--parallel", "ddp", "--batch", "1", "--accumulation", "4"],
    "pipeline": ["--parallel", "pp", "--schedule", "1f1b", "--micro-batches", "4", "--batch", "2"],
}
measured = {}
for name, flags in forms.items():
    job = slurm.submit("dlo_lib.train", [*little, *flags], gpus=2).wait()
    rates = [line.tokens_per_second for line in job.metrics()][1:]
    measured[name] = 8 * SMALL_SEQ / max(rates)
    print(f"{name}: {1e3 * measured[name]:.1f} ms a step")
found = {"pipeline / copies": measured["pipeline"] / measured["copies"]}
print(f"by your bubble: {(1 + bubble(2, 1, 1, 8, 2)) / (1 + bubble(2, 1, 2, 8, 1)):.2f}")
print(compared(expected_scale, found, "{:.2f}".format))

# %% [markdown] id="scale_lesson"
# The bubble alone gives 1.25. What is measured (the fastest step of each) is 1.0 to 2 on a busy machine. Unequal stages and messages as
# long as the small products make it larger; the copies reduce all gradients, and each updates the whole model, which makes it smaller.
# On GPUs, with large models, these become small.

# %% [markdown] id="quiz_text"
# ## 10 · Quiz
#
# **Core · 6 min · ●○○**

# %% id="show_quiz" tags=["demo"]
lab.quiz()

# %% nbgrader={"grade_id": "quiz", "solution": true}
### BEGIN SOLUTION: quiz = {"q1": "", "q2": "", "q3": "", "q4": "", "q5": ""}
quiz = {"q1": "b", "q2": "c", "q3": "a", "q4": "d", "q5": "b"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true}
lab.check("quiz")

# %% [markdown] id="further"
# ## Go further
#
# - Does your plan change if `cluster["between"]` is 8 times larger? Why is `tp` 8 never better than 4 here?
# - Add context parallelism as an eighth knob (lab 20): it divides the tokens of a rank, and sends keys and values around a ring.
# - `dlo plan --gpus 256 --memory 60 --out plan` writes the files of a plan. Read `job.sh` and `why_others_lose`.
#
# **What comes next.** Lab 23 asks the question before this one: which size of model, and how many tokens, for a given budget.
#
# ## References
#
# - D. Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM* (2021), [arXiv:2104.04473](https://arxiv.org/abs/2104.04473): the three rules (section 3), scatter/gather (section 4.1)
# - V. Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models* (2022), [arXiv:2205.05198](https://arxiv.org/abs/2205.05198)
# - W. Liang et al., *TorchTitan: One-stop PyTorch native solution for production ready LLM pre-training* (2024), [arXiv:2410.06511](https://arxiv.org/abs/2410.06511)
# - A. Chowdhery et al., *PaLM: Scaling Language Modeling with Pathways* (2022), [arXiv:2204.02311](https://arxiv.org/abs/2204.02311): MFU, appendix B
# - The course this lab follows: IDRIS, *Deep Learning Optimisé – Jean Zay* (DLO-JZ), day 4
