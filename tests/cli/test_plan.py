"""``dlo plan``: the table, JSON, the files of the chosen plan, a measured run, requests without a plan."""

from __future__ import annotations

import json
import math
import tomllib

import pytest

from dlo_lib.cli.plan import stack_of_run
from dlo_lib.cluster import site
from dlo_lib.planner import LIBRARY, PlanRequest
from dlo_lib.train import TrainConfig
from dlo_lib.train.__main__ import parse
from tests.cli.in_process import commands

run = pytest.fixture(commands)

SMALL = ["plan", "--model", "llama-3.1-8b", "--gpus", "16", "--seq", "4096"]


def test_json_has_the_fastest_plans_the_front_and_the_reasons(run):
    ran = run(*SMALL, "--rows", "3", "--json")
    assert ran.status == 0, ran
    data = json.loads(ran.out)
    assert (data["model"], data["gpus"], data["gpu"], data["batch"]) == ("llama-3.1-8b", 16, "h100-80", 64)
    assert len(data["rows"]) == 3
    assert data["fit"] < data["tried"]
    for row in data["rows"]:
        assert row["low"] < row["seconds"] < row["high"]
        assert 0 < row["mfu"] < 1
        assert row["memory_gib"] < 77.6
        assert row["tokens_per_second"] == pytest.approx(64 * 4096 / row["seconds"])
    assert data["pareto"][0]["plan"] == data["rows"][0]["plan"]
    assert "does not fit" in data["others"]["data parallelism alone"]
    assert data["thousand_steps"]["kwh"] == pytest.approx(0.7 * data["thousand_steps"]["gpu_hours"])


def test_the_memory_of_the_shown_plan_is_measured(run):
    asked = ["--model", "tiny", "--gpus", "2", "--seq", "512", "--batch", "64", "--rows", "1", "--measure"]
    data = json.loads(run("plan", *asked, "--json").out)
    assert data["measured_gib"] == pytest.approx(data["rows"][0]["memory_gib"], rel=0.1)


def test_the_files_of_a_plan_are_those_of_the_trainer_and_of_other_software(run, tmp_path):
    ran = run(*SMALL, "--row", "2", "--out", str(tmp_path / "plan"), "--account", "abc")
    assert ran.status == 0, ran
    assert "90 % interval" in ran.out
    assert "is too close to the first" in ran.out
    files = {file.name for file in (tmp_path / "plan").iterdir()}
    assert files == {
        "plan.toml", "train.txt", "megatron.txt", "torchtitan.toml", "job.sh", "plans.png", "heat_map.png",
    }  # fmt: skip
    config = parse(["--config", str(tmp_path / "plan" / "plan.toml")])
    words = (tmp_path / "plan" / "train.txt").read_text().split()
    assert config == parse(words[3:])
    assert config.plan(16, 4).degrees.over(16)
    script = (tmp_path / "plan" / "job.sh").read_text()
    assert "#SBATCH --account=abc@h100" in script
    assert str(tmp_path / "plan" / "plan.toml") in script
    titan = tomllib.loads((tmp_path / "plan" / "torchtitan.toml").read_text())
    degrees = titan["parallelism"]
    kinds = ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel", "context_parallel")
    copies = math.prod(degrees[f"{kind}_degree"] for kind in kinds)
    assert copies * degrees["pipeline_parallel_degree"] == 16
    megatron = (tmp_path / "plan" / "megatron.txt").read_text().split()
    assert megatron[megatron.index("--global-batch-size") + 1] == "64"
    assert megatron[megatron.index("--num-query-groups") + 1] == "8"


def test_a_request_without_a_plan_gets_one_line(run):
    assert "fits in 77.6 GiB; the smallest needs" in run("plan", "--gpus", "8", "--json").refusal
    assert "did you mean llama-3.3-70b" in run("plan", "--gpus", "8", "--model", "llama-3.3-70").refusal
    assert "seq is 200000: llama-3.1-8b has 131072 positions" in run(*SMALL[:-1], "200000").refusal
    assert "names no GPU or no links between nodes" in run(*SMALL, "--site", "local").refusal
    assert "plans fit; use at most that" in run(*SMALL, "--row", "100000").refusal


def test_a_measured_run_fixes_the_constant(tmp_path):
    config = TrainConfig(
        model="llama-3.2-1b", parallel="fsdp", dp_shard=8, batch=2, seq=2048, precision="bf16", out=tmp_path
    )
    (tmp_path / "config.json").write_text(config.to_json())
    line = {"step": 10, "loss": 1.0, "lr": 1e-3, "grad_norm": None, "tokens": 10 * 8 * 2 * 2048}
    seconds = {"tokens_per_second": 8 * 2 * 2048 / 0.2, "step_seconds": 0.2, "peak_bytes": 1}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line | seconds) + "\n")
    request = PlanRequest("llama-3.2-1b", site("jean-zay-h100").nodes, 8, 16, 2048)
    stack = stack_of_run(tmp_path, request)
    assert stack.slowdown > 1
    assert stack.spread < LIBRARY.spread


def test_a_folder_without_a_run_is_refused(run, tmp_path):
    assert "is no folder of a run" in run(*SMALL, "--run", str(tmp_path)).refusal
