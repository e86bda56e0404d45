"""The training loop: read, step, report and save, until the last step or a request to stop.

``train_step`` does the training; this module adds the rest. All ranks leave the loop after the same step,
because the decision is collective (``control``). Only rank 0 reports. The loop waits for the accelerator only
in steps with a line of metrics."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dlo_lib.base import progress
from dlo_lib.base.errors import UserError
from dlo_lib.base.ownership import owned
from dlo_lib.base.stop import StopRequests
from dlo_lib.base.text import tr
from dlo_lib.data import batches
from dlo_lib.launch import Place, init_process_group, place
from dlo_lib.optim import train_step
from dlo_lib.parallel.parallelize import local_tokens
from dlo_lib.parallel.plan import ZeroStage
from dlo_lib.train.batch_search import find_batch
from dlo_lib.train.checkpoint import save
from dlo_lib.train.compiled import losses_of_run
from dlo_lib.train.config import Auto, TrainConfig
from dlo_lib.train.control import Control, Decision
from dlo_lib.train.disk import writing
from dlo_lib.train.prepare import Prepared, open_out, prepare, write_config
from dlo_lib.train.report import reporter
from dlo_lib.train.state import TrainState


@dataclass(frozen=True)
class TrainResult:
    """The result of a run, the same on every rank.

    Attributes:
        step: the last completed step.
        tokens: the number of valid tokens of all steps and ranks.
        loss: the loss of the last step; None if the run had no step left.
        checkpoint: the folder of the state after ``step``.
        stopped: whether a signal ended the run before ``config.steps``.
        out: the folder of the run.
    """

    step: int
    tokens: int
    loss: float | None
    checkpoint: Path
    stopped: bool
    out: Path


def train(config: TrainConfig) -> TrainResult:
    """Train with ``config``; every rank calls it, under torchrun or srun, alone, or inside ``run_ranks``.

    An existing process group is used. Otherwise one is created, and destroyed at the end, if
    ``config.parallel`` needs it. The global random states are seeded. SIGTERM or SIGUSR1 on any rank ends the
    run after a step with a checkpoint; the result then has ``stopped``.

    Raises:
        UserError: the run cannot be trained or resumed, another run owns ``config.out``, a checkpoint is
            damaged, or the disk is full. It is an ``AgreedError`` if every rank raises it.
    """
    here = place()
    with contextlib.ExitStack() as stack:
        requests = stack.enter_context(StopRequests())
        if here.world_size > 1 or config.is_parallel:
            stack.enter_context(init_process_group(here))
        control = stack.enter_context(Control())
        with control.together(), writing(config.out):
            if here.rank == 0:
                stack.enter_context(owned(config.out))
        with control.together():
            prepared = prepare(config, here)
        with control.together():
            if here.rank == 0:
                open_out(prepared.config, resumed=prepared.checkpoint is not None)
        return _run(here, prepared, control, requests)


def _run(here: Place, prepared: Prepared, control: Control, requests: StopRequests) -> TrainResult:
    config, checkpoint = prepared.config, prepared.checkpoint
    state = prepared.spread(here)
    if config.batch is Auto.AUTO:
        config = _with_found_batch(state, prepared, here, control)
    if checkpoint is not None:
        checkpoint.restore(state, config, here.rank, here.world_size, control)
    saved = checkpoint.folder if checkpoint else None
    stream = batches(prepared.dataset, state.sampler.endless(), here.device)
    tokens = torch.tensor(state.tokens, device=here.device)
    verdict, failure, loss = Decision.CONTINUE, None, None
    which_loss = losses_of_run(config.kernels.operations, prepared.plan, state.compiled, here.device)

    with control.together():
        report = reporter(config, here, state, prepared.dataset)
        if here.rank == 0:  # from now on, every rank can be asked to stop
            progress.report(state.step, config.steps)
    with report:
        saved_at = time.monotonic()
        while state.step < config.steps and verdict in (Decision.CONTINUE, Decision.SAVE):
            strongest = control.ask(_wish(failure, requests, _too_long_since(saved_at, config)))
            state.step += 1
            for parameters in state.optimizer.param_groups:
                parameters["lr"] = config.learning_rate(state.step)
            try:
                with report.clock() as clock:
                    result = train_step(
                        state.spread,
                        state.optimizer,
                        [
                            local_tokens(prepared.plan, prepared.mesh, next(stream))
                            for _ in range(config.accumulation)
                        ],
                        precision=config.precision,
                        scaler=state.scaler,
                        max_norm=config.clip or None,
                        group=state.group,
                        sync_each=prepared.plan.stage >= ZeroStage.GRADIENTS,
                        **which_loss,
                        on_phase=clock.on_phase,
                    )
            except torch.OutOfMemoryError as error:
                raise UserError(
                    f"the GPU of rank {here.rank} is full in step {state.step}: "
                    "use a smaller --batch with more --accumulation, or --checkpointing"
                ) from error
            if state.average is not None:
                state.average.after_step(state.step)
            tokens += result.tokens
            loss = result.loss
            try:
                report.after_step(result, tokens)
            except UserError as error:  # a full disk on rank 0; the next verdict tells the other ranks
                failure = error
            verdict = strongest()
            last = state.step == config.steps or verdict is Decision.STOP
            due = verdict is Decision.SAVE or _due(config, state.step)
            if verdict is not Decision.FAILED and (last or due):
                state.tokens = int(tokens)
                with report.paused():
                    saved = save(state, config, here.rank, here.world_size, control)
                saved_at = time.monotonic()
        with control.together():
            if failure is not None:
                raise failure
            if here.rank == 0 and state.step < config.steps:
                progress.report(state.step, config.steps, stopped=True)
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


def _with_found_batch(state: TrainState, prepared: Prepared, here: Place, control: Control) -> TrainConfig:
    """Return the configuration with the largest batch that fits, which ``state`` has then too."""
    found = find_batch(state, prepared, here, control)
    config = replace(prepared.config, batch=found.batch)
    with control.together():
        if here.rank == 0:
            write_config(config)
            print(
                tr(
                    "batch {batch}: the largest that fits, after {trials} trials; the fullest GPU uses "
                    "{used:.0%} of its limit",
                    batch=found.batch,
                    trials=len(found.trials),
                    used=found.trials[found.batch],
                ),
                flush=True,
            )
    return config


def _wish(failure: UserError | None, requests: StopRequests, save_now: bool) -> Decision:
    if failure is not None:
        return Decision.FAILED
    if requests.received:
        return Decision.STOP
    return Decision.SAVE if save_now else Decision.CONTINUE


def _too_long_since(saved_at: float, config: TrainConfig) -> bool:
    """Whether the newest checkpoint is older than the configuration wants: a failed node loses that time."""
    minutes = config.checkpoint_minutes
    return minutes > 0 and time.monotonic() - saved_at >= 60 * minutes


def _due(config: TrainConfig, step: int) -> bool:
    return config.checkpoint_every > 0 and step % config.checkpoint_every == 0
