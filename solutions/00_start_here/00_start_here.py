# %% [markdown] id="title"
# # 00 · Start here
#
# **What you will do.** See the labs of the course and where you are in them, check your machine, and have a first
# success: four processes that communicate, a deadlock that explains itself, and the memory of one training step of
# Llama 3.2 3B, measured on this machine.
#
# You need no GPU: the ranks are processes on this machine (gloo). The core exercises, with their prediction, take about 15
# minutes, and the whole notebook takes about 20.
#
# Click on the next cell and press **Shift+Enter**: this runs the cell and goes to the next one. The cell shows the
# map of the course; run it again whenever you return here.
#
# Words: rank (*rang*), deadlock (*interblocage*), memory footprint (*empreinte mémoire*).

# %% id="show_map" tags=["demo"]
from dlo_lib.grading import start_page

start_page()

# %% [markdown] id="map_text"
# `dlo lab` and `make lab` open this page. The cell shows your new points each time that you run it.
#
# - **Open** shows the notebook of a lab. The browser on the left then lists its modules: you may read the checks and
#   the figures.
# - **Check** runs the visible checks of a lab on its saved notebook, like `dlo check 04` in a terminal.
# - **Submit** hands the saved notebook in, like `dlo submit 04`. You may submit as often as you like; the last one counts.
#
# ## 1 · Your machine
#
# **Core · 2 min · ●○○**
#
# Some cells only show something. Where their code is long it is folded: a click on the three dots opens it.
#
# The next cell looks for what the labs need. A missing part has its cure beside it. `dlo doctor` shows the same in a
# terminal, and also what only instructors and users of a cluster need.

# %% id="show_machine" tags=["demo"]
from dlo_lib.cli.machine import machine

machine()

# %% [markdown] id="mean_text"
# ## 2 · Four ranks that communicate, and a check that answers
#
# **Core · 4 min · ●○○**
#
# Distributed training runs one program in several processes. Each process is a **rank**: it has its number, its own
# memory, and its own data. Ranks communicate by *collective operations*, which all of them call. The most important
# one is the all-reduce: `dist.all_reduce(tensor)` replaces `tensor` by the sum over all ranks, in place, on every
# rank.
#
# In data parallelism each rank computes the gradient of a different batch, and all ranks need the **mean**. The function
# below should return the mean of `x` over all ranks, on every rank, for any number of ranks and with **one**
# all-reduce. It may change `x`.
#
# It is wrong as it stands. Run the next three cells **without a change**: the imports, the function, and its check. See how a
# check answers a wrong solution. Then correct the function, run it again, and run its check again.

# %% id="setup"
import os

import torch
import torch.distributed as dist

from dlo_lib.grading import Lab

MODEL = os.environ.get("DLO_MODEL", "llama-3.2-3b")
lab = Lab(globals())

# %% nbgrader={"grade_id": "mean", "solution": true}
def mean_over_ranks(x: torch.Tensor) -> torch.Tensor:
    """The mean of `x` over all ranks. x: of the same shape on every rank."""
    ### BEGIN SOLUTION: return x
    dist.all_reduce(x)
    return x / dist.get_world_size()
    ### END SOLUTION

# %% nbgrader={"grade_id": "test_mean", "grade": true}
lab.check("mean")

# %% [markdown] id="mean_after"
# The inputs of a check are drawn anew in each run, so a number that is typed in does not pass. The message says what is
# wrong, and mostly why; `seed=` repeats the inputs. If you are stuck, `lab.hint("mean")` gives a nudge, then a pointer,
# then a sketch, and `lab.use_reference("mean")` lets you continue without the points of that step. Some labs have checks
# that run only in grading: when all visible checks pass, the last line names them.
#
# `run_ranks` starts ranks from a notebook. Here are four, each with its own number:

# %% id="run_mean" tags=["demo"]
from dlo_lib.launch import run_ranks


def own_number() -> str:
    """Return a line with this rank's number and the mean over all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mean = mean_over_ranks(torch.tensor(float(rank)))
    return f"rank {rank} has {rank}, the mean over {world} ranks is {float(mean):g}"


print("\n".join(run_ranks(own_number, 4)))

# %% [markdown] id="live_text"
# `run_ranks` ends its ranks. Ranks of `%%ranks 4` live as long as the notebook: they run a whole cell, and their
# variables are there in the next one. The number of each rank is in `rank`. Run the next three cells, then change the
# second one and run it again: multiply instead of adding (`dist.all_reduce(x, op=dist.ReduceOp.PRODUCT)`), or use eight ranks.

# %% id="load_live" tags=["demo"]
# %load_ext dlo_lib.live_ranks

# %% id="show_live" tags=["demo"]
# %%ranks 4
x = torch.tensor([1.0, 10.0]) * (dist.get_rank() + 1)
print("mine", x.tolist())
dist.all_reduce(x)

# %% id="show_live_again" tags=["demo"]
# %%ranks
x

# %% [markdown] id="lock_text"
# ## 3 · A deadlock that explains itself
#
# **Core · 2 min · ●○○**
#
# A collective operation waits for *every* rank. If one rank skips a call, the others wait forever: a **deadlock**,
# the most frequent failure of distributed programs. Usually a job then stays silent until a time-out of 10 to 30 minutes.
# In this course it is stopped at once, with a table of what each rank does.
#
# Below, each rank calls the all-reduce once for each of its batches, and rank 2 has one batch less. **What do you
# expect in the table?**

# %% id="show_lock" tags=["demo", "read", "nbval-check-output"]
from dlo_lib.launch import DeadLock


def train(batches: int) -> int:
    """Average a gradient over all ranks after each batch of this rank."""
    for _ in range(batches):
        gradient = torch.ones(3)
        dist.all_reduce(gradient)
    return batches


def train_this_rank() -> int:
    """Rank 2 has two batches, the others have three."""
    return train(2 if dist.get_rank() == 2 else 3)


try:
    run_ranks(train_this_rank, 4)
except DeadLock as lock:
    print(lock)

# %% [markdown] id="state_text"
# Find the rank that does something else than the others, then the line of code. You will meet this table in many labs.
#
# ## 4 · The memory of Llama 3.2 3B
#
# **Core · 4 min · ●○○**
#
# Does one training step of a model with 3.2 billion parameters fit on a GPU of 80 GB, or of 40 GB? At the end of
# backward, three parts are in memory, with 4 bytes (fp32) for each parameter in each tensor:
#
# - the weights: one tensor;
# - their gradients: one tensor;
# - the state of the optimiser: `moments` tensors. AdamW keeps two, SGD with momentum one, plain SGD none.
#
# Write `state_gib`: the sum of the three, in GiB (2³⁰ bytes). As it stands it counts the weights alone.

# %% nbgrader={"grade_id": "state", "solution": true}
def state_gib(parameters: int, moments: int) -> float:
    """The GiB of weights, gradients and optimiser state in fp32."""
    ### BEGIN SOLUTION: return 4 * parameters / 2**30
    return (2 + moments) * 4 * parameters / 2**30
    ### END SOLUTION

# %% nbgrader={"grade_id": "test_state", "grade": true}
lab.check("state")

# %% [markdown] id="predict_text"
# **Predict, then measure.** The next cell prints the number of parameters and your state. A step also needs activations
# and the logits. What do you expect for the *peak* of one step with AdamW, one sequence of 2048 tokens, in GiB? Run
# the next cell, then write your number in place of None in the one below it; a prediction is not graded.

# %% id="show_state" tags=["demo", "nbval-check-output"]
from dlo_lib.profiling import parameters

size = parameters(MODEL)
print(
    f"{MODEL}: {size / 1e9:.2f} billion parameters, "
    f"{state_gib(size, 2):.1f} GiB of state with AdamW"
)

# %% id="predict_peak" tags=["prediction"]
predicted_peak = {"peak": None}

# %% [markdown] id="measure_text"
# The next cell runs the real training step, forward, backward and AdamW, on *fake tensors*: they have shapes and sizes
# but no data, so the step needs seconds, and hardly any memory, on this machine. Every allocation is recorded.

# %% id="show_peak" tags=["demo", "nbval-check-output"]
from dlo_lib.hardware import gpu
from dlo_lib.labkit.predictions import compared, require_numbers
from dlo_lib.profiling import measure_memory, plot_memory

require_numbers(predicted_peak)

report = measure_memory(MODEL, batch=1, seq=2048, parallel="none")
print(compared(predicted_peak, {"peak": report.peak_bytes / 2**30}, "{:.1f} GiB".format))
usable = gpu("a100-40").usable_bytes
plot_memory(report, limit_bytes=usable, title=f"{MODEL}: one step, 2048 tokens")

# %% [markdown] id="state_after"
# Weights and optimiser state stay, gradients grow during backward, and activations are largest when backward begins:
# there is the peak. The *cast weights* are copies of the weights in 16 bits: the step uses mixed precision (lab 01), which
# computes products in 16 bits. At the end of backward the state that you computed is in memory. The peak fits on a GPU of
# 80 GB. The state alone is larger than the memory of an A100 of 40 GB (the dashed line), whatever the batch: data parallelism, which gives every rank a copy of the whole
# model, cannot help. Labs 13 to 16 are about this limit, and the ways past it.
#
# ## 5 · Quiz
#
# **Core · 2 min · ●○○**
#
# The answers are letters in the dict. The check here only sees that every question has an answer; the feedback of your class
# tells you which ones are right, and why, when your instructor releases it. Without a class, the third check with all
# answers tells you, or `lab.quiz.reveal()`.

# %% id="show_quiz"
lab.quiz()

# %% nbgrader={"grade_id": "quiz", "solution": true}
### BEGIN SOLUTION: quiz = {"q1": "", "q2": "", "q3": ""}
quiz = {"q1": "b", "q2": "c", "q3": "a"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true}
lab.check("quiz")

# %% [markdown] id="end"
# ## Done
#
# Save the notebook (Ctrl+S). Run the first code cell again: it shows your points, and the lab to continue with.
# `GLOSSARY.md`, in the folder above this one, explains the terms of all labs, in English and in French.
