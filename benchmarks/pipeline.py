"""Pipelines: `dlo_lib.parallel.pipeline` compared with `torch.distributed.pipelining`, for Llamas over gloo,
and measured schedules compared with simulated ones.

A turn is one step (forward and backward of all micro-batches, SGD) of the same stages with the same table: if
PyTorch builds a table, ours executes this table. Both run alternately in the same ranks and the same process
group. The floor is the same arithmetic in one process without a pipeline. Memory is the largest peak of the
ranks of a separate job.

The rows named *plan* have stages that sleep instead of computing, so that two cores are sufficient for four
ranks. They contain the measured makespan of each schedule divided by the simulated one.
"""

from __future__ import annotations

import csv
import io
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as theirs

from benchmarks.paired import Row, Turns, compare, measure, over_ranks, ratios, spread, take_turns
from benchmarks.peaks import peaks_in_turns, return_freed_memory
from dlo_lib.launch import Explain, run_ranks
from dlo_lib.models import Llama, LlamaConfig
from dlo_lib.optim.step import summed_cross_entropy, train_step
from dlo_lib.parallel.pipeline import schedules
from dlo_lib.parallel.pipeline.llama import LlamaStage
from dlo_lib.parallel.pipeline.partition import counted_costs, partition
from dlo_lib.parallel.pipeline.runtime import Pipeline
from dlo_lib.parallel.pipeline.simulate import Costs, simulate
from dlo_lib.parallel.pipeline.table import Schedule, in_a_loop, in_a_v, read_csv

MICRO_BATCHES = 8
CASES = {
    # name: the model, the sequences of a micro-batch, the tokens of a sequence
    "hidden 256": (
        LlamaConfig(257, 256, 704, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=64),
        2,
        128,
    ),
    "hidden 1024": (
        LlamaConfig(257, 1024, 2816, num_layers=8, num_heads=8, num_kv_heads=4, head_dim=128),
        1,
        64,
    ),
}
PEERS = {
    # our name: the class of PyTorch, the number of stages per rank
    "AFAB": (theirs.ScheduleGPipe, 1),
    "1F1B": (theirs.Schedule1F1B, 1),
    "interleaved 1F1B": (theirs.ScheduleInterleaved1F1B, 2),
    "interleaved zero bubble": (theirs.ScheduleInterleavedZeroBubble, 2),
    "ZB-V": (theirs.ScheduleZBVZeroBubble, 2),
}
PLANS = {
    "AFAB": schedules.afab,
    "1F1B": schedules.one_f_one_b,
    "interleaved 1F1B": lambda ranks, micro_batches: schedules.interleaved(ranks, micro_batches, 2),
    "ZB-H1": schedules.zb_h1,
    "ZB-H2": schedules.zb_h2,
    "ZB-V": schedules.zb_v,
    "DualPipe-V": schedules.dualpipe_v,
}
SLEEP = 0.05  # the seconds of each forward, input part and weight part
WORLD_SIZES = (2, 4)
ROWS = (len(PLANS) + len(CASES) * len(PEERS)) * len(WORLD_SIZES)
MAX_PEAKS = 5  # the number of jobs for the peak memory, which varies little


def rows(pairs: int = 40) -> Iterator[Row]:
    for name in PLANS:
        for world_size in WORLD_SIZES:
            yield _plan(name, world_size, max(3, pairs // 8))
    for case in CASES:
        for name in PEERS:
            for world_size in WORLD_SIZES:
                yield _row(case, name, world_size, pairs)


class Candidate:
    """The stages of a model with one of the two runtimes."""

    def __init__(self, case: str, name: str, ours: bool) -> None:
        config, self.batch, seq = CASES[case]
        kind, per_rank = PEERS[name]
        rank, ranks = dist.get_rank(), dist.get_world_size()
        placement = in_a_v(ranks) if name == "ZB-V" else in_a_loop(ranks, per_rank)
        cuts = partition(counted_costs(config, seq), len(placement))
        torch.manual_seed(0)
        model = Llama(config)
        stages = {
            stage: LlamaStage(model, cuts[stage]) for stage, owner in enumerate(placement) if owner == rank
        }
        parameters = [parameter for stage in stages.values() for parameter in stage.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.01)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(config.vocab_size, (MICRO_BATCHES * self.batch, seq + 1), generator=generator)
        self.inputs, self.targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        cpu = torch.device("cpu")
        wrapped = [PipelineStage(module, stage, len(placement), cpu) for stage, module in stages.items()]
        stage_or_stages = wrapped[0] if per_rank == 1 else wrapped
        peer = kind(stage_or_stages, MICRO_BATCHES, loss_fn=self._loss, scale_grads=False)
        self.peer, self.stages = peer, stages
        self.pipeline: Pipeline | None = None
        if ours:
            self.pipeline = Pipeline(stages, table_of(peer, placement, name))
            self.micro_batches = list(zip(self.inputs.split(self.batch), self.targets.split(self.batch)))

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return summed_cross_entropy(logits, targets) / self.targets.numel()

    def step(self) -> None:
        if self.pipeline is not None:
            train_step(self.pipeline, self.optimizer, self.micro_batches)
            return
        given: dict[str, Any] = {"target": self.targets} if self.peer_has_last else {}
        self.peer.step(*([self.inputs] if 0 in self.stages else []), **given)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def peer_has_last(self) -> bool:
        return any(isinstance(getattr(stage, "lm_head", None), nn.Module) for stage in self.stages.values())


def table_of(peer: Any, placement: tuple[int, ...], name: str) -> Schedule:
    """Return the table of the schedule of PyTorch. Its schedules with one stage per rank have no table; for
    them, return our table of the same name."""
    if not isinstance(peer, theirs.PipelineScheduleMulti):
        return PLANS[name](max(placement) + 1, MICRO_BATCHES)
    text = io.StringIO()
    order = peer.pipeline_order
    rows = [["" if action is None else str(action) for action in order[rank]] for rank in sorted(order)]
    csv.writer(text).writerows(rows)
    return read_csv(text.getvalue(), placement, name)


class Whole:
    """The same step in one process."""

    def __init__(self, case: str) -> None:
        config, batch, seq = CASES[case]
        torch.manual_seed(0)
        self.model = Llama(config)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        tokens = torch.randint(config.vocab_size, (MICRO_BATCHES * batch, seq + 1))
        self.micro_batches = list(zip(tokens[:, :-1].split(batch), tokens[:, 1:].split(batch)))

    def step(self) -> None:
        train_step(self.model, self.optimizer, self.micro_batches)


def _row(case: str, name: str, world_size: int, pairs: int) -> Row:
    turns = over_ranks(run_ranks(_turns, world_size, case, name, pairs, explain=Explain.OFF))
    floor = run_ranks(_floor, 1, case, max(3, pairs // 4), explain=Explain.OFF)[0]
    repeats = min(MAX_PEAKS, -(-pairs // 8))  # few, because a separate job takes much longer than a pair

    def job(wrapper: str) -> list[int]:
        return run_ranks(_peak, world_size, case, name, wrapper == "ours", explain=Explain.OFF)

    peaks = peaks_in_turns(job, repeats)
    peer = PEERS[name][0].__name__
    row = compare(f"{name}, {case}", peer, world_size, turns, floor_cpu=floor)
    return replace(row, memory_ratio=ratios(peaks["ours"], peaks["peer"]))


def _turns(case: str, name: str, pairs: int) -> Turns:
    torch.set_num_threads(1)
    ours, peer = Candidate(case, name, ours=True), Candidate(case, name, ours=False)
    return take_turns(ours.step, peer.step, pairs, between=dist.barrier)


def _floor(case: str, repeats: int) -> float:
    """Return the CPU time of the arithmetic alone, in seconds."""
    torch.set_num_threads(1)
    whole = Whole(case)
    whole.step()
    return statistics.median(measure(whole.step).cpu for _ in range(repeats))


def _peak(case: str, name: str, ours: bool) -> int:
    torch.set_num_threads(1)
    return_freed_memory()

    def train() -> None:
        candidate = Candidate(case, name, ours)
        for _ in range(3):
            candidate.step()

    return measure(train).memory


class Sleeping(nn.Module):
    """A stage whose forward, input part and weight part take ``SLEEP`` seconds each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        # Store the pipeline in a list, because a module in an attribute would be registered as a child.
        self.pipeline: list[tuple[Pipeline, int]] = []

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x.float(), self.weight, self)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stage: Sleeping) -> Tensor:
        ctx.stage = stage
        time.sleep(SLEEP)
        return x + weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        time.sleep(SLEEP)
        pipeline, number = ctx.stage.pipeline[0]
        split = pipeline.splits.get(number)
        if split is not None and split.deferred is not None:
            split.deferred.add(lambda: time.sleep(SLEEP))
            return grads[0], None, None
        time.sleep(SLEEP)
        return grads[0], grads[0].sum(), None


def _plan(name: str, world_size: int, steps: int) -> Row:
    plan = simulate(PLANS[name](world_size, MICRO_BATCHES), Costs(SLEEP, SLEEP, SLEEP)).makespan
    measured = run_ranks(_makespans, world_size, name, steps, explain=Explain.OFF)[0]
    note = f"measured {1e3 * statistics.median(measured):.0f} ms, simulated {1e3 * plan:.0f} ms"
    ratio = spread([value / plan for value in measured])
    return Row(f"plan: {name}", "simulator", world_size, time_ratio=ratio, note=note)


def _makespans(name: str, steps: int) -> list[float]:
    torch.set_num_threads(1)
    schedule = PLANS[name](dist.get_world_size(), MICRO_BATCHES)
    stages = {stage: Sleeping() for stage in schedule.stages_of(dist.get_rank())}
    pipeline = Pipeline(stages, schedule)
    for number, stage in stages.items():
        stage.pipeline.append((pipeline, number))
    micro_batches = [(torch.zeros(1, 4), torch.zeros(1, 4))] * MICRO_BATCHES
    found = []
    with pipeline.recording():
        for step in range(steps + 1):
            dist.barrier()
            pipeline.accumulate_gradients(micro_batches, lambda output, targets: output.sum())
            if step:  # the first step also exchanges the shapes of the outputs
                found.append(pipeline.measured().makespan)
    return found
