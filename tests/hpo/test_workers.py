"""Processes and job arrays that share a search, and the dashboard of a search."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from optuna.distributions import FloatDistribution

from dlo_lib import cluster
from dlo_lib.base.errors import UserError
from dlo_lib.cluster.slurm import commands
from dlo_lib.hpo.asha import Asha
from dlo_lib.hpo.dashboard import Dashboard
from dlo_lib.hpo.definition import Definition
from dlo_lib.hpo.search import Search
from dlo_lib.hpo.workers import run_workers, take_part

SPACE = {"x": FloatDistribution(0.001, 1, log=True)}


@pytest.mark.slow
def test_processes_share_a_search_and_run_each_task_once(tmp_path):
    search = Search.make(tmp_path / "s.journal", Definition(SPACE, Asha(9, 1, 9)))
    done = run_workers(tmp_path / "s.journal", lambda task: task.params["x"] + 1 / task.resource, workers=2)
    assert len(done) == 2
    assert sum(done) == sum(len(row.reports) for row in search.table())


@pytest.mark.slow
def test_the_elements_of_a_job_array_share_one_search(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("SLURM_", "DLO_SITE"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(commands, "is_available", lambda: False)  # submit() then runs on this machine
    monkeypatch.setenv("DLO_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DLO_POLL_S", "0.1")
    path = tmp_path / "s.journal"
    search = Search.make(path, Definition(SPACE, Asha(9, 1, 9)))
    shared = {"path": str(path), "objective": lambda task: task.params["x"] + 1 / task.resource}
    job = cluster.submit(take_part, shared, gpus=0, sweep={"worker": range(2)})
    job.wait(timeout=300)
    assert sum(job.results()) == sum(len(row.reports) for row in search.table())
    assert len(search.table()) == 9


def test_workers_without_a_search_raise(tmp_path):
    with pytest.raises(UserError, match="there is no search"):
        run_workers(tmp_path / "s.journal", lambda task: 0.0, workers=2)


def get(url: str) -> bytes:
    with urllib.request.urlopen(url) as answer:
        return answer.read()


def test_the_dashboard_shows_the_study_is_read_only_and_stops(tmp_path):
    search = Search.make(tmp_path / "s.journal", Definition(SPACE, Asha(9, 1, 9)))
    search.work(lambda task: task.params["x"])
    with Dashboard(tmp_path / "s.journal") as dashboard:
        root = dashboard.url.removesuffix("/dashboard")
        assert b"<html" in get(dashboard.url).lower()
        studies = json.loads(get(f"{root}/api/studies"))["study_summaries"]
        assert [study["study_name"] for study in studies] == ["s"]
        trials = json.loads(get(f"{root}/api/studies/{studies[0]['study_id']}?after=0"))["trials"]
        assert len(trials) == 9
        assert dashboard.url in dashboard._repr_html_()
        with pytest.raises(urllib.error.HTTPError, match="405"):
            urllib.request.urlopen(
                urllib.request.Request(f"{root}/api/studies/{studies[0]['study_id']}", method="DELETE")
            )
    with pytest.raises(urllib.error.URLError):
        get(dashboard.url)
    assert len(search.table()) == 9


def test_a_process_can_end_while_its_dashboard_is_running(tmp_path):
    Search.make(tmp_path / "s.journal", Definition(SPACE, Asha(9, 1, 9)))
    source = (
        f"from dlo_lib.hpo.dashboard import Dashboard; print(Dashboard({str(tmp_path / 's.journal')!r}).url)"
    )
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    with pytest.raises(urllib.error.URLError):
        get(ended.stdout.strip())


def test_a_dashboard_without_a_search_raises(tmp_path):
    with pytest.raises(UserError, match="there is no search"):
        Dashboard(tmp_path / "s.journal")
