"""``--ep``: experts on different ranks train the same model as one process, and resume with another
degree."""

from __future__ import annotations

from typing import Any

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.launch import RankFailure, run_ranks
from dlo_lib.train import TrainConfig, TrainResult, read_metrics, train
from tests.train.test_context import trained_in_turn
from tests.train.test_loop import assert_same_state
from tests.train.test_optimizer import assert_same_average, in_steps


def learned(result: TrainResult | TrainConfig) -> list[float]:
    return [number for line in read_metrics(result.out) for number in (line.loss, line.grad_norm)]


def test_ranks_with_parts_of_the_experts_train_the_same_model_as_one_process(small_run):
    options = {"model": "tiny-moe", "steps": 4, "accumulation": 2}
    twin = train(small_run("twin", batch=2, **options))
    configs = [
        small_run("ddp", ep=2, **options, batch=1),
        small_run("cp", cp=2, ep=2, **options, batch=2),
        small_run("resumed", parallel="fsdp", ep=2, **{**options, "steps": 2}, batch=1),
        small_run("resumed", parallel="fsdp", resume=True, **options, batch=1),
    ]
    by_rank = run_ranks(trained_in_turn, 2, configs)
    ddp, cp, _, _ = by_rank[0]
    resumed = learned(by_rank[0][3])
    for result in (ddp, cp):
        assert learned(result) == pytest.approx(learned(twin), rel=1e-4)
    assert resumed == pytest.approx(learned(twin), rel=1e-3)


AVERAGED: list[dict[str, Any]] = [
    {"average": "ema"},
    {"average": "swa", "average_start": 2},
    {"average": "ema", "parallel": "fsdp"},
]
SGD: dict[str, Any] = {"optimizer": "sgd-momentum", "lr": 0.1, "steps": 4}
"""Adam divides small differences of small gradients by their size."""


def test_the_average_of_parts_of_the_experts_is_that_of_one_process(small_run):
    """Each rank averages its experts; a resumed run has the same average bit for bit."""
    runs = []
    for number, form in enumerate(AVERAGED):
        options = {"model": "tiny-moe", **SGD, "batch": 1, "ep": 2, **form}
        runs += in_steps(small_run(f"run-{number}", **options))
    results = run_ranks(trained_in_turn, 2, runs)[0]
    for number, (form, whole, resumed) in enumerate(zip(AVERAGED, results[::3], results[2::3], strict=True)):
        assert_same_state(resumed, whole)
        same = {key: value for key, value in form.items() if key != "parallel"}
        twin = train(small_run(f"twin-{number}", model="tiny-moe", batch=2, **SGD, **same))
        assert_same_average(whole, twin, 1e-6, form)


def test_a_degree_that_does_not_fit_is_refused(small_run):
    with pytest.raises(RankFailure, match="no mixture-of-experts layer: use ep 1, or a model such as tiny"):
        run_ranks(train, 2, small_run(ep=2))
    with pytest.raises(UserError, match="ep 2 does not divide dp_shard x cp = 3: use ep 1 or 3"):
        small_run(ep=2, dp_shard=3).plan(3, 3)
