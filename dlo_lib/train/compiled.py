"""``--compile``: the blocks of this rank's model and the loss, compiled by Inductor.

The blocks of a Llama share one graph (``parallel.compile``), so the time of compilation is that of one block.
The embedding, the last norm, the output projection and the optimiser are not compiled. The loss of the logits
is another graph: without it, PyTorch writes the logits in fp32, their log-probabilities and their gradient to
memory one after the other. What communicates, or adds to a gradient itself, runs in Python between graphs:
attention over the ranks of ``cp``, mixtures of experts, and the linear layers of a pipeline. With ``tp``,
every layer communicates, so ``TrainConfig`` refuses it.

Inductor keeps what it generates in ``$TORCHINDUCTOR_CACHE_DIR``, or in a folder of the cache of this library
(``files.cache_dir``), which also survives the job. A second run traces the code again and finds the rest.

Cost: seconds of the first forward and backward of a process, which the metrics report apart
(``compile_seconds``).
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dlo_lib.base.errors import UserError
from dlo_lib.base.files import cache_dir
from dlo_lib.kernels.llama import FusedOperation, loss_options
from dlo_lib.parallel.compile import compile_llama, compile_loss
from dlo_lib.parallel.plan import ParallelPlan
from dlo_lib.profiling.compile_time import Backend, usable_backend
from dlo_lib.profiling.compile_watch import watch_compilation

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@dataclass(frozen=True)
class Compiled:
    """What a rank compiles: ``blocks`` blocks, with the cache of Inductor in ``cache``."""

    blocks: int
    cache: Path


def inductor(device: torch.device) -> str:
    """Return the name of the backend of ``torch.compile``.

    Raises:
        UserError: Inductor cannot generate code for this device.
    """
    choice = usable_backend(device)
    if choice.backend is not Backend.INDUCTOR:
        raise UserError(f"--compile would not make training faster here, because there is {choice.why}")
    return choice.backend.value


def compile_model(spread: nn.Module, plan: ParallelPlan, device: torch.device) -> Compiled:
    """Compile the blocks of this rank's Llama in place, at their next forward.

    Args:
        spread: the result of ``parallelize``.
        plan: its plan.
        device: the device of the model.

    Raises:
        UserError: Inductor cannot generate code for this device.
    """
    backend = inductor(device)
    cache = os.environ.setdefault(CACHE_VARIABLE, str(cache_dir() / "inductor"))
    return Compiled(compile_llama(spread, plan, backend), Path(cache))


def losses_of_run(
    fused: Collection[FusedOperation], plan: ParallelPlan, compiled: Compiled | None, device: torch.device
) -> dict[str, Any]:
    """Return the arguments of ``train_step`` that choose the loss. The loss of logits is compiled if the
    blocks are; a loss that the model computes is one kernel already.

    Args:
        fused: the operations that are fused.
        plan: how the model is distributed.
        compiled: what ``compile_model`` returned; None if nothing is compiled.
        device: the device of the model.
    """
    options = loss_options(fused, plan.takes_logits)
    return options if compiled is None else compile_loss(options, inductor(device))


class CompileClock:
    """The seconds that this process spends on compilation, between one call of ``lap`` and the next."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._context = watch_compilation()
        self._watch = self._context.__enter__()

    def lap(self) -> float:
        """Return the seconds since the last call, or since the clock was made."""
        self._context.__exit__(None, None, None)
        seconds = self._watch.report.seconds
        self._start()
        return seconds
