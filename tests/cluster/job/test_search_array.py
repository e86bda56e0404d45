"""A hyperparameter search as an array on a real SLURM: workers share a journal, even if one is requeued."""

from __future__ import annotations

import time

import pytest
from optuna.distributions import FloatDistribution

from dlo_lib import cluster
from dlo_lib.hpo.asha import Asha
from dlo_lib.hpo.definition import Definition
from dlo_lib.hpo.search import Search
from dlo_lib.hpo.workers import take_part


@pytest.mark.slow
def test_workers_of_an_array_share_a_search_and_lose_no_trial(jean_zay, tmp_path, monkeypatch):
    monkeypatch.setenv("DLO_POLL_S", "0.3")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)

    def slowly(task) -> float:
        time.sleep(0.3)
        return task.params["x"] + 1 / task.resource

    path = tmp_path / "s.journal"
    search = Search.make(path, Definition({"x": FloatDistribution(0.001, 1, log=True)}, Asha(9, 1, 9)))
    shared = {"path": str(path), "objective": slowly}
    job = cluster.submit(
        take_part,
        shared,
        gpus=0,
        cores=1,
        site="jean-zay-v100",
        account="abc",
        time=10,
        sweep={"worker": range(2)},
    )
    begun = time.monotonic()
    while not search.table():
        assert time.monotonic() - begun < 120, job.logs()
        time.sleep(0.1)
    job.requeue(0)
    job.wait(timeout=300)
    rows = search.table()
    assert len(rows) == 9
    assert sum(len(row.reports) for row in rows) >= 9
    assert all(row.reports for row in rows)
