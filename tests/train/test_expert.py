"""``--ep``: experts on different ranks train the same model as one process, and resume with another
degree."""

from __future__ import annotations

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.launch import RankFailure, run_ranks
from dlo_lib.train import TrainConfig, TrainResult, read_metrics, train
from tests.train.test_context import trained_in_turn


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


def test_a_degree_that_does_not_fit_is_refused(small_run):
    with pytest.raises(RankFailure, match="no mixture-of-experts layer: use ep 1, or a model such as tiny"):
        run_ranks(train, 2, small_run(ep=2))
    with pytest.raises(UserError, match="ep 2 does not divide dp_shard x cp = 3: use ep 1 or 3"):
        small_run(ep=2, dp_shard=3).plan(3, 3)
