"""Settings that cannot be are refused at the submission, with the nearest right one."""

from __future__ import annotations

import pytest

from dlo_lib import cluster
from dlo_lib.base.errors import UserError
from dlo_lib.cluster.job import settings_check

ASKED = {"site": "jean-zay-a100", "account": "abc", "dry_run": True}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DSDIR", raising=False)


@pytest.mark.parametrize(
    ("settings", "gpus", "says"),
    [
        ({"stpes": 10}, 1, "No such option: --stpes .*--steps"),
        ({"model": "tinny"}, 1, 'unknown model "tinny": did you mean tiny'),
        ({"data": "pyhton"}, 1, 'unknown data set "pyhton": did you mean python'),
        ({"parallel": "fdsp"}, 2, 'unknown parallel "fdsp": did you mean fsdp'),
        ({"pp": 3, "accumulation": 4}, 2, "pp"),
        ({"steps": 10}, 2, "parallel none trains on one rank, this job has 2: use --parallel ddp"),
        ({"steps": "many"}, 1, "Invalid value for '--steps'"),
        ({"lr": 0}, 1, "lr is 0"),
        ({"seq": 2**20}, 1, r"seq is 1048576: tiny has \d+ positions; use at most that"),
        (["steps", "10"], 1, "Got unexpected extra argument"),
        ({"tp": 3}, 3, r"tp 3 does not divide layers.0.self_attn.q_proj, .*: use tp 1, 2 or 4"),
        ({"tp": 8, "model": "llama-3.2-1b", "async_tp": True}, 8, "async-tp needs sequence-parallel"),
        ({"parallel": "pp", "pp": 16, "accumulation": 16}, 16, r"cannot make 16 stages, .*: use at most 4"),
        ({"parallel": "fsdp", "pp": 2, "schedule": "zb-v", "accumulation": 4}, 4, "use --schedule 1f1b"),
        ({"ep": 2}, 2, "no mixture-of-experts layer: use ep 1, or a model such as tiny-moe"),
        ({"ep": 3, "model": "tiny-moe"}, 3, "ep 3 does not divide the 8 experts .*: use ep 1, 2, 4 or 8"),
        ({"cp": 2, "seq": 130}, 2, "seq 130 cannot be divided over cp 2: use --seq 132"),
        ({"cp": 8, "context_kind": "ulysses", "seq": 64}, 8, "query and 2 key heads cannot be divided"),
    ],
)
def test_a_setting_of_a_training_that_cannot_be_is_one_line(settings, gpus, says):
    with pytest.raises(UserError, match=says) as error:
        cluster.submit("dlo_lib.train", settings, gpus=gpus, **ASKED)
    assert "\n" not in str(error.value)
    assert cluster.jobs() == []


def test_settings_that_can_be_are_accepted(tmp_path, capsys):
    (tmp_path / "weights").mkdir()
    for settings in (
        {"model": "weights"},
        {"model": "runs/of-an-earlier-job", "data": "below/a-folder"},
        {"model": "tiny", "batch": "auto", "sequence_parallel": False, "lr": 1e-3},
        {"model": "tiny", "parallel": "fsdp"},
        ["--help"],
    ):
        cluster.submit("dlo_lib.train", settings, gpus=1, **ASKED)
    assert "Usage" not in capsys.readouterr().out


def test_the_element_of_a_sweep_is_named():
    with pytest.raises(UserError, match=r'element 1 \(--parallel fdsp\): unknown parallel "fdsp"'):
        cluster.submit("dlo_lib.train", {}, gpus=2, sweep={"parallel": ["fsdp", "fdsp"]}, **ASKED)


def test_each_value_of_a_large_sweep_is_checked_once():
    elements = [("--lr", str(lr), "--seed", str(seed)) for lr in range(30) for seed in range(30)]
    checked = settings_check.covering(elements)
    words = {word for number in checked for word in elements[number]}
    assert words == {word for element in elements for word in element}
    assert len(checked) < 150


def function(x: int, lr: float = 0.1) -> float:
    return x * lr


@pytest.mark.parametrize(
    ("given", "sweep", "says"),
    [
        ({"x": 1, "lrr": 2}, None, 'unknown argument of function "lrr": did you mean lr'),
        ({"lr": 2}, None, "function needs the argument x: give it"),
        ({"x": 1}, {"x": [1, 2]}, "function gets x twice"),
        ({"x": 1}, {"steps": [1, 2]}, 'unknown argument of function "steps"'),
    ],
)
def test_an_argument_that_a_function_lacks_is_one_line(given, sweep, says):
    with pytest.raises(UserError, match=says):
        cluster.submit(function, given, gpus=1, sweep=sweep, **ASKED)
    cluster.submit(function, {"lr": 1}, gpus=1, sweep={"x": [1, 2]}, **ASKED)
    cluster.submit(lambda **settings: settings, {"any": 1}, gpus=1, **ASKED)
