"""The training loop: read, step, report, save, until the last step or a request to stop.

All that is learned happens in ``train_step``; here is what surrounds it. Ranks run the same lines in the same order and leave the loop
after the same step, because they decide that together (``control``). Rank 0 alone reports; an accelerator is waited for only where a line
of metrics is due.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from dlo_lib.data import batches
from dlo_lib.errors import UserError
from dlo_lib.launch import Place, init_process_group, place
from dlo_lib.optim import train_step
from dlo_lib.parallel.forms import FORMS, Parallel, Sharded
from dlo_lib.train.checkpoint import save
from dlo_lib.train.config import TrainConfig
from dlo_lib.train.control import Control, Verdict
from dlo_lib.train.prepare import Prepared, open_out, prepare
from dlo_lib.train.report import reporter
from dlo_lib.train.signals import StopRequests


@dataclass(frozen=True)
class TrainResult:
    """How a run ended, the same on every rank.

    step: the last one done. tokens: valid ones learned from, on all ranks. loss: of the last step; None when there was none left to do.
    checkpoint: the folder of the state after ``step``. stopped: whether a signal ended it before ``config.steps``. out: the run's folder.
    """

    step: int
    tokens: int
    loss: float | None
    checkpoint: Path
    stopped: bool
    out: Path


def train(config: TrainConfig) -> TrainResult:
    """Train as ``config`` says, on every rank alike: under torchrun, srun or alone, or inside ``run_ranks``.

    A process group that exists is used, else one is made (and destroyed) when ``config.parallel`` needs it. The global random states are
    seeded. SIGTERM and SIGUSR1, on whichever rank, end the run after a step with a checkpoint; the result then says ``stopped``.

    Raises:
        UserError: what cannot be trained or resumed, a damaged checkpoint, a full disk. ``AgreedError`` when it is raised on every rank.
    """
    here = place()
    with contextlib.ExitStack() as stack:
        requests = stack.enter_context(StopRequests())
        if here.world_size > 1 or config.parallel is not Parallel.NONE:
            stack.enter_context(init_process_group(here))
        control = stack.enter_context(Control())
        with control.together():
            prepared = prepare(config, here)
        with control.together():
            if here.rank == 0:
                open_out(config, resumed=prepared.checkpoint is not None)
        return _run(config, here, prepared, control, requests)


def _run(config: TrainConfig, here: Place, prepared: Prepared, control: Control, requests: StopRequests) -> TrainResult:
    checkpoint = prepared.checkpoint
    group = dist.group.WORLD if dist.is_initialized() else None
    state = prepared.spread(config, here, group)
    if checkpoint is not None:
        checkpoint.restore(state, here.rank, here.world_size, control)
    saved = checkpoint.folder if checkpoint else None
    stream = batches(prepared.dataset, state.sampler.endless(), here.device)
    tokens = torch.tensor(state.tokens, device=here.device)
    verdict, failure, loss = Verdict.GO_ON, None, None

    with control.together():
        report = reporter(config, here, state)
    with report:
        while state.step < config.steps and verdict is Verdict.GO_ON:
            strongest = control.ask(_wish(failure, requests))
            state.step += 1
            for parameters in state.optimizer.param_groups:
                parameters["lr"] = config.learning_rate(state.step)
            try:
                with report.clock() as clock:
                    result = train_step(
                        state.spread,
                        state.optimizer,
                        [next(stream) for _ in range(config.accumulation)],
                        precision=config.precision,
                        scaler=state.scaler,
                        max_norm=config.clip or None,
                        group=state.group,
                        sync_each=FORMS[config.parallel].sharded >= Sharded.GRADIENTS,
                        on_phase=clock.on_phase,
                    )
            except torch.OutOfMemoryError as error:
                raise UserError(
                    f"the GPU of rank {here.rank} is full in step {state.step}: "
                    "use a smaller --batch with more --accumulation, or --checkpointing"
                ) from error
            tokens += result.tokens
            loss = result.loss
            try:
                report.after_step(result, tokens)
            except UserError as error:  # a full disk, on rank 0: the others learn it with the next verdict
                failure = error
            verdict = strongest()
            last = state.step == config.steps or verdict is Verdict.STOP
            if verdict is not Verdict.FAILED and (last or _due(config, state.step)):
                state.tokens = int(tokens)
                with report.paused():
                    saved = save(state, config, here.rank, here.world_size, control)
        with control.together():
            if failure is not None:
                raise failure
        assert saved is not None  # a run has at least one step, and a checkpoint after its last
        outcome = TrainResult(
            step=state.step,
            tokens=int(tokens),
            loss=None if loss is None else float(loss),
            checkpoint=saved,
            stopped=state.step < config.steps,
            out=config.out,
        )
        report.finish(saved, outcome.stopped, requests.received)
    return outcome


def _wish(failure: UserError | None, requests: StopRequests) -> Verdict:
    if failure is not None:
        return Verdict.FAILED
    return Verdict.STOP if requests.received else Verdict.GO_ON


def _due(config: TrainConfig, step: int) -> bool:
    return config.checkpoint_every > 0 and step % config.checkpoint_every == 0
