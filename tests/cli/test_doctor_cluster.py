"""`dlo doctor` on a cluster: the site, its partition, the account and the folder of the jobs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dlo_lib.cli.diagnosis import Diagnosis
from dlo_lib.cli.doctor_cluster import examine_cluster
from dlo_lib.cluster.slurm import commands
from tests.cluster.fixtures import OTHER_SITE


@pytest.fixture(autouse=True)
def cluster_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("DLO_SITE", "DLO_ACCOUNT", "IDRPROJ", "WORK", "DLO_SITES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(commands, "is_available", lambda: True)
    monkeypatch.setattr(commands, "partitions", lambda: ("training", "debug"))
    monkeypatch.setattr(commands, "accounts", lambda: ("abc@a100", "abc@v100"))


def found() -> dict[str, Diagnosis]:
    return {one.name: one for one in examine_cluster()}


def test_all_is_well_on_a_site_that_fits(monkeypatch, tmp_path):
    (tmp_path / "ours.toml").write_text(OTHER_SITE)
    monkeypatch.setenv("DLO_SITE", str(tmp_path / "ours.toml"))
    monkeypatch.setenv("DLO_ACCOUNT", "abc@a100")
    monkeypatch.setattr("dlo_lib.cli.doctor_cluster._OF_ONE_NODE", ())
    said = found()
    assert list(said) == ["site", "partition", "account", "jobs"]
    assert all(one.ok for one in said.values()), said
    assert said["site"].found == "ours: our machine room"


@pytest.mark.parametrize(
    ("name", "value", "part", "found_", "cure"),
    [
        ("DLO_SITE", "", "site", "DLO_SITE is not set", "jean-zay-a100, .*or to a TOML file"),
        ("DLO_SITE", "nowhere", "site", 'unknown site "nowhere"', "correct DLO_SITE or the file"),
        ("DLO_SITE", "jean-zay-v100-8gpu", "partition", "no partition gpu_p2", "one of training, debug"),
        ("DLO_ACCOUNT", "xyz", "account", '"xyz@a100" is not one of yours', "one of abc@a100, abc@v100"),
        ("DLO_ACCOUNT", "abc@v100", "account", "is not valid on jean-zay-a100", "name of the project"),
        ("DLO_HOME", "/tmp/dlo-doctor-test", "jobs", "which other nodes do not see", "a shared file system"),
    ],
)
def test_what_is_wrong_has_a_cure(name, value, part, found_, cure, monkeypatch, tmp_path):
    if name == "DLO_HOME":
        value = str(tmp_path)
        monkeypatch.setattr("dlo_lib.cli.doctor_cluster._OF_ONE_NODE", (str(tmp_path),))
    monkeypatch.setenv("DLO_SITE", "jean-zay-a100")
    monkeypatch.setenv(name, value)
    one = found()[part]
    assert not one.ok
    assert found_ in one.found
    assert re.search(cure, one.cure)


def test_a_home_with_little_room_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("DLO_SITE", "jean-zay-a100")
    monkeypatch.setenv("WORK", str(tmp_path))
    monkeypatch.setenv("DLO_HOME", str(tmp_path.parent / f"{tmp_path.name}-home"))
    assert found()["jobs"].cure == "set DLO_HOME=$WORK/dlo"


def test_a_site_with_slurm_on_a_machine_without_it(monkeypatch):
    monkeypatch.setattr(commands, "is_available", lambda: False)
    assert examine_cluster() == []
    monkeypatch.setenv("DLO_SITE", "jean-zay-a100")
    assert found()["site"].cure == "log in to the cluster to submit jobs"


def test_a_controller_that_does_not_answer_is_one_line(monkeypatch):
    def silent() -> bool:
        raise commands.NoAnswer("scontrol has not answered for 60 s: try again later")

    monkeypatch.setattr(commands, "is_available", silent)
    (one,) = examine_cluster()
    assert (one.ok, one.found) == (False, "scontrol has not answered for 60 s: try again later")
