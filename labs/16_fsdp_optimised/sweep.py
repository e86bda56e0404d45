"""The sweep of this lab: DDP, FSDP and FSDP with torch.compile over sequences of 512 tokens; in the notebook, and as one job array on a cluster.

    cluster.submit("sweep.py", {"model": ...}, gpus=8, sweep={"row": range(11)})         one row an element, on the GPUs of a node
    torchrun --standalone --nproc-per-node=2 sweep.py --row 4 --model tiny               one row here

A row prints one line of JSON: form, batch, peak bytes, seconds a step; ``table`` reads them.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from dlo_lib.cluster import Job
from dlo_lib.launch import init_process_group, place
from dlo_lib.models import Llama, LlamaConfig, model_config
from dlo_lib.models.counts import parameters_by_part
from dlo_lib.optim import Precision, train_step
from dlo_lib.parallel.compile_blocks import compile_blocks
from dlo_lib.parallel.ddp import DDP
from dlo_lib.parallel.deferred_init import deferred_init
from dlo_lib.parallel.fsdp import FSDP
from dlo_lib.profiling import Part, measure_memory
from dlo_lib.profiling.report import MemoryReport
from dlo_lib.train.metrics import peak_memory

SEQ, WORLD = 512, 8
COMPILED = "fsdp + compile"
BATCHES = {"ddp": (1, 2, 4, 8), "fsdp": (4, 8, 16, 32), COMPILED: (8, 16, 24)}
ROWS = [(form, batch) for form, batches in BATCHES.items() for batch in batches]
SMALL = {"ddp": (1, 2, 4, 8), "fsdp": (4, 8, 16, 32), COMPILED: (8, 16, 24)}
SMALL_SEQ, SMALL_MODEL = 64, LlamaConfig(512, 128, 384, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32)
GAIN = 0.10
"""What compiling is assumed to take off the computing at true size, until a cluster has said it."""

Point = tuple[int, float, float]


def some(batches: Sequence[int], points: int) -> tuple[int, ...]:
    """About ``points`` of them, the first and the last one always."""
    last = len(batches) - 1
    places = {0, last} | {round(i * last / max(1, points - 1)) for i in range(points)}
    return tuple(batches[place] for place in sorted(places))


# -- memory, at true size


@functools.cache
def measured(model: str, form: str, batch: int, checkpointing: bool = False) -> MemoryReport:
    """A training step on fake tensors, of one of 8 ranks."""
    return measure_memory(model, batch, SEQ, parallel=form, world_size=WORLD, checkpointing=checkpointing)


def memory(model: str, points: int, share: float) -> dict[str, list[tuple[int, float]]]:
    """Batch and peak bytes of one of 8 ranks: measured on fake tensors; compiled blocks keep ``share`` of the activations.

    ``points`` of each line are measured, its ends among them.
    """
    found: dict[str, list[tuple[int, float]]] = {}
    activations = []
    for form in ("ddp", "fsdp"):
        found[form] = []
        for batch in some(BATCHES[form], points):
            report = measured(model, form, batch)
            found[form].append((batch, report.peak_bytes))
            if form == "fsdp":
                activations.append((batch, report.at_peak[Part.ACTIVATIONS]))
    found[COMPILED] = [(batch, on_line(found["fsdp"], batch) - (1 - share) * on_line(activations, batch)) for batch in BATCHES[COMPILED]]
    return found


def on_line(points: Sequence[tuple[int, float]], batch: int) -> float:
    """The value at ``batch`` of the line through the first and the last point."""
    (first, low), (last, high) = points[0], points[-1]
    return low + (batch - first) * (high - low) / (last - first)


def with_seconds(peaks: dict[str, list[tuple[int, float]]], model: str) -> dict[str, list[Point]]:
    """The same points with modelled seconds of a step on a node of 8 A100: what each sequence costs, and what a step costs once.

    Each sequence: 6 operations a parameter and token, at 40 % of the peak. Once: the messages that nothing hides (the first gather and the last
    reduction, of one block, at 100 GB/s; for DDP the last bucket), and the optimiser, which reads and writes 28 bytes a parameter it owns.
    """
    config = model_config(model)
    parameters = sum(parameters_by_part(config).values())
    block = parameters / config.num_layers
    each = 6 * parameters * SEQ / (0.4 * 312e12)
    runs = {}
    for form, points in peaks.items():
        owned = parameters if form == "ddp" else parameters / WORLD
        exposed = 25 * 2**20 if form == "ddp" else 2 * block + 4 * block
        once = exposed / 100e9 + 28 * owned / 1.6e12
        slower = 1 - GAIN if form == COMPILED else 1
        runs[form] = [(batch, peak, once + slower * each * batch) for batch, peak in points]
    return runs


def with_rates(winners: dict[int, tuple[str, int] | None], runs: dict[str, list[Point]]) -> dict[int, tuple[str, int, float] | None]:
    """The sequences a second of each winner."""
    found: dict[int, tuple[str, int, float] | None] = {}
    for limit, chosen in winners.items():
        found[limit] = None
        if chosen is not None:
            form, batch = chosen
            found[limit] = form, batch, batch / on_line([(count, seconds) for count, _, seconds in runs[form]], batch)
    return found


# -- time, on ranks


def default_backend() -> str:
    """Inductor, where it finds the C++ compiler that it needs on a CPU."""
    compiler = any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++"))
    return "inductor" if torch.cuda.is_available() or compiler else "aot_eager_decomp_partition"


def wrapped(form: str, config: LlamaConfig, device: torch.device, backend: str) -> nn.Module:
    """A Llama in the form asked for, on ``device``; in shards it is built without ever being whole."""
    if form == "ddp":
        return DDP(Llama(config).to(device))
    with deferred_init() as recipe:
        llama = Llama(config)
    model = FSDP(llama, values=recipe.value, device=device, compute_dtype=torch.bfloat16 if device.type == "cuda" else None)
    if form == COMPILED:
        compile_blocks(model, backend=backend or default_backend(), dynamic=True)  # one graph for all batches
    return model


def timed(
    model: nn.Module,
    config: LlamaConfig,
    batch: int,
    seq: int,
    device: torch.device,
    steps: int,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Seconds of a training step by ``clock``, the least of ``steps`` after a warm one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, config.vocab_size, (batch, seq + 1), device=device)
    precision = Precision.BF16 if device.type == "cuda" else Precision.FP32
    seconds = []
    for _ in range(steps + 1):
        dist.barrier()
        begin = clock()
        train_step(model, optimizer, [(tokens[:, :-1], tokens[:, 1:])], precision=precision, group=dist.group.WORLD)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(clock() - begin)
    return min(seconds[1:])


def measure(form: str, batches: tuple[int, ...], backend: str) -> list[tuple[int, float]]:
    """Batch and sequences a second of all ranks, of the small model; on GPUs where there is one for each rank.

    Without GPUs the ranks share cores with each other and with all else that runs here: then a second is one of this rank's processor time.
    """
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    device = place().device
    model = wrapped(form, SMALL_MODEL, device, backend)
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    found = []
    for batch in batches:
        seconds = timed(model, SMALL_MODEL, batch, SMALL_SEQ, device, 2, clock)
        found.append((batch, batch * dist.get_world_size() / seconds))
    return found


def table(job: Job) -> list[str]:
    """What the elements of the submitted sweep have printed, a line each."""
    lines = []
    for element in range(job.elements):
        said = [json.loads(line) for line in job.logs(element).splitlines() if line.startswith("{")]
        lines += [
            f"{row['form']:>14}  batch {row['batch']:>2} on {row['ranks']} ranks: {row['peak_bytes'] / 2**30:.2f} GiB, {row['seconds']:.2f} s a step, "
            f"{row['sequences_per_second']:.1f} sequences/s"
            for row in said
        ]
    return lines


def main() -> None:
    """One row of the sweep, on the ranks that torchrun or srun has started."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", type=int, default=0, choices=range(len(ROWS)))
    parser.add_argument("--model", default="llama-3.2-3b")
    chosen = parser.parse_args()
    form, batch = ROWS[chosen.row]
    here, config = place(), model_config(chosen.model)
    with init_process_group(here):
        model = wrapped(form, config, here.device, "")
        seconds = timed(model, config, batch, SEQ, here.device, 10 if here.device.type == "cuda" else 1)
        line = {
            "form": form,
            "batch": batch,
            "ranks": here.world_size,
            "peak_bytes": peak_memory(here.device),
            "seconds": round(seconds, 4),
            "sequences_per_second": round(batch * here.world_size / seconds, 2),
        }
        if here.rank == 0:
            print(json.dumps(line))


if __name__ == "__main__":
    main()
