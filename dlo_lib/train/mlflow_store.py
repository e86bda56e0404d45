"""Runs in MLflow, in one SQLite file for the runs of a folder: ``runs/mlflow.db`` for ``runs/lion``.

    mlflow ui --backend-store-uri sqlite:///runs/mlflow.db

MLflow's own store of files is being retired. A run has the settings as parameters, and its record as tags;
``mlflow.source.git.commit`` is the tag that MLflow shows as the version. MLflow appends points and removes
none, so a resume adds a tag, after which the earlier points beyond its checkpoint do not count.

Cost: some seconds for the first run of a file, which creates MLflow's tables.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlo_lib.base.errors import UserError
from dlo_lib.base.provenance import Provenance

FILE, EXPERIMENT = "mlflow.db", "runs"
_LONGEST_VALUE = 5_000
"""Characters of a parameter; MLflow refuses 6,001."""
_COMMIT, _SEED, _DATA, _MISSING = "mlflow.source.git.commit", "seed", "data_hash", "not_reproducible"
_RESUMED = "resumed_ms."
"""Of the tag of a resume: its time follows, and its value is the step of the checkpoint."""


def require_mlflow() -> Any:
    """Import and return MLflow.

    Raises:
        UserError: it is not installed.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # nodes have no network
    try:
        import mlflow
    except ImportError as error:
        raise UserError(
            "tracking with MLflow needs the package mlflow: pip install mlflow, or use tensorboard"
        ) from error
    return mlflow


def open_store(file: Path) -> Any:
    """Return MLflow's client of the store in ``file``, which is created if it does not exist."""
    return require_mlflow().MlflowClient(f"sqlite:///{file.resolve()}")


class MLflowWriter:
    """Writes a run of the folder ``folder``.

    Args:
        provenance: becomes parameters and tags of a new run.
        run_id: of the run to continue; None for a new one.
        resumed_step: the step of the checkpoint from which it continues.
    """

    def __init__(self, folder: Path, provenance: Provenance, run_id: str | None, resumed_step: int) -> None:
        self._client = open_store(folder.parent / FILE)
        self.run_id = run_id or self._new(folder, provenance)
        if run_id is not None:
            self._client.update_run(run_id, status="RUNNING")
            self._client.set_tag(run_id, f"{_RESUMED}{_now_ms()}", str(resumed_step))

    def _new(self, folder: Path, provenance: Provenance) -> str:
        from mlflow.entities import Param

        experiment = self._client.get_experiment_by_name(EXPERIMENT)
        where = (folder.resolve().parent / "mlflow-artifacts").as_uri()
        number = (
            experiment.experiment_id
            if experiment is not None
            else self._client.create_experiment(EXPERIMENT, artifact_location=where)
        )
        tags = {
            _COMMIT: provenance.commit,
            _SEED: provenance.seed,
            _DATA: provenance.data,
            _MISSING: ", ".join(provenance.missing) or None,
        }
        run = self._client.create_run(
            number,
            run_name=folder.name,
            tags={name: str(value) for name, value in tags.items() if value is not None},
        )
        settings = (provenance.config or {}).items()
        self._client.log_batch(
            run.info.run_id, params=[Param(name, str(value)[:_LONGEST_VALUE]) for name, value in settings]
        )
        return run.info.run_id

    def write(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = _now_ms()
        points = [Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self.run_id, metrics=points)

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")


def read_curves(file: Path, run_id: str) -> dict[str, list[tuple[int, float]]]:
    """Return the curves of a run by name, points (step, value) in the order of the steps.

    Raises:
        UserError: MLflow is not installed.
    """
    client = open_store(file)
    data = client.get_run(run_id).data
    resumes = [
        (int(tag.removeprefix(_RESUMED)), int(step))
        for tag, step in data.tags.items()
        if tag.startswith(_RESUMED)
    ]
    curves = {}
    for name in data.metrics:
        points = [
            (point.step, point.value)
            for point in client.get_metric_history(run_id, name)
            if not any(point.timestamp < when and point.step > step for when, step in resumes)
        ]
        curves[name] = sorted(points)
    return {name: curve for name, curve in curves.items() if curve}


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
