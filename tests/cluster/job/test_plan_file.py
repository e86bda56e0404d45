"""The file of ``dlo plan`` is submitted and trains."""

from __future__ import annotations

import pytest

from dlo_lib import cluster
from dlo_lib.base.files import write_text
from dlo_lib.planner import PlanRequest, search
from dlo_lib.planner.write import to_toml


@pytest.mark.slow
def test_the_file_of_a_plan_trains_on_a_cluster(jean_zay, tmp_path, monkeypatch):
    monkeypatch.setenv("DLO_POLL_S", "0.3")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    found = search(PlanRequest("tiny", cluster.site("jean-zay-h100").nodes, 2, 8, 32))
    write_text(tmp_path / "plan.toml", to_toml(found))
    words = [
        "--config",
        str(tmp_path / "plan.toml"),
        "--data",
        "arithmetic",
        "--steps",
        "3",
        "--log-every",
        "1",
    ]
    job = cluster.submit("dlo_lib.train", words, gpus=2, site="jean-zay-v100", account="abc", time=5)
    job.wait(timeout=300)
    assert [line.step for line in job.metrics()] == [1, 2, 3]
