"""The record of a run: where it comes from, and its curves, in TensorBoard's files or in MLflow.

    with track("runs/lion", config={"lr": 3e-4}, seed=0, data=digest(images, labels)) as run:
        run.log(step, {"train/loss": loss})

``run.json`` in the folder has the four fields of ``dlo_lib.base.provenance``. A run that lacks one is tracked
too, and marked as not reproducible: here, in MLflow, and in the table of ``compare``. TensorBoard's event
files are in ``tensorboard/`` of the folder. MLflow stores all runs beside each other in one SQLite file
(``mlflow_store``).
"""

from __future__ import annotations

import enum
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dlo_lib.base.errors import UserError
from dlo_lib.base.files import write_text
from dlo_lib.base.provenance import Provenance, commit_of
from dlo_lib.base.text import tr

RECORD, EVENTS = "run.json", "tensorboard"


class Tracking(enum.Enum):
    """Where the curves of a run are stored."""

    TENSORBOARD = "tensorboard"
    MLFLOW = "mlflow"

    def require(self) -> None:
        """Check that the package is installed. TensorBoard may be missing: a run then prints a notice.

        Raises:
            UserError: MLflow is chosen and not installed.
        """
        if self is Tracking.MLFLOW:
            from dlo_lib.train.mlflow_store import require_mlflow

            require_mlflow()


class CurveWriter(Protocol):
    """Writes points of curves."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add one point to each curve; it can be read at once."""

    def close(self, failed: bool) -> None:
        """End the run; ``failed`` after an exception."""


@dataclass(frozen=True)
class RunRecord:
    """The content of ``run.json``.

    Attributes:
        provenance: of the start of the run.
        tracking: where its curves are.
        mlflow_id: of the run in MLflow.
        resumed: the commit of each resume by the step after which it continued.
    """

    provenance: Provenance
    tracking: Tracking = Tracking.TENSORBOARD
    mlflow_id: str | None = None
    resumed: tuple[tuple[int, str | None], ...] = ()

    def to_json(self) -> str:
        plain = {
            **self.provenance.plain(),
            "missing": list(self.provenance.missing),
            "tracking": self.tracking.value,
            "mlflow_id": self.mlflow_id,
            "resumed": [list(resume) for resume in self.resumed],
        }
        return json.dumps(plain, indent=1) + "\n"


def read_record(folder: str | Path) -> RunRecord | None:
    """Read the record of the run in ``folder``; None if it has none.

    Raises:
        UserError: the file is damaged.
    """
    file = Path(folder) / RECORD
    if not file.is_file():
        return None
    try:
        plain = json.loads(file.read_text(encoding="utf-8"))
        resumed = tuple((step, commit) for step, commit in plain["resumed"])
        return RunRecord(Provenance.read(plain), Tracking(plain["tracking"]), plain["mlflow_id"], resumed)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is not the record of a run: move it away to start the run anew") from error


class TrackedRun:
    """A tracked run; use it as a context, which ends it.

    Attributes:
        folder: of the run.
        provenance: its record.
    """

    def __init__(
        self, folder: str | Path, provenance: Provenance, tracking: Tracking, resumed_step: int = 0
    ) -> None:
        self.folder, self.provenance = Path(folder), provenance
        self.folder.mkdir(parents=True, exist_ok=True)
        before = read_record(self.folder) if resumed_step else None
        if before is not None:
            self.provenance = before.provenance
        resumed = (*before.resumed, (resumed_step, provenance.commit)) if before is not None else ()
        mlflow_id = None if before is None else before.mlflow_id
        self._curves: CurveWriter | None
        if tracking is Tracking.MLFLOW:
            from dlo_lib.train.mlflow_store import MLflowWriter

            writer = MLflowWriter(self.folder, self.provenance, mlflow_id, resumed_step)
            mlflow_id, self._curves = writer.run_id, writer
        else:
            self._curves = _tensorboard(self.folder / EVENTS, resumed_step + 1)
        record = RunRecord(self.provenance, tracking, mlflow_id, resumed)
        write_text(self.folder / RECORD, record.to_json())

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add one point to each curve of ``values``, such as ``{"test/accuracy": 0.9}``; it can be read at
        once. A resumed run writes the steps after its checkpoint again, which replaces the earlier points."""
        if self._curves is not None:
            self._curves.write(step, {name: float(value) for name, value in values.items()})

    def __enter__(self) -> TrackedRun:
        return self

    def __exit__(self, *error: object) -> None:
        if self._curves is not None:
            self._curves.close(failed=error[0] is not None)


def track(
    folder: str | Path,
    *,
    config: Mapping[str, Any] | None = None,
    seed: int | None = None,
    data: str | None = None,
    commit: str | None = None,
    tracking: Tracking | str = Tracking.TENSORBOARD,
    resumed_step: int = 0,
) -> TrackedRun:
    """Begin the record of a run in ``folder``.

    Args:
        config: its settings, JSON values.
        seed: of its random numbers.
        data: the hash of its data, from ``dlo_lib.base.provenance.digest``.
        commit: of its code; None for that of the repository of the working directory.
        tracking: "tensorboard" or "mlflow".
        resumed_step: the step of the checkpoint from which the run continues; its later points are replaced.

    Raises:
        UserError: the folder has a run already and ``resumed_step`` is 0; MLflow is chosen and not installed.
    """
    names = [kind.value for kind in Tracking]
    if isinstance(tracking, str) and tracking not in names:
        raise UserError(f'tracking is "{tracking}": choose {" or ".join(names)}')
    chosen = Tracking(tracking)
    chosen.require()
    if not resumed_step and (Path(folder) / RECORD).exists():
        raise UserError(f"{folder} already contains a run: choose another folder, or give resumed_step")
    provenance = Provenance(commit_of() if commit is None else commit, seed, config, data)
    if missing := provenance.missing:
        text = "{folder} is not reproducible, because its record has no {missing}"
        print(tr(text, folder=folder, missing=", ".join(missing)), file=sys.stderr)
    return TrackedRun(folder, provenance, chosen, resumed_step)


class _EventFiles:
    def __init__(self, board: Any) -> None:
        self._board = board

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._board.add_scalar(name, value, step)
        self._board.flush()

    def close(self, failed: bool) -> None:
        self._board.close()


def _tensorboard(folder: Path, purge_step: int) -> CurveWriter | None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        text = "tensorboard is not installed, so {folder} gets no curves (pip install tensorboard)"
        print(tr(text, folder=folder), file=sys.stderr)
        return None
    _wait_for_a_new_second(folder)
    return _EventFiles(SummaryWriter(str(folder), purge_step=purge_step))


def _wait_for_a_new_second(folder: Path) -> None:
    """Wait until a new file of events is the last one by name, at most a second.

    TensorBoard reads the files in the order of their names, which begin with the second of their creation and
    end with a number that is not padded: within a second, a resumed run could come before the first one.
    """
    seconds = [int(file.name.split(".")[3]) for file in folder.glob("events.out.tfevents.[0-9]*.*")]
    now = time.time()
    if seconds and max(seconds) >= int(now):
        time.sleep(min(1.0, int(now) + 1 - now))
