"""The two virtual clusters of the tests: one with Jean Zay's names and accounting, one with other names, other nodes and no accounting."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.virtual_slurm import Cluster, Nodes, attached

_V100 = ("qos_gpu-t3", "qos_gpu-t4", "qos_gpu-dev")
JEAN_ZAY = Cluster(
    name="jean-zay",
    nodes=(
        Nodes("v", 2, cores=40, gpus=4, features="v100,v100-16g,v100-32g"),
        Nodes("w", 1, cores=24, gpus=8, features="v100,v100-32g"),
        Nodes("a", 1, cores=64, gpus=8, features="a100"),
        Nodes("h", 1, cores=96, gpus=4, features="h100"),
    ),
    partitions={"gpu_p13": (("v", "a", "h"), "100:00:00"), "gpu_p2": (("w",), "100:00:00")},
    qos={
        "qos_gpu-t3": {"MaxWall": "20:00:00"},
        "qos_gpu-t4": {"MaxWall": "100:00:00"},
        "qos_gpu-dev": {"MaxWall": "2:00:00"},
        "qos_gpu_a100-t3": {"MaxWall": "20:00:00"},
        "qos_gpu_h100-t3": {"MaxWall": "20:00:00"},
    },
    accounts={"abc@v100": _V100, "abc@a100": ("qos_gpu_a100-t3",), "abc@h100": ("qos_gpu_h100-t3",)},
)
ELSEWHERE = Cluster(
    name="elsewhere",
    nodes=(Nodes("big-", 2, cores=32, gpus=2, features="a100"), Nodes("small-", 1, cores=6, gpus=1, features="v100")),
    partitions={"training": (("big-",), "1-00:00:00"), "debug": (("small-",), "0:30:00")},
)
OTHER_SITE = """
title = "our machine room"
scheduler = "slurm"
gpus_per_node = 2
cores_per_gpu = 16
gpu = "a100-80"
partition = "training"

[[qos]]
name = "normal"
time = "1-00:00:00"
"""


def _raised(cluster: Cluster, factory: pytest.TempPathFactory) -> Iterator[Path]:
    if missing := cluster.missing():
        pytest.skip(f"NOT TESTED HERE: a real SLURM ({missing})")
    base = factory.getbasetemp()
    session = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # one for all workers
    with attached(cluster, session / f"slurm-{cluster.name}") as conf:
        yield conf


@pytest.fixture(scope="session")
def jean_zay_conf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The slurm.conf of a cluster with Jean Zay's names, raised once a session."""
    yield from _raised(JEAN_ZAY, tmp_path_factory)


@pytest.fixture(scope="session")
def elsewhere_conf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The same of another cluster."""
    yield from _raised(ELSEWHERE, tmp_path_factory)


@pytest.fixture
def log_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Make this process a login node of a cluster: its SLURM commands answer for it, and no job is around it."""

    def to(conf: Path) -> None:
        for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_", "DLO_SITE", "DLO_ACCOUNT"))]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("SLURM_CONF", str(conf))
        monkeypatch.setenv("BASH_FUNC_module%%", '() { echo "module $*"; }')  # a function of every shell, where there are modules

    return to


@pytest.fixture
def jean_zay(jean_zay_conf: Path, log_in: Callable[[Path], None]) -> None:
    """This test runs on a login node of the virtual Jean Zay."""
    log_in(jean_zay_conf)


@pytest.fixture
def elsewhere(elsewhere_conf: Path, log_in: Callable[[Path], None]) -> None:
    """This test runs on a login node of the other virtual cluster."""
    log_in(elsewhere_conf)


@pytest.fixture
def other_site(tmp_path: Path) -> Path:
    """The file that describes the other virtual cluster's large nodes."""
    file = tmp_path / "other.toml"
    file.write_text(OTHER_SITE)
    return file
