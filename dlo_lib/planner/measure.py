"""Fits the constants of ``machine`` to steps of small models, and measures steps of plans beside.

Both ranks of the calibration compute at the same time, because cores share their caches and the memory. All
runs take turns, so that other work of the machine slows them alike; and a plan is measured in turns with the
first calibration run, whose time shows how busy the machine is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dlo_lib.base.cores import usable_cores
from dlo_lib.base.torch_compat import all_gather_single, reduce_scatter_single
from dlo_lib.launch import run_ranks
from dlo_lib.models import Llama, LlamaConfig
from dlo_lib.optim import train_step
from dlo_lib.parallel.mesh import TOKENS, ParallelMesh
from dlo_lib.parallel.parallelize import local_tokens, make_optimizer, parallelize
from dlo_lib.parallel.pipeline.table import ScheduleKind
from dlo_lib.parallel.plan import ParallelPlan, ZeroStage
from dlo_lib.parallel.sharding.transport import BufferPool, default_transport
from dlo_lib.planner.laws import without_negatives
from dlo_lib.planner.machine import COMPUTING, FORMS, KINDS, CpuMachine, MachineCost, machine_cost, unit
from dlo_lib.planner.plans import Array, Checkpointing, Plans
from dlo_lib.planner.sizes import ModelSizes


@dataclass(frozen=True)
class SmallRun:
    """Steps of the trainer on one rank of a machine, or on several."""

    config: LlamaConfig
    seq: int
    batch: int
    plan: ParallelPlan = field(default_factory=ParallelPlan)
    micro_batches: int = 1
    checkpointing: bool = False

    @property
    def plans(self) -> Plans:
        """The plan as arrays of shape (1,)."""
        saves = Checkpointing.FULL if self.checkpointing else Checkpointing.NONE
        batch = {"micro_batch": self.batch, "micro_batches": self.micro_batches, "checkpointing": saves}
        return Plans.of_plans([self.plan], **batch)


@dataclass(frozen=True)
class Turns:
    """Seconds of steps on ranks, arrays of shape (steps,), each the largest of the ranks: of the plan, and of
    the first calibration run, which takes turns with it."""

    wall: Array
    cpu: Array
    reference_wall: Array
    reference_cpu: Array


def small_llama(hidden: int = 256, layers: int = 4, vocab: int = 257) -> LlamaConfig:
    """Return a Llama with heads of 64 features, half as many with keys, and tied embeddings."""
    heads = hidden // 64
    return LlamaConfig(
        vocab, hidden, hidden * 11 // 4, num_layers=layers, num_heads=heads, num_kv_heads=max(1, heads // 2),
        head_dim=64, tied_embeddings=True,
    )  # fmt: skip


CALIBRATION = (
    SmallRun(small_llama(), 128, 2),
    SmallRun(small_llama(layers=1), 128, 2),
    SmallRun(small_llama(), 16, 1),
    SmallRun(small_llama(layers=2), 512, 1),
    SmallRun(small_llama(512, layers=1), 128, 2),
    SmallRun(small_llama(512, layers=2), 16, 1),
    SmallRun(small_llama(layers=2), 128, 2, checkpointing=True),
    SmallRun(small_llama(), 32, 1, micro_batches=4),
    SmallRun(small_llama(layers=1, vocab=4096), 128, 2),
)
"""What the constants of computation are fitted to: no two constants have the same part in all of them."""
_PIPELINE = ParallelPlan(pp=2, schedule=ScheduleKind.ONE_F_ONE_B, micro_batches=4)
IN_FORMS = {
    "unit": SmallRun(small_llama(layers=2), 64, 1, ParallelPlan(dp_shard=2, zero_stage=ZeroStage.PARAMETERS)),
    "tensor": SmallRun(small_llama(layers=2), 64, 1, ParallelPlan(tp=2)),
    "ring": SmallRun(small_llama(layers=2), 128, 1, ParallelPlan(cp=2)),
    "stage": SmallRun(small_llama(layers=2), 64, 1, _PIPELINE, micro_batches=4),
}
"""For each form of parallelism the run whose time beyond the other constants is that of the form."""
SIZES = (1 << 12, 1 << 20)
"""The elements of the messages whose times give a constant for a byte and one for a call."""
STEPS, WARM_UP, MESSAGES = 6, 2, 20


def measure(
    runs: Sequence[SmallRun] = CALIBRATION,
    forms: Mapping[str, SmallRun] = IN_FORMS,
    cores: int | None = None,
    steps: int = STEPS,
    messages: int = MESSAGES,
) -> CpuMachine:
    """Return the constants of this machine, after about 20 s of CPU time on two ranks.

    Args:
        runs: what the constants of computation are fitted to.
        forms: what those of forms of parallelism are fitted to; 0 for a form that is not there.
        cores: that ranks share; None for those of this process.
        steps, messages: how often each is measured.
    """
    ranks = run_ranks(_calibrate, 2, runs, list(forms.values()), steps, messages)
    seconds, idle = (np.mean([each[index] for each in ranks], 0) for index in (0, 1))
    machine = fit_machine(runs, seconds[: len(runs)], cores or usable_cores())
    times = np.mean([each[2] for each in ranks], 0)  # (kinds, sizes)
    sent = 4 * np.array(SIZES) * np.array([[1.0], [0.5], [0.5], [1.0], [0.5], [0.5]])
    byte = np.maximum(times[:, 1] - times[:, 0], 0) / (sent[:, 1] - sent[:, 0])
    call = np.maximum(times[:, 0] - byte * sent[:, 0], 0)
    machine = replace(machine, byte=tuple(map(float, byte)), call=tuple(map(float, call)))
    return with_forms(machine, forms, seconds[len(runs) :], idle[len(runs) :])


def with_forms(
    machine: CpuMachine, forms: Mapping[str, SmallRun], seconds: Array, idle: Array | None = None
) -> CpuMachine:
    """Return a machine with the constants of forms, from the CPU times of their runs; none is below 0.

    Args:
        idle: the seconds of each run without CPU time, of which those of "tensor" give ``wait``.
    """
    found, wait = dict.fromkeys(FORMS, 0.0), 0.0
    for index, (name, run) in enumerate(forms.items()):
        messages = float(predicted(run, unit(name)).cpu_seconds[0])
        rest = float(seconds[index] - predicted(run, machine).cpu_seconds[0])
        found[name] = max(rest, 0.0) / messages
        if name == "tensor" and idle is not None:
            wait = max(float(idle[index]), 0.0) / messages
    return replace(machine, form=tuple(found.values()), wait=wait)


def fit_machine(runs: Sequence[SmallRun], seconds: Array, cores: int) -> CpuMachine:
    """Return the constants of computation for which the predictions of ``runs`` are nearest to ``seconds``,
    in relative terms, and none below 0."""

    counts = np.array([[predicted(run, unit(name)).cpu_seconds[0] for name in COMPUTING] for run in runs])
    found = without_negatives(counts / np.asarray(seconds)[:, None], np.ones(len(runs)))
    constants: dict[str, Any] = dict(zip(COMPUTING, map(float, found)))
    return CpuMachine(cores, **constants)


def predicted(run: SmallRun, machine: CpuMachine) -> MachineCost:
    """Return the predictions of a run, arrays of shape (1,)."""
    return machine_cost(ModelSizes.of(run.config), run.plans, run.seq, machine)


def run_steps(run: SmallRun, steps: int = STEPS) -> Turns:
    """Return the times of steps of the trainer on ranks of this machine, as many as the plan has."""
    ranks = np.array(run_ranks(_in_turns, int(run.plans.gpus[0]), run, steps))  # (ranks, steps, 4)
    return Turns(*ranks.max(0).T)


def _in_turns(run: SmallRun, steps: int) -> list[tuple[float, float, float, float]]:
    """Wall and CPU seconds of each step of a run on this rank, and of the first calibration run."""
    torch.set_num_threads(1)
    trained, alone = _step_of(run, together=True), _step_of(CALIBRATION[0], together=False)
    turns = []
    for _ in range(WARM_UP + steps):
        reference = _timed(alone)
        dist.barrier()
        turns.append((*_timed(trained), *reference))
    return turns[WARM_UP:]


def _timed(call: Callable[[], object]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


def _step_of(run: SmallRun, together: bool) -> Callable[[], object]:
    """Return what makes a step of a run on this rank; not ``together``: a process alone."""
    torch.manual_seed(0)
    model: Any = Llama(run.config, checkpointing=run.checkpointing)
    mesh = ParallelMesh(run.plan.degrees) if together else None
    model = parallelize(model, run.plan, mesh, seq=run.seq)
    groups = [{"params": [one for one in model.parameters() if one.requires_grad]}]
    optimizer = make_optimizer(model, run.plan, mesh, groups, torch.optim.AdamW, lr=1e-4)
    learns_with = None  # as the trainer does
    if mesh is not None and (not run.plan.pipelined or mesh.size(*TOKENS) > 1):
        learns_with = mesh.group_along(*TOKENS)
    tokens = torch.randint(0, run.config.vocab_size, (run.micro_batches, run.batch, run.seq))
    micro_batches = [local_tokens(run.plan, mesh, (one, one)) for one in tokens]
    return lambda: train_step(
        model, optimizer, micro_batches, max_norm=1.0, group=learns_with,
        sync_each=run.plan.stage >= ZeroStage.GRADIENTS,
    )  # fmt: skip


def _calibrate(
    runs: Sequence[SmallRun], forms: Sequence[SmallRun], steps: int, messages: int
) -> tuple[list[float], list[float], list[list[float]]]:
    """CPU seconds of a step of each run, the least seconds without CPU time, and CPU seconds of each kind and
    size of a message, in turns."""
    torch.set_num_threads(1)
    calls = [_step_of(run, together=False) for run in runs]
    calls += [_step_of(run, together=True) for run in forms]
    rounds = np.array([[_timed(call) for call in calls] for _ in range(WARM_UP + steps)])[WARM_UP:]
    wall, cpu = rounds.transpose(2, 0, 1)
    turns = [[_message(kind, size) for kind in KINDS for size in SIZES] for _ in range(1 + messages)][1:]
    times = np.median(turns, 0).reshape(len(KINDS), len(SIZES))
    return np.median(cpu, 0).tolist(), (wall - cpu).min(0).tolist(), times.tolist()


def _message(kind: str, size: int) -> float:
    """CPU seconds of one message of ``size`` elements between two ranks."""
    whole, half = torch.ones(size), torch.ones(size // 2)
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    transport, pool = default_transport(group, whole.device), BufferPool(whole.device, keep=True)
    calls: dict[str, list[Callable[[], object]]] = {
        "reduce": [lambda: dist.all_reduce(whole)],
        "scatter": [lambda: reduce_scatter_single(half, whole)],
        "gather": [lambda: all_gather_single(whole, half)],
        "scatter shards": [lambda: transport.reduce_scatter(half, whole, group, pool)()],
        "gather shards": [lambda: transport.all_gather(whole, half, group)()],
        "send": [lambda: dist.send(whole, 1 - rank), lambda: dist.recv(whole, 1 - rank)],
    }
    for call in calls[kind][:: 1 if rank else -1]:  # with memory that was used before
        call()
    dist.barrier()
    # A stage sends one message and receives one: half of this is one of them.
    return _timed(lambda: [call() for call in calls[kind][:: 1 if rank else -1]])[1] / len(calls[kind])
