"""The two virtual clusters of the tests: one like Jean Zay with accounting, one without accounting."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.cluster.site.description import PACKAGED, sites
from dlo_lib.cluster.site.pytorch import check_pytorch
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
    nodes=(
        Nodes("big-", 2, cores=32, gpus=2, features="a100", gpu_type="a100"),
        Nodes("small-", 1, cores=6, gpus=1, features="v100"),
    ),
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
    session = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # shared by all workers
    with attached(cluster, session / f"slurm-{cluster.name}") as conf:
        yield conf


@pytest.fixture(scope="session")
def jean_zay_conf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The slurm.conf of a cluster with Jean Zay's names, started once per session."""
    yield from _raised(JEAN_ZAY, tmp_path_factory)


@pytest.fixture(scope="session")
def elsewhere_conf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The slurm.conf of another cluster."""
    yield from _raised(ELSEWHERE, tmp_path_factory)


def log_in_to(conf: Path, patched: pytest.MonkeyPatch) -> None:
    """Make this process a login node of a cluster, outside of any job; SLURM's commands use it."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "SBATCH_", "DLO_SITE", "DLO_ACCOUNT")):
            patched.delenv(name)
    patched.setenv("SLURM_CONF", str(conf))
    # A shell function, as with environment modules.
    patched.setenv("BASH_FUNC_module%%", '() { echo "module $*"; }')


@pytest.fixture
def log_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Return the function that makes this process a login node of a cluster."""
    return lambda conf: log_in_to(conf, monkeypatch)


@pytest.fixture(scope="session")
def jean_zay_sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sites of Jean Zay for any build of PyTorch: the virtual nodes have no GPU that it has to support.

    A recent CUDA build lacks the machine code of the V100: a submission from it is rightly refused. A rank
    computes with one thread, because a virtual node has fewer cores than it says.
    """
    folder = tmp_path_factory.mktemp("sites")
    for name, known in sites().items():
        if name.startswith("jean-zay"):
            text = f'extends = "{PACKAGED / name}.toml"\n'
            try:
                check_pytorch(known)
            except UserError:
                text += 'arch = ""\n'
            (folder / f"{name}.toml").write_text(f'{text}[environment]\nOMP_NUM_THREADS = "1"\n')
    return folder


@pytest.fixture
def jean_zay(
    jean_zay_conf: Path,
    jean_zay_sites: Path,
    log_in: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Run the test on a login node of the virtual Jean Zay."""
    log_in(jean_zay_conf)
    monkeypatch.setenv("DLO_SITES", str(jean_zay_sites))


@pytest.fixture
def elsewhere(elsewhere_conf: Path, log_in: Callable[[Path], None]) -> None:
    """Run the test on a login node of the other virtual cluster."""
    log_in(elsewhere_conf)


@pytest.fixture
def other_site(tmp_path: Path) -> Path:
    """Return the file that describes the large nodes of the other virtual cluster."""
    file = tmp_path / "other.toml"
    file.write_text(OTHER_SITE)
    return file
