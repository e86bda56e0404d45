"""The overhead of the tracer and of the explainer: a training step with and without them.

The steps are those of PyTorch's DDP (few large messages) and FSDP2 (many messages) with a Llama over gloo,
and a step of small all-reduces without computation, which measures the overhead of each call. Steps with and
without the tracer alternate in the same ranks, and so do steps with and without the rank's part of the
explainer. Jobs with and without the whole explainer, including the watcher in the parent, alternate as well;
the cost of a job is the median over its steps. Instruments that are not measured are off. The note contains
the CPU time of the overhead in each step and in each call.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.paired import Row, Turn, Turns, compare, measure, over_ranks
from dlo_lib.comm.deadlock import board
from dlo_lib.comm.deadlock.rank_recorder import record_row
from dlo_lib.comm.tracing.recorder import trace_collectives
from dlo_lib.launch import Explain, run_ranks
from dlo_lib.models import Llama, LlamaConfig

CONFIG = LlamaConfig(257, 256, 704, num_layers=6, num_heads=4, num_kv_heads=2, head_dim=64)
BATCH, SEQ = 4, 128  # more than 100 ms of CPU time per step
STEPS = 6
"""The number of steps of a job that is compared with another job."""
FORMS = ("DDP", "FSDP2")
SMALL, SMALL_CALLS = "small calls", 100
WARM_UP = 2
WORLD_SIZES = (2, 4)
ROWS = 2 * (len(FORMS) + 1) * len(WORLD_SIZES) + len(FORMS)


def rows(pairs: int = 40) -> Iterator[Row]:
    """``pairs`` is the number of steps of each kind. The number of jobs is a quarter of it."""
    for instrument in (_Tracer(), _RowRecorder()):
        for form in (*FORMS, SMALL):
            for world in WORLD_SIZES:
                per_rank = run_ranks(
                    _turns, world, instrument, form, pairs, explain=Explain.OFF, timeout=1200
                )
                turns = over_ranks([turns for turns, _ in per_rank])
                note = _note(turns, sum(calls for _, calls in per_rank))
                yield compare(f"{instrument.name}, {form}", f"no {instrument.name}", world, turns, note=note)
    for form in FORMS:
        turns = take_jobs(form, 2, max(2, pairs // 4))
        yield compare(f"watched job, {form}", "unwatched job", 2, turns, note=_note(turns))


class _Tracer:
    """Switches the tracer on for a step."""

    name = "tracer"

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with trace_collectives():
            yield


class _RowRecorder:
    """Switches on a rank's part of the explainer: it writes the row of the rank and reads the other rows,
    which are empty here."""

    name = "explainer"

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with record_row(board.RankRow(board.Board(dist.get_world_size()), dist.get_rank())):
            yield


def take_jobs(form: str, world: int, pairs: int) -> Turns:
    """Run jobs on watched and on unwatched ranks alternately, and return the median step of each."""
    turns = Turns([], [])
    for pair in range(pairs):
        order = [(Explain.TABLE, turns.ours), (Explain.OFF, turns.peer)]
        for explain, measured in order if pair % 2 == 0 else order[::-1]:
            measured.append(_median_step(run_ranks(_steps, world, form, explain=explain, timeout=600)))
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
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in llama.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(llama, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tokens = torch.randint(
        CONFIG.vocab_size, (BATCH, SEQ), generator=torch.Generator().manual_seed(dist.get_rank())
    )

    def step() -> None:
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _small_calls() -> None:
    x = torch.ones(1)
    for _ in range(SMALL_CALLS):
        dist.all_reduce(x)


def _turns(
    instrument: Callable[[], AbstractContextManager[None]], form: str, pairs: int
) -> tuple[Turns, int]:
    """Measure steps with and without the instrument, and count the calls in a step. As in normal use, the
    instrument is switched on outside of the measurement."""
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
