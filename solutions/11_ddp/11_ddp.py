# %% [markdown] id="title"
# # 11 · Distributed data parallelism, from hooks
#
# **What you will do.** Several processes train one model together: each has the whole model and its own part
# of the data. You write every part of it: equal replicas, the average of the gradients, buckets, hooks that
# communicate *while* backward runs, gradient accumulation, the division of the data, and metrics over all
# ranks. At the end your `DataParallel` trains on 4 ranks and follows the training of one process, and stands
# beside PyTorch's.
#
# You need no GPU: ranks are processes on this machine (gloo).
#
# Builds on lab 10 (collectives). Labs 1 to 9 train on one device; you need from them only the training loop of PyTorch:
# forward, backward, and a step of the optimiser. The core exercises and predictions take about 100 minutes; with the text and the demos plan two
# hours. Two optional sections follow the quiz. Each exercise has a check that answers at once; `lab.hint("name")` gives a nudge, then a pointer, then a sketch.
# If you are stuck, `lab.use_reference("name")` lets you continue without its points.
#
# Words: data parallelism (*parallélisme de données*), replica (*réplique*), gradient accumulation (*accumulation de gradient*), overlap
# (*recouvrement*), batch normalisation (*normalisation par lot*), launcher (*lanceur*), local rank (*rang local*), checkpoint (*point de
# reprise*).

# %% id="setup"
import contextlib
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlo_lib.grading import Lab
from dlo_lib.labkit.predictions import compared, require_numbers
from dlo_lib.launch import run_ranks

STEPS = int(os.environ.get("DLO_STEPS", 40))  # of each training
REPEATS = int(os.environ.get("DLO_REPEATS", 7))  # of each timing
GPUS = int(os.environ.get("DLO_GPUS", 2))  # ranks of the training by hand at the end
KIB, MIB = 1 << 10, 1 << 20
lab = Lab(globals())


class Standard(DistributedDataParallel):
    """PyTorch's wrapper, which section 9 compares with yours, under the names of this lab."""

    def __init__(self, module: nn.Module, bucket_bytes: int = 1024 * KIB) -> None:
        super().__init__(module, bucket_cap_mb=bucket_bytes / KIB / KIB)

    def finish(self) -> None:
        """Nothing is left to do."""

# %% [markdown] id="why"
# ## Why: ranks that do not talk
# Four ranks train on 512 samples, 128 each, from the same weights. In the left figures they exchange nothing.
# In the right figures their models are wrapped by PyTorch's `DistributedDataParallel`, which makes them
# exchange something: you will write this wrapper. Nothing else differs.

# %% id="show_why" tags=["demo"]
import figures

torch.manual_seed(0)
teacher = torch.randn(16, 4)
samples = torch.randn(512, 16)
labels = (samples @ teacher + 1.5 * torch.randn(512, 4)).argmax(1)


def make_model(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def four_trainings(talk: bool) -> list[tuple[float, float, torch.Tensor]]:
    """For each step: the loss on this rank's part, on all samples, and the weights of the first layer."""
    torch.set_num_threads(1)
    rank, world, net = dist.get_rank(), dist.get_world_size(), make_model()
    model = DistributedDataParallel(net) if talk else net
    optimizer, seen = torch.optim.AdamW(net.parameters(), lr=0.01), []
    own = slice(rank * 512 // world, (rank + 1) * 512 // world)
    for _ in range(STEPS):
        loss = F.cross_entropy(model(samples[own]), labels[own])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            seen.append((loss.item(), F.cross_entropy(net(samples), labels).item(), net[0].weight.detach().clone()))
    return seen


figures.drift(run_ranks(four_trainings, 4, False), run_ranks(four_trainings, 4, True))

# %% [markdown] id="why_questions"
# Without exchange, each rank fits its own 128 samples. But there are now four different models, and each is
# worse on the data of the other ranks. After step 1 their gradients are not even taken *at the same point*:
# averaging the four models at the end does not give the model of a common training.
#
# - Must the ranks exchange weights, gradients or samples? Which is the smallest? Which is enough?
# - What is the earliest moment at which a rank can send something?

# %% [markdown] id="idea"
# ## The idea
#
# The loss of the whole batch is the mean of the ranks' losses, when their parts have the same size.
# Differentiation is linear, so
#
# $$\nabla L = \frac{1}{N} \sum_{r=0}^{N-1} \nabla L_r$$
#
# If all replicas start equal and step with the same average, they stay equal to the last bit: no weights are
# sent after the start. Backward produces gradients from the last layer to the first. A gradient that is ready
# can be sent while the others are still being computed.
#
# The figure is a *model* of the machine: backward takes 1 ms a layer, and a message takes $\alpha = 1$ ms plus 1 ms for
# each 64 KiB. Numbers are layers, letters are messages. Above, one message with all gradients follows backward;
# below, four messages with three gradients each begin during backward. Communication to the right of the dashed
# line is waiting time.

# %% id="show_idea" tags=["demo"]
twelve = [64 * KIB] * 12
figures.plans(
    {
        "everything after backward": (twelve, [list(range(11, -1, -1))]),
        "in buckets, during backward": (twelve, [[11, 10, 9], [8, 7, 6], [5, 4, 3], [2, 1, 0]]),
    }
)

# %% [markdown] id="replicate_text"
# ## 1 · Equal replicas
#
# **Core · 6 min · ●○○**
#
# Write `replicate`: all ranks get the values of rank 0, in place, with `dist.broadcast` (lab 10). The state of a model is
# more than its weights. `module.parameters()` are the tensors that an optimiser can train, and the frozen ones.
# `module.buffers()` are the other tensors of the state, such as the running statistics of a batch normalisation.
# (`state_dict()` has no buffers with `persistent=False`, which a checkpoint does not save.)
#
# (Why not rely on the same seed on every rank? Because one rank that loads a checkpoint, or draws one more
# random number, makes the whole training wrong without an error.)

# %% nbgrader={"grade_id": "replicate", "solution": true}
def replicate(module: nn.Module) -> None:
    """Overwrite this rank's parameters and buffers with those of rank 0."""
    ### BEGIN SOLUTION
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.detach(), 0)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_replicate", "grade": true}
lab.check("replicate")

# %% [markdown] id="average_text"
# ## 2 · The average, after backward
#
# **Core · 8 min · ●○○**
#
# The simple form: after backward, replace each gradient by its average over the ranks, in place. Use one
# all-reduce for each parameter that has a gradient (`.grad` of a frozen parameter is `None`). An all-reduce adds. With
# `ReduceOp.AVG`, which gloo has since PyTorch 2.8, it adds and then divides.
#
# Your function must also work for gradients in half precision (fp16). Mathematically, it is the same to divide
# before or after the sum. But the largest number in fp16 is 65,504. The average of eight gradients of 10,000
# fits; does their sum? (In fp32 and bf16, which reach 3e38, both orders are safe.)

# %% nbgrader={"grade_id": "average", "solution": true}
def average_gradients(module: nn.Module) -> None:
    """Replace each gradient by its average over all ranks."""
    ### BEGIN SOLUTION
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_average", "grade": true}
lab.check("average")

# %% [markdown] id="average_order_text"
# The other order, measured: two ranks, each with the gradient 40,000 in fp16.

# %% id="show_average_order" tags=["demo", "nbval-check-output"]
def average_of_two(divide_first: bool) -> float:
    """The average of 40,000 over two ranks, in fp16."""
    gradient = torch.tensor(40_000.0, dtype=torch.float16)
    if divide_first:
        dist.all_reduce(gradient.div_(dist.get_world_size()))
    else:
        dist.all_reduce(gradient, dist.ReduceOp.AVG)
    return gradient.item()


divided, averaged = (run_ranks(average_of_two, 2, first)[0] for first in (True, False))
print(f"divide, then add: {divided:,.0f}; ReduceOp.AVG of gloo: {averaged}")

# %% [markdown] id="average_after"
# The result is right, but the method is slow for two reasons. First, the number of messages. The cell after
# next sends the same 2 MiB of gradients in more and more all-reduces. **Predict first:** how many times as
# long as one all-reduce of 2 MiB do 16 all-reduces take, and 256? (Use $\alpha$ and $\beta$ of your fit of lab 10, or say that
# an all-reduce of $B$ bytes takes 0.2 ms + $B$ / (1 GB/s).)

# %% id="predict_messages" tags=["prediction"]
predicted_messages = {"16 messages": None, "256 messages": None}  # times as long as one message

# %% id="show_messages" tags=["demo"]
require_numbers(predicted_messages)
def time_of_messages(total: int, counts: list[int]) -> dict[int, float]:
    """Seconds to send `total` numbers in `count` all-reduces, for each count; the minimum of the repeats."""
    torch.set_num_threads(1)
    found = dict.fromkeys(counts, float("inf"))
    for repeat in range(REPEATS + 1):
        for count in counts:
            parts = torch.zeros(total).split(total // count)
            dist.barrier()
            began = time.perf_counter()
            for part in parts:
                dist.all_reduce(part)
            if repeat:  # the first opens connections
                found[count] = min(found[count], time.perf_counter() - began)
    return found


by_count = run_ranks(time_of_messages, 2, 2**19, [1, 4, 16, 64, 256], explain=False)[0]
print(compared(predicted_messages, {f"{count} messages": by_count[count] / by_count[1] for count in (16, 256)}))
print(f"each further message costs {1e3 * (by_count[256] - by_count[1]) / 255:.2f} ms here")
figures.messages(by_count, predicted_messages)

# %% [markdown] id="buckets_text"
# Every message costs a fixed time $\alpha$, however short it is (lab 10). Llama 3.2 1B has 146 parameter tensors,
# and 33 of them are norms of 8 KiB in fp32: a separate message for a norm spends most of its time in $\alpha$.
# Second, nothing is sent while backward computes.
#
# ## 3 · Buckets
#
# **Core · 13 min · ●●○**
#
# Gradients are therefore sent in *buckets*: several in one message. `nbytes[i]` is the size of the gradient
# of parameter `i`, and parameters are in the order of forward. Their gradients arrive roughly in reverse
# order. Fill buckets **in the order of arrival**: a gradient goes into the current bucket if it still fits
# within `limit`, else it begins a new one. A gradient larger than `limit` gets a separate bucket.

# %% nbgrader={"grade_id": "buckets", "solution": true}
def assign_buckets(nbytes: list[int], limit: int) -> list[list[int]]:
    """Return the indices of the parameters of each bucket, in the order of arrival."""
    ### BEGIN SOLUTION
    buckets, held = [], 0
    for i in reversed(range(len(nbytes))):
        if not buckets or held + nbytes[i] > limit:
            buckets.append([])
            held = 0
        buckets[-1].append(i)
        held += nbytes[i]
    return buckets
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_buckets", "grade": true}
lab.check("buckets")

# %% [markdown] id="buckets_after"
# The figure shows your buckets for 24 layers of 32 KiB, with three limits, in the model of the machine of "The
# idea".

# %% id="show_buckets" tags=["demo"]
layers = [32 * KIB] * 24
figures.plans(
    {
        f"limit {limit} KiB": (layers, assign_buckets(layers, limit * KIB))
        for limit in (16, 128, 1024)
    }
)

# %% [markdown] id="overlap_text"
# Small buckets pay $\alpha$ too often; a large bucket starts too late. A good size is in between: PyTorch's default
# is 25 MiB, with a first bucket of 1 MiB. (Why is the first one smaller?)
#
# ## 4 · Communicate while backward runs
#
# **Core · 35 min · ●●●**
#
# After `parameter.register_post_accumulate_grad_hook(function)`, PyTorch calls `function(parameter)` when the
# parameter's `.grad` is complete. This hook can *start* an all-reduce with
# `dist.all_reduce(flat, async_op=True)`. The call returns a *work* immediately, and backward continues.
# `finish()` calls `work.wait()` later. The hooks are registered in `__init__`, which is given. (A lambda in a loop
# needs `i=i` among its arguments; otherwise every hook uses the last `i`.)
#
# Write `on_gradient` and `finish`, with other methods if you like. The rules of the class:
#
# - **One all-reduce for each bucket**, of a flat tensor with all its gradients, divided by the number of ranks before
#   the sum as in section 2. It starts in the hook of the gradient that completes the bucket.
# - **Strictly in the order of `self.buckets`**, on every rank. A bucket that is complete too early waits for
#   those before it. (All-reduces are matched across ranks by their order only. If rank 0 starts with the
#   bucket of layer 3 and rank 1 with that of layer 2, layer 3 is added to layer 2 without an error.)
# - `finish()` is called after every backward pass outside `no_sync`. It starts the buckets that have not started: a
#   parameter whose `.grad` is None, because this rank **did not use** it, counts as zeros. It waits for all buckets,
#   writes the averages into `.grad` (also where it was None), and resets the state for the next pass.
# - While `self.sync` is False (inside `no_sync`), hooks do nothing: gradients accumulate on this rank. The next
#   pass outside `no_sync` adds its gradients, and the sums are averaged. A parameter that this last pass does not
#   use still has the gradient of the passes before it.
#
# All parameters have the same dtype. Frozen parameters are left out. `DistributedDataParallel` is refused here: the
# last section compares it with your class.

# %% nbgrader={"grade_id": "overlap", "solution": true}
class DataParallel(nn.Module):
    """Average the gradients of `module` over all ranks during backward; then call `finish()`."""

    def __init__(self, module: nn.Module, bucket_bytes: int = 1024 * KIB) -> None:
        super().__init__()
        replicate(module)
        self.module, self.sync = module, True
        self.trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        sizes = [parameter.nbytes for parameter in self.trained]
        self.buckets = assign_buckets(sizes, bucket_bytes)
        self.arrived, self.works = set(), []  # gradients of this pass; buckets that have started
        for i, parameter in enumerate(self.trained):
            parameter.register_post_accumulate_grad_hook(lambda _, i=i: self.on_gradient(i))

    def forward(self, *inputs):
        return self.module(*inputs)

    @contextlib.contextmanager
    def no_sync(self):
        """Inside this context, backward passes communicate nothing."""
        self.sync = False
        try:
            yield
        finally:
            self.sync = True

    def on_gradient(self, i: int) -> None:
        """The gradient of self.trained[i] is complete."""
        ### BEGIN SOLUTION
        if not self.sync:
            return
        self.arrived.add(i)
        while len(self.works) < len(self.buckets) and self.arrived.issuperset(self.buckets[len(self.works)]):
            self.send()
        ### END SOLUTION

    def finish(self) -> None:
        """Call it after backward: all gradients become averages over the ranks."""
        ### BEGIN SOLUTION
        while len(self.works) < len(self.buckets):
            self.send()
        for bucket, (work, flat) in zip(self.buckets, self.works):
            work.wait()
            for i, average in zip(bucket, flat.split([self.trained[i].numel() for i in bucket])):
                self.trained[i].grad = average.view_as(self.trained[i])
        self.arrived, self.works = set(), []

    def send(self) -> None:
        """Start the all-reduce of the next bucket."""
        members = [self.trained[i] for i in self.buckets[len(self.works)]]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in members]
        flat = torch.cat([gradient.flatten() for gradient in gradients]) / dist.get_world_size()
        self.works.append((dist.all_reduce(flat, async_op=True), flat))
        ### END SOLUTION


# %% nbgrader={"grade_id": "test_overlap", "grade": true}
lab.check("overlap")

# %% [markdown] id="overlap_after"
# Does communication overlap with backward? With a GPU, the CPU is free while kernels run. Here both ranks
# compute on the same few cores, so the layers of the next cells *sleep* for 4 ms each in backward instead of
# computing. Every millisecond beyond the sleep is communication that is not hidden, or a copy into a bucket.
#
# There are 12 layers of 1 MiB. **Predict first:** how many milliseconds does communication add to the 48 ms of
# backward, with a bucket for each layer (1 MiB), with four buckets (3 MiB), and with one bucket (12 MiB)? The
# figure of section 2 gives the time of an all-reduce of 2 MiB, and the line above it the cost of a message. (The cell
# shows the minimum of several repeats. On a loaded machine the points still move: run it again when the machine is quiet.)

# %% id="predict_waiting" tags=["prediction"]
predicted_waiting = {"1 MiB": None, "3 MiB": None, "12 MiB": None}  # ms

# %% id="run_overlap" tags=["demo"]
require_numbers(predicted_waiting)
class Sleeping(torch.autograd.Function):
    """The identity; its backward sleeps for 4 ms, while the processor is free."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.004)
        return grad


class SlowNet(nn.Module):
    """12 layers of 1 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(12))

    def forward(self, x):
        for layer in self.layers:
            x = Sleeping.apply(torch.tanh(layer(x)))
        return x


LIMITS = [limit * MIB for limit in (1, 2, 3, 4, 6, 12)]


def backward_pass(model: nn.Module, x: torch.Tensor, form: str) -> float:
    """Seconds of one backward pass and its communication. form: "none", "after backward" or "buckets"."""
    model.zero_grad()
    loss = model(x).square().mean()
    dist.barrier()
    began = time.perf_counter()
    loss.backward()
    if form == "after backward":
        average_gradients(model)
    elif form == "buckets":
        model.finish()
    return time.perf_counter() - began


def waiting_times() -> dict[int | str, float]:
    """Seconds that communication adds to a backward pass, for each limit and for one message a parameter after backward."""
    torch.set_num_threads(1)
    x = torch.randn(4, 512)
    models = {"none": SlowNet(), "after backward": SlowNet()} | {limit: DataParallel(SlowNet(), limit) for limit in LIMITS}
    fastest = dict.fromkeys(models, float("inf"))
    for repeat in range(REPEATS + 1):  # all forms in turn, so that a busy moment disturbs them equally
        for name, model in models.items():
            seconds = backward_pass(model, x, name if isinstance(name, str) else "buckets")
            if repeat:
                fastest[name] = min(fastest[name], seconds)
    return {name: seconds - fastest["none"] for name, seconds in fastest.items() if name != "none"}


waiting = run_ranks(waiting_times, 2, explain=False)[0]
after_backward = waiting.pop("after backward")
print(compared(predicted_waiting, {f"{limit // MIB} MiB": 1e3 * seconds for limit, seconds in waiting.items()}, "{:.1f} ms".format))
print(figures.what_waiting_shows(waiting))
figures.waiting(waiting, after_backward, predicted_waiting)

# %% [markdown] id="overlap_lesson"
# The rightmost point has one bucket for all gradients: it is sent after backward, so nothing is hidden. The
# leftmost point has one bucket a layer: as much as possible is hidden behind the sleep, but $\alpha$ is paid 12
# times. No point reaches 0, because each gradient is copied into its bucket. Compare with the figure of your
# buckets above. The line above the figure says when the picture disagrees with this text.
#
# The tracer shows one such pass in time, with four buckets. Each rank computes (here: sleeps) while its
# all-reduces are in flight. A thin line before a bar: this rank has called, the other has not. The cell also
# writes a file beside this notebook, which opens in <https://ui.perfetto.dev>.

# %% id="show_trace" tags=["demo"]
def one_pass() -> None:
    torch.set_num_threads(1)
    model = DataParallel(SlowNet(), 3 * MIB)
    backward_pass(model, torch.randn(4, 512), "buckets")


trace = run_ranks(one_pass, 2, trace=True, explain=False).trace
print("written:", trace.to_perfetto("overlap_trace.json"))
first = min(event.issued for event in trace.select("all_reduce"))
number, hidden = trace.count("all_reduce", rank=0), trace.hidden("all_reduce")
title = f"one backward pass: {number} all-reduces a rank, {hidden:.0%} of their time hidden"
trace.plot(title, start=max(0.0, first - 0.015))

# %% [markdown] id="accumulate_text"
# ## 5 · Gradient accumulation
#
# **Core · 8 min · ●●○**
#
# When memory is short, a batch is cut into micro-batches whose gradients accumulate in `.grad`. Averaging every partial
# sum is a waste: only the last backward pass communicates, while it runs as in section 4.
#
# `losses` is a list of functions without arguments, one for each micro-batch. Each runs forward and returns
# the mean loss of its samples; all have the same number of samples. Afterwards `.grad` is the gradient of the
# mean over all micro-batches of all ranks.

# %% nbgrader={"grade_id": "accumulate", "solution": true}
def accumulate(model: DataParallel, losses: list) -> None:
    """Run all backward passes; communicate once.

    `.grad` is that of the mean over all micro-batches and ranks.
    """
    ### BEGIN SOLUTION
    with model.no_sync():
        for loss in losses[:-1]:
            (loss() / len(losses)).backward()
    (losses[-1]() / len(losses)).backward()
    model.finish()
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_accumulate", "grade": true}
lab.check("accumulate")

# %% [markdown] id="accumulate_after"
# The tracer counts the communication of the same 8 micro-batches, without and with accumulation. The model has
# 22 KiB of gradients. **Predict first:** how many all-reduces does a rank start?

# %% id="predict_all_reduces" tags=["prediction"]
predicted_all_reduces = {"one after the other": None, "accumulated": None}

# %% id="show_accumulate" tags=["demo", "nbval-check-output"]
from dlo_lib.labkit.predicted_bars import predicted_bars

require_numbers(predicted_all_reduces)


def eight_micro_batches(at_once: bool) -> None:
    model = DataParallel(make_model())
    losses = [lambda x=x, y=y: F.cross_entropy(model(x), y) for x, y in zip(samples[:128].split(16), labels[:128].split(16))]
    for group in [losses] if at_once else [[loss] for loss in losses]:
        accumulate(model, group)


ways = {"one after the other": False, "accumulated": True}
traces = {name: run_ranks(eight_micro_batches, 2, at_once, trace=True).trace for name, at_once in ways.items()}
counts = {name: each.count("all_reduce", rank=0) for name, each in traces.items()}
print(compared(predicted_all_reduces, counts, "{:g}".format))
for name, each in traces.items():
    print(f"{name:20} {each.bytes('all_reduce', rank=0) / KIB:6.1f} KiB a rank")
predicted_bars(counts, predicted_all_reduces, "all-reduces that a rank starts", text="{:g}".format)

# %% [markdown] id="sampler_text"
# ## 6 · Whose samples?
#
# **Core · 10 min · ●●○**
#
# In each epoch, one rank should see each sample, once. Write the *sampler*: it returns the indices of the
# samples of this rank in this epoch.
#
# - All ranks must run the same number of steps, because otherwise some ranks wait forever. So every rank gets
#   the same number of samples: when `world` does not divide `length`, repeat a few (fewer than `world` in
#   total). With fewer samples than ranks, one sample may be repeated several times.
# - The order is new in every epoch and depends on `seed` and `epoch` only: every rank computes the *same*
#   permutation and takes its share, without a message.
# - Use a separate generator (`torch.Generator().manual_seed(...)`). `torch.manual_seed` would change the
#   random numbers of other code, such as dropout and augmentation.
# - `DistributedSampler` is refused here: the last section compares it with your function.

# %% nbgrader={"grade_id": "sampler", "solution": true}
def rank_samples(length: int, rank: int, world: int, epoch: int, seed: int = 0) -> list[int]:
    """Return the samples of this rank in this epoch, out of 0 ... length - 1, in random order."""
    ### BEGIN SOLUTION
    order = torch.randperm(length, generator=torch.Generator().manual_seed(1_000_003 * seed + epoch)).tolist()
    each = -(-length // world)
    while len(order) < each * world:
        order += order[: each * world - len(order)]
    return order[rank::world]
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_sampler", "grade": true}
lab.check("sampler")

# %% id="show_sampler" tags=["demo"]
by_epoch = [[rank_samples(22, rank, 4, epoch) for rank in range(4)] for epoch in range(3)]
figures.shares(by_epoch, length=22)

# %% [markdown] id="metrics_text"
# The figure shows which rank sees which sample in three epochs; a double ring marks a repeated sample. In
# *training* a repeated sample does no harm. In *evaluation* it counts twice. So evaluation gives the ranks
# unequal numbers of samples, and its metric takes them into account.
#
# ## 7 · A metric over all ranks
#
# **Core · 6 min · ●○○**
#
# Compute the accuracy over the samples of all ranks. Ranks may have unequal numbers of samples, and one may
# have none. The mean of the ranks' accuracies would give more weight to the samples of a rank that has few.
# **One all-reduce** of two numbers is enough.

# %% nbgrader={"grade_id": "metrics", "solution": true}
def global_accuracy(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the accuracy over the samples of all ranks.

    logits: (samples, classes). labels: (samples,) int64.
    """
    ### BEGIN SOLUTION
    counts = torch.tensor([(logits.argmax(1) == labels).sum(), len(labels)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_metrics", "grade": true}
lab.check("metrics")

# %% [markdown] id="real_text"
# ## 8 · For real
#
# Now combine all parts: compare 4 ranks with one process, on the 512 samples of the start and with a global
# batch of 64. The one process takes the samples that the four ranks take together.
#
# **Predict first:** by how much do the losses of the two trainings differ at most, and which share of the 512 samples
# does the model classify rightly at the end? (The loss is about 1. A number in fp32 has about 7 digits.)

# %% id="predict_training" tags=["prediction"]
predicted_training = {"largest difference of a loss": None, "accuracy at the end": None}

# %% id="run_training" tags=["demo"]
require_numbers(predicted_training)
def train_together(epochs: int) -> dict[str, list[float]]:
    """Loss of every step and accuracy after every epoch."""
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DataParallel(make_model(seed=rank), 16 * KIB)  # all ranks start from rank 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, accuracy = [], []
    for epoch in range(epochs):
        for batch in torch.tensor(rank_samples(512, rank, world, epoch)).split(64 // world):
            optimizer.zero_grad()
            halves = batch.chunk(2)
            accumulate(model, [lambda part=part: F.cross_entropy(model(samples[part]), labels[part]) for part in halves])
            optimizer.step()
            with torch.no_grad():
                loss = F.cross_entropy(model(samples[batch]), labels[batch])
            dist.all_reduce(loss)
            losses.append(loss.item() / world)
        own = slice(rank * 100, rank * 100 + 100 if rank < world - 1 else 512)  # unequal shares, no sample twice
        with torch.no_grad():
            accuracy.append(global_accuracy(model(samples[own]), labels[own]))
    return {"loss": losses, "accuracy": accuracy, "weight": [model.module[0].weight.detach()]}


epochs = max(1, STEPS // 8)
together, alone = run_ranks(train_together, 4, epochs), run_ranks(train_together, 1, epochs)[0]
print("largest difference between the ranks' weights:", max(float((other["weight"][0] - together[0]["weight"][0]).abs().max()) for other in together))
apart = max(abs(a - b) for a, b in zip(together[0]["loss"], alone["loss"]))
print(compared(predicted_training, {"largest difference of a loss": apart, "accuracy at the end": together[0]["accuracy"][-1]}, "{:.2g}".format))
figures.training(together[0], alone, predicted_training)

# %% [markdown] id="real_lesson"
# The replicas are equal to the last bit: every rank computed the same step from the same average. The one
# process adds in another order, so its results differ in the last digits of fp32.
#
# ## 9 · Read: the same with PyTorch
#
# **Core · 5 min · ●○○**
#
# Outside this course you write `DistributedDataParallel(module)`. It does the same as your class, with three
# refinements: with `gradient_as_bucket_view=True` gradients are views of the buckets (no copy), the buckets follow the
# order in which gradients arrived in the first step, and there is no `finish()`: a callback at the end of backward waits. `Standard`, in the
# first cell, gives it the names of this lab. The sampler is `DistributedSampler`. Both pass your checks, except “The gradient
# is that of the mean over all micro-batches and ranks, and only the last pass communicates”: when PyTorch's wrapper is built, it
# also compares the shapes of the parameters over the ranks, with an all-gather.

# %% id="run_standard" tags=["demo", "read"]
from torch.utils.data import DistributedSampler


def standard_samples(length: int, rank: int, world: int, epoch: int, seed: int = 0) -> list[int]:
    sampler = DistributedSampler(range(length), world, rank, seed=seed)
    sampler.set_epoch(epoch)
    return list(sampler)


lab.check("accumulate", instead={"DataParallel": Standard})
lab.check("sampler", instead={"rank_samples": standard_samples})

# %% [markdown] id="standard_table_text"
# The table compares one training step of both wrappers: 8 layers of 1 MiB on two ranks, all in turn, the
# minimum of several repeats. The memory is the peak of the tensors of a rank in a step.

# %% id="show_standard" tags=["demo", "read", "nbval-check-output"]
from dlo_lib.labkit import side_by_side
from dlo_lib.labkit.measured_step import peak_of_a_step

FORMS = {"your DataParallel": DataParallel, "DistributedDataParallel": Standard}
LINES = {
    "your DataParallel": (replicate, assign_buckets, DataParallel),
    "DistributedDataParallel": ("model = DistributedDataParallel(module)",),
}


def step_of(name: str):
    """A training step of this form, which returns its seconds."""
    torch.set_num_threads(1)
    x = torch.randn(32, 512)
    net = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
    model, optimizer = FORMS[name](net), torch.optim.SGD(net.parameters(), lr=0.01)

    def step() -> float:
        optimizer.zero_grad()
        dist.barrier()
        began = time.perf_counter()
        model(x).square().mean().backward()
        model.finish()
        optimizer.step()
        return time.perf_counter() - began

    return step


def steps_in_turn(names: list[str], repeats: int) -> dict[str, float]:
    """Seconds of the fastest training step of each form on this rank."""
    steps, fastest = {name: step_of(name) for name in names}, dict.fromkeys(names, float("inf"))
    for repeat in range(repeats + 1):
        for name, step in steps.items():
            seconds = step()
            if repeat:  # DistributedDataParallel builds its buckets anew after the first step
                fastest[name] = min(fastest[name], seconds)
    return fastest


def peak_memory(name: str) -> int:
    """The most bytes of tensors in the third step.

    In the second one DistributedDataParallel builds its buckets anew.
    """

    def build():
        step = step_of(name)
        step()
        return step

    return peak_of_a_step(build)


by_form = run_ranks(steps_in_turn, 2, list(FORMS), 3 * REPEATS, explain=False)
forms = []
for name in FORMS:
    one_step = run_ranks(steps_in_turn, 2, [name], 0, trace=True, explain=False)
    sent = one_step.trace.bytes("all_reduce", rank=0)
    seconds = max(each[name] for each in by_form)
    memory = max(run_ranks(peak_memory, 2, name, explain=False))
    lines = side_by_side.lines_of(*LINES[name])
    forms.append(side_by_side.Form(name, lines=lines, seconds=seconds, nbytes=sent, memory=memory))
print(side_by_side.table(forms))

# %% [markdown] id="standard_lesson"
# Both send the same bytes, and both hold weights, gradients and buckets, 8 MiB each. What differs:
#
# - Your class copies every gradient into a flat tensor, and the averages are views of it. `DistributedDataParallel`
#   keeps its buckets beside the gradients, and copies in and back; with `gradient_as_bucket_view=True` a gradient is a
#   part of its bucket. On two ranks on CPUs these copies are a small part of the step, so the times hardly differ.
# - The first step of `DistributedDataParallel` sends one bucket; from the second step on the buckets follow
#   the order of arrival. It fills a bucket until the limit is *reached*, so buckets may exceed `bucket_cap_mb`.
# - A parameter that a rank does not use needs `find_unused_parameters=True`, which walks through the graph in
#   each step. Without it, the next step raises an error.
#
# The next cell runs your checks of section 4 on `Standard`. Four of them fail:
#
# - “One all-reduce for each bucket, of the gradients in it”,
# - “Buckets are sent before backward ends”,
# - “A parameter that one rank leaves out in the first step is averaged with zeros, on every rank”,
# - “Inside no_sync nothing is sent, and the next pass adds its gradients, also if it uses fewer parameters”.
#
# Which of the four concern the gradients, and which only the traffic?

# %% id="run_standard_overlap" tags=["demo", "read"]
lab.check("overlap", instead={"DataParallel": Standard})

# %% [markdown] id="standard_overlap_lesson"
# <details><summary>Answer</summary>
#
# The first two expect the traffic of *your* class. When PyTorch's wrapper is built, it compares the shapes of the
# parameters over the ranks (all_gather), and the buckets of its first step are not yours. The last two leave a
# parameter out. Without `find_unused_parameters=True` the bucket of this parameter never starts, so its gradients are
# not averaged, and the next step raises the error. With it, both pass.
#
# </details>

# %% [markdown] id="quiz_text"
# ## 10 · Quiz
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

# %% [markdown] id="moments_text"
# ## 11 · Batch normalisation over all ranks
#
# **Optional · 20 min · ●●○**
#
# Batch normalisation subtracts the mean of each channel over the batch and divides by its standard deviation.
# With two samples a GPU (detection, segmentation, 3-D images) both are mostly noise. `SyncBatchNorm` uses the
# samples of all ranks. How noisy is the standard deviation of 2 samples, of 4, 8, ...?

# %% id="show_moments" tags=["demo"]
noise = {ranks: torch.randn(4000, 2 * ranks).std(1, correction=0) for ranks in (1, 2, 4, 8, 16, 32)}
figures.spread(noise)

# %% [markdown] id="moments_exercise"
# Compute the mean and the variance of each channel over all samples of all ranks. `x` is
# `(samples, channels)`, fp32; the number of samples may differ between ranks and may be 0. The variance is
# that of the population (divide by the number of samples).
#
# Send only a few numbers per channel, not the samples. The mean of the ranks' variances is not the variance
# (why?). Avoid $E[x^2] - E[x]^2$, which loses its digits in fp32: for a mean of 10,000 and a standard deviation
# of 1, $E[x^2]$ is about 100,000,001, and fp32 numbers of that size are 8 apart.

# %% nbgrader={"grade_id": "moments", "solution": true}
def global_moments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and variance, each (channels,), over the samples of all ranks.

    x: (samples, channels).
    """
    ### BEGIN SOLUTION
    count = torch.tensor(float(len(x)))
    total = x.sum(0)
    dist.all_reduce(count)
    dist.all_reduce(total)
    mean = total / count
    squares = (x - mean).square().sum(0)
    dist.all_reduce(squares)
    return mean, squares / count
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_moments", "grade": true}
lab.check("moments")

# %% [markdown] id="moments_after"
# In training, backward also goes through these statistics: the gradient of a sample on rank 0 depends on
# samples of rank 1, which takes a second exchange. `dlo_lib/parallel/sync_batch_norm.py` implements it, with
# a single message in forward (it combines means and squared deviations). So each layer costs two blocking
# exchanges a step, without overlap.

# %% [markdown] id="launch_text"
# ## 12 · Launch by hand
#
# **Optional · 15 min · ●○○**
#
# `run_ranks` has started the ranks so far. Outside a notebook, a **launcher** starts one process for each rank
# and tells each its place by environment variables:
#
# | | meaning | `torchrun` sets | `srun` sets |
# |---|---|---|---|
# | rank | the number among all processes of the job | `RANK` | `SLURM_PROCID` |
# | local rank | the number on this machine: which GPU | `LOCAL_RANK` | `SLURM_LOCALID` |
# | world size | the number of processes | `WORLD_SIZE` | `SLURM_NTASKS` |
# | address of rank 0 | where all ranks meet | `MASTER_ADDR`, `MASTER_PORT` | nothing: the job's script exports both |
#
# `train_by_hand.py`, beside this notebook, uses PyTorch alone. Read its five numbered parts, its loop (only
# rank 0 prints and writes) and how it resumes. The next cell is a launcher in ten lines: it starts the
# processes itself, for two epochs. Then `torchrun` continues the training from the checkpoint.

# %% id="run_by_hand" tags=["demo", "read"]
import socket
import subprocess
import sys
import tempfile

checkpoint = os.path.join(tempfile.mkdtemp(), "checkpoint.pt")
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = str(free.getsockname()[1])
meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(GPUS)}
script = ["train_by_hand.py", "--checkpoint", checkpoint, "--epochs"]
captured = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
ranks = []
for rank in range(GPUS):
    environment = {**os.environ, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    ranks.append(subprocess.Popen([sys.executable, *script, "2"], env=environment, **captured))
for rank in ranks:
    print(rank.communicate()[0], end="")

# %% id="run_torchrun" tags=["demo"]
torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
torchrun.append(f"--nproc-per-node={GPUS}")
if GPUS > 1:
    done = subprocess.run([*torchrun, *script, "4"], check=False, **captured)
    print(done.stdout)

# %% [markdown] id="launch_questions"
# - Rank 0 is killed while it writes the checkpoint. What does the next start find?
# - Move the all-reduce of the loss inside `if rank == 0:`. What happens, and on which rank do you see it?
# - You resume with four ranks instead of two. What stays right, and what changes?
#
# ### On a cluster
#
# A job of SLURM starts the same file with `srun`, once for each GPU. Its script names the meeting point:
#
# ```bash
# #SBATCH --nodes=2 --ntasks-per-node=8 --gres=gpu:8 --cpus-per-task=8 --time=00:20:00
# export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# export MASTER_PORT=$((10000 + SLURM_JOB_ID % 50000))
# export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
# srun python train_by_hand.py --epochs 4
# ```
#
# `cluster.submit` writes such a script for you; with `dry_run` it only returns it. (`dlo_lib.train` finds its
# place and the meeting point by itself.)

# %% id="show_slurm" tags=["demo"]
from dlo_lib import cluster
from dlo_lib.labkit import at_scale

large = ["--model", "llama-3.2-1b", "--seq", "2048", "--precision", "bf16", "--steps", "100"]
flags = ["--parallel", "ddp", "--batch", "4", "--accumulation", "2"]
job = cluster.submit(
    "dlo_lib.train", [*large, *flags], gpus=16, site="jean-zay-a100", account="abc", dry_run=True
)
print("For SLURM, 2 nodes of 8 GPUs:", at_scale.directives(job), sep="\n")

# %% [markdown] id="further"
# ## Go further
#
# - Make the first bucket smaller than the others, as PyTorch does. Does the measured waiting time change?
# - Record the order in which gradients arrive in the first step, and fill the buckets in that order. For
#   which models does this matter?
# - Send gradients in bf16: half the bytes. What happens to the loss? (`dlo_lib/parallel/ddp/comm_hooks.py`; lab 12 goes much further.)
# - `dlo_lib/parallel/ddp/` has the three refinements of section 9. How do its gradients become views of the buckets?
# - Give rank 3 one batch less than the others. Read the explanation of the deadlock. Then read
#   `dlo_lib/parallel/ddp/join.py`.
#
# **What comes next.** Lab 13: how large a model can each rank hold? Labs 14 and 15 divide the training state
# over the ranks.
#
# ## References
#
# - S. Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training* (2020), [arXiv:2006.15704](https://arxiv.org/abs/2006.15704)
# - P. Goyal et al., *Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour* (2017), [arXiv:1706.02677](https://arxiv.org/abs/1706.02677)
# - S. Ioffe, C. Szegedy, *Batch Normalization* (2015), [arXiv:1502.03167](https://arxiv.org/abs/1502.03167)
# - The course this lab follows: IDRIS, *Deep Learning Optimisé – Jean Zay* (DLO-JZ), day 3
