"""What a run reports, as data: ``metrics.jsonl``, one JSON object a line, and TensorBoard's event files.

A line is written whole and at once, so that it can be read while the run goes on. A resumed run first drops what was written after its
checkpoint (in TensorBoard by ``purge_step``), so that each step stands there once. JSON knows neither NaN nor infinity: such a number is
``null``.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from dlo_lib.errors import no_space
from dlo_lib.files import write_text

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class Metrics:
    """One line. Rates and times are means over the steps since the line before, of this process's run.

    step: from 1. loss: mean over the step's valid tokens of all ranks, in nats. lr: of this step. grad_norm: before clipping; None when
    nothing is clipped. tokens: valid ones learned from since the run began, on all ranks. tokens_per_second: of all ranks. step_seconds:
    wall time. peak_bytes: of rank 0, on the GPU or of the process. mfu: share of the GPU's peak that went into model FLOPs; None on other
    devices. loss_scale: of the fp16 scaler after the step, or None. gpu: the card, by its name in ``dlo_lib.hardware``; None where it is
    none of these. load_seconds to communication_seconds: where the time of this one step went on rank 0 (``train.clock``), or None.
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
    load_seconds: float | None = None
    forward_seconds: float | None = None
    backward_seconds: float | None = None
    optimizer_seconds: float | None = None
    communication_seconds: float | None = None


def read_metrics(out: str | Path) -> list[Metrics]:
    """The lines of a run's folder, in order of step; empty before the first."""
    return [Metrics(**line) for line in _whole_lines(Path(out) / METRICS_FILE)]


class MetricsWriter:
    """Writes :class:`Metrics` below ``out``, after dropping those beyond ``resumed_step``; used as a context.

    Without the package ``tensorboard`` only the JSON lines are written, and it says so once.
    """

    def __init__(self, out: Path, resumed_step: int) -> None:
        self._path = out / METRICS_FILE
        kept = [line for line in _whole_lines(self._path) if line["step"] <= resumed_step]
        write_text(self._path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = self._path.open("a", encoding="utf-8")
        self._board = _tensorboard(out / "tensorboard", resumed_step + 1)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._file.close()
        except OSError:  # what a full disk left in the buffer; `write` has raised for it
            if error[0] is None:
                raise
        if self._board is not None:
            self._board.close()

    def write(self, metrics: Metrics) -> None:
        """Append one line.

        Raises:
            UserError: the disk is full.
        """
        values = {name: _finite(value) for name, value in asdict(metrics).items()}
        try:
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()
            if self._board is not None:
                for name, value in values.items():
                    if isinstance(value, (int, float)) and name != "step":
                        self._board.add_scalar(f"train/{name}", value, metrics.step)
                self._board.flush()
        except OSError as error:
            if known := no_space(self._path, error):
                raise known from error
            raise


def peak_memory(device: torch.device) -> int:
    """The most bytes held at once so far: by tensors on a GPU, else by this process (VmHWM, which a fork does not inherit)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS, in bytes there


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of an earlier run; a process that was killed may have left the last one unfinished, or a block of zeros."""
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


def _tensorboard(folder: Path, purge_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print("tensorboard is not installed: metrics are written to metrics.jsonl only (pip install tensorboard)", file=sys.stderr)
        return None
    return SummaryWriter(str(folder), purge_step=purge_step)
