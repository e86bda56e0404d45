"""The metrics of a run: ``metrics.jsonl`` with one JSON object per line, and curves in its ``tracking``.

Each line is flushed at once, so that it can be read during the run. A resumed run first removes the lines
after its checkpoint, so that each step occurs once; the curves do the same. JSON has no NaN and no infinity;
such a number is written as ``null``."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from dlo_lib.base.errors import no_space
from dlo_lib.base.files import write_text
from dlo_lib.train.tracking import TrackedRun

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class Metrics:
    """One line of metrics. Rates and times are means over the steps since the previous line of this process.

    Attributes:
        step: the step, from 1.
        loss: the mean over the valid tokens of the step on all ranks, in nats.
        lr: the learning rate of the step.
        grad_norm: the norm before clipping; None without clipping.
        tokens: the number of valid tokens on all ranks since the start of the run.
        tokens_per_second: the rate of all ranks together, without the time of compilation and, like
            ``step_seconds``, without the first step of this process, which initialises the device (but a line
            for this step alone shows it).
        step_seconds: the wall time per step.
        peak_bytes: the peak memory of rank 0, of its GPU or of its process.
        mfu: the model FLOPs divided by the peak FLOPs of the GPU in the dtype of ``--precision``, also with
            ``--fp8``; None on other devices.
        loss_scale: the scale of the fp16 scaler after the step, or None.
        gpu: the name of the GPU in ``dlo_lib.hardware``; None if it is unknown.
        compile_seconds: the time of compilation on rank 0 since the previous line; None without
            ``--compile``.
        load_seconds to communication_seconds: the parts of this step on rank 0 (``train.clock``), or None.
    """

    step: int
    loss: float | None
    lr: float
    grad_norm: float | None
    tokens: int
    tokens_per_second: float
    step_seconds: float
    peak_bytes: int
    mfu: float | None = None
    loss_scale: float | None = None
    gpu: str | None = None
    compile_seconds: float | None = None
    load_seconds: float | None = None
    forward_seconds: float | None = None
    backward_seconds: float | None = None
    optimizer_seconds: float | None = None
    communication_seconds: float | None = None


def read_metrics(out: str | Path) -> list[Metrics]:
    """Read the lines of metrics of a run in the order of the steps; empty if there are none yet."""
    return [Metrics(**line) for line in _whole_lines(Path(out) / METRICS_FILE)]


class MetricsWriter:
    """Write :class:`Metrics` to ``out`` after removing the lines beyond ``resumed_step``; use it as a
    context.

    Args:
        run: gets the numbers of each line too, as curves named ``train/loss``; None for JSON lines only.
    """

    def __init__(self, out: Path, resumed_step: int, run: TrackedRun | None = None) -> None:
        self._path = out / METRICS_FILE
        kept = [line for line in _whole_lines(self._path) if line["step"] <= resumed_step]
        write_text(self._path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = self._path.open("a", encoding="utf-8")
        self._run = run

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._file.close()
        except OSError:  # a full disk left text in the buffer; `write` has already raised
            if error[0] is None:
                raise
        if self._run is not None:
            self._run.__exit__(*error)

    def write(self, metrics: Metrics) -> None:
        """Append one line.

        Raises:
            UserError: the disk is full.
        """
        values = {name: _finite(value) for name, value in asdict(metrics).items()}
        try:
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()
            if self._run is not None:
                numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
                del numbers["step"]
                self._run.log(metrics.step, {f"train/{name}": value for name, value in numbers.items()})
        except OSError as error:
            if known := no_space(self._path, error):
                raise known from error
            raise


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: of tensors on a GPU, otherwise of this process (VmHWM, which a fork
    resets).
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS, in bytes


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of an earlier run; a killed process may leave an incomplete line or a block
    of zeros.
    """
    if not path.exists():
        return []
    known = {option.name for option in fields(Metrics)}
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if isinstance(line, dict) and line.keys() <= known and "step" in line:
            lines.append(line)
    return lines
