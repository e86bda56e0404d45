# %% [markdown] id="title"
# # 11 · Distributed data parallelism, from hooks
#
# **What you will do.** Several processes train one model together: each has the whole model and its own part of the data. You write all that
# this takes: equal replicas, the average of the gradients, buckets, hooks that communicate *while* backward runs, gradient accumulation, the
# division of the data, metrics and batch normalisation over all ranks. At the end your `DataParallel` trains on 4 ranks, and learns what one
# process would have learnt.
#
# You need no GPU: ranks are processes on this machine (gloo).
#
# Builds on lab 10 (collectives). It takes about 80 minutes. Each exercise has a check that answers at once; `lab.hint("name")` gives a nudge,
# then a pointer, then a sketch. If a step stays stuck, `lab.use_reference("name")` lets you go on without its points.
#
# Words: data parallelism (*parallélisme de données*), replica (*réplique*), gradient accumulation (*accumulation de gradient*), overlap
# (*recouvrement*), batch normalisation (*normalisation par lot*).

# %% id="setup"
import contextlib
import os
import time
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dlo_lib.grading import Lab
from dlo_lib.launch import run_ranks

STEPS = int(os.environ.get("DLO_STEPS", 40))  # of each training
REPEATS = int(os.environ.get("DLO_REPEATS", 7))  # of each timing
PROCESSES = int(os.environ.get("DLO_PROCESSES", 2))  # of the job at the end
KIB = 1024
lab = Lab(globals())

# %% [markdown] id="why"
# ## Why: ranks that do not talk
#
# Four ranks, 512 samples, 128 for each. The four start from the same weights. In the left pictures they never talk; in the right ones something
# happens after each backward pass, which you will write. Nothing else differs.

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
    """Each step: the loss on this rank's part, on all samples, and the weights of the first layer."""
    torch.set_num_threads(1)
    rank, world, model = dist.get_rank(), dist.get_world_size(), make_model()
    optimizer, seen = torch.optim.AdamW(model.parameters(), lr=0.01), []
    own = slice(rank * 512 // world, (rank + 1) * 512 // world)
    for _ in range(STEPS):
        loss = F.cross_entropy(model(samples[own]), labels[own])
        optimizer.zero_grad()
        loss.backward()
        if talk:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= world
        optimizer.step()
        with torch.no_grad():
            seen.append((loss.item(), F.cross_entropy(model(samples), labels).item(), model[0].weight.detach().clone()))
    return seen


figures.drift(run_ranks(four_trainings, 4, False), run_ranks(four_trainings, 4, True))

# %% [markdown] id="why_questions"
# The silent ranks are happy: each learns its 128 samples by heart. But there are four different models now, and each is worse on the data of the
# others. And after step 1 their gradients are not even gradients *at the same point*: averaging the models at the end would be an average
# of four answers to four questions.
#
# - Must the ranks exchange weights, gradients or samples? What is smallest? What is enough?
# - When is the first moment at which a rank could send something?

# %% [markdown] id="idea"
# ## The idea
#
# The loss of the whole batch is the mean of the ranks' losses, when their parts are equally large. Differentiation is linear, so
#
# $$\nabla L = \frac{1}{N} \sum_{r=0}^{N-1} \nabla L_r$$
#
# If all replicas start equal and step with the same average, they stay equal for ever, to the last bit: no weights are sent after the beginning.
# Backward produces gradients from the last layer to the first. What is ready can be sent while the rest is still being computed:

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
# Write `replicate`: all ranks get the values of rank 0, in place. A model's state is more than its weights. `module.parameters()` are what an
# optimiser could train, `module.buffers()` what else belongs to a model, such as the running statistics of a batch normalisation. Frozen
# parameters belong to it too.
#
# (Why not trust to the same seed everywhere? Because one rank that loads a checkpoint, or draws one random number more, breaks the whole job
# without an error.)

# %% nbgrader={"grade_id": "replicate", "solution": true}
def replicate(module: nn.Module) -> None:
    """Overwrite this rank's parameters and buffers with those of rank 0."""
    ### BEGIN SOLUTION
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.detach(), 0)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_replicate", "grade": true, "points": 3}
lab.check("replicate")

# %% [markdown] id="average_text"
# ## 2 · The average, after backward
#
# The simple form: when backward is over, each gradient becomes the average over the ranks, in place. One all-reduce for each parameter that has a
# gradient (`.grad` of a frozen parameter is `None`).
#
# One thing to think of: in half precision (fp16) the largest number is 65,504. Eight gradients of 10,000 have a harmless average; what about
# their sum on the way there?

# %% nbgrader={"grade_id": "average", "solution": true}
def average_gradients(module: nn.Module) -> None:
    """Replace each gradient by its average over all ranks."""
    ### BEGIN SOLUTION
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_average", "grade": true, "points": 4}
lab.check("average")

# %% [markdown] id="average_after"
# This is right, and it is slow in two ways. First, the number of messages. The cell sends the same 2 MiB of gradients, cut into more and more
# all-reduces:

# %% id="show_messages" tags=["demo"]
def time_of_messages(total: int, counts: list[int]) -> dict[int, float]:
    """Seconds for `total` numbers in so many all-reduces, the median of some repeats."""
    torch.set_num_threads(1)
    found = {}
    for count in counts:
        parts = torch.zeros(total).split(total // count)
        seconds = []
        for _ in range(REPEATS + 1):
            dist.barrier()
            began = time.perf_counter()
            for part in parts:
                dist.all_reduce(part)
            seconds.append(time.perf_counter() - began)
        found[count] = median(seconds[1:])
    return found


by_count = run_ranks(time_of_messages, 2, 2**19, [1, 4, 16, 64, 256], explain=False)[0]
figures.messages(by_count)

# %% [markdown] id="buckets_text"
# Every message costs a fixed time α, however short it is (lab 10). A Llama 3.2 1B has 147 parameter tensors, of which 33 are norms of 8 kB: a
# message for each wastes most of its time in α.
#
# Second: nothing is sent while backward computes.
#
# ## 3 · Buckets
#
# So gradients travel in *buckets*: several in one message. `nbytes[i]` is the size of the gradient of parameter `i`, and parameters are in the
# order of forward. Their gradients arrive in the opposite order, roughly. Fill buckets **in the order of arrival**: a gradient goes into the
# current bucket if it still fits within `limit`, else it begins a new one. A gradient larger than `limit` is a bucket of its own.

# %% nbgrader={"grade_id": "buckets", "solution": true}
def assign_buckets(nbytes: list[int], limit: int) -> list[list[int]]:
    """The parameters (numbers) of each bucket, in the order in which buckets and gradients are complete."""
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


# %% nbgrader={"grade_id": "test_buckets", "grade": true, "points": 4}
lab.check("buckets")

# %% [markdown] id="buckets_after"
# Your buckets for 24 layers, with three limits, in a *model* of the machine: 1 ms of backward for each layer, α = 1 ms for a message and 1 ms for
# 64 KiB. What is left on the right of the dashed line is waiting.

# %% id="show_buckets" tags=["demo"]
layers = [32 * KIB] * 24
figures.plans({f"limit {limit // KIB} KiB": (layers, assign_buckets(layers, limit)) for limit in (16 * KIB, 128 * KIB, 1024 * KIB)})

# %% [markdown] id="overlap_text"
# Small buckets pay α too often; a large one starts too late. Between the two there is a good size; PyTorch's default is 25 MiB, with a first
# bucket of 1 MiB. (Why is the first one smaller?)
#
# ## 4 · Communicate while backward runs
#
# PyTorch calls `parameter.register_post_accumulate_grad_hook(function)`'s function, with the parameter as argument, when its `.grad` is complete. In
# it you can *start* an all-reduce, `dist.all_reduce(flat, async_op=True)`. It returns a *work* at once, and backward goes on. `work.wait()`
# comes later, in `finish()`.
#
# Complete the class. Its rules:
#
# - **One all-reduce for each bucket**, of a flat tensor with all its gradients. It starts in the hook of the gradient that completes the bucket.
# - **Strictly in the order of `self.buckets`**, on every rank. A bucket that is complete too early waits for those before it. (The all-reduces of the
#   ranks find each other by their order alone. If rank 0 starts with the bucket of layer 3 and rank 1 with that of layer 2, layer 3 is added to
#   layer 2, and nobody is told.)
# - `finish()` comes after every backward pass. It starts what has not been started: a parameter that this rank **did not use** has no gradient, and
#   counts as zeros. It waits for everything, puts the averages into `.grad`, and makes the object ready for the next pass.
# - While `self.sync` is False (inside `no_sync`), hooks do nothing: gradients add up on this rank.
#
# All parameters have the same dtype. Frozen ones take no part.

# %% nbgrader={"grade_id": "overlap", "solution": true}
class DataParallel(nn.Module):
    """`module` with gradients that are averaged over all ranks while backward runs; call `finish()` after backward."""

    def __init__(self, module: nn.Module, bucket_bytes: int = 1024 * KIB) -> None:
        super().__init__()
        replicate(module)
        self.module, self.sync = module, True
        self.trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.buckets = assign_buckets([parameter.nbytes for parameter in self.trained], bucket_bytes)
        ### BEGIN SOLUTION
        self.arrived, self.works = set(), []
        for i, parameter in enumerate(self.trained):
            parameter.register_post_accumulate_grad_hook(lambda _, i=i: self.on_gradient(i))
        ### END SOLUTION

    def forward(self, *inputs):
        return self.module(*inputs)

    @contextlib.contextmanager
    def no_sync(self):
        """Backward passes inside communicate nothing."""
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
        """After backward: all gradients are averages over the ranks."""
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


# %% nbgrader={"grade_id": "test_overlap", "grade": true, "points": 10}
lab.check("overlap")

# %% [markdown] id="overlap_after"
# Does it overlap? On a GPU the processor is free while kernels run. Here both ranks compute on the same few cores, so we let the layers of the next
# cell *sleep* in backward instead of computing, 2 ms each. Then every millisecond beyond the sleep is communication that did not hide.

# %% id="run_overlap" tags=["demo"]
class Sleeping(torch.autograd.Function):
    """Passes on what it gets; its backward takes 2 ms, in which the processor is free."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.002)
        return grad


class SlowNet(nn.Module):
    """24 layers of 64 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128, bias=False) for _ in range(24))

    def forward(self, x):
        for layer in self.layers:
            x = Sleeping.apply(torch.tanh(layer(x)))
        return x


def waiting_time(limit: int | None) -> float:
    """Seconds of backward and finish beyond the same without communication; None: one all-reduce a parameter, after backward."""
    torch.set_num_threads(1)
    net, x = SlowNet(), torch.randn(4, 128)
    model = DataParallel(net, limit) if limit else net
    seconds = {True: [], False: []}
    for repeat in range(2 * REPEATS + 2):
        talk = repeat % 2 == 0
        net.zero_grad()
        loss = model(x).square().mean()
        dist.barrier()
        began = time.perf_counter()
        if limit is None:
            loss.backward()
            if talk:
                average_gradients(net)
        elif talk:
            loss.backward()
            model.finish()
        else:
            with model.no_sync():
                loss.backward()
        if repeat > 1:
            seconds[talk].append(time.perf_counter() - began)
    return median(seconds[True]) - median(seconds[False])


LIMITS = [64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, 1024 * KIB, 2048 * KIB]
after_backward = run_ranks(waiting_time, 2, None, explain=False)[0]
waiting = {limit: run_ranks(waiting_time, 2, limit, explain=False)[0] for limit in LIMITS}
figures.waiting(waiting, after_backward)

# %% [markdown] id="overlap_lesson"
# The rightmost point has one bucket for everything: it is sent when backward is over, so nothing hides. The other end has one bucket for each layer: as
# much as possible hides behind the sleep, but there are 24 times α. Compare with your plans above.
#
# ## 5 · Gradient accumulation
#
# Memory is short, so a batch is cut into micro-batches whose gradients add up in `.grad`. Averages of every partial sum would be a waste: only the
# last backward pass has to talk.
#
# `losses` are functions without arguments, one for each micro-batch. Each runs forward and returns the mean loss of its samples; all have
# the same number of samples. Afterwards `.grad` is the gradient of the mean over all micro-batches of all ranks.

# %% nbgrader={"grade_id": "accumulate", "solution": true}
def accumulate(model: DataParallel, losses: list) -> None:
    """Backward of all micro-batches, communicating once; `.grad` is then that of the mean over all micro-batches and ranks."""
    ### BEGIN SOLUTION
    with model.no_sync():
        for loss in losses[:-1]:
            (loss() / len(losses)).backward()
    (losses[-1]() / len(losses)).backward()
    model.finish()
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_accumulate", "grade": true, "points": 4}
lab.check("accumulate")

# %% [markdown] id="accumulate_after"
# The tracer counts what passes. With and without accumulation, the same 8 micro-batches:

# %% id="show_accumulate" tags=["demo"]
def eight_micro_batches(at_once: bool) -> None:
    model = DataParallel(make_model())
    losses = [lambda x=x, y=y: F.cross_entropy(model(x), y) for x, y in zip(samples[:128].split(16), labels[:128].split(16))]
    for group in [losses] if at_once else [[loss] for loss in losses]:
        accumulate(model, group)


for name, at_once in {"one after the other": False, "accumulated": True}.items():
    trace = run_ranks(eight_micro_batches, 2, at_once, trace=True).trace
    print(f"{name:22} {trace.count('all_reduce', rank=0):2} all-reduces, {trace.bytes('all_reduce', rank=0) / KIB:6.1f} KiB a rank")

# %% [markdown] id="sampler_text"
# ## 6 · Whose samples?
#
# Each epoch, every sample should be seen once, by one rank. Write the *sampler*: the samples (numbers) of this rank in this epoch.
#
# - All ranks must do the same number of steps, or the others wait for ever. So every rank gets the same number of samples: when `length` is not
#   divisible, repeat a few (fewer than `world` in total).
# - A new order in every epoch, from `seed` and `epoch` alone: every rank computes the *same* permutation and takes its share, without a message.
# - Use a generator of your own (`torch.Generator().manual_seed(...)`). `torch.manual_seed` would change the random numbers of everybody else:
#   dropout, augmentation.

# %% nbgrader={"grade_id": "sampler", "solution": true}
def rank_samples(length: int, rank: int, world: int, epoch: int, seed: int = 0) -> list[int]:
    """The samples of this rank in this epoch, of 0 ... length - 1, in random order."""
    ### BEGIN SOLUTION
    order = torch.randperm(length, generator=torch.Generator().manual_seed(1_000_003 * seed + epoch)).tolist()
    each = -(-length // world)
    while len(order) < each * world:
        order += order[: each * world - len(order)]
    return order[rank::world]
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_sampler", "grade": true, "points": 5}
lab.check("sampler")

# %% id="show_sampler" tags=["demo"]
figures.shares([[rank_samples(22, rank, 4, epoch) for rank in range(4)] for epoch in range(3)], length=22)

# %% [markdown] id="metrics_text"
# The picture shows who sees which sample in three epochs; a double ring marks the repeated ones. In *training* a repeated sample does no harm. In
# *evaluation* it counts twice: evaluate with ranks of unequal size, and write the metric for it.
#
# ## 7 · A metric over all ranks
#
# Accuracy over all ranks' samples. Ranks may have unequal numbers of samples, and one may have none. The mean of the ranks' accuracies would give a
# sample of a small rank more weight. **One all-reduce** of two numbers is enough.

# %% nbgrader={"grade_id": "metrics", "solution": true}
def global_accuracy(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """The share of samples, of all ranks, whose largest logit is that of the label. logits: (samples, classes); labels: (samples,) int64."""
    ### BEGIN SOLUTION
    counts = torch.tensor([(logits.argmax(1) == labels).sum(), len(labels)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_metrics", "grade": true, "points": 3}
lab.check("metrics")

# %% [markdown] id="moments_text"
# ## 8 · Batch normalisation over all ranks
#
# Batch normalisation subtracts the mean of each channel over the batch and divides by its standard deviation. With two samples a GPU (detection,
# segmentation, 3-D images) these are mostly noise. `SyncBatchNorm` uses the samples of all ranks. How noisy is the standard deviation of 2
# samples, of 4, 8, ...?

# %% id="show_moments" tags=["demo"]
noise = {ranks: torch.randn(4000, 2 * ranks).std(1, correction=0) for ranks in (1, 2, 4, 8, 16, 32)}
figures.spread(noise)

# %% [markdown] id="moments_exercise"
# Write the statistics: mean and variance of each channel over all samples of all ranks. `x` is `(samples, channels)`, fp32; the number of
# samples may differ between ranks and may be 0. The variance is that of the population (divide by the number of samples).
#
# Only a few numbers per channel may travel, not the samples. The mean of the ranks' variances is not the variance (why?). And E[x²] - E[x]² is
# a trap in fp32: for a mean of 10,000 and a standard deviation of 1, E[x²] is about 100,000,001, and fp32 knows numbers of that size only in
# steps of 8.

# %% nbgrader={"grade_id": "moments", "solution": true}
def global_moments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance, each (channels,), over the samples of all ranks. x: (samples, channels)."""
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


# %% nbgrader={"grade_id": "test_moments", "grade": true, "points": 5}
lab.check("moments")

# %% [markdown] id="moments_after"
# In training, backward has to go through these statistics too: the gradient of a sample on rank 0 depends on samples of rank 1, which takes a
# second exchange. `dlo_lib/parallel/sync_batch_norm.py` shows it, with a single message for the forward (a combination of means and
# squared deviations). So the layer is not free: two blocking exchanges for each layer and step, and no overlap.
#
# ## 9 · For real
#
# Everything together: 4 ranks against one process, on the 512 samples of the beginning, with the global batch of 64. The one process takes the
# samples that the four ranks take together. What do you expect of the difference between the two curves?

# %% id="run_training" tags=["demo"]
def train_together(epochs: int) -> dict[str, list[float]]:
    """Loss of every step and accuracy after every epoch."""
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DataParallel(make_model(seed=rank), 16 * KIB)  # rank 0 decides
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
print(f"largest difference of a loss to one process:   {max(abs(a - b) for a, b in zip(together[0]['loss'], alone['loss'])):.1e}")
figures.training(together[0], alone)

# %% [markdown] id="real_lesson"
# The replicas are equal to the last bit: every rank computed the same step from the same average. The one process differs in the order of additions,
# in the last digits of fp32.
#
# ## 10 · At scale
#
# The library's DDP is yours with more care: gradients are views of the buckets (no copy back), the buckets follow the order in which gradients really
# came in the first step, parameters that no rank uses keep `None`.
#
# On a cluster it is a job, one process for each GPU. `cluster.submit` is one call for both: with `dry_run` it shows the script that SLURM would get, and
# without SLURM it runs here, with the *same options*, two processes and a small model. What the job writes is read from its metrics, not from its log.

# %% id="run_at_scale" tags=["demo"]
from dlo_lib import cluster

flags = ["--parallel", "ddp", "--batch", "4", "--accumulation", "2"]
large = ["--model", "llama-3.2-1b", "--seq", "2048", "--precision", "bf16", "--steps", "100"]
little = ["--model", "tiny", "--seq", "32", "--steps", "4", "--log-every", "2"]
script = cluster.submit("dlo_lib.train", [*large, *flags], gpus=8, site="jean-zay-a100", account="abc", dry_run=True)
print("For SLURM, on 8 GPUs:", *(line for line in script.splitlines() if line.startswith(("#SBATCH", "srun"))), sep="\n  ")
job = cluster.submit("dlo_lib.train", [*little, *flags], gpus=PROCESSES).wait()
for line in job.metrics():
    print(f"  step {line.step}: loss {line.loss:.3f}, {line.tokens_per_second:,.0f} tokens/s")

# %% [markdown] id="quiz_text"
# ## 11 · Quiz
#
# Answer with the letter, for example `{"q1": "a", ...}`. The check here says whether every question has an answer; right answers count in grading.

# %% id="show_quiz" tags=["demo"]
lab.quiz()

# %% nbgrader={"grade_id": "quiz", "solution": true}
### BEGIN SOLUTION: quiz = {"q1": "", "q2": "", "q3": "", "q4": "", "q5": ""}
quiz = {"q1": "b", "q2": "d", "q3": "a", "q4": "c", "q5": "b"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true, "points": 6}
lab.check("quiz")

# %% [markdown] id="further"
# ## Go further
#
# - Make the first bucket smaller than the others, as PyTorch does. Does the measured waiting change?
# - Note the order in which gradients arrive in the first step and cut the buckets anew. For which models does that matter?
# - Send gradients in bf16: half the bytes. What happens to the loss? (`dlo_lib/parallel/comm_hooks.py`; lab 12 goes much further.)
# - Let rank 3 have one batch less than the others and run it. Read the explanation of the dead-lock. Then read `dlo_lib/parallel/join.py`.
#
# **What comes next.** Lab 13: how large a model can each rank hold? Labs 14 and 15 stop holding everything everywhere.
#
# ## References
#
# - S. Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training* (2020), [arXiv:2006.15704](https://arxiv.org/abs/2006.15704)
# - P. Goyal et al., *Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour* (2017), [arXiv:1706.02677](https://arxiv.org/abs/1706.02677)
# - S. Ioffe, C. Szegedy, *Batch Normalization* (2015), [arXiv:1502.03167](https://arxiv.org/abs/1502.03167)
# - The course this lab follows: IDRIS, *Deep Learning Optimisé – Jean Zay* (DLO-JZ), day 3
