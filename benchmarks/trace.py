"""What the instruments cost: a training step with the tracer against one without, and on ranks with the explainer against ranks without.

The steps are those of PyTorch's DDP (few large messages) and of its FSDP2 (many), of a Llama, over gloo. The tracer takes turns with its
absence in the same ranks, step by step. The explainer belongs to the ranks from their start, so whole jobs take turns; a job's cost is the
median over its steps. Both are switched off where they are not measured. The note says how much CPU time that is in each step and call.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.paired import Row, Turn, Turns, compare, measure, over_ranks, take_turns
from dlo_lib.comm.trace import trace_collectives
from dlo_lib.launch import Explain, run_ranks
from dlo_lib.models import Llama, LlamaConfig

CONFIG = LlamaConfig(257, 256, 704, num_layers=6, num_heads=4, num_kv_heads=2, head_dim=64)
BATCH, SEQ = 4, 128  # more than 100 ms of CPU time a step
STEPS = 6
"""Steps of a job that is compared with another job."""
FORMS = ("DDP", "FSDP2")


def rows(pairs: int = 40) -> list[Row]:
    """``pairs``: steps of each for the tracer; a quarter of it jobs of each for the explainer."""
    found = []
    for form in FORMS:
        for world in (2, 4):
            per_rank = run_ranks(_traced_turns, world, form, pairs, explain=Explain.OFF, timeout=1200)
            turns, calls = over_ranks([turns for turns, _ in per_rank]), sum(calls for _, calls in per_rank)
            found.append(compare(f"tracer, {form}", "no tracer", world, turns, note=_note(turns, calls)))
        turns = take_jobs(form, 2, max(2, pairs // 4))
        found.append(compare(f"explainer, {form}", "no explainer", 2, turns, note=_note(turns)))
    return found


def take_jobs(form: str, world: int, pairs: int) -> Turns:
    """Jobs on watched and on unwatched ranks in turns: of each the median step."""
    turns = Turns([], [])
    for pair in range(pairs):
        order = [(Explain.TABLE, turns.ours), (Explain.OFF, turns.peer)]
        for explain, noted in order if pair % 2 == 0 else order[::-1]:
            noted.append(_median_step(run_ranks(_steps, world, form, explain=explain, timeout=600)))
    return turns


def _note(turns: Turns, calls: int = 0) -> str:
    more = statistics.median(mine.cpu - theirs.cpu for mine, theirs in zip(turns.ours, turns.peer))
    step = statistics.median(turn.cpu for turn in turns.peer)
    each = f", {1e6 * more / calls:.0f} us for each of {calls} calls" if calls else ""
    return f"{1e3 * more:+.1f} ms of CPU time on a step of {1e3 * step:.0f} ms, all ranks together{each}"


def _step_of(form: str) -> Callable[[], None]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    llama = Llama(CONFIG)
    model: torch.nn.Module = llama
    if form == "DDP":
        model = DistributedDataParallel(llama, bucket_cap_mb=1, gradient_as_bucket_view=True)
    else:
        for block in llama.layers:
            fully_shard(block)
        fully_shard(llama)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tokens = torch.randint(CONFIG.vocab_size, (BATCH, SEQ), generator=torch.Generator().manual_seed(dist.get_rank()))

    def step() -> None:
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _traced_turns(form: str, pairs: int) -> tuple[Turns, int]:
    """Steps with and without the tracer, and the calls that it saw in one."""
    step = _step_of(form)

    def traced() -> None:
        with trace_collectives():
            step()

    turns = take_turns(traced, step, pairs, between=dist.barrier)
    with trace_collectives() as trace:
        step()
    return turns, trace.count()


def _steps(form: str) -> list[Turn]:
    step = _step_of(form)
    turns = []
    for _ in range(STEPS + 2):
        dist.barrier()
        turns.append(measure(step))
    return turns[2:]


def _median_step(per_rank: list[list[Turn]]) -> Turn:
    steps = over_ranks([Turns(turns, turns) for turns in per_rank]).ours
    return sorted(steps, key=lambda turn: turn.cpu)[len(steps) // 2]
