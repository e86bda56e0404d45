# %% [markdown] id="title"
# # 01 · One device, used well
#
# **What you will do.** Before you use many GPUs, use one of them well. You measure a training step so that the number
# can be trusted, see what a 16-bit number can and cannot hold, write the loss scaler and the master weights that make
# training in 16 bits (*précision mixte*) safe, choose the memory layout that convolutions prefer, and find the largest
# batch that a card can hold, in a few tries. At the end PyTorch's own tools do the same and pass the same checks.
#
# You should have trained a small model with PyTorch before: a loss, `backward`, and the step of an optimiser.
#
# You need no GPU. What a CPU shows, the cells show on a CPU; on a GPU the same cells use it. The core exercises and
# predictions take about 91 minutes, with the text and the demos plan an hour and three quarters. Each exercise has a check that answers
# at once; `lab.hint("name")` gives a nudge, then a pointer, then a sketch. If you are stuck,
# `lab.use_reference("name")` lets you continue without the points of that step.
#
# Words: mixed precision (*précision mixte*), loss scaling (*mise à l'échelle de la perte*), overflow
# (*dépassement*), underflow (*soupassement*), master weights (*poids maîtres*), memory layout (*disposition en mémoire*),
# bisection (*dichotomie*).

# %% id="setup"
import math
import os

import torch
import torch.nn.functional as F

from dlo_lib.grading import Lab
from dlo_lib.labkit.predictions import compared, require_numbers

STEPS = int(os.environ.get("DLO_STEPS", 60))  # of each training run below
REPEATS = int(os.environ.get("DLO_REPEATS", 15))  # of each measurement of time
LARGEST = int(os.environ.get("DLO_LARGEST", 1024))  # rows of the larger matrices
CARD = int(os.environ.get("DLO_CARD_GIB", 16)) * 2**30  # bytes of the card that a batch may fill
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCH = 64
lab = Lab(globals())

# %% [markdown] id="why_text"
# ## Why: the same step, measured three times
#
# The cell trains a small ResNet on real handwritten digits and measures each of its first steps with a clock, as
# most people do at first.

# %% id="data" tags=["demo"]
import time

import figures

from dlo_lib.data import digits
from dlo_lib.models import ResNet

torch.set_num_threads(1)  # tensors of this size are slower with more
DATA = digits().to(DEVICE)


def new_model(seed=0):
    """Return the small ResNet with the initial weights of `seed`."""
    torch.manual_seed(seed)
    return ResNet(depth=8, widths=(8, 12, 16), channels=1).to(DEVICE).train()


def batches(count, size=BATCH):
    """Return `count` batches of `size` images, the same ones in each call."""
    found, epoch = [], 0
    while len(found) < count:
        found += [batch for batch in DATA.train.batches(size, seed=0, epoch=epoch) if len(batch) == size]
        epoch += 1
    return found[:count]


def fp32_step(model, optimizer, batch):
    """Train one step in fp32; return the loss."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch.images), batch.labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


# %% id="show_why" tags=["demo"]
model = new_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
naive = []
for batch in batches(REPEATS):
    begin = time.perf_counter()
    fp32_step(model, optimizer, batch)
    naive.append(time.perf_counter() - begin)
figures.naive_times(naive)

# %% [markdown] id="why_after"
# The first step takes longer than the others: memory is allocated for the first time, libraries choose their
# algorithms, and the optimiser creates its state. A mean that contains it says little. On a GPU the same clock is
# wrong in a worse way: a call returns as soon as its work is in the **queue** of the device, so the clock measures how
# long Python took to fill the queue.

# %% [markdown] id="timed_text"
# ## 1 · A time that can be trusted
#
# **Core · 7 min · ●○○**
#
# Write `step_times`. First it runs `warmup` steps without a clock. Then it measures `repeats` steps, each by itself:
# wait until the device has finished all earlier work, read the clock, run the step, wait until the device has
# finished, read the clock.
#
# `synchronize()` waits for the device (on a GPU `torch.cuda.synchronize`; on a CPU it does nothing) and `clock()`
# returns seconds. The check gives you a simulated device with a queue, on which each mistake shows.

# %% nbgrader={"grade_id": "timed", "solution": true}
def step_times(step, synchronize, clock, warmup: int, repeats: int) -> list[float]:
    """Return the seconds of `repeats` calls of `step()`, after `warmup` unmeasured ones."""
    ### BEGIN SOLUTION
    for _ in range(warmup):
        step()
    times = []
    for _ in range(repeats):
        synchronize()
        begin = clock()
        step()
        synchronize()
        times.append(clock() - begin)
    return times
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_timed", "grade": true}
lab.check("timed")

# %% [markdown] id="predict_first_text"
# The next cell trains a new model with a new optimiser. But the **process** is warm now: the cell at the top has already
# loaded the libraries and allocated memory.
#
# **Predict.** How many times as long as the median step does the first step of the new model take, and how many times as
# long does the slowest of the steps after the warm-up take? Replace each `None` that you want to predict by a number.
# Predictions are not graded; the next cell shows them beside the measurement.

# %% id="predict_first" tags=["prediction"]
predicted_times = {"first": None, "slowest after warm-up": None}

# %% id="show_first" tags=["demo"]
require_numbers(predicted_times)
def synchronize():
    """Wait until the device has finished its work; a CPU has nothing to wait for."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def stepper(make_step, size=BATCH):
    """Return a function without arguments that trains one step with the next of some batches."""
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found, count = batches(4, size), iter(range(10**9))
    return lambda: make_step(model, optimizer, found[next(count) % len(found)])


def median(values):
    return sorted(values)[len(values) // 2]


cold = step_times(stepper(fp32_step), synchronize, time.perf_counter, 0, REPEATS)
warm = step_times(stepper(fp32_step), synchronize, time.perf_counter, 5, REPEATS)
ratios = {"first": cold[0] / median(warm), "slowest after warm-up": max(warm) / median(warm)}
print(f"median step {1e3 * median(warm):.1f} ms")
print(f"in the first figure, in a new process, the first step took {naive[0] / median(naive):.1f} times as long as the median one")
print(compared(predicted_times, ratios))
figures.ratio_bars(ratios, predicted_times)

# %% [markdown] id="first_after"
# A part of what makes a first step slow belongs to the process, not to the model: compare the printed ratio of the new process
# with yours. A warm-up is needed in every process, and again for every new shape of the tensors if a library chooses its
# algorithm by shape.
#
# On a machine that other programs use too, single steps take much longer for no reason of yours. Therefore a benchmark
# gives the **median** and the spread of many steps, or the minimum if only the work itself is of interest, and it
# compares two variants **in turns**. `dlo_lib.profiling.Chronometer` does this with named phases; lab 02 uses it.

# %% [markdown] id="limits_text"
# ## 2 · What 16 bits can hold
#
# **Core · 8 min · ●●○**
#
# A floating-point number has a sign bit, `e` **exponent bits** and `m` **mantissa bits**. Its value is
# $\pm 1.\mathrm{mantissa} \times 2^{\mathrm{field} - \mathrm{bias}}$, where the field is the integer in the exponent bits and $\mathrm{bias} = 2^{e - 1} - 1$. Two
# values of the field are special:
#
# - all bits 1: infinity and NaN, so the largest finite number has the next smaller field;
# - all bits 0: **subnormal** numbers, $0.\mathrm{mantissa} \times 2^{1 - \mathrm{bias}}$. They fill the gap to 0, and they have fewer
#   significant bits.
#
# Compute four limits from the two numbers of bits: the `largest` finite number, the `smallest_normal` positive number,
# the `smallest` positive number of all, and `eps`, the distance from 1 to the next larger number.

# %% nbgrader={"grade_id": "limits", "solution": true}
def limits(exponent_bits: int, mantissa_bits: int) -> dict[str, float]:
    """Return {"largest": ..., "smallest_normal": ..., "smallest": ..., "eps": ...} of a format."""
    ### BEGIN SOLUTION
    bias = 2 ** (exponent_bits - 1) - 1
    eps = 2.0**-mantissa_bits
    return {
        "largest": (2 - eps) * 2.0**bias,
        "smallest_normal": 2.0 ** (1 - bias),
        "smallest": eps * 2.0 ** (1 - bias),
        "eps": eps,
    }
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_limits", "grade": true}
lab.check("limits")

# %% id="show_limits" tags=["demo", "nbval-check-output"]
from dlo_lib.optim.precision import FORMATS

print(f"{'':6}{'bits e + m':>12}{'largest':>12}{'smallest normal':>17}{'smallest':>12}{'eps':>10}")
for name in ("fp32", "tf32", "fp16", "bf16", "e5m2"):
    entry = FORMATS[name]
    found = limits(entry.exponent_bits, entry.mantissa_bits)
    bits = f"{entry.exponent_bits} + {entry.mantissa_bits}"
    print(
        f"{name:6}{bits:>12}{found['largest']:12.3g}{found['smallest_normal']:17.3g}"
        f"{found['smallest']:12.3g}{found['eps']:10.2g}"
    )

# %% [markdown] id="limits_after"
# **fp16** has 11 significant bits (with the leading 1) and a small range: 65504 is its largest number. **bf16** has the
# range of fp32 and 8 significant bits. **tf32** exists only inside the matrix units of a GPU: operands stay fp32 in
# memory and lose mantissa bits on the way in. (The fp8 format E4M3 breaks the rule above: it has no infinity, and uses that
# exponent for numbers up to 448.)
#
# Which of the two limits hurts, range or resolution? Look at real gradients.
#
# **Predict.** The next cell computes the gradients of the activations of the ResNet after some steps of training. Each is
# a mean over all pixels and micro-batches, so it is small in a large run. The cell divides by 1024: that is the size for
# images with 16 times as many pixels as these digits and 64 micro-batches in a step. Which share, **in percent**, of those that are not
# 0 becomes 0 in fp16, without scaling, and if the loss was multiplied by $2^{16}$ before `backward`?

# %% id="predict_lost" tags=["prediction"]
predicted_lost = {"scale 1": None, "scale 65536": None}

# %% id="show_lost" tags=["demo"]
from dlo_lib.models.resnet import BasicBlock
from dlo_lib.optim.precision import FORMATS, plot_range

require_numbers(predicted_lost)

SHRINK = 1024



def gradients_of_activations(model, batch):
    """Return the gradients of the outputs of all blocks of the ResNet, in one vector."""
    found = []
    hooks = [
        module.register_forward_hook(lambda module, inputs, output: output.register_hook(found.append) and None)
        for module in model.modules()
        if isinstance(module, BasicBlock)
    ]
    F.cross_entropy(model(batch.images), batch.labels).backward()
    for hook in hooks:
        hook.remove()
    return torch.cat([grad.flatten() for grad in found])


model = new_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for batch in batches(STEPS):
    fp32_step(model, optimizer, batch)
(batch,) = batches(1, 256)
gradients = gradients_of_activations(model, batch) / SHRINK
gradients = gradients[gradients != 0]
lost = {f"scale {scale}": 100 * ((scale * gradients).half() == 0).double().mean().item() for scale in (1, 65536)}
overflows = (65536 * gradients).half().isinf().double().mean().item()
print(compared(predicted_lost, lost, "{:.3g} %".format))
print(f"overflow with scale 65536: {overflows:.2%} of the gradients")
plot_range({"gradients": gradients, "times 65536": 65536 * gradients}, [FORMATS["fp16"], FORMATS["bf16"]])

# %% [markdown] id="lost_after"
# Most of the gradients are below the smallest number of fp16, and the upper half of its range is empty. In bf16 none is lost. So fp16
# needs help, and the help is cheap: multiply the **loss** by a factor. By the chain rule every gradient is multiplied
# by it. Divide the gradients of the weights by the same factor before the optimiser uses them.

# %% [markdown] id="unscale_text"
# ## 3 · Loss scaling
#
# ### Back to the true gradients
#
# **Core · 6 min · ●●○**
#
# Write `unscale`: it divides the gradient of each parameter by `scale`, **in place**, and returns whether all
# gradients are finite. Frozen parameters have no gradient. `parameters` may be an iterator, as
# `model.parameters()` is: it can be read once. Divide all of them, also those after one that is not finite.

# %% nbgrader={"grade_id": "unscale", "solution": true}
@torch.no_grad()
def unscale(parameters, scale: float) -> bool:
    """Divide all gradients by `scale`, in place; return True if no value is infinite or a NaN."""
    ### BEGIN SOLUTION
    finite = True
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.div_(scale)
            finite = finite and bool(torch.isfinite(parameter.grad).all())
    return finite
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_unscale", "grade": true}
lab.check("unscale")

# %% [markdown] id="scaler_text"
# ### The largest factor that works
#
# **Core · 15 min · ●●●**
#
# Which factor? The larger it is, the fewer gradients are lost, until one **overflows** to infinity. An overflow is easy
# to see, so the scaler searches: it starts high, and an overflow costs one step.
#
# - `scale(loss)` returns the loss times the present scale.
# - `unscale_(optimizer)` divides the gradients of its parameters and remembers whether they are finite.
# - `step(optimizer)` calls `unscale_` unless it was called since the last `update`, and then `optimizer.step()` if all
#   gradients are finite. Otherwise it **skips** the step: no weight and no momentum changes.
# - `update()` chooses the next scale. After a skipped step: times `backoff_factor`, and the count of good steps begins
#   again. After `growth_interval` good steps in succession: times `growth_factor`, and the count begins again.
# - `get_scale()` returns the present scale. `state_dict()` and `load_state_dict(state)` hold what a resumed run needs:
#   scale and count, as numbers or tensors that `torch.save` can write.
#
# The names and the rule are those of `torch.amp.GradScaler`, which the last section compares with yours. Do not inherit
# from it, and keep none inside. Your `unscale` is there to be used.

# %% nbgrader={"grade_id": "scaler", "solution": true}
class LossScaler:
    """A dynamic loss scale for one optimiser."""

    def __init__(
        self, init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000
    ):
        ### BEGIN SOLUTION
        self._scale, self._good = init_scale, 0
        self._growth, self._backoff, self._interval = growth_factor, backoff_factor, growth_interval
        self._finite = None  # unknown until unscale_
        ### END SOLUTION

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the scale."""
        ### BEGIN SOLUTION
        return loss * self._scale
        ### END SOLUTION

    def get_scale(self) -> float:
        """Return the present scale."""
        ### BEGIN SOLUTION
        return self._scale
        ### END SOLUTION

    def unscale_(self, optimizer) -> None:
        """Divide the gradients of the optimiser's parameters by the scale."""
        ### BEGIN SOLUTION
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        self._finite = unscale(parameters, self._scale)
        ### END SOLUTION

    def step(self, optimizer) -> None:
        """Unscale unless it is done, then step unless a gradient is not finite."""
        ### BEGIN SOLUTION
        if self._finite is None:
            self.unscale_(optimizer)
        if self._finite:
            optimizer.step()
        ### END SOLUTION

    def update(self) -> None:
        """Choose the scale of the next step."""
        ### BEGIN SOLUTION
        if self._finite:
            self._good += 1
            if self._good == self._interval:
                self._scale *= self._growth
                self._good = 0
        else:
            self._scale *= self._backoff
            self._good = 0
        self._finite = None
        ### END SOLUTION

    def state_dict(self) -> dict:
        """Return the scale and the number of good steps."""
        ### BEGIN SOLUTION
        return {"scale": self._scale, "good": self._good}
        ### END SOLUTION

    def load_state_dict(self, state: dict) -> None:
        """Continue with the scale and the count of `state`."""
        ### BEGIN SOLUTION
        self._scale, self._good = state["scale"], state["good"]
        ### END SOLUTION


# %% nbgrader={"grade_id": "test_scaler", "grade": true}
lab.check("scaler")

# %% [markdown] id="predict_scale_text"
# Now watch it work. A CPU computes fp16 slowly, so the cell keeps the arithmetic in fp32 and rounds only the gradients of
# the activations to fp16 between the blocks of the ResNet, where fp16 loses them; on a GPU this is what happens inside
# of autocast. Two runs without scaling divide the loss by 1024, as above, and by 65536; your scaler gets the harder case.
#
# **Predict.** The scale starts at $2^{48}$ and doubles after 10 good steps. How many steps are skipped at the start, before
# the first good one?

# %% id="predict_scale" tags=["prediction"]
predicted_skips = {"skipped": None}

# %% id="show_scale" tags=["demo"]
require_numbers(predicted_skips)
class ThroughFP16(torch.autograd.Function):
    """The identity, whose gradient is rounded to fp16 on its way."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.half().float()


def trained_in_fp16(scaler, shrink, gradients_in_fp16=True):
    """Return the losses and the scales of a run whose loss is divided by `shrink`."""
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * shrink, momentum=0.9)
    if gradients_in_fp16:
        for block in model.blocks:
            block.register_forward_hook(lambda module, inputs, output: ThroughFP16.apply(output))
    losses, scales = [], []
    for batch in batches(STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch.images), batch.labels)
        scales.append(scaler.get_scale())
        scaler.scale(loss / shrink).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses, scales


def fixed_scale():
    """Return a scaler that stays at 1."""
    return LossScaler(1.0, growth_interval=10**9)


runs = {
    "fp32": trained_in_fp16(fixed_scale(), SHRINK, gradients_in_fp16=False),
    "fp16, loss / 1024": trained_in_fp16(fixed_scale(), SHRINK),
    "fp16, loss / 65536": trained_in_fp16(fixed_scale(), 64 * SHRINK),
    "the same, your scaler": trained_in_fp16(LossScaler(2.0**48, growth_interval=10), 64 * SHRINK),
}
scales = runs["the same, your scaler"][1]
skipped = next((step for step in range(1, len(scales)) if scales[step] >= scales[step - 1]), len(scales)) - 1
print(compared(predicted_skips, {"skipped": skipped}))
figures.scaled_runs({name: losses for name, (losses, _) in runs.items()}, scales, predicted_skips["skipped"])

# %% [markdown] id="scale_after"
# With loss / 1024 most of the gradients are lost, the share that you measured in section 2. It does no harm here, because the
# largest ones remain. With loss / 65536 nearly all become
# 0. Then only the last layer learns, whose gradient passes no block, and there is no error. The scaler gives up some steps at the start,
# then it stays near the largest factor that works, and tries a larger one again and again. bf16 needs none of
# this, because its range is that of fp32. That is why bf16 has replaced fp16 in training where the hardware has
# it (NVIDIA from Ampere on: A100, H100; not V100).

# %% [markdown] id="mixed_text"
# ## 4 · Mixed precision, the whole step
#
# **Core · 11 min · ●●○**
#
# `torch.autocast(device_type, dtype=...)` chooses the dtype of each operation: matrix products and convolutions run in
# the low precision, sums such as the loss run in fp32, and the weights stay fp32. Write the whole step, in this order:
#
# 1. clear the gradients;
# 2. forward and loss (`F.cross_entropy`) **inside** of autocast;
# 3. backward **outside** of it, of the scaled loss: each backward operation has the dtype of its forward;
# 4. clip the **true** gradients to the norm `max_norm` with `torch.nn.utils.clip_grad_norm_`: unscale them first;
# 5. the scaler's step and update.
#
# Return the loss, not scaled, as a number. With `dtype=torch.float32` autocast does nothing, and PyTorch prints a warning.

# %% nbgrader={"grade_id": "mixed", "solution": true}
def mixed_step(
    model, optimizer, scaler, images, labels, dtype: torch.dtype, max_norm: float
) -> float:
    """Train one step with autocast to `dtype`, the `scaler`, and clipping; return the loss."""
    ### BEGIN SOLUTION
    optimizer.zero_grad()
    with torch.autocast(images.device.type, dtype=dtype):
        loss = F.cross_entropy(model(images), labels)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    return loss.item()
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_mixed", "grade": true}
lab.check("mixed")

# %% [markdown] id="predict_speed_text"
# **Predict.** How many times as fast as fp32 is a matrix product in bf16 on this machine? The cell measures square
# matrices, small ones of 512 rows and large ones of 1024, with your `step_times`; the minimum counts. An A100 has 16 times the FLOP/s of its fp32
# units in bf16, 312 against 19.5 TFLOP/s; a CPU gains only if it has instructions for bf16 (AVX512-BF16, AMX).

# %% id="predict_speed" tags=["prediction"]
predicted_speed = {"small": None, "large": None}

# %% id="show_speed" tags=["demo"]
require_numbers(predicted_speed)
def seconds_of_product(rows, dtype):
    a = torch.randn(rows, rows, device=DEVICE).to(dtype)
    return min(step_times(lambda: a @ a, synchronize, time.perf_counter, 1, max(1, REPEATS // 3)))


ROWS = {"small": LARGEST // 2, "large": LARGEST}
speed = {
    name: seconds_of_product(rows, torch.float32) / seconds_of_product(rows, torch.bfloat16)
    for name, rows in ROWS.items()
}
print(f"{DEVICE.type}, {torch.backends.cpu.get_cpu_capability()}")
print(compared(predicted_speed, speed))
figures.ratio_bars(
    speed,
    predicted_speed,
    xlabel=f"matrices of {LARGEST // 2} and of {LARGEST} rows",
    ylabel="time in fp32 / time in bf16",
)

# %% [markdown] id="speed_on_gpu_text"
# Without a GPU, the next cell shows what the cell above gave on one, with larger matrices.

# %% id="speed_on_gpu" tags=["demo"]
from dlo_lib.labkit.stored_results import show_stored

show_stored("01_first_device", "show_speed")

# %% id="show_trained" tags=["demo"]
import warnings

from torch.amp import GradScaler

warnings.filterwarnings("ignore", message="In CPU autocast, but the target dtype")  # fp32: no autocast, as intended here


def trained_mixed(dtype, seed):
    """Return the losses of a run with your step. bf16 needs no scaler: a disabled one multiplies by 1."""
    model = new_model(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = GradScaler(DEVICE.type, enabled=False)
    return [mixed_step(model, optimizer, scaler, batch.images, batch.labels, dtype, 1.0) for batch in batches(STEPS)]


def last_losses(losses):
    return sum(losses[-10:]) / len(losses[-10:])


for seed in range(3):
    fp32, bf16 = (last_losses(trained_mixed(dtype, seed)) for dtype in (torch.float32, torch.bfloat16))
    print(f"seed {seed}: mean loss of the last 10 steps {fp32:.3f} in fp32, {bf16:.3f} with bf16")

# %% [markdown] id="masters_text"
# ## 5 · Master weights
#
# **Core · 8 min · ●●○**
#
# With autocast the weights are fp32 and each forward casts them. A large model may store its weights in 16 bits
# instead. Then a second limit of the format hurts: the **resolution**. The distance between bf16 numbers just above 1 is
# $2^{-7} \approx 0.008$. An update of 0.001 is rounded away, in every step, and the weight never moves.
#
# The remedy: an fp32 copy of each weight, the **master weight**, collects the updates, and the 16-bit weight is its
# rounded value. Write the step of plain gradient descent: for each weight that has a gradient, convert the gradient to
# fp32, subtract `rate` times the gradient from the master, and round the master into the weight, all in place. The
# product is computed in fp32 too.

# %% nbgrader={"grade_id": "masters", "solution": true}
@torch.no_grad()
def master_step(weights, masters, rate: float) -> None:
    """Update the fp32 `masters` with the gradients of the 16-bit `weights`.

    Then round the masters into the weights.
    """
    ### BEGIN SOLUTION
    for weight, master in zip(weights, masters):
        if weight.grad is not None:
            master.sub_(rate * weight.grad.float())
            weight.copy_(master)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_masters", "grade": true}
lab.check("masters")

# %% [markdown] id="predict_masters_text"
# **Predict.** A weight starts at 1.0 in bf16. In each of 200 steps its gradient is −1 and the rate 0.001. Where does it end
# without a master weight, and where with one?

# %% id="predict_masters" tags=["prediction"]
predicted_end = {"bf16": None, "with a master": None}

# %% id="show_masters" tags=["demo", "nbval-check-output"]
require_numbers(predicted_end)
def path_of(with_master, steps=200, rate=0.001):
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    master, path = torch.ones(1), []
    for _ in range(steps):
        path.append(weight.item())
        weight.grad = torch.full_like(weight, -1.0)
        if with_master:
            master_step([weight], [master], rate)
        else:
            with torch.no_grad():
                weight -= rate * weight.grad
    return [*path, weight.item()]


paths = {"bf16": path_of(False), "with a master": path_of(True)}
print(compared(predicted_end, {name: path[-1] for name, path in paths.items()}))
figures.weight_paths(paths, predicted_end)

# %% [markdown] id="memory_after"
# What does it cost? Per parameter, with Adam: 2 bytes for the weight, 2 for its gradient, 4 for the master and 8 for the
# two moments: 16 bytes, exactly as many as fp32 training has with 4 + 4 + 8. Mixed precision saves memory of
# **activations** and time, not memory of weights. Lab 14 divides these 16 bytes over ranks.

# %% [markdown] id="strides_text"
# ## 6 · The layout that convolutions prefer
#
# **Core · 5 min · ●○○**
#
# A batch of images is a tensor (N, C, H, W): images, channels, rows, columns. Its shape does not say in which order the
# numbers lie in memory; the **strides** do: the distance in memory, in numbers, between neighbours along each
# dimension.
#
# - `contiguous` (the default): along a row of one channel first, then row by row, channel by channel;
# - `channels_last`: all channels of one pixel lie side by side, then pixel by pixel along the row. A convolution sums over
#   the channels of a pixel, and matrix units read them in one go.
#
# Write the strides of both.

# %% nbgrader={"grade_id": "strides", "solution": true}
def strides(shape: tuple[int, int, int, int], channels_last: bool) -> tuple[int, int, int, int]:
    """Return the strides (of N, C, H, W) of a tensor of this shape."""
    ### BEGIN SOLUTION
    _, channels, height, width = shape
    if channels_last:
        return (channels * height * width, 1, width * channels, channels)
    return (channels * height * width, height * width, width, 1)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_strides", "grade": true}
lab.check("strides")

# %% [markdown] id="predict_layout_text"
# In PyTorch one argument changes the layout of a model and of its images, and shapes and results stay the same:
# `.to(memory_format=torch.channels_last)`. The cell measures a ResNet with 16, 32 and 64 channels on images of 32 × 32
# pixels, in fp32 and with bf16 autocast.
#
# **Predict.** How many times as fast is a step with `channels_last`?

# %% id="predict_layout" tags=["prediction"]
predicted_layout = {"fp32": None, "bf16": None}

# %% id="show_layout" tags=["demo"]
require_numbers(predicted_layout)
def layout_steps(memory_format, dtype):
    """Return a function that trains one step of a larger ResNet on random images of 32 × 32 pixels."""
    torch.manual_seed(0)
    model = ResNet(depth=8, widths=(16, 32, 64)).to(DEVICE, memory_format=memory_format).train()
    images = torch.randn(16, 3, 32, 32, device=DEVICE).to(memory_format=memory_format)
    labels = torch.randint(10, (16,), device=DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step():
        optimizer.zero_grad()
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=dtype == "bf16"):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    return step


LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
layout_seconds = {
    dtype: {name: min(step_times(layout_steps(each, dtype), synchronize, time.perf_counter, 1, REPEATS // 3)) for name, each in LAYOUTS.items()}
    for dtype in predicted_layout
}
gain = {dtype: found["contiguous"] / found["channels_last"] for dtype, found in layout_seconds.items()}
print(compared(predicted_layout, gain))
figures.layouts(layout_seconds, predicted_layout)

# %% [markdown] id="layout_after"
# A value below 1 means that the layout costs time here. Whether it pays depends on the library behind the convolution, the
# dtype and the number of channels, so it is measured and not assumed. On GPUs with matrix units it pays for
# convolutions in 16 bits, because their kernels want this layout and a contiguous tensor is converted in each of them.

# %% [markdown] id="line_text"
# ## 7 · How large can the batch be?
#
# ### A line
#
# **Core · 6 min · ●○○**
#
# Memory of a step has a **fixed** part (weights, gradients, optimiser state) and a part that grows with each **sample**
# (activations). So the peak is nearly a line in the batch size, and two measurements tell the rest.
#
# `measured` maps two batch sizes, in any order, to bytes. Return the largest batch whose peak, on the line through both points, is at
# most `capacity` bytes; 0 if not even one sample fits.

# %% nbgrader={"grade_id": "line", "solution": true}
def batch_on_line(measured: dict[int, float], capacity: float) -> int:
    """Return the largest batch that fits into `capacity` bytes, by the line through `measured`."""
    ### BEGIN SOLUTION
    (small, less), (large, more) = sorted(measured.items())
    per_sample = (more - less) / (large - small)
    fixed = less - per_sample * small
    return max(0, math.floor((capacity - fixed) / per_sample))
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_line", "grade": true}
lab.check("line")

# %% [markdown] id="search_text"
# ### A search
#
# **Core · 12 min · ●●○**
#
# A line is a forecast. The truth is a step that runs, or `torch.OutOfMemoryError`. Write two functions:
#
# - `fits(run, batch)` calls `run(batch)` and returns True, or False if it raises `torch.OutOfMemoryError`. Every other
#   error is a mistake in the program, also an illegal memory access, and must reach its author: do not catch it.
# - `largest_batch(fits, limit)` finds the largest batch for which `fits(batch)` is True. Each try costs a step, so
#   double from 1 until a batch fails, then halve the interval between the largest that fits and the smallest that fails
#   (**bisection**). Never try more than `limit`, the number of samples that there are. Return 0 if not even one sample
#   fits.
#
# A search by bisection needs at most $2 \log_2(\mathrm{limit}) + 2$ tries.

# %% nbgrader={"grade_id": "search", "solution": true}
def fits(run, batch: int) -> bool:
    """Return whether `run(batch)` ends without torch.OutOfMemoryError."""
    ### BEGIN SOLUTION
    try:
        run(batch)
    except torch.OutOfMemoryError:
        return False
    return True
    ### END SOLUTION


def largest_batch(fits, limit: int) -> int:
    """Return the largest batch up to `limit` for which `fits(batch)` is True; 0 without one."""
    ### BEGIN SOLUTION
    good, bad = 0, 1
    while bad <= limit and fits(bad):
        good, bad = bad, 2 * bad
    bad = min(bad, limit + 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_search", "grade": true}
lab.check("search")

# %% [markdown] id="predict_batch_text"
# The cell measures the memory of a true-size step on a laptop: a ResNet on images of 224 × 224 pixels, with
# **fake tensors**, which have a size and no data (lab 13 explains them). `on_card` raises `torch.OutOfMemoryError` if the
# peak is above the memory of the card.
#
# **Predict.** The figure of the first two measurements is printed. Which batch fits on a card of 16 GiB, in fp32 and with
# bf16 autocast?

# %% id="memory" tags=["demo"]
from itertools import accumulate

from torch._subclasses.fake_tensor import FakeTensorMode

from dlo_lib.profiling import MemoryTracker


def peak_bytes(batch, dtype=None):
    """Return the peak memory of a training step of `batch` images of 224 × 224 pixels."""
    with FakeTensorMode() as fake, MemoryTracker(fake) as tracker:
        model = ResNet(depth=8, widths=(64, 128, 256)).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # creates the momentum, which each later step holds
        optimizer.zero_grad()
        images, labels = torch.randn(batch, 3, 224, 224), torch.randint(10, (batch,))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bf16"):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    return max(accumulate(event.bytes for event in tracker.events()))


POINTS = {dtype: {batch: peak_bytes(batch, dtype) for batch in (4, 8)} for dtype in ("fp32", "bf16")}
for dtype, points in POINTS.items():
    print(dtype, ", ".join(f"batch {batch}: {nbytes / 2**30:.2f} GiB" for batch, nbytes in points.items()))

# %% id="predict_batch" tags=["prediction"]
predicted_batch = {"fp32": None, "bf16": None}

# %% id="show_batch" tags=["demo"]
require_numbers(predicted_batch)
tries = {dtype: dict(points) for dtype, points in POINTS.items()}


def on_card(batch, dtype):
    """Run the step with fake tensors, as a card of this size would."""
    tries[dtype][batch] = peak_bytes(batch, dtype)
    if tries[dtype][batch] > CARD:
        raise torch.OutOfMemoryError(f"a batch of {batch} needs {tries[dtype][batch] / 2**30:.1f} GiB")


lines = {dtype: batch_on_line(points, CARD) for dtype, points in POINTS.items()}
found_batch = {"fp32": largest_batch(lambda batch: fits(lambda size: on_card(size, "fp32"), batch), 4096)}
print(f"fp32: {found_batch['fp32']} by search, with {len(tries['fp32'])} measurements; {lines['fp32']} by the line")
# For bf16 the forecast of the line is tried: it and the next batch are two measurements.
runs_bf16 = [fits(lambda size: on_card(size, "bf16"), lines["bf16"] + more) for more in (0, 1)]
found_batch["bf16"] = lines["bf16"]
print(f"bf16: {lines['bf16']} by the line; it {'fits' if runs_bf16[0] else 'does not fit'}, {lines['bf16'] + 1} {'fits too' if runs_bf16[1] else 'does not'}")
print(compared(predicted_batch, found_batch))
figures.memory_of_batches(tries, CARD, predicted_batch)

# %% [markdown] id="throughput_text"
# ### The best batch
#
# The largest batch that fits need not be the best one. As long as the device is not busy, more samples cost hardly more
# time; once it is busy, they only take more time. The rule of the FIDLE course: the best batch is the largest size above
# which the **scaling efficiency** decreases, and that fits. (Lab 06 asks what the batch does to learning.) The cell measures
# images per second on this machine, and says whether it became busy below the largest batch that is tried.
#
# **Predict.** From which batch size on are 90 % of the highest throughput reached?

# %% id="predict_best" tags=["prediction"]
predicted_best = {"best": None}

# %% id="show_throughput" tags=["demo"]
require_numbers(predicted_best)
SIZES = [2**power for power in range(10)]
throughput = {}
for size in SIZES:
    step, repeats = stepper(fp32_step, size), max(1, REPEATS // 3)
    throughput[size] = size / min(step_times(step, synchronize, time.perf_counter, 1, repeats))
best = next(size for size in SIZES if throughput[size] >= 0.9 * max(throughput.values()))
print(compared(predicted_best, {"best": best}))
if best < SIZES[-1]:
    print(f"from a batch of {best} on, this machine is busy: larger ones add at most 11 %")
else:
    print(
        "the throughput still grows with the last doubling: "
        f"the best batch here is {best}, the largest tried, or a larger one"
    )
figures.throughput(throughput, best, predicted_best["best"])

# %% [markdown] id="monday_text"
# ## 8 · The same with what you will use on Monday
#
# `torch.amp.GradScaler` passes the check of your `LossScaler`. The table compares the whole step: your scaler against
# PyTorch's, fp32 against bf16 autocast. Each time is the minimum of several steps, measured in turns; the memory is the
# peak of the tensors of one step.

# %% id="monday_check" tags=["demo"]
import functools

lab.check("scaler", instead={"LossScaler": functools.partial(GradScaler, "cpu")})

# %% id="monday_table" tags=["demo"]
from dlo_lib.labkit.measured_step import peak_of_a_step
from dlo_lib.labkit.side_by_side import Form, lines_of, table

TORCH_SCALER = "scaler = torch.amp.GradScaler(device)"


def standard_step(model, optimizer, scaler, images, labels, dtype, max_norm):
    """The step with PyTorch's tools, as its documentation writes it."""
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(images.device.type, dtype):
        loss = F.cross_entropy(model(images), labels)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


def with_scaler(one_step, make_scaler, dtype):
    """Return a step for `stepper`, with one scaler for all of its steps."""
    scaler = make_scaler()
    return lambda model, optimizer, batch: one_step(model, optimizer, scaler, batch.images, batch.labels, dtype, 1.0)


off = functools.partial(GradScaler, DEVICE.type, enabled=False)
on = functools.partial(GradScaler, DEVICE.type)
forms = {
    "fp32": (with_scaler(standard_step, off, torch.float32), None),
    "bf16, PyTorch's, no scaler": (with_scaler(standard_step, off, torch.bfloat16), lines_of(standard_step)),
    "bf16, yours": (with_scaler(mixed_step, LossScaler, torch.bfloat16), lines_of(mixed_step, LossScaler, unscale)),
    "bf16, PyTorch's": (with_scaler(standard_step, on, torch.bfloat16), lines_of(standard_step, TORCH_SCALER)),
}
steps = {name: stepper(step) for name, (step, _) in forms.items()}
seconds = dict.fromkeys(forms, math.inf)
for _ in range(3):
    for name, step in steps.items():
        seconds[name] = min(seconds[name], *step_times(step, synchronize, time.perf_counter, 1, max(1, REPEATS // 3)))
memory = {name: peak_of_a_step(functools.partial(stepper, step)) for name, (step, _) in forms.items()}
print(table(Form(name, lines=lines, seconds=seconds[name], memory=memory[name]) for name, (_, lines) in forms.items()))

# %% [markdown] id="monday_after"
# For the largest batch, `accelerate.utils.find_executable_batch_size` halves until a step fits, and Lightning's
# `Tuner.scale_batch_size` doubles or bisects. Both start real steps on the device.

# %% [markdown] id="quiz_text"
# ## 9 · Quiz
#
# **Core · 5 min · ●○○**
#
# Answer with the letter, for example `{"q1": "a", ...}`. The check here tests whether every question has an
# answer; right answers count in grading.

# %% id="show_quiz" tags=["demo"]
lab.quiz()

# %% nbgrader={"grade_id": "quiz", "solution": true}
### BEGIN SOLUTION: quiz = {"q1": "", "q2": "", "q3": "", "q4": "", "q5": ""}
quiz = {"q1": "c", "q2": "a", "q3": "d", "q4": "b", "q5": "c"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true}
lab.check("quiz")

# %% [markdown] id="further"
# ## Go further
#
# - Replace `masters` by **stochastic rounding** (`dlo_lib.optim.precision.stochastic_round`): where does the path of
#   section 5 end, in the mean over 100 runs?
# - Repeat the speed of section 4 with `torch.set_num_threads(os.cpu_count())`. Does the ratio change?
# - `torch.set_float32_matmul_precision("high")` allows tf32 on a GPU. What does it do to the fp32 row of the last table?
# - Add `checkpointing` of the blocks to `peak_bytes` (`torch.utils.checkpoint`): how does the line change, the fixed part
#   or the part of a sample?
#
# ## References
#
# - P. Micikevicius et al., *Mixed Precision Training* (2017), [arXiv:1710.03740](https://arxiv.org/abs/1710.03740)
# - D. Kalamkar et al., *A Study of BFLOAT16 for Deep Learning Training* (2019),
#   [arXiv:1905.12322](https://arxiv.org/abs/1905.12322)
# - PyTorch: [Automatic Mixed Precision](https://docs.pytorch.org/docs/stable/amp.html),
#   [Channels Last Memory Format](https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html)
# - NVIDIA, *A100 Tensor Core GPU*, data sheet (FLOP/s of each format)
# - The course this lab follows: FIDLE, sequence 16, and IDRIS, *Deep Learning Optimisé – Jean Zay* (DLO-JZ)
