"""A request beyond the site is refused before it reaches SLURM, in one line with what the site provides."""

from __future__ import annotations

from datetime import timedelta

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.cluster.site.description import site
from dlo_lib.cluster.site.duration import parse_duration, slurm_duration
from dlo_lib.cluster.site.limits import time_of_site
from dlo_lib.cluster.site.pytorch import check_pytorch
from dlo_lib.cluster.site.request import allocate, make_request


@pytest.fixture(autouse=True)
def no_account(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DLO_ACCOUNT", "IDRPROJ"):
        monkeypatch.delenv(name, raising=False)


def asked(name: str, time: str = "1:00:00", **wanted: object):
    return allocate(site(name), make_request(time, **wanted))


@pytest.mark.parametrize(
    ("name", "wanted", "nodes", "per_node"),
    [
        ("jean-zay-v100", {"gpus": 3}, 1, 3),
        ("jean-zay-v100", {"gpus": 8}, 2, 4),
        ("jean-zay-v100-8gpu", {"gpus": 8}, 1, 8),
        ("jean-zay-a100", {"gpus": 6, "nodes": 3}, 3, 2),
        ("jean-zay-h100", {"gpus": 0}, 1, 0),
    ],
)
def test_gpus_are_placed_on_as_few_nodes_as_possible(name, wanted, nodes, per_node):
    got = asked(name, **wanted)
    assert (got.nodes, got.gpus_per_node, got.ranks) == (nodes, per_node, max(1, wanted["gpus"]))
    assert got.cores == site(name).cores_per_gpu


@pytest.mark.parametrize(
    ("name", "wanted", "says"),
    [
        ("jean-zay-v100", {"gpus": 5},
         "5 GPUs do not fill nodes of 4 on jean-zay-v100: use 4 (one node) or 8 (2 nodes)"),
        ("jean-zay-v100", {"gpus": 9},
         "9 GPUs do not fill nodes of 4 on jean-zay-v100: use 8 (2 nodes) or 12 (3 nodes)"),
        ("jean-zay-v100", {"gpus": 12, "nodes": 2},
         "12 GPUs on 2 nodes: nodes of jean-zay-v100 have 4 GPUs: use nodes=3"),
        ("jean-zay-v100", {"gpus": 7, "nodes": 2},
         "7 GPUs cannot be spread evenly over 2 nodes: use gpus=6 or gpus=8"),
        ("jean-zay-v100", {"gpus": -1}, "use 1 or more"),
        ("jean-zay-v100", {"ranks": 13},
         "13 ranks of 10 cores do not spread evenly over 4 nodes of jean-zay-v100: "
         "use ranks=12 or ranks=16, or nodes=13"),
        ("jean-zay-v100", {"ranks": 10},
         "10 ranks of 10 cores do not spread evenly over 3 nodes of jean-zay-v100: "
         "use ranks=9 or ranks=12, or nodes=5"),
        ("jean-zay-v100", {"env": {"2X": 1}}, "env: '2X' is no name of a variable"),
        ("jean-zay-v100", {"env": {"SLURM_JOB_ID": 1}}, "env: the job sets SLURM_JOB_ID: leave it out"),
        ("jean-zay-v100", {"env": {"A": None}}, "env: A is None: it must be a text or a number"),
        ("jean-zay-v100", {"env": ["A=1"]}, "env is ['A=1']: write a dict"),
        ("jean-zay-v100", {"srun": {"ntasks": 3}}, "srun: the job sets --ntasks: use gpus= or ranks="),
        ("jean-zay-v100", {"srun": {"n": 3}}, 'srun: "n" is no long name of an option'),
        ("jean-zay-v100", {"srun": "--mpi=pmix"}, "srun is '--mpi=pmix': write a dict"),
        ("jean-zay-v100", {"srun": {"mpi": ["a"]}}, "srun: mpi is ['a']: it must be a text"),
        ("jean-zay-v100", {"options": {"hetjob": True}}, "a heterogeneous job (hetjob) is not supported"),
        ("jean-zay-v100", {"options": [{"mem": "1G"}, {"mem": "2G"}]}, "a heterogeneous job"),
        ("jean-zay-v100", {"options": {"clusters": "b"}}, "the job sets --clusters: use SLURM_CLUSTERS"),
        ("jean-zay-v100", {"options": {"output": None}}, "options: the job sets --output: use job.logs()"),
        ("jean-zay-v100", {"time": "30:00:00"},
         '30 h is more than qos_gpu-t3 (20 h, at most 512 GPUs) allows: use qos="qos_gpu-t4"'),
        ("jean-zay-a100", {"time": "30:00:00"}, 'use requeue=True with time="20:00:00"'),
        ("jean-zay-v100", {"gpus": 32, "qos": "qos_gpu-t4"},
         '32 GPUs are more than qos_gpu-t4 (100 h, at most 16 GPUs) allows'),
        ("jean-zay-v100", {"elements": 12, "qos": "qos_gpu-dev"}, "12 jobs are more than qos_gpu-dev"),
        ("jean-zay-v100", {"qos": "qos_gpu-t5"},
         'unknown QOS of jean-zay-v100 "qos_gpu-t5": did you mean qos_gpu-t4'),
        ("jean-zay-a100", {"account": "abc@v100"},
         'account "abc@v100" is not valid on jean-zay-a100: use "abc@a100"'),
        ("jean-zay-v100", {"time": "soon"}, 'time is "soon": write it as hours:minutes:seconds'),
        ("jean-zay-v100", {"time": "0"}, 'time is "0"'),
    ],
)  # fmt: skip
def test_an_impossible_request_is_one_line_with_its_cure(name, wanted, says):
    with pytest.raises(UserError) as error:
        asked(name, **wanted)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_ranks_fill_nodes_and_a_number_of_nodes_is_kept():
    assert [asked("jean-zay-v100", ranks=ranks).nodes for ranks in (3, 4, 8, 9)] == [1, 1, 2, 3]
    assert asked("jean-zay-v100", ranks=13, nodes=13).nodes == 13


def test_the_default_time_of_a_site_is_its_longest_if_that_is_less(tmp_path):
    short = tmp_path / "short.toml"
    short.write_text('extends = "jean-zay-v100"\n[[qos]]\nname = "dev"\ntime = "1:00:00"\n')
    two = timedelta(hours=2)
    assert time_of_site(site(short), two) == timedelta(hours=1)
    assert time_of_site(site("jean-zay-v100"), two) == two
    assert time_of_site(site("local"), two) == two


def test_an_account_gets_its_suffix(monkeypatch):
    assert asked("jean-zay-h100").account == ""
    assert asked("jean-zay-h100", account="abc").account == "abc@h100"
    monkeypatch.setenv("IDRPROJ", "xyz")
    assert asked("jean-zay-h100").account == "xyz@h100"
    monkeypatch.setenv("DLO_ACCOUNT", "abc@h100")
    assert asked("jean-zay-h100").account == "abc@h100"


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("1-06:00:00", 30 * 3600),
        ("30:00:00", 30 * 3600),
        ("90", 5400),
        ("1:30", 90),
        (timedelta(seconds=1.2), 2),
        ("2-3", 51 * 3600),
    ],
)
def test_times_in_slurms_forms(text, length):
    assert parse_duration(text) == timedelta(seconds=length)
    assert parse_duration(slurm_duration(parse_duration(text))) == timedelta(seconds=length)


def test_a_pytorch_too_old_or_built_for_other_gpus_is_refused():
    v100, h100 = site("jean-zay-v100"), site("jean-zay-h100")
    with pytest.raises(
        UserError,
        match=(
            "PyTorch 2.4.1.cu124 is too old for jean-zay-h100, which needs 2.8 or later: install a newer one"
        ),
    ):
        check_pytorch(h100, "2.4.1+cu124", ("sm_90",))
    without_volta = ("sm_75", "sm_80", "sm_90", "compute_90")
    with pytest.raises(
        UserError,
        match="built for sm_75, sm_80, sm_90, compute_90, not for sm_70, the GPU of jean-zay-v100: install",
    ):
        check_pytorch(v100, "2.9.0+cu128", without_volta)
    assert check_pytorch(h100, "2.9.0+cu128", without_volta) == ""
    assert check_pytorch(v100, "2.9.0+cu126", ("sm_60", "sm_70")) == ""
    assert check_pytorch(v100, "2.9.0", ("compute_60",)) == "", "PTX is compiled for any later GPU"
    assert "CPU build" in check_pytorch(v100, "2.9.0+cpu", ())
