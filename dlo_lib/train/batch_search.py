"""``--batch auto``: the largest batch whose step fits on the GPU of every rank.

A trial is two steps of the run itself, with its model, optimiser and plan, on random tokens and with a
learning rate of 0; the peak of the second one is measured. The memory of a step grows nearly linearly with
the batch, so the line through the last two trials says which batch to try next, at most four times the
largest one that fits. The search ends when the next batch did not fit, or when the line says that it does
not. Several ranks take smaller steps, at most twice, because a rank whose memory is full leaves the step, and
the others would wait for it.

Trials change no weight, and what else they change is restored: the state of the optimiser, buffers, the
scaler and random states. They do not read the data. The result is written to ``config.json`` and to every
checkpoint, from which a resumed run takes it.

Cost: two steps for each of about log4(batch) + 2 trials (with several ranks log2), and with ``--compile`` the
compilation of each batch. That of the batch of the run is then in the cache.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dlo_lib.base.errors import UserError
from dlo_lib.data import RankSampler
from dlo_lib.launch import Place
from dlo_lib.models.moe import moe_layers
from dlo_lib.optim import train_step
from dlo_lib.parallel.parallelize import local_tokens
from dlo_lib.parallel.plan import ZeroStage
from dlo_lib.parallel.protocol import local_optimizer
from dlo_lib.profiling.batch_memory import step_peak
from dlo_lib.train.compiled import losses_of_run
from dlo_lib.train.control import Control
from dlo_lib.train.prepare import Prepared
from dlo_lib.train.state import RankSnapshot, TrainState

USED = 0.95
"""The part of the free memory that a step may take. The rest is for fragmentation, which grows in a run."""


@dataclass(frozen=True)
class FoundBatch:
    """The result: the batch, and for each trial the peak of the fullest rank as a part of its limit (infinite
    if the memory was full)."""

    batch: int
    trials: dict[int, float]


def largest_fitting(share: Callable[[int], float], most: int, growth: int = 2) -> FoundBatch:
    """Search the largest batch whose ``share`` of the memory is at most 1; a batch of 0 means that none fits.

    Args:
        share: measures a batch; infinite if the memory was full. It grows with the batch.
        most: no larger batch is tried.
        growth: no batch is tried that is more than this number of times as large as one that fits.
    """
    trials: dict[int, float] = {}
    fits, too_large, candidate = 0, most + 1, 1
    while too_large - fits > 1:
        trials[candidate] = share(candidate)
        if trials[candidate] <= 1:
            fits = candidate
        else:
            too_large = candidate
        expected = _on_the_line(trials)
        if expected <= fits:
            break
        if expected >= too_large and too_large in trials:  # the line is wrong
            candidate = (fits + too_large) // 2
        else:
            candidate = min(expected, growth * fits, too_large - 1)
    return FoundBatch(fits, trials)


def _on_the_line(trials: dict[int, float]) -> int:
    """Return the largest batch that fits by the line through the two largest measured batches; without two,
    a batch that is larger than any."""
    measured = sorted((batch, value) for batch, value in trials.items() if value != math.inf)[-2:]
    if len(measured) < 2 or measured[1][1] <= measured[0][1]:
        return 1 << 62
    (first, low), (second, high) = measured
    return first + math.floor((1 - low) * (second - first) / (high - low))


def find_batch(state: TrainState, prepared: Prepared, place: Place, control: Control) -> FoundBatch:
    """Search the largest batch of this run; every rank calls it, before the first step.

    Args:
        state: a run before its first step; it is the same afterwards, with a sampler for the batch.

    Raises:
        UserError: there is no GPU; one sequence does not fit; with several ranks, the memory of
            one was full in a trial.
    """
    limit = _free_bytes(place.device)
    before = _Before(state)

    def share(batch: int) -> float:
        try:
            peak = step_peak(lambda: _trial(state, prepared, place, batch), place.device)
        except torch.OutOfMemoryError as error:
            if place.world_size > 1:
                raise UserError(
                    f"the GPU of rank {place.rank} is full with a batch of {batch}: use a smaller --batch"
                ) from error
            peak = None
        finally:
            _forget_step(state)
            if state.compiled is not None:  # after 8 shapes, PyTorch would compile no other one
                torch.compiler.reset()
        return control.largest(math.inf if peak is None else peak / limit)

    sampler = state.sampler
    try:
        growth = 4 if place.world_size == 1 else 2
        found = largest_fitting(share, sampler.size // sampler.world_size, growth)
    finally:
        before.put_back(state)
    if not found.batch:
        raise UserError(
            "one sequence does not fit on the GPU of every rank: use --checkpointing, a shorter --seq, or "
            "--parallel fsdp on more ranks"
        )
    state.sampler = RankSampler(
        sampler.size, found.batch, sampler.rank, sampler.world_size, seed=sampler.seed
    )
    return found


def _free_bytes(device: torch.device) -> int:
    """Return what the tensors of this rank may take."""
    if device.type != "cuda":
        raise UserError("batch auto measures the memory of a GPU: without one, give --batch as a number")
    free, _ = torch.cuda.mem_get_info(device)
    return int(USED * (free + torch.cuda.memory_reserved(device)))


def _trial(state: TrainState, prepared: Prepared, place: Place, batch: int) -> Callable[[], object]:
    """Return a function that trains one step with ``batch`` sequences and changes no weight."""
    config, plan = prepared.config, prepared.plan
    # More micro-batches need no more memory than two, the second of which finds gradients. The schedule of a
    # pipeline has a fixed number.
    count = config.accumulation if plan.pipelined else min(config.accumulation, 2)
    generator = torch.Generator().manual_seed(0)
    vocabulary = state.model.config.vocab_size
    pairs = []
    for _ in range(count):
        tokens = torch.randint(vocabulary, (2, batch, config.seq), generator=generator).to(place.device)
        pairs.append(local_tokens(plan, prepared.mesh, (tokens[0], tokens[1])))
    which_loss = losses_of_run(config.kernels.operations, plan, state.compiled, place.device)

    def step() -> object:
        for group in state.optimizer.param_groups:
            group["lr"] = 0.0
        return train_step(
            state.spread,
            state.optimizer,
            pairs,
            precision=config.precision,
            scaler=state.scaler,
            max_norm=config.clip or None,
            group=state.group,
            sync_each=plan.stage >= ZeroStage.GRADIENTS,
            **which_loss,
        )

    return step


def _forget_step(state: TrainState) -> None:
    """Free what a step has left, also one that failed."""
    state.optimizer.zero_grad(set_to_none=True)
    gc.collect()  # a graph that is part of a cycle, or the frames of an error
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class _Before:
    """What trials change and the weights do not contain."""

    def __init__(self, state: TrainState) -> None:
        self._random = RankSnapshot.now()
        self._buffers = [(buffer, buffer.clone()) for buffer in state.spread.buffers()]
        self._scaler = None if state.scaler is None else state.scaler.state_dict()
        self._rates = [group["lr"] for group in state.optimizer.param_groups]

    @torch.no_grad()
    def put_back(self, state: TrainState) -> None:
        local_optimizer(state.optimizer).state.clear()  # before the first step there is none
        state.optimizer.zero_grad(set_to_none=True)
        for group, rate in zip(state.optimizer.param_groups, self._rates):
            group["lr"] = rate
        for buffer, value in self._buffers:
            buffer.copy_(value)
        for layer in moe_layers(state.spread):
            layer.take_load()
        if state.scaler is not None and self._scaler is not None:
            state.scaler.load_state_dict(self._scaler)
        self._random.put_back()
