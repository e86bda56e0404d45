"""The measurements of this lab, and its sweep as one job array on a cluster.

    cluster.submit("sweep.py", {"model": ...}, gpus=8, sweep={"row": range(14)})         one row per element,
        on the GPUs of a node
    torchrun --standalone --nproc-per-node=2 sweep.py --row 4 --model tiny               one row on this
        machine

A row prints one line of JSON: form, batch, peak bytes, seconds per step; ``table`` reads them.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.cluster import Job
from dlo_lib.comm.calls import Kind
from dlo_lib.comm.tracing.timeline import waits
from dlo_lib.comm.tracing.trace import Trace
from dlo_lib.labkit.measured_step import peak_of_a_step
from dlo_lib.launch import init_process_group, place
from dlo_lib.models import Llama, LlamaConfig, model_config
from dlo_lib.models.counts import parameters_by_part
from dlo_lib.models.llama import Block, rotation
from dlo_lib.optim import Precision, train_step
from dlo_lib.parallel.compile import compile_blocks
from dlo_lib.parallel.fsdp import FSDP
from dlo_lib.parallel.fsdp.deferred_init import deferred_init
from dlo_lib.parallel.mesh import Degrees, ParallelMesh
from dlo_lib.parallel.parallelize import parallelize
from dlo_lib.parallel.plan import ShortForm
from dlo_lib.parallel.sharding.transport import CollectiveTransport
from dlo_lib.profiling import measure_memory
from dlo_lib.profiling.report import MemoryReport
from dlo_lib.train.metrics import peak_memory

UNITS, ROWS_OF_X = 6, 8
WIDTH = int(os.environ.get("DLO_WIDTH", 1024))  # of a layer: a unit has 4 bytes x WIDTH x WIDTH
TIMED = 4  # steps, of which the first is not timed
COMPUTING = 0.015  # seconds of the forward of a layer; its backward takes twice as long
LAYERS = int(os.environ.get("DLO_LAYERS", 4))  # of both small Llamas
LLAMA = LlamaConfig(512, 128, 384, num_layers=LAYERS, num_heads=4, num_kv_heads=2, head_dim=32)
LIBRARY_LAYERS, LIBRARY_WIDTH = 6, 64
MESSAGES = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)

SEQ, WORLD = 512, 8
CHECKPOINTED, COMPILED = "fsdp + checkpointing", "fsdp + compile"
BATCHES = {"ddp": (1, 2, 4, 8), "fsdp": (4, 8, 16, 32), CHECKPOINTED: (8, 16, 32), COMPILED: (8, 16, 24)}
ROWS = [(form, batch) for form, batches in BATCHES.items() for batch in batches]
SMALL = {"ddp": (1, 2, 4, 8), "fsdp": (2, 4, 8, 16), CHECKPOINTED: (2, 8, 16, 32)}
SMALL_SEQ = int(os.environ.get("DLO_SEQ", 64))
SMALL_MODEL = LlamaConfig(512, 256, 768, num_layers=LAYERS, num_heads=4, num_kv_heads=2, head_dim=64)

Point = tuple[int, float, float]
Sharding = Callable[[nn.Module, type[nn.Module]], None]


# -- a stack of layers in the student's FSDP


class _OnTheDevice(torch.autograd.Function):
    """Waits as long as a GPU would compute. The cores are free meanwhile, as beside a GPU, so messages can
    move."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(COMPUTING)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(2 * COMPUTING)
        return grad


class Layer(nn.Module):
    """tanh(x W), which a simulated GPU computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(_OnTheDevice.apply(x @ self.weight))


def simple_form(model: nn.Module, kind: type[nn.Module]) -> None:
    """Shard ``model`` as in lab 15: every message is waited for at once."""
    import own_fsdp  # here: a row of the sweep runs without it

    root, units = own_fsdp.make_units(model, kind)
    own_fsdp.add_hooks(model, root, units, own_fsdp.Simple())


def traced_step(shard: Sharding, steps: int = 3) -> None:
    """Run steps on this rank, each after a barrier: what follows the last barrier is one warm step."""
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(*(Layer() for _ in range(UNITS)))
    shard(model, Layer)
    x = torch.randn(ROWS_OF_X, WIDTH)
    for _ in range(steps):
        dist.barrier()
        model(x).sum().backward()


def tensors_at_peak(shard: Sharding) -> int:
    """Return the most bytes that the tensors of this rank take in a step."""

    def build() -> Callable[[], None]:
        torch.manual_seed(dist.get_rank())
        model = nn.Sequential(*(Layer() for _ in range(UNITS)))
        shard(model, Layer)
        x = torch.randn(ROWS_OF_X, WIDTH)

        def step() -> None:
            model.zero_grad()
            model(x).sum().backward()

        return step

    torch.set_num_threads(1)
    return peak_of_a_step(build)


def asked_ahead(trace: Trace) -> tuple[int, int]:
    """Count the gathers of rank 0 in the last step, and those that start before the process waits for another
    message or reduces."""
    events, _ = _last_step(trace, 0)
    gathers = [event for event in events if event.call.kind is Kind.ALL_GATHER]

    def early(gather: Any) -> bool:
        others = [event for event in events if event is not gather]
        moments = [event.waited_from for event in others if event.waited_from is not None]
        moments += [event.issued for event in others if event.call.kind is not Kind.ALL_GATHER]
        return gather.waited_from is not None and any(
            gather.issued < moment < gather.waited_from for moment in moments
        )

    return len(gathers), sum(early(gather) for gather in gathers)


def sent_in_a_step(trace: Trace, kind: Kind) -> int:
    """Return the payload bytes of rank 0 for calls of a kind in the last step."""
    return sum(event.call.payload_bytes for event in _last_step(trace, 0)[0] if event.call.kind is kind)


def _last_step(trace: Trace, rank: int) -> tuple[list[Any], float]:
    """Return the events of a rank after its last barrier, and the seconds from the barrier to the end of the
    last one."""
    begin = max(event.waited_until or event.issued for event in trace.select(Kind.BARRIER, rank))
    events = [event for event in trace.select(rank=rank) if event.issued >= begin]
    return events, max(event.waited_until or event.issued for event in events) - begin


def seconds_of_step(trace: Trace) -> float:
    """Return the time of the last step, of the slower rank."""
    return max(_last_step(trace, rank)[1] for rank in {event.rank for event in trace.events})


def least_seconds(trace: Trace) -> float:
    """Return the time of the fastest step after the first one, of the slower rank."""
    found: list[list[float]] = []
    for rank in {event.rank for event in trace.events}:
        begins = [event.waited_until or event.issued for event in trace.select(Kind.BARRIER, rank)]
        ends = [event.waited_until or event.issued for event in trace.select(rank=rank)]
        spans = zip(begins, [*begins[1:], float("inf")])
        # A barrier ends where the next step begins, so that it is not in the step before.
        found.append(
            [max(end for end in ends if begin < end < following) - begin for begin, following in spans]
        )
    return min(map(max, list(zip(*found))[1:]))


def waiting(trace: Trace) -> float:
    """Return the share of the last step in which the process waits, mean over the ranks."""
    shares = []
    for rank in sorted({event.rank for event in trace.events}):
        events, seconds = _last_step(trace, rank)
        shares.append(sum(until - since for since, until in waits(events)) / seconds)
    return sum(shares) / len(shares)


# -- the library's FSDP


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(LIBRARY_WIDTH, LIBRARY_WIDTH, bias=False) for _ in range(LIBRARY_LAYERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def library_units() -> list[int]:
    """Return the bytes of the units of ``library_step``."""
    return [4 * LIBRARY_WIDTH**2] * LIBRARY_LAYERS


def library_step(keep: int) -> None:
    """Run forward and backward; ``keep`` ranks share a unit in between."""
    policy = {dist.get_world_size(): True, 1: False}.get(keep, keep)
    FSDP(_Layers(), reshard_after_forward=policy, transport=CollectiveTransport())(
        torch.randn(4, LIBRARY_WIDTH)
    ).sum().backward()


def hybrid_step(size: int) -> None:
    """Run forward and backward with shard groups of ``size`` ranks."""
    mesh = ParallelMesh(Degrees(dp_replicate=0, dp_shard=size))
    shards, replicas = mesh.group_along("dp_shard"), mesh.group_along("dp_replicate")
    model = FSDP(_Layers(), shards, replicas=replicas, transport=CollectiveTransport())
    model(torch.randn(4, LIBRARY_WIDTH)).sum().backward()


def llama_step(checkpointing: bool) -> None:
    """Run forward and backward of a small Llama."""
    model = FSDP(Llama(LLAMA, checkpointing=checkpointing), transport=CollectiveTransport())
    model(torch.randint(0, LLAMA.vocab_size, (1, 32))).sum().backward()


def links(trace: Trace, per_node: int) -> dict[str, float]:
    """Return the bytes that stay in a node and that leave it, mean per rank; in a ring a rank sends to the
    next."""
    sent = {"inside a node": 0.0, "between nodes": 0.0}
    for event in trace.events:
        if event.call.kind in MESSAGES:
            members = list(event.call.members)
            neighbour = members[(members.index(event.rank) + 1) % len(members)]
            same = neighbour // per_node == event.rank // per_node
            sent["inside a node" if same else "between nodes"] += event.call.ring_bytes
    ranks = len({event.rank for event in trace.events})
    return {where: count / ranks for where, count in sent.items()}


def graphs_under_fsdp(compile_blocks: Callable[..., None]) -> tuple[list[int], list[int]]:
    """Return the operations of each graph of a small Llama in lab 15's FSDP, compiled as a whole and block by
    block."""
    warnings.simplefilter("ignore")  # dynamo warns of each graph break
    tokens = torch.randint(0, LLAMA.vocab_size, (1, 32))
    counts: list[int] = []

    def backend(graph_module: Any, example_inputs: Any) -> Any:
        counts.append(
            sum(
                node.op in ("call_function", "call_method", "call_module")
                for node in graph_module.graph.nodes
            )
        )
        return graph_module.forward

    llama = Llama(LLAMA)
    simple_form(llama, Block)
    torch.compile(llama, backend=backend)(tokens)
    whole = counts.copy()
    counts.clear()
    torch._dynamo.reset()
    compile_blocks(llama.layers, backend)
    llama(tokens)
    return whole, counts


# -- sizes


def block_bytes(model: str) -> list[int]:
    """Return the bytes in bf16 of each block of ``model``."""
    parts, layers = parameters_by_part(model_config(model)), model_config(model).num_layers
    return [2 * (parts["attention"] + parts["mlp"]) // layers] * layers


def wrapping_cases(
    model: str, forward_time: Callable[..., float], gather_cost: Callable[..., tuple[float, float]]
) -> tuple[list[float], dict[str, list[float]], list[float]]:
    """Return blocks in a unit (1/7: one matrix), milliseconds of a forward pass, and peak GiB of weights; 64
    ranks."""
    sizes, world = block_bytes(model), 64
    units: dict[float, list[int]] = {1 / 7: [size // 7 for size in sizes for _ in range(7)]}
    for count in range(1, len(sizes) + 1):
        if len(sizes) % count == 0:
            units[count] = [sum(sizes[first : first + count]) for first in range(0, len(sizes), count)]
    counts = list(units)
    times: dict[str, list[float]] = {}
    # A start of 5 microseconds for each of the N - 1 steps of a ring; the slowest link of the ring sets its
    # pace.
    for link, bandwidth in (("25 GB/s per rank", 25e9), ("200 GB/s per rank", 200e9)):
        for tokens in (2048, 16384):
            # for a parameter in bf16: 2 bytes, 2 operations, at 40 % of an A100's peak
            seconds = tokens / (0.4 * 312e12)
            times[f"{link}, {tokens} tokens"] = [
                1e3
                * forward_time(
                    [(size, size * seconds) for size in units[count]],
                    5e-6 * (world - 1),
                    (world - 1) / world / bandwidth,
                )
                for count in counts
            ]
    return counts, times, [gather_cost(units[count], world, world)[0] / 2**30 for count in counts]


def flops(wrapper: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> int:
    """Return the matrix-product FLOPs of forward and backward through three Llama blocks, called by
    ``wrapper``."""
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.randn(1, 64, LLAMA.hidden, requires_grad=True)
    cos, sin = rotation(LLAMA, 64, x)
    blocks = [Block(LLAMA) for _ in range(3)]
    with FlopCounterMode(display=False) as counter:
        y = x
        for block in blocks:
            y = wrapper(lambda x, block=block: block(x, cos, sin), y)
        y.sum().backward()
    return counter.get_total_flops()


def tiny_updates(host_optimizer: Callable[..., Any], steps: int = 60) -> dict[str, list[float]]:
    """Return a weight of 1 over small steps: in bf16, in fp32, and in bf16 with an fp32 master."""

    def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-3)

    kinds = {
        "bf16": (torch.bfloat16, sgd),
        "fp32": (torch.float32, sgd),
        "bf16, master on the host": (torch.bfloat16, None),
    }
    curves = {}
    for name, (dtype, make) in kinds.items():
        weight = nn.Parameter(torch.ones(1, dtype=dtype))
        optimizer = make([weight]) if make is not None else host_optimizer([weight], sgd)
        curves[name] = [1.0]
        for _ in range(steps):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            curves[name].append(float(weight.detach()))
    return curves


# -- the sweep: memory


def some(batches: Sequence[int], points: int) -> tuple[int, ...]:
    """Return about ``points`` of the batches, always with the first and the last."""
    last = len(batches) - 1
    places = {0, last} | {round(i * last / max(1, points - 1)) for i in range(points)}
    return tuple(batches[place] for place in sorted(places))


@functools.cache
def measured(
    model: str | LlamaConfig, form: str, batch: int, seq: int = SEQ, world_size: int = WORLD
) -> MemoryReport:
    """Measure a training step on fake tensors, of one rank."""
    parallel = "ddp" if form == "ddp" else "fsdp"
    return measure_memory(
        model, batch, seq, parallel=parallel, world_size=world_size, checkpointing=form == CHECKPOINTED
    )


def memory(model: str, points: int) -> dict[str, list[tuple[int, float]]]:
    """Return batch and peak bytes of one of 8 ranks, for about ``points`` batches of each form, always with
    the first and the last."""
    forms = ("ddp", "fsdp", CHECKPOINTED)
    return {
        form: [(batch, measured(model, form, batch).peak_bytes) for batch in some(BATCHES[form], points)]
        for form in forms
    }


# -- the sweep: time, on ranks


def wrapped(form: str, config: LlamaConfig, device: torch.device) -> nn.Module:
    """Return a Llama in this form on ``device``; a sharded one is never whole, even during construction."""
    ranks = dist.get_world_size()
    short = ShortForm.DDP if form == "ddp" else ShortForm.FSDP
    plan = short.plan(ranks, ranks, compute_dtype=torch.bfloat16 if device.type == "cuda" else None)
    mesh = ParallelMesh(plan.degrees)
    if not plan.builds_in_parts:
        return parallelize(Llama(config).to(device), plan, mesh)
    with deferred_init() as recipe:
        llama = Llama(config, checkpointing=form == CHECKPOINTED)
    model = parallelize(llama, plan, mesh, values=recipe.value, device=device)
    if form == COMPILED:
        compile_blocks(model, dynamic=True)  # one graph for all batches
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
    """Return the seconds of a training step by ``clock``, the least of ``steps`` after a warm-up step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, config.vocab_size, (batch, seq + 1), device=device)
    precision = Precision.BF16 if device.type == "cuda" else Precision.FP32
    seconds = []
    for _ in range(steps + 1):
        dist.barrier()
        begin = clock()
        train_step(
            model, optimizer, [(tokens[:, :-1], tokens[:, 1:])], precision=precision, group=dist.group.WORLD
        )
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(clock() - begin)
    return min(seconds[1:])


def measure(form: str, batches: tuple[int, ...]) -> list[tuple[int, float]]:
    """Return batch and seconds of a step of the small model; on GPUs if there is one for each rank.

    Without GPUs the ranks share cores with other processes, so the seconds are processor time of this rank.
    """
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    device = place().device
    model = wrapped(form, SMALL_MODEL, device)
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    return [(batch, timed(model, SMALL_MODEL, batch, SMALL_SEQ, device, 3, clock)) for batch in batches]


def small_runs(seconds: dict[str, list[tuple[int, float]]], world_size: int = 2) -> dict[str, list[Point]]:
    """Add the peak of each run of the small model, measured on fake tensors."""
    return {
        form: [
            (batch, measured(SMALL_MODEL, form, batch, SMALL_SEQ, world_size).peak_bytes, time)
            for batch, time in found
        ]
        for form, found in seconds.items()
    }


def limits(runs: dict[str, list[Point]], number: int = 120) -> list[int]:
    """Return memory sizes in MiB at equal distances, from below the least peak to above the largest."""
    peaks = [peak / 2**20 for points in runs.values() for _, peak, _ in points]
    low, high = int(0.8 * min(peaks)), int(1.1 * max(peaks))
    return list(range(low, high + 1, max(1, (high - low) // number)))


def table(job: Job) -> list[str]:
    """Return what the elements of the submitted sweep have printed, one line for each."""
    lines = []
    for element in range(job.elements):
        said = [json.loads(line) for line in job.logs(element).splitlines() if line.startswith("{")]
        lines += [
            f"{row['form']:>14}  batch {row['batch']:>2} on {row['ranks']} ranks: "
            f"{row['peak_bytes'] / 2**30:.2f} GiB, {row['seconds']:.2f} s per step, "
            f"{row['sequences_per_second']:.1f} sequences/s"
            for row in said
        ]
    return lines


def main() -> None:
    """Run one row of the sweep, on the ranks that torchrun or srun has started."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--row", type=int, default=0, choices=range(len(ROWS)))
    parser.add_argument("--model", default="llama-3.2-3b")
    chosen = parser.parse_args()
    form, batch = ROWS[chosen.row]
    here, config = place(), model_config(chosen.model)
    with init_process_group(here):
        model = wrapped(form, config, here.device)
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
