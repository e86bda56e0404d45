# %% [markdown] id="title"
# # 03 · The data pipeline
#
# **What you will do.** A model learns no faster than its data arrive, and no better than they are. You measure how long a training
# waits for its batches, choose the number of workers by a formula and a measurement, and correct two mistakes of workers that raise no error: equal
# random numbers, and samples that are read several times. Then you write mixup and CutMix for a whole batch without a loop, balance a rare class,
# scale features with streamed statistics, stop at the right epoch, and resume in the middle of one. At the end the library and PyTorch do the same in a few lines.
#
# You should have trained a small model with PyTorch before. You need no GPU and no download: the images are generated, or part of scikit-learn.
#
# The core exercises, predictions and the quiz take about 86 minutes; with the text and the demos plan 110. Two optional exercises (shards, RandAugment) take 14
# minutes more. Each exercise has a check that answers at once; `lab.hint("name")` gives a nudge, then a pointer, then a sketch. If you are stuck,
# `lab.use_reference("name")` lets you continue without the points of that step.
#
# Words: data loader (*chargeur de données*), worker (*processus de chargement*), prefetch (*préchargement*), pinned memory (*mémoire verrouillée*), data
# augmentation (*augmentation de données*), class imbalance (*déséquilibre des classes*), recall (*rappel*), feature scaling (*normalisation des variables*), data leak (*fuite de
# données*), early stopping (*arrêt précoce*), shard (*fragment*).

# %% id="setup"
import copy
import math
import os
import time
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from dlo_lib.grading import Lab
from dlo_lib.labkit.predictions import compared, require_numbers

BATCHES = int(os.environ.get("DLO_BATCHES", 12))  # of a measured loader
REPEATS = int(os.environ.get("DLO_REPEATS", 5))  # of a measured time
SEEDS = int(os.environ.get("DLO_SEEDS", 5))  # repeats of a training
EPOCHS = int(os.environ.get("DLO_EPOCHS", 60))  # of the training that overfits
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
lab = Lab(globals())

# %% [markdown] id="why_text"
# ## Why: a model that waits
#
# `Files` is a data set as many projects have it: one compressed image for each file. `__getitem__` opens the file, decodes the PNG and
# enlarges it. A parallel file system needs some milliseconds to open a file, however small it is; here a sleep of `latency` seconds stands in for
# that. A sleep of `STEP` seconds stands in for the training step of a GPU, which leaves the CPU free.

# %% id="files" tags=["demo", "read"]
import io
import warnings

from PIL import Image

from dlo_lib.data import generated

torch.set_num_threads(1)  # tensors of this size are slower with two
# more workers than cores: section 2 measures it
warnings.filterwarnings("ignore", "This DataLoader will create")
SIZE, BATCH, STEP = 96, 16, 0.025
IMAGES = generated(train=256, test=1)


def encoded(image):
    """Return an image (3, height, width) as the bytes of a PNG."""
    pixels = ((image.clamp(-2, 2) + 2) * 63).byte().permute(1, 2, 0).numpy()
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    return data.getvalue()


FILES = [encoded(image) for image in IMAGES.train.images]


class Files(Dataset):
    """Images in files: one is opened in `latency` seconds, decoded and enlarged `decodes` times."""

    def __init__(self, latency=0.0, decodes=1):
        self.latency, self.decodes = latency, decodes

    def __len__(self):
        return len(FILES)

    def __getitem__(self, index):
        time.sleep(self.latency)
        for _ in range(self.decodes):
            image = Image.open(io.BytesIO(FILES[index])).convert("RGB")
            image = image.resize((SIZE, SIZE), Image.Resampling.BICUBIC)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), IMAGES.train.labels[index]


def loader_of(dataset, workers, **options):
    """Return a DataLoader. Workers are forked, so they know what this notebook defines."""
    context = {"multiprocessing_context": "fork"} if workers else {}
    return DataLoader(dataset, **{"batch_size": BATCH} | options, num_workers=workers, **context)


images, labels = next(iter(loader_of(Files(), 0)))
mean_kib = sum(map(len, FILES)) / len(FILES) / 1024
print(
    f"a batch: {tuple(images.shape)} {images.dtype}, "
    f"{len(FILES)} files of {mean_kib:.1f} KiB on average"
)

# %% [markdown] id="waits_text"
# ## 1 · Measure the wait
#
# **Core · 6 min · ●○○**
#
# How fast a loader is does not matter as long as the model does not wait for it. So measure the **wait**: the time from the end of a step until the next batch is there.
#
# - `measure_waits(loader, step, clock)` iterates over `loader` and calls `step(batch)` for each batch. It returns two lists: the seconds that each batch was waited for,
#   and the seconds of each step. `clock()` returns the present time. The wait of the first batch begins before the iteration, so it includes the start of the workers.
# - `waiting_share(waits, steps)` is the share of the time that is waiting, in [0, 1]. Leave out the first wait and the first step, because they occur once in an epoch:
#   the sum of the other waits, divided by the sum of the other waits and steps.

# %% nbgrader={"grade_id": "waits", "solution": true}
def measure_waits(loader, step, clock=time.perf_counter) -> tuple[list[float], list[float]]:
    """Return the waits and the durations of the steps, in seconds, one of each for every batch."""
    ### BEGIN SOLUTION
    waits, steps = [], []
    before = clock()
    for batch in loader:
        arrived = clock()
        waits.append(arrived - before)
        step(batch)
        before = clock()
        steps.append(before - arrived)
    return waits, steps
    ### END SOLUTION


def waiting_share(waits: list[float], steps: list[float]) -> float:
    """Return the share of the time, without the first batch, in which the training waits."""
    ### BEGIN SOLUTION
    waited, worked = sum(waits[1:]), sum(steps[1:])
    return waited / (waited + worked)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_waits", "grade": true}
lab.check("waits")

# %% [markdown] id="show_waits_text"
# A step takes 25 ms, and a batch has 16 files of 4 ms each. The real measurement, with the loader in the process of the training (no workers):

# %% id="show_waits" tags=["demo"]
import figures


def first_batches(loader, count=None):
    """Yield the first batches of a loader."""
    for _, batch in zip(range(count or BATCHES), loader):
        yield batch


def gpu_step(batch):
    time.sleep(STEP)


LATENCY = 0.004
waits, steps = measure_waits(first_batches(loader_of(Files(LATENCY), 0)), gpu_step)
share = waiting_share(waits, steps)
print(f"Each step waits {1000 * sum(waits[1:]) / len(waits[1:]):.0f} ms for its batch and computes for {1000 * sum(steps[1:]) / len(steps[1:]):.0f} ms:")
print(f"the training waits {100 * share:.0f} % of its time. A GPU that is twice as fast would shorten it by {50 * (1 - share):.0f} % only.")
figures.waiting(waits, steps)

# %% [markdown] id="waits_after"
# On a GPU, let `step` end with `torch.cuda.synchronize()`: a call returns when the work is in the queue, and without it the computation would count as
# waiting of the next batch. The library's `profile_loader` measures the same with a stand-in for the step, and
# `Chronometer` measures the phases of a whole step (load, forward, backward, optimiser) with the synchronisation.

# %% [markdown] id="steady_text"
# ## 2 · How many workers?
#
# **Core · 4 min · ●○○**
#
# With `num_workers=W`, $W$ processes load batches while the model computes. Each worker loads whole batches, so $W$ batches are in preparation at the same time.
# Let $L$ be the seconds that one process needs for a batch, and $S$ the seconds of a step.
#
# - `steady_step(load, step, workers)`: the seconds from one step to the next, after the start. Without workers, loading and computing alternate. With
#   workers both run at the same time, a batch leaves the workers every $L/W$ seconds, and the slower one of the two decides.
# - `fewest_workers(load, step)`: the smallest number of workers, at least 1 (also if `load` is 0), with which the model does not wait. A rate that is just enough is enough.

# %% nbgrader={"grade_id": "steady", "solution": true}
def steady_step(load: float, step: float, workers: int) -> float:
    """Return the seconds from one step to the next.

    `load`: seconds of a batch in one process. `step`: seconds of a step of the model.
    """
    ### BEGIN SOLUTION
    if workers == 0:
        return load + step
    return max(step, load / workers)
    ### END SOLUTION


def fewest_workers(load: float, step: float) -> int:
    """Return the smallest number of workers, at least 1, with which no step waits."""
    ### BEGIN SOLUTION
    return max(1, math.ceil(load / step))
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_steady", "grade": true}
lab.check("steady")

# %% [markdown] id="predict_text"
# **Predict.** Two data sets, each with about the same time for a batch in one process: one *waits* for files, the other one *computes* (it decodes images). How many images per
# second does each deliver with 4 workers, on this machine? No model computes: this is the speed of the loader alone. The cell prints the speed without workers and the number of cores; then
# replace each `None` by your number. Predictions are not graded.

# %% id="alone" tags=["demo"]
def images_per_second(dataset, workers):
    """Return the speed of a loader after its first batches, over as many batches as all workers load several times."""
    waits, _ = measure_waits(first_batches(loader_of(dataset, workers, prefetch_factor=1 if workers else None)), lambda batch: None)
    start = max(1, workers)  # the first batch of each worker takes its start
    return BATCH * len(waits[start:]) / sum(waits[start:])


DECODES = 3
DATASETS = {"waits for files": Files(latency=LATENCY), "computes": Files(decodes=DECODES)}
# other programs slow down a measurement, and nothing makes it faster: the best of several counts
ALONE = {name: max(images_per_second(dataset, 0) for _ in range(min(3, REPEATS))) for name, dataset in DATASETS.items()}
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
for name, speed in ALONE.items():
    print(f"{name}: {speed:.0f} images/s in one process, {1000 * BATCH / speed:.0f} ms for a batch")
print(f"this machine has {CORES} cores for this process")

# %% id="predict_workers" tags=["prediction"]
predicted_speed = {"waits for files": None, "computes": None}

# %% id="show_workers" tags=["demo"]
require_numbers(predicted_speed)
COUNTS = (1, 2, 4)
speeds = {
    name: {0: ALONE[name]} | {workers: images_per_second(dataset, workers) for workers in COUNTS}
    for name, dataset in DATASETS.items()
}
print(compared(predicted_speed, {name: found[4] for name, found in speeds.items()}))
formula = {
    name: {workers: BATCH / steady_step(BATCH / found[0], 0.0, workers) for workers in found}
    for name, found in speeds.items()
}
figures.throughput(speeds, formula, predicted_speed, CORES)

# %% [markdown] id="workers_after"
# The formula assumes that $W$ workers are $W$ times as fast as one. This holds while they **wait**: many requests are under way at the same time. Workers that
# **compute** share the cores: beyond the number of cores (or below it, if other programs run) more workers bring nothing, and each costs memory. So the formula gives a first
# number, and a measurement decides. How many cores a GPU has differs much between the partitions of Jean Zay, from 3 to 24:

# %% id="show_cores" tags=["demo", "nbval-check-output"]
from dlo_lib.cluster.site import sites

cores = {name: site.cores_per_gpu for name, site in sites().items() if name.startswith("jean-zay")}
fewest_first = sorted(cores.items(), key=lambda item: item[1])
print("cores for each GPU: " + ", ".join(f"{name} {number}" for name, number in fewest_first))

# %% [markdown] id="enough_text"
# The next cell uses your formula for the training of section 1. Does the wait disappear?

# %% id="show_enough" tags=["demo"]
load = BATCH / ALONE["waits for files"]
enough = min(8, fewest_workers(load, STEP))  # more would only load this machine
shares = {}
for workers in (0, 1, enough):
    waits, steps = measure_waits(first_batches(loader_of(Files(LATENCY), workers)), gpu_step)
    share = shares[workers] = waiting_share(waits, steps)
    period = 1000 * (sum(waits[1:]) + sum(steps[1:])) / len(steps[1:])
    by_formula = 1000 * steady_step(load, STEP, workers)
    print(
        f"{workers} workers: a step every {period:.0f} ms (formula {by_formula:.0f} ms), "
        f"it waits {100 * share:.0f} % of its time; first batch after {1000 * waits[0]:.0f} ms"
    )

# %% [markdown] id="options_text"
# Three more options of the `DataLoader`, each with its measurement:
#
# - `prefetch_factor` (2 by default): each worker prepares this number of batches in advance. It does not make loading faster. It hides **uneven** loading: a queue of ready
#   batches covers the time of a slow one (in the cell, every sixth batch takes as long as five steps). It costs memory: workers × factor batches.
# - `persistent_workers=True` keeps the workers between epochs. Without it every epoch starts new processes and fills the queue again.
# - `pin_memory=True` copies each batch into **pinned** (page-locked) memory. The GPU reads it directly, without an extra copy by the driver, and only then can
#   `batch.to(device, non_blocking=True)` run while the CPU continues. Without a GPU it has no use; the cell measures it where there is one.
#
# `multiprocessing_context` says how a worker starts. A **forked** worker inherits the data set and the classes of the notebook; the labs fork on every Python. In a script,
# Python 3.14 starts workers by *forkserver*: each one imports the script and receives the data set by pickle. So define the classes at the top level of a file, and start the
# training below `if __name__ == "__main__":`.

# %% id="show_options" tags=["demo"]
class Uneven(Dataset):
    """Whole batches; every sixth one takes as long as five steps, the others 0.6 steps."""

    def __len__(self):
        return 3 * BATCHES

    def __getitem__(self, number):
        time.sleep(STEP * (5 if number % 6 == 5 else 0.6))
        return number


uneven = {}
for factor in (1, 4):
    waits, steps = measure_waits(loader_of(Uneven(), 2, batch_size=None, prefetch_factor=factor), gpu_step)
    uneven[f"prefetch_factor={factor}"] = waits[1:]
    print(f"prefetch_factor={factor}: the training waits {100 * waiting_share(waits, steps):.0f} % of its time")

for persistent in (False, True):
    loader, firsts = loader_of(Files(LATENCY), 2, persistent_workers=persistent, sampler=range(4 * BATCH)), []
    for _ in range(3):
        waits, _ = measure_waits(loader, lambda batch: None)
        firsts.append(f"{1000 * waits[0]:.0f}")
    print(f"persistent_workers={persistent}: the first batch of epochs 1 to 3 takes {', '.join(firsts)} ms")
    del loader

if torch.cuda.is_available():
    for pinned in (False, True):
        host, times = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=pinned), []
        for _ in range(REPEATS):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            host.to("cuda", non_blocking=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        print(f"{'pinned' if pinned else 'pageable'} memory: {64 / 1024 / min(times):.1f} GiB/s to the GPU")
else:
    print("pin_memory: not measured, because this machine has no GPU")
figures.prefetched(uneven)

# %% [markdown] id="seed_text"
# ## 3 · Workers that draw the same numbers
#
# **Core · 7 min · ●●○**
#
# An augmentation draws random numbers in `__getitem__`, so in a worker. A worker begins as a **copy** of the process, with a copy of each random generator. This
# data set returns the number that it draws; three workers read it in two epochs:

# %% id="show_same" tags=["demo"]
class Drawing(Dataset):
    """Returns random numbers instead of images: those of a generator in the data set, or of NumPy's global one."""

    def __init__(self, own):
        self.own, self.rng = own, np.random.default_rng(0)

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return (self.rng.random() if self.own else np.random.random()), get_worker_info().id


def drawn_by_workers(own, worker_init_fn=None):
    """Return the numbers of three workers in two epochs."""
    loader = loader_of(Drawing(own), 3, batch_size=1, worker_init_fn=worker_init_fn)
    return [[round(float(value), 3) for value, _ in loader] for _ in range(2)]


for name, own in (("a generator in the data set", True), ("numpy.random, the global one", False)):
    for epoch, values in enumerate(drawn_by_workers(own)):
        print(f"{name}, epoch {epoch}: {values}")

# %% [markdown] id="seed_task"
# Three workers draw the same number, in every epoch again: a third of the variety that was paid for, and no error. For the *global* generators
# of Python, NumPy and PyTorch the `DataLoader` sets a seed in each worker (for NumPy since PyTorch 1.9; before, the second line would look like the first). It cannot know
# generators that your data set holds, as NumPy recommends.
#
# Write `seed_worker`, which runs in each worker at its start (`worker_init_fn`). `get_worker_info()` has what you need: `.dataset`, the worker's copy of the data set, and
# `.seed`, an integer that differs from worker to worker and from epoch to epoch. Replace `dataset.rng` by a new `np.random.default_rng(...)`,
# a `Generator` (`RandomState` is the old interface of NumPy).
#
# - The numbers differ between workers and between epochs.
# - They differ between **ranks** too. All ranks usually call `torch.manual_seed` with the same number, and then `.seed` is the same on every rank. It is *base + worker*, so
#   `seed + rank` gives worker 1 of rank 0 and worker 0 of rank 1 the same numbers, and `seed + 10 * rank` those of worker 10. `default_rng` accepts a list of integers and mixes them well.
# - The same seed gives the same numbers, so that a run can be repeated.

# %% nbgrader={"grade_id": "seed_worker", "solution": true}
def seed_worker(worker_id: int, rank: int = 0) -> None:
    """Give the data set of this worker a new generator: `dataset.rng`, a NumPy Generator."""
    ### BEGIN SOLUTION
    info = get_worker_info()
    info.dataset.rng = np.random.default_rng([info.seed, rank])
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_seed_worker", "grade": true}
lab.check("seed_worker")

# %% id="show_seeded" tags=["demo"]
torch.manual_seed(0)
for epoch, values in enumerate(drawn_by_workers(True, seed_worker)):
    print(f"rank 0, epoch {epoch}: {values}")
torch.manual_seed(0)  # as every rank does
print(f"rank 1, epoch 0: {drawn_by_workers(True, partial(seed_worker, rank=1))[0]}")

# %% [markdown] id="split_text"
# ## 4 · A stream that is read several times
#
# **Core · 8 min · ●●○**
#
# A map-style data set is asked for indices, and the sampler gives each index to one worker. An `IterableDataset` is a stream: every worker iterates over its own copy, and so
# does every rank. If the data set does not divide itself, each sample arrives as often as there are workers, times ranks:

# %% id="show_copies" tags=["demo", "nbval-check-output"]
class WholeStream(IterableDataset):
    def __iter__(self):
        return iter(range(6))


print("2 workers:", [int(item) for item in loader_of(WholeStream(), 2, batch_size=None)])

# %% [markdown] id="split_task"
# Write `SplitStream`, which yields only the items of its worker on its rank.
#
# - Together, all workers of all ranks yield each item **at most once**.
# - Every rank yields the same number of items, `len(items) // world`; the items that are left over are dropped. A rank with one batch more would wait forever in its
#   all-reduce, because the others have finished.
# - The numbers of items of two workers of a rank differ by at most one.
# - `get_worker_info()` is None if there are no workers; then the data set yields all items of its rank. It has `.id` and `.num_workers` otherwise.

# %% nbgrader={"grade_id": "split", "solution": true}
class SplitStream(IterableDataset):
    def __init__(self, items: list, rank: int = 0, world: int = 1):
        ### BEGIN SOLUTION
        self.items, self.rank, self.world = items, rank, world
        ### END SOLUTION

    def __iter__(self):
        """Yield the items of this worker."""
        ### BEGIN SOLUTION
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        end = len(self.items) // self.world * self.world
        own = range(self.rank, end, self.world)
        for place in own[worker::workers]:
            yield self.items[place]
        ### END SOLUTION


# %% nbgrader={"grade_id": "test_split", "grade": true}
lab.check("split")

# %% [markdown] id="shards_show_text"
# For millions of images, a stream is more than a matter of style. Opening a file takes the time of the file system, again and again; a **shard** is a large file with many
# samples, which is opened once and read from start to end. The usual formats are tar files (WebDataset) and Parquet (Hugging Face). The library writes and reads both; two ranks with two workers
# each read six tar files:

# %% id="show_shards" tags=["demo", "nbval-check-output"]
import tempfile

from dlo_lib.data import ShardedImages, write_shards

folder = tempfile.TemporaryDirectory(prefix="lab03-shards-")  # deleted when the kernel ends
pixels = ((IMAGES.train.images.clamp(-2, 2) + 2) * 63).byte()
files = write_shards(pixels, torch.arange(len(pixels)), folder.name, samples=48)
print(", ".join(file.name for file in files), f"of {files[0].stat().st_size / 1024:.0f} KiB")
found = []
for rank in range(2):
    shards = ShardedImages(folder.name, rank, world_size=2, seed=1)
    found += [int(label) for image, label in loader_of(shards, 2, batch_size=None)]
print(f"{len(pixels)} samples written, {len(found)} read by 2 ranks with 2 workers each, {len(set(found))} of them different")
print(f"files opened in an epoch: {len(FILES)} without shards, {len(files) + 3} at most with them")

# %% [markdown] id="mixup_text"
# ## 5 · mixup: labels between two classes
#
# **Core · 6 min · ●●○**
#
# More variety from the same images: **mixup** averages each image with another one of the batch, its *partner*, and averages the labels in the same way. The model learns
# to change its prediction smoothly between two images. Each image i has its own share `lam[i]` of itself:
#
# $$\tilde x_i = \lambda_i\, x_i + (1 - \lambda_i)\, x_{p(i)}, \qquad \tilde y_i = \lambda_i\, \text{onehot}(y_i) + (1 - \lambda_i)\, \text{onehot}(y_{p(i)})$$
#
# Many implementations use one $\lambda$ for a whole batch. With one $\lambda$ for each image the gradient has less noise, and on the batch it costs the same. Write both functions **without a loop over the images**.
# The check counts the operations on tensors: their number must not grow with the batch.
#
# - `soft_targets(labels, partner, share, classes)`: the labels as probabilities, (batch, classes), in the dtype of `share`. Each row adds up to 1, also if an image and its partner are of one class. `F.cross_entropy` accepts them.
# - `mixup(images, labels, partner, lam, classes)`: the mixed images, of the shape and dtype of `images` (`lam` has the same dtype), and their targets. Do not change the arguments.

# %% nbgrader={"grade_id": "mixup", "solution": true}
def soft_targets(
    labels: torch.Tensor, partner: torch.Tensor, share: torch.Tensor, classes: int
) -> torch.Tensor:
    """labels and partner (B) int64, share (B) of the own label -> probabilities (B, classes)."""
    ### BEGIN SOLUTION
    own = F.one_hot(labels, classes).to(share.dtype)
    return torch.lerp(own[partner], own, share[:, None])
    ### END SOLUTION


def mixup(
    images: torch.Tensor,
    labels: torch.Tensor,
    partner: torch.Tensor,
    lam: torch.Tensor,
    classes: int,
):
    """images (B, C, H, W), labels, partner, lam (B) -> mixed images, targets (B, classes)."""
    ### BEGIN SOLUTION
    mixed = torch.lerp(images[partner], images, lam[:, None, None, None])
    return mixed, soft_targets(labels, partner, lam, classes)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_mixup", "grade": true}
lab.check("mixup")

# %% [markdown] id="cutmix_text"
# ## 6 · CutMix: a box for each image
#
# **Core · 11 min · ●●●**
#
# **CutMix** replaces a rectangle of each image by the same rectangle of its partner. The rectangle has the share $1 - \lambda$ of the area and a random centre. `centres` (B, 2) holds
# the centre of each image as (y, x), as fractions of the height and the width. Along each axis, with `size` pixels:
#
# $$\text{first} = \text{round}\left(c \cdot \text{size} - \frac{1}{2} \sqrt{1 - \lambda}\cdot \text{size}\right), \qquad \text{last} = \text{round}\left(c \cdot \text{size} + \frac{1}{2} \sqrt{1 - \lambda}\cdot \text{size}\right)$$
#
# The edges are rounded to the nearest pixel (`torch.round`; `.int()` and `torch.floor` round down). The box has the pixels from `first` to `last - 1`, as far as they lie in the image. The border cuts it off, so it is often **smaller than** $1 - \lambda$. The weight of the own label is the share of the
# pixels that the image really keeps, not $\lambda$.
#
# Each image has its own box, and slices cannot differ from image to image. Compare positions instead: `torch.arange(size)` against `first[:, None]` gives one row of True and False for each
# image. The rows of both axes give a mask (B, H, W), and `torch.where` chooses. (No index with a mask: the size of its result depends on the values, and a GPU would have to wait for it.)
# Use `soft_targets`. The images keep their dtype, which may be uint8; the targets have that of `lam`. Do not change the arguments.

# %% nbgrader={"grade_id": "cutmix", "solution": true}
def cutmix(
    images: torch.Tensor,
    labels: torch.Tensor,
    partner: torch.Tensor,
    lam: torch.Tensor,
    centres: torch.Tensor,
    classes: int,
):
    """images (B, C, H, W), labels, partner, lam (B), centres (B, 2) -> the same as mixup."""
    ### BEGIN SOLUTION
    side, inside = (1 - lam).sqrt(), []
    for axis, size in enumerate(images.shape[-2:]):
        centre, half = centres[:, axis] * size, side * size / 2
        first, last = (centre - half).round(), (centre + half).round()
        position = torch.arange(size, device=images.device)
        inside.append((position >= first[:, None]) & (position < last[:, None]))
    box = inside[0][:, :, None] & inside[1][:, None, :]
    kept = 1 - box.to(lam.dtype).mean((1, 2))
    mixed = torch.where(box[:, None], images[partner], images)
    return mixed, soft_targets(labels, partner, kept, classes)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_cutmix", "grade": true}
lab.check("cutmix")

# %% [markdown] id="show_mixed_text"
# The same six digits, unchanged and mixed. Below each image are its labels with their weights, its own one first; the frame is the box of CutMix.

# %% id="show_mixed" tags=["demo"]
from dlo_lib.data import digits

DIGITS = digits()


def random_pairs(images, labels, alpha, seed):
    """Return a batch with partners, shares and centres, as arguments of `cutmix` without the classes."""
    generator = torch.Generator().manual_seed(seed)
    lam = torch.from_numpy(np.random.default_rng(seed).beta(alpha, alpha, len(images))).float()
    return images, labels, torch.randperm(len(images), generator=generator), lam, torch.rand(len(images), 2, generator=generator)


images, labels, partner, lam, centres = random_pairs(DIGITS.train.images[:6], DIGITS.train.labels[:6], 1.0, 3)
figures.mixed(
    {"original": (images, F.one_hot(labels, 10).float()), "mixup": mixup(images, labels, partner, lam, 10), "CutMix": cutmix(images, labels, partner, lam, centres, 10)},
    labels,
    {"CutMix": figures.boxes(lam, centres, *images.shape[-2:])},
)

# %% [markdown] id="loop_text"
# Was the effort worth it? The cell compares your CutMix with a loop over the images, which does the same with slices. **Predict** how many times faster your form is, for 256 images
# of 8 × 8 pixels (digits) and for 256 of 32 × 32 (the size of CIFAR-10).

# %% id="predict_loop" tags=["prediction"]
predicted_gain = {"256 of 8 x 8": None, "256 of 32 x 32": None}

# %% id="show_loop" tags=["demo"]
require_numbers(predicted_gain)
def cutmix_loop(images, labels, partner, lam, centres, classes):
    """CutMix, image by image."""
    mixed, targets = images.clone(), torch.zeros(len(images), classes)
    height, width = images.shape[-2:]
    for i in range(len(images)):
        half = math.sqrt(1 - lam[i]) / 2
        (top, bottom), (left, right) = (
            (max(0, round(float(centre - half) * size)), min(size, round(float(centre + half) * size))) for centre, size in zip(centres[i], (height, width))
        )
        mixed[i, :, top:bottom, left:right] = images[partner[i], :, top:bottom, left:right]
        kept = 1 - (bottom - top) * (right - left) / (height * width)
        targets[i, labels[i]] += kept
        targets[i, labels[partner[i]]] += 1 - kept
    return mixed, targets


def fastest(function, *args):
    """Return the shortest of REPEATS times, in seconds of the processor, after one call that does not count."""
    times = []
    for _ in range(REPEATS + 1):
        begin = time.process_time()
        function(*args)
        times.append(time.process_time() - begin)
    return min(times[1:])


cases = {"8 x 8": DIGITS.train.images, "32 x 32": IMAGES.train.images}
loop_times, batch_times = ({name: {} for name in cases} for _ in range(2))
for name, images in cases.items():
    for count in (16, 64, 256):
        case = (*random_pairs(images[:count], torch.arange(count) % 10, 1.0, 0), 10)
        same = all(torch.allclose(one, other) for one, other in zip(cutmix(*case), cutmix_loop(*case)))
        loop_times[name][count], batch_times[name][count] = fastest(cutmix_loop, *case), fastest(cutmix, *case)
gains = {f"256 of {name}": loop_times[name][256] / batch_times[name][256] for name in cases}
print(f"both give the same batch: {same}")
print(compared(predicted_gain, gains))
figures.loop_or_batch(loop_times, batch_times)

# %% [markdown] id="loop_after"
# The loop pays for each **image**: about twenty calls of PyTorch, each of some microseconds, whatever the size. The batch form pays for the calls once, and then for each **pixel**. With small images
# the calls are nearly everything, and the batch form is more than 20 times as fast. With 32 × 32 × 3 pixels on one thread of a CPU, most of its time is memory: it writes
# every pixel of the partners, also those outside the boxes, which the loop does not touch. A GPU moves memory a hundred times faster and starts a call no faster, so there the batch form wins at every size.

# %% [markdown] id="weights_text"
# ## 7 · A rare class
#
# **Core · 4 min · ●○○**
#
# One faulty part in a hundred, one ill patient in a thousand: a model that never predicts the rare class is right nearly always. Its accuracy hides it; the **recall** of the class shows it: the share of
# the samples *of this class* that the model finds. (The precision is the other question: which share of its predictions of the class is right?)
#
# A weighted sampler draws samples with replacement, each with a probability in proportion to its weight, so that all classes are drawn equally often.
#
# - `sample_weights(labels)`: one weight for each **sample**, (n,) float64, so that the weights of every class that occurs have the same sum, and samples of one class are equal. Only ratios count.
# - `recall(predicted, labels, label)`: a float in [0, 1]. The class occurs in `labels`.

# %% nbgrader={"grade_id": "weights", "solution": true}
def sample_weights(labels: torch.Tensor) -> torch.Tensor:
    """labels (n) int64 -> weights (n) float64."""
    ### BEGIN SOLUTION
    return 1 / labels.bincount()[labels].double()
    ### END SOLUTION


def recall(predicted: torch.Tensor, labels: torch.Tensor, label: int) -> float:
    """predicted and labels (n) int64 -> the share of the samples of this class that are found."""
    ### BEGIN SOLUTION
    return (predicted[labels == label] == label).double().mean().item()
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_weights", "grade": true}
lab.check("weights")

# %% [markdown] id="rare_text"
# The digits, with only 6 of the training images of class 8. A small network is trained with both samplers, several times. **Predict** the recall of class 8 in percent.

# %% id="predict_recall" tags=["prediction"]
predicted_recall = {"as they come": None, "weighted": None}

# %% id="show_rare" tags=["demo"]
from statistics import mean

from torch.utils.data import RandomSampler, TensorDataset, WeightedRandomSampler

require_numbers(predicted_recall)

RARE, LEFT = 8, 6
train, test = DIGITS.train, DIGITS.test
eights = (train.labels == RARE).nonzero().flatten()
kept = torch.ones(len(train), dtype=torch.bool)
kept[eights[LEFT:]] = False
imbalanced = TensorDataset(train.images[kept].flatten(1), train.labels[kept])


def trained(dataset, sampler, seed, epochs=4):
    """Train a small network; return the classes that it predicts for the test images."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(epochs):
        for indices in torch.tensor(list(sampler)).split(32):
            optimizer.zero_grad()
            F.cross_entropy(model(dataset.tensors[0][indices]), dataset.tensors[1][indices]).backward()
            optimizer.step()
    return model(test.images.flatten(1)).argmax(-1)


weights = sample_weights(imbalanced.tensors[1])
samplers = {"as they come": RandomSampler(imbalanced), "weighted": WeightedRandomSampler(weights, len(imbalanced))}
results = {name: [] for name in samplers}
for seed in range(SEEDS):
    for name, sampler in samplers.items():
        predicted = trained(imbalanced, sampler, seed)
        precision = (test.labels[predicted == RARE] == RARE).double().mean().item() if (predicted == RARE).any() else math.nan
        results[name].append({"recall": recall(predicted, test.labels, RARE), "accuracy": (predicted == test.labels).double().mean().item(), "precision": precision})
print(compared(predicted_recall, {name: 100 * mean(run["recall"] for run in runs) for name, runs in results.items()}))
drawn = torch.tensor(list(samplers["weighted"]))
print(f"an epoch of the weighted sampler: {len(drawn)} draws, {len(drawn.unique())} of {len(imbalanced)} images, each of the {LEFT} rare ones {(imbalanced.tensors[1][drawn] == RARE).sum() / LEFT:.0f} times")
figures.rare(results, RARE)

# %% [markdown] id="rare_after"
# Weighted sampling raises the recall, because the gradient of the rare class is no longer lost among the others. It does not create information: the same few images are repeated, so augment them. And as it draws with replacement, it leaves
# out images of the large classes by chance. The library's `balanced_order` repeats each class in whole passes instead: all classes occur equally often, and no image twice more often than another one of its class.
# Never weight the **test** set: its accuracy would describe data in which class 8 is as frequent as the others, and not the data of the use.

# %% [markdown] id="scaling_text"
# ## 8 · Feature scaling, from a stream
#
# **Core · 11 min · ●●○**
#
# Inputs with mean 0 and standard deviation 1 in every feature make the loss equally steep in all directions. The statistics come from the **training data only**, and from all of them; a data set that does not
# fit into memory arrives in chunks, on several workers or ranks. So statistics must be *mergeable*. Keep three things for each part: the count $n$, the mean $m$, and $M$, the sum of the squared distances from the mean.
# For two parts $a$ and $b$, with $d = m_b - m_a$ and $n = n_a + n_b$ (Chan, Golub, LeVeque, 1979):
#
# $$m = m_a + d\,\frac{n_b}{n}, \qquad M = M_a + M_b + d^2\,\frac{n_a\,n_b}{n}$$
#
# The sum of the squares, minus $n$ times the square of the mean, is the same number on paper. If the mean is large, both terms are nearly equal, and their difference loses all its digits.
#
# - `statistics(chunk)`: chunk (rows, features) → `(n, m, M)`, an int and two tensors (features) in float64.
# - `merged(a, b)`: the statistics of both parts together.
# - `scaled(train_chunks, test)`: `test` (rows, features), scaled with the statistics of the **training** chunks: minus $m$, divided by $s = \sqrt{M/n}$. A feature that is constant in
#   the training data becomes 0; rounding may leave it an $s$ of about $10^{-16}\,|m|$, so treat $s \leq 10^{-10}\,|m|$ as constant. The result has the dtype of `test`.

# %% nbgrader={"grade_id": "scaling", "solution": true}
def statistics(chunk: torch.Tensor) -> tuple[int, torch.Tensor, torch.Tensor]:
    """chunk (rows, features) -> count, mean, and sum of squared distances from the mean.

    The last two are (features) in float64.
    """
    ### BEGIN SOLUTION
    values = chunk.double()
    mean = values.mean(0)
    return len(values), mean, (values - mean).square().sum(0)
    ### END SOLUTION


def merged(a: tuple, b: tuple) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Return the statistics of two parts together."""
    ### BEGIN SOLUTION
    count = a[0] + b[0]
    distance = b[1] - a[1]
    mean = a[1] + distance * (b[0] / count)
    squares = a[2] + b[2] + distance.square() * (a[0] * b[0] / count)
    return count, mean, squares
    ### END SOLUTION


def scaled(train_chunks: list[torch.Tensor], test: torch.Tensor) -> torch.Tensor:
    """test (rows, features) -> the same, scaled with the statistics of the training chunks."""
    ### BEGIN SOLUTION
    total = statistics(train_chunks[0])
    for chunk in train_chunks[1:]:
        total = merged(total, statistics(chunk))
    count, mean, squares = total
    std = (squares / count).sqrt()
    return torch.where(std > 1e-10 * mean.abs(), (test.double() - mean) / std, 0.0).to(test.dtype)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_scaling", "grade": true}
lab.check("scaling")

# %% [markdown] id="leak_text"
# Statistics of the test set are a **data leak**: what the model sees of an image then depends on the other images of the test. In the cell, each pixel comes in a separate unit, from 0.01 to 100. It trains a linear model without
# scaling, with the best of several learning rates, and with scaling. Then it tests the same images all together, and one class at a time. With the statistics of the training set an image has one prediction. With those of its group, its prediction depends on the other images of the group.

# %% id="show_leak" tags=["demo"]
units = 10 ** torch.empty(64).uniform_(-2, 2, generator=torch.Generator().manual_seed(0))
raw_train, raw_test = DIGITS.train.images.flatten(1) * units, DIGITS.test.images.flatten(1) * units
chunks = list(raw_train.split(200))


def linear(inputs, rate):
    """Train a linear model on all images at once, for 60 steps."""
    torch.manual_seed(0)
    net = torch.nn.Linear(64, 10)
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), DIGITS.train.labels).backward()
        optimizer.step()
    return net


def accuracy_of(net, inputs, labels=DIGITS.test.labels):
    return 100 * (net(inputs).argmax(-1) == labels).double().mean().item()


model = linear(scaled(chunks, raw_train), 0.1)
raw_best = max(accuracy_of(linear(raw_train, rate), raw_test) for rate in (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0))
groups = [raw_test[DIGITS.test.labels == label] for label in range(10)]
grouped_labels = torch.arange(10).repeat_interleave(torch.tensor([len(group) for group in groups]))
print(f"without scaling {raw_best:.0f} % at best, with scaling {accuracy_of(model, scaled(chunks, raw_test)):.0f} %")
print(f"statistics of the training set: one class at a time {accuracy_of(model, torch.cat([scaled(chunks, group) for group in groups]), grouped_labels):.0f} %")
print(f"statistics of the test set:     all together {accuracy_of(model, scaled([raw_test], raw_test)):.0f} %, one class at a time {accuracy_of(model, torch.cat([scaled([group], group) for group in groups]), grouped_labels):.0f} %")

# %% [markdown] id="leak_after"
# The leak hides well: on the whole test set it changes almost nothing, because both sets have the same statistics. It shows in use, where images come one at a time. The same leak has other forms:
# selecting features, filling gaps or choosing the epoch by the test set. Split first, and compute everything else from the training part.

# %% [markdown] id="stopping_text"
# ## 9 · Early stopping
#
# **Core · 8 min · ●●○**
#
# After some epochs a model learns the noise of its training data: the validation loss rises again. **Early stopping** ends the training when the validation loss has not improved for a while, and returns to the best weights.
#
# - A loss is *better* if it is below `best - min_delta`, where `best` is the last loss that was better (at first infinity). NaN is never better.
# - `stops(loss)` is called after each epoch, with the validation loss. It returns True if the last `patience` losses, in a row, were not better, and False otherwise. If the loss is better, it keeps the weights of the model.
# - `restore()` loads the weights that the model had at the last better loss. The model continues to train after `stops`, so keep a **copy**.

# %% nbgrader={"grade_id": "stopping", "solution": true}
class EarlyStopping:
    def __init__(self, model: torch.nn.Module, patience: int, min_delta: float = 0.0):
        ### BEGIN SOLUTION
        self.model, self.patience, self.min_delta = model, patience, min_delta
        self.best, self.since, self.weights = math.inf, 0, None
        ### END SOLUTION

    def stops(self, loss: float) -> bool:
        """Record the loss; return whether the training should stop."""
        ### BEGIN SOLUTION
        if loss < self.best - self.min_delta:
            self.best, self.since = loss, 0
            self.weights = copy.deepcopy(self.model.state_dict())
        else:
            self.since += 1
        return self.since >= self.patience
        ### END SOLUTION

    def restore(self) -> None:
        """Load the best weights."""
        ### BEGIN SOLUTION
        self.model.load_state_dict(self.weights)
        ### END SOLUTION


# %% nbgrader={"grade_id": "test_stopping", "grade": true}
lab.check("stopping")

# %% id="show_stopping" tags=["demo"]
PATIENCE = 6
noisy = DIGITS.train.first(200)
generator = torch.Generator().manual_seed(0)
wrong = torch.rand(len(noisy), generator=generator) < 0.2  # a fifth of the labels is wrong
noisy_labels = torch.where(wrong, torch.randint(10, (len(noisy),), generator=generator), noisy.labels)
half = len(DIGITS.test) // 2
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
stopper, curves, stopped, best = EarlyStopping(model, PATIENCE), {"training": [], "validation": []}, None, None
for epoch in range(EPOCHS):
    for indices in torch.randperm(len(noisy), generator=generator).split(20):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(noisy.images[indices]), noisy_labels[indices])
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        curves["training"].append(F.cross_entropy(model(noisy.images), noisy_labels).item())
        curves["validation"].append(F.cross_entropy(model(DIGITS.test.images[:half]), DIGITS.test.labels[:half]).item())
    if stopped is None and stopper.stops(curves["validation"][-1]):
        stopped = epoch  # a real training ends here; this one continues, to show what follows
held_out = DIGITS.test.images[half:], DIGITS.test.labels[half:]
with torch.no_grad():
    last = accuracy_of(model, *held_out)
    stopper.restore()
    print(f"accuracy on images that chose nothing: {last:.0f} % after {EPOCHS} epochs, {accuracy_of(model, *held_out):.0f} % with the best weights")
figures.stopping(curves, stopped)

# %% [markdown] id="stopping_after"
# The loss that stops a training also chooses its weights, so it is no longer an honest test: the accuracy above comes from images that chose nothing. With several ranks, give `stops` the same loss on all of
# them (the mean over the ranks): otherwise some stop and the others wait for them.

# %% [markdown] id="resume_text"
# ## 10 · Resume in the middle of an epoch
#
# **Core · 14 min · ●●●**
#
# A job on a cluster ends at its time limit, rarely at the end of an epoch. A checkpoint with the model alone begins the epoch again: some images are seen twice, others not at all. Two more things belong into it: the **position** in the order of the
# epoch, and the state of the **random numbers** of the augmentation.
#
# Write `ResumableOrder`, a batch sampler:
#
# - Iterating yields the batches of the current epoch, lists of indices, from the first batch that the training has not used yet. Each epoch has all indices from 0 to `size - 1` once, in an order that depends only on the seed and the number of the
#   epoch, and that differs from epoch to epoch. `seed + epoch` is no seed for it: epoch 1 of seed 0 would have the order of epoch 0 of seed 1. Nor is `10 * seed + epoch`: a training has a hundred epochs.
# - The last batch may be smaller. The next iteration after a complete epoch is the next epoch.
# - The order takes its random numbers from a separate `torch.Generator`, not from the global one (`torch.manual_seed`), from which the training draws too, for example in dropout.
# - `generator` is a `torch.Generator` with the seed `seed`; the training draws its augmentations from it. The order must not use it.
# - `step_done()` is called by the training after each step. **Count steps here, not batches in `__iter__`**: workers prefetch, so the iterator is some batches ahead of the training, and what only waits in their queue is lost with the job.
# - `state_dict()` and `load_state_dict(state)`: a dict of integers and tensors (no generator: `get_state()` gives a tensor), so that `torch.load` reads it safely. A new object that has loaded the state continues exactly as the old one would have.

# %% nbgrader={"grade_id": "resume", "solution": true}
class ResumableOrder:
    def __init__(self, size: int, batch: int, seed: int):
        ### BEGIN SOLUTION
        self.size, self.batch, self.seed = size, batch, seed
        self.epoch, self.used = 0, 0
        self.generator = torch.Generator().manual_seed(seed)
        ### END SOLUTION

    def __iter__(self):
        """Yield the rest of the epoch: lists of indices."""
        ### BEGIN SOLUTION
        of_epoch = torch.Generator().manual_seed(1_000_003 * self.seed + self.epoch)
        order = torch.randperm(self.size, generator=of_epoch)
        for indices in order.split(self.batch)[self.used :]:
            yield indices.tolist()
        ### END SOLUTION

    def step_done(self) -> None:
        """Record that the training has used one more batch."""
        ### BEGIN SOLUTION
        self.used += 1
        if self.used == math.ceil(self.size / self.batch):
            self.epoch, self.used = self.epoch + 1, 0
        ### END SOLUTION

    def state_dict(self) -> dict:
        ### BEGIN SOLUTION
        return {"epoch": self.epoch, "used": self.used, "generator": self.generator.get_state()}
        ### END SOLUTION

    def load_state_dict(self, state: dict) -> None:
        ### BEGIN SOLUTION
        self.epoch, self.used = state["epoch"], state["used"]
        self.generator.set_state(state["generator"])
        ### END SOLUTION


# %% nbgrader={"grade_id": "test_resume", "grade": true}
lab.check("resume")

# %% [markdown] id="show_resume_text"
# Two workers with a queue, and a job that ends after 5 of 16 steps. The resumed job is compared with one that begins the epoch again with another seed, for the remaining 11 steps, and
# with one that continues where the *sampler* was.

# %% id="show_resume" tags=["demo"]
class Numbers(Dataset):
    def __len__(self):
        return len(FILES)

    def __getitem__(self, index):
        return index


def steps_of(order, count):
    """Run `count` steps with two workers; return the indices of the images that they saw, and how many batches the sampler gave out."""
    given, seen = [], []

    def counted():
        for indices in order:
            given.append(indices)
            yield indices

    loader = loader_of(Numbers(), 2, batch_size=1, batch_sampler=counted())
    for _, indices in zip(range(count), loader):
        seen += indices.tolist()
        order.step_done()
    return seen, len(given)


total, done = len(FILES) // BATCH, 5
first = ResumableOrder(len(FILES), BATCH, seed=1)
before, given = steps_of(first, done)
resumed = ResumableOrder(len(FILES), BATCH, seed=1)
resumed.load_state_dict(first.state_dict())
late = ResumableOrder(len(FILES), BATCH, seed=1)
for _ in range(given):
    late.step_done()
rest = {
    "begins again": steps_of(ResumableOrder(len(FILES), BATCH, seed=2), total - done)[0],
    "position of the sampler": steps_of(late, total - given)[0],
    "yours": steps_of(resumed, total - done)[0],
}
print(f"after {done} steps the sampler had given out {given} batches: {given - done} of them were lost in the queue of the workers")
whole, _ = steps_of(ResumableOrder(len(FILES), BATCH, seed=1), total)
print("yours sees exactly the images of the uninterrupted epoch:", before + rest["yours"] == whole)
figures.seen({name: np.bincount(before + indices, minlength=len(FILES)) for name, indices in rest.items()})

# %% [markdown] id="ranges_text"
# ## 11 · Shards without overlap
#
# **Optional · 8 min · ●●○**
#
# To give whole shards to workers is simple, and wasteful: with 6 shards for 4 workers, two of them read twice as much. Instead, line up the samples of all shards, and give each rank an equal part of the line, and each worker an equal part of that.
#
# `ranges(counts, rank, world, worker, workers)`: `counts[s]` samples are in shard s. A rank has `total // world` samples, from `rank` times this number on; the rest is dropped. Worker w has the samples from
# `per_rank * w // workers` to `per_rank * (w + 1) // workers` of its rank. Return a list of `(shard, first, last)`: the samples `first` to `last - 1` of each shard that it reads, in order, without empty parts.

# %% nbgrader={"grade_id": "ranges", "solution": true}
def ranges(
    counts: list[int], rank: int, world: int, worker: int, workers: int
) -> list[tuple[int, int, int]]:
    """Return the parts of shards that this worker reads, as (shard, first, last)."""
    ### BEGIN SOLUTION
    per_rank = sum(counts) // world
    start, stop = (rank * per_rank + per_rank * place // workers for place in (worker, worker + 1))
    parts, begin = [], 0
    for shard, count in enumerate(counts):
        first, last = max(start, begin) - begin, min(stop, begin + count) - begin
        if first < last:
            parts.append((shard, first, last))
        begin += count
    return parts
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_ranges", "grade": true}
lab.check("ranges")

# %% [markdown] id="rand_augment_text"
# ## 12 · RandAugment
#
# **Optional · 6 min · ●●○**
#
# Which augmentations help? Instead of a search over policies, **RandAugment** (Cubuk et al., 2019) has two numbers: each image passes N random operations, all with the same magnitude M. Every image draws its own operations, so a batch needs several. Loop over the few
# operations, not over the many images: each operation computes the group of images that drew it.
#
# `rand_augment(images, operations, drawn, magnitude)`: `operations` is a list of functions `(group, magnitude) → group` of the same shape; `drawn` (rounds, B) int64 says which one image i passes in each round, round after round. In a round, call an operation at most once, and not
# without images. Images stay at their places, and `images` is not changed.

# %% nbgrader={"grade_id": "rand_augment", "solution": true}
def rand_augment(
    images: torch.Tensor, operations: list, drawn: torch.Tensor, magnitude: float
) -> torch.Tensor:
    """images (B, C, H, W), drawn (rounds, B) int64 -> images (B, C, H, W)."""
    ### BEGIN SOLUTION
    images = images.clone()
    for choice in drawn:
        for number, operation in enumerate(operations):
            group = (choice == number).nonzero().flatten()
            if len(group):
                images[group] = operation(images[group], magnitude)
    return images
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_rand_augment", "grade": true}
lab.check("rand_augment")

# %% [markdown] id="show_augment_text"
# The library's `RandAugment` has the fourteen operations of the paper. The figure shows generated images with three magnitudes. Below each column are its two operations:

# %% id="show_augment" tags=["demo"]
from dlo_lib.data.augment import RandAugment
from dlo_lib.data.augment.rand_augment import OPERATIONS

originals = (IMAGES.train.images[:8] + 2).clamp(0, 4) / 4
generator = torch.Generator().manual_seed(2)
operation_of = torch.randint(len(OPERATIONS), (2, len(originals)), generator=generator)  # (round, image)
sign_of = torch.randint(2, (2, len(originals)), generator=generator) * 2 - 1
augmented = {"original": originals}
for magnitude in (5, 15, 28):
    images = originals
    for chosen, signs in zip(operation_of, sign_of):
        images = RandAugment(magnitude=magnitude).augment(images, chosen, signs)
    augmented[f"magnitude {magnitude}"] = images
figures.rows_of_images(augmented, [[OPERATIONS[number] for number in column] for column in operation_of.T.tolist()])

# %% [markdown] id="scale_text"
# ## 13 · At scale
#
# - **Shards, and the local disk.** On Jean Zay, data sets lie below `$DSDIR`, in few large files. Reading a million small files from a parallel file system also slows down everybody else.
# - **Decode on the fly, or once?** Decoding costs cores in every epoch. Smaller images on the disk, or decoded arrays (memory-mapped), trade space for cores. The cell of section 2 says whether you need it.
# - **Augment on the GPU.** mixup, CutMix and RandAugment on the batch move the work from the workers to the GPU, which does it in a fraction of a millisecond.
# - **Many ranks.** Each rank has its own workers: 4 ranks with 8 workers are 32 processes on a node. `--cpus-per-task` must have a core for each.
#
# The library's training command resumes in the middle of an epoch by the same means as yours, a sampler with a position:

# %% id="scale" tags=["demo"]
from dlo_lib.data import RankSampler

sampler = RankSampler(size=1_000, batch=8, rank=3, world_size=4, seed=0)
batches = iter(sampler)
taken = [next(batches) for _ in range(5)]
print("state after 5 micro-batches:", sampler.state_dict())
print("  python -m dlo_lib.train --model tiny --steps 1000 --save-every 100")

# %% [markdown] id="same_text"
# ## 14 · The same with PyTorch and the library
#
# In a project you use what exists. The library's statistics and its early stopping pass your checks (scikit-learn's `StandardScaler.partial_fit` streams and merges in the same way):

# %% id="same" tags=["demo"]
from dlo_lib.data import FeatureStatistics
from dlo_lib.optim.early_stopping import EarlyStopping as LibraryStopping


def library_scaled(train_chunks, test):
    total = FeatureStatistics.of(train_chunks[0])
    for chunk in train_chunks[1:]:
        total = total.merged(FeatureStatistics.of(chunk))
    return total.scale(test)


def library_statistics(chunk):
    found = FeatureStatistics.of(chunk)
    return found.count, found.mean, found.squares


def library_merged(a, b):
    found = FeatureStatistics(*a).merged(FeatureStatistics(*b))
    return found.count, found.mean, found.squares


class Stopping(LibraryStopping):
    def __init__(self, model, patience, min_delta=0.0):
        super().__init__(patience, min_delta, model)


lab.check("scaling", instead={"statistics": library_statistics, "merged": library_merged, "scaled": library_scaled})
lab.check("stopping", instead={"EarlyStopping": Stopping})

# %% [markdown] id="same_loader_text"
# And the whole pipeline in ten lines of PyTorch: weighted sampling, and mixup on the collated batch. (`torchvision.transforms.v2` has `MixUp`, `CutMix` and `RandAugment` ready; its mixup draws one $\lambda$ for a batch.)
# For the position in the epoch, `torchdata.stateful_dataloader.StatefulDataLoader` is a `DataLoader` with `state_dict()` and `load_state_dict()`, which counts what the training has received and not what its workers have prefetched.

# %% id="same_loader" tags=["demo"]
import importlib.util

from torch.utils.data import default_collate

from dlo_lib.data.augment import mixup as library_mixup
from dlo_lib.labkit.side_by_side import Form, lines_of, table


def torch_pipeline():
    def mixed(samples):
        images, labels = default_collate(samples)
        return library_mixup(images, labels, 10)

    labels = DIGITS.train.labels
    sampler = WeightedRandomSampler(1 / labels.bincount()[labels], len(labels))
    return DataLoader(TensorDataset(DIGITS.train.images, labels), batch_size=64, sampler=sampler, collate_fn=mixed)


def own_pipeline():
    weights, order = sample_weights(DIGITS.train.labels), ResumableOrder(len(DIGITS.train), 64, seed=0)
    chosen = torch.multinomial(weights, len(weights), replacement=True)
    for indices in order:
        images, labels = DIGITS.train.images[chosen[indices]], DIGITS.train.labels[chosen[indices]]
        shares = torch.from_numpy(np.random.default_rng(len(images)).beta(0.2, 0.2, len(images))).float()
        yield mixup(images, labels, torch.randperm(len(images), generator=order.generator), shares, 10)
        order.step_done()


def seconds_of_a_batch(pipeline):
    """Return the shortest mean time of a batch in an epoch, of several epochs."""
    return min(sum(waits) / len(waits) for waits in (measure_waits(pipeline(), lambda batch: None)[0] for _ in range(REPEATS)))


forms = [
    Form("yours", lines=lines_of(own_pipeline, sample_weights, soft_targets, mixup, ResumableOrder), seconds=seconds_of_a_batch(own_pipeline)),
    Form("PyTorch", lines=lines_of(torch_pipeline), seconds=seconds_of_a_batch(torch_pipeline)),
]
print(table(forms, "a batch"))
installed = importlib.util.find_spec("torchdata") is not None
print("torchdata is installed: StatefulDataLoader can be used here" if installed else "torchdata is not installed here; in a project: pip install torchdata")

# %% [markdown] id="same_after"
# Yours is faster on data in memory, because it indexes a whole batch at once: the `DataLoader` calls `__getitem__` for each sample and stacks them, which pays only if a sample comes from a file. PyTorch's form is shorter, but it
# cannot resume in the middle of an epoch.

# %% [markdown] id="quiz_text"
# ## 15 · Quiz
#
# **Core · 4 min · ●○○**
#
# Answer with the letter, for example `{"q1": "a", ...}`. The check here tests whether every question has an
# answer; right answers count in grading.

# %% id="show_quiz" tags=["demo"]
lab.quiz()

# %% nbgrader={"grade_id": "quiz", "solution": true}
### BEGIN SOLUTION: quiz = {"q1": "", "q2": "", "q3": "", "q4": "", "q5": ""}
quiz = {"q1": "c", "q2": "b", "q3": "d", "q4": "a", "q5": "b"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true}
lab.check("quiz")

# %% [markdown] id="further"
# ## Go further
#
# - Set `LATENCY` to 0.02. How many workers does your formula ask for, and does the wait disappear? How much memory do their queues hold?
# - Train the digits of section 9 with mixup instead of early stopping. How far does the validation loss rise after its minimum?
# - Remove class 8 from the training set except for one image. Does weighted sampling still help? Add CutMix.
# - Read the shards of section 4 with `ranges` and `tarfile`, and compare with `ShardedImages`.
# - CIFAR-10 instead of generated images: put its files into `datasets/cifar-10`, and use `dlo_lib.data.cifar10(first=256)`.
#
# ## References
#
# - H. Zhang et al., *mixup: Beyond Empirical Risk Minimization* (2017), [arXiv:1710.09412](https://arxiv.org/abs/1710.09412)
# - S. Yun et al., *CutMix* (2019), [arXiv:1905.04899](https://arxiv.org/abs/1905.04899)
# - E. D. Cubuk et al., *RandAugment* (2019), [arXiv:1909.13719](https://arxiv.org/abs/1909.13719)
# - T. F. Chan, G. H. Golub, R. J. LeVeque, *Updating Formulae and a Pairwise Algorithm for Computing Sample Variances* (Stanford, 1979)
# - L. Prechelt, *Early Stopping - But When?* (in Neural Networks: Tricks of the Trade, 1998)
# - PyTorch, [*torch.utils.data*](https://docs.pytorch.org/docs/stable/data.html): workers, their seeds, pinned memory
# - WebDataset, [the format of tar shards](https://github.com/webdataset/webdataset)
# - The course this lab follows: FIDLE, sequence 16, and IDRIS, *Deep Learning Optimisé – Jean Zay* (DLO-JZ)
