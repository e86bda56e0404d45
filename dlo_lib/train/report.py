"""The reports of rank 0 during a run: lines of metrics and the progress.

Throughput is measured between two lines, without the time of checkpoints. The values are read from the device
only in steps with a line."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_lib.base.provenance import Provenance, commit_of, digest
from dlo_lib.base.text import tr
from dlo_lib.data import TokenDataset
from dlo_lib.hardware import Gpu, recognise
from dlo_lib.launch import Place
from dlo_lib.optim import Precision, StepResult
from dlo_lib.profiling import mfu
from dlo_lib.train.clock import NoClock, StepClock
from dlo_lib.train.compiled import CompileClock
from dlo_lib.train.config import TrainConfig
from dlo_lib.train.disk import writing
from dlo_lib.train.metrics import Metrics, MetricsWriter, peak_memory
from dlo_lib.train.progress import TrainProgress
from dlo_lib.train.state import TrainState
from dlo_lib.train.tracking import TrackedRun

_HASHED = 256
"""Sequences of a data set that its hash reads: hashing all of a large one would delay every start."""


class Quiet:
    """The reporter of all ranks except rank 0: a context that reports nothing."""

    def __enter__(self) -> Quiet:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def clock(self) -> NoClock:
        """Return the context for the next step, including the reading of its data."""
        return NoClock()

    def after_step(self, result: StepResult, tokens: Tensor) -> None:
        """Report a step; ``tokens``, (), is the number of tokens of the run so far.

        Raises:
            UserError: the disk is full.
        """

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the block from the throughput."""
        yield

    def finish(self, checkpoint: Path, stopped: bool, signal: str | None) -> None:
        """Report the end of the run; ``signal`` is the signal that this rank received, if any."""


class Reporter(Quiet):
    """The reporter of rank 0."""

    def __init__(self, config: TrainConfig, place: Place, state: TrainState, data: TokenDataset) -> None:
        self._config, self._place, self._state = config, place, state
        self._card = _card(place.device)
        self._gpu = _gpu(place.device, config.precision)
        self._clock: StepClock | None = None
        self._first = state.step + 1
        self._compiling = CompileClock() if state.compiled is not None else None
        self._compile_seconds = 0.0  # since the last line
        if place.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(place.device)
        with writing(config.out):
            provenance = Provenance(commit_of(), config.seed, config.plain(), hash_of_dataset(data))
            run = TrackedRun(config.out, provenance, config.tracking, state.step)
            self._metrics = MetricsWriter(config.out, state.step, run)
        self._progress = TrainProgress(config.steps, state.step)
        self._since, self._since_step, self._since_tokens = 0.0, state.step, state.tokens
        self._progress.say(
            tr(
                "{model}, {parameters:,} parameters, {parallel}on {ranks} x {device}: "
                "steps {first} to {last} of {sequences} sequences of {seq} tokens",
                model=config.model,
                parameters=state.parameters,
                parallel=f"{config.form} " if config.is_parallel else "",
                ranks=place.world_size,
                device=place.device.type,
                first=state.step + 1,
                last=config.steps,
                sequences=config.sequences
                * config.accumulation
                * (dist.get_world_size(state.group) if state.group is not None else 1)
                // config.cp,  # whose ranks share each sequence
                seq=config.seq,
            )
        )

    def __enter__(self) -> Reporter:
        self._metrics.__enter__()
        self._progress.__enter__()
        self._since = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.__exit__(*error)
        self._metrics.__exit__(*error)

    def clock(self) -> NoClock:
        self._clock = StepClock(self._place.device) if self._is_due(self._state.step) else None
        return self._clock or NoClock()

    def _is_due(self, step: int) -> bool:
        return step % self._config.log_every == 0 or step == self._config.steps

    def after_step(self, result: StepResult, tokens: Tensor) -> None:
        step = self._state.step
        self._progress.advance(step)
        if step == self._first:
            self._after_first_step(tokens)
        if not self._is_due(step):
            return
        loss, all_tokens = float(result.loss), int(tokens)  # waits for the device before the clock is read
        self._leave_out_compilation()
        seconds = time.perf_counter() - self._since
        rate = (all_tokens - self._since_tokens) / seconds
        metrics = Metrics(
            step=step,
            loss=loss,
            lr=self._config.learning_rate(step),
            grad_norm=None if result.grad_norm is None else float(result.grad_norm),
            tokens=all_tokens,
            tokens_per_second=rate,
            step_seconds=seconds / (step - self._since_step),
            peak_bytes=peak_memory(self._place.device),
            mfu=None if self._gpu is None else self._mfu(rate, self._gpu),
            loss_scale=None if self._state.scaler is None else self._state.scaler.get_scale(),
            gpu=None if self._card is None else self._card.name,
            compile_seconds=None if self._compiling is None else self._compile_seconds,
            **self._split(),
        )
        self._metrics.write(metrics)
        self._progress.show(metrics)
        self._compile_seconds = 0.0
        self._measure_from(step, all_tokens)

    def _measure_from(self, step: int, tokens: int) -> None:
        """Begin the interval of the rates after this step."""
        self._since, self._since_step, self._since_tokens = time.perf_counter(), step, tokens

    def _after_first_step(self, tokens: Tensor) -> None:
        """Say how long the compilation took. Leave the first step out of the rates, because it initialises
        the device, unless it has a line."""
        compiled = self._state.compiled
        if compiled is not None:
            self._leave_out_compilation()
            self._progress.say(
                tr(
                    "compiled {blocks} blocks in {seconds:.1f} s; cache: {cache}",
                    blocks=compiled.blocks,
                    seconds=self._compile_seconds,
                    cache=compiled.cache,
                )
            )
        if not self._is_due(self._first):
            self._measure_from(self._first, int(tokens))  # waits for the device

    def _leave_out_compilation(self) -> None:
        """Exclude the compilation since the last call from the rates, and add it to that of the next line."""
        if self._compiling is not None:
            seconds = self._compiling.lap()
            self._compile_seconds += seconds
            self._since += seconds

    def _split(self) -> dict[str, float | None]:
        split = self._clock.split() if self._clock is not None else None
        return (
            {} if split is None else {f"{part}_seconds": seconds for part, seconds in asdict(split).items()}
        )

    @contextmanager
    def paused(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._since += time.perf_counter() - began

    def _mfu(self, rate: float, gpu: Gpu) -> float:
        return mfu(
            rate,
            self._state.model.config,
            self._config.seq,
            gpu,
            self._config.precision,
            self._place.world_size,
        )

    def finish(self, checkpoint: Path, stopped: bool, signal: str | None) -> None:
        step = self._state.step
        if not stopped:
            self._progress.say(tr("finished at step {step}: {checkpoint}", step=step, checkpoint=checkpoint))
        else:
            self._progress.say(
                tr(
                    "stopped by {signal} after step {step}: {checkpoint}; "
                    "continue with the same command and --resume",
                    signal=signal or tr("a signal to another rank"),
                    step=step,
                    checkpoint=checkpoint,
                )
            )


def hash_of_dataset(data: TokenDataset) -> str:
    """Return the SHA-256 of the lengths of the documents, and of up to 256 sequences at equal distances."""
    chosen = sorted({len(data) * part // _HASHED for part in range(_HASHED)})
    return digest(data.documents.lengths, *(data[index][0] for index in chosen))


def _card(device: torch.device) -> Gpu | None:
    """Return the GPU of this device if it is known."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return recognise(properties.name, properties.total_memory)


def _gpu(device: torch.device, precision: Precision) -> Gpu | None:
    """Return the GPU for the MFU: the GPU of this device, if it is known and supports the precision."""
    gpu = _card(device)
    return gpu if gpu is not None and precision.value in gpu.peak_flops else None


def reporter(config: TrainConfig, place: Place, state: TrainState, data: TokenDataset) -> Quiet:
    """Create the reporter of this rank."""
    return Reporter(config, place, state, data) if place.rank == 0 else Quiet()
