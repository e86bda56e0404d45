"""What the instruments cost: a training step with the tracer against one without, and on ranks with the explainer against ranks without.

The steps are those of PyTorch's DDP (few large messages) and of its FSDP2 (many), of a Llama, over gloo; and a step that computes nothing,
of small all-reduces only, which says what each call costs. The tracer takes turns with its absence in the same ranks, step by step, and so
does a rank's part of the explainer. A watched job as a whole, the watcher in the parent with it, takes turns with an unwatched one; a job's
cost is the median over its steps. What is not measured is switched off. The note says how much CPU time that is in each step and call.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.paired import Row, Turn, Turns, compare, measure, over_ranks
from dlo_lib.comm import board
from dlo_lib.comm.keeper import kept_row
from dlo_lib.comm.trace import trace_collectives
from dlo_lib.launch import Explain, run_ranks
from dlo_lib.models import Llama, LlamaConfig

CONFIG = LlamaConfig(257, 256, 704, num_layers=6, num_heads=4, num_kv_heads=2, head_dim=64)
BATCH, SEQ = 4, 128  # more than 100 ms of CPU time a step
STEPS = 6
"""Steps of a job that is compared with another job."""
FORMS = ("DDP", "FSDP2")
SMALL, SMALL_CALLS = "small calls", 100
WARM_UP = 2


def rows(pairs: int = 40) -> Iterator[Row]:
    """``pairs``: steps of each; a quarter of it jobs of each."""
    for instrument in (_Tracer(), _RowKeeper()):
        for form in (*FORMS, SMALL):
            for world in (2, 4):
                per_rank = run_ranks(_turns, world, instrument, form, pairs, explain=Explain.OFF, timeout=1200)
                turns, calls = over_ranks([turns for turns, _ in per_rank]), sum(calls for _, calls in per_rank)
                yield compare(f"{instrument.name}, {form}", f"no {instrument.name}", world, turns, note=_note(turns, calls))
    for form in FORMS:
        turns = take_jobs(form, 2, max(2, pairs // 4))
        yield compare(f"watched job, {form}", "unwatched job", 2, turns, note=_note(turns))


class _Tracer:
    """The tracer, on for a step."""

    name = "tracer"

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with trace_collectives():
            yield


class _RowKeeper:
    """A rank's part of the explainer: its row is written, and the others' are read, which here stay empty."""

    name = "explainer"

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with kept_row(board.Row(board.Board(dist.get_world_size()), dist.get_rank())):
            yield


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
    if form == SMALL:
        return _small_calls
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


def _small_calls() -> None:
    x = torch.ones(1)
    for _ in range(SMALL_CALLS):
        dist.all_reduce(x)


def _turns(instrument: Callable[[], AbstractContextManager[None]], form: str, pairs: int) -> tuple[Turns, int]:
    """Steps with and without the instrument, and the calls in one. It is put in place outside what is measured, as in use."""
    step = _step_of(form)
    turns = Turns([], [])
    for pair in range(-WARM_UP, pairs):
        for watched in (True, False) if pair % 2 == 0 else (False, True):
            with instrument() if watched else nullcontext():
                dist.barrier()
                turn = measure(step)
            if pair >= 0:
                (turns.ours if watched else turns.peer).append(turn)
    with trace_collectives() as trace:
        step()
    return turns, trace.count()


def _steps(form: str) -> list[Turn]:
    step = _step_of(form)
    turns = []
    for _ in range(WARM_UP + STEPS):
        dist.barrier()
        turns.append(measure(step))
    return turns[WARM_UP:]


def _median_step(per_rank: list[list[Turn]]) -> Turn:
    steps = over_ranks([Turns(turns, turns) for turns in per_rank]).ours
    return sorted(steps, key=lambda turn: turn.cpu)[len(steps) // 2]
