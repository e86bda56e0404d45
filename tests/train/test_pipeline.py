"""``--parallel pp``: a pipeline trains the same model as one process, resumes with other stages and has every
schedule.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.launch import RankFailure, run_ranks
from dlo_lib.parallel.mesh import Degrees
from dlo_lib.parallel.pipeline.table import ScheduleKind
from dlo_lib.train import TrainResult, read_metrics, train
from dlo_lib.train.__main__ import parse


def learned(result: TrainResult) -> list[tuple[float, float, int]]:
    return [(line.loss, line.grad_norm, line.tokens) for line in read_metrics(result.out)]


def assert_learned_the_same(one: TrainResult, other: TrainResult) -> None:
    for (loss, norm, tokens), (its_loss, its_norm, its_tokens) in zip(
        learned(one), learned(other), strict=True
    ):
        assert abs(loss - its_loss) < 1e-4
        assert abs(norm - its_norm) < 1e-3
        assert tokens == its_tokens


@pytest.mark.parametrize("schedule", [kind.value for kind in ScheduleKind])
def test_a_pipeline_trains_the_same_model_as_one_process_with_every_schedule(small_run, schedule):
    twin = train(small_run("twin", model="tiny", batch=1, accumulation=4, steps=3))
    ranks = run_ranks(
        train,
        2,
        small_run("ranks", model="tiny", batch=1, accumulation=4, steps=3, parallel="pp", schedule=schedule),
    )
    assert len({result.loss for result in ranks}) == 1
    assert_learned_the_same(ranks[0], twin)


@pytest.mark.parametrize(
    ("form", "precision"),
    [
        ({"parallel": "pp", "pp": 2}, "fp32"),
        ({"parallel": "pp", "pp": 2}, "fp16"),
        ({"pp": 2, "dp_shard": 2}, "fp32"),
    ],
)
def test_two_pipelines_train_on_different_data(small_run, form, precision):
    """Each stage is held twice, whole or in shards."""
    twin = train(small_run("twin", model="tiny", batch=2, accumulation=3, precision=precision))
    ranks = run_ranks(
        train, 4, small_run("ranks", model="tiny", batch=1, accumulation=3, precision=precision, **form)
    )
    if precision == "fp32":
        assert_learned_the_same(ranks[0], twin)
    assert abs(ranks[0].loss - twin.loss) < 2e-3
    assert ranks[0].tokens == twin.tokens


def test_a_pipeline_resumes_on_another_number_of_ranks_with_other_stages(small_run):
    """The schedule and the number of ranks change only the order of sums."""
    twin = train(small_run("twin", model="tiny", batch=1, accumulation=4))
    first = small_run("pipeline", model="tiny", batch=1, accumulation=4, parallel="pp", schedule="zb-v")
    run_ranks(train, 2, replace(first, steps=2))
    run_ranks(train, 2, replace(first, steps=4, resume=True))
    last = run_ranks(train, 1, replace(first, resume=True))
    assert_learned_the_same(last[0], twin)


def test_an_impossible_pipeline_raises(small_run):
    with pytest.raises(RankFailure, match="4 pieces cannot make 8 stages"):
        run_ranks(train, 4, small_run(model="tiny", parallel="pp", schedule="zb-v"))
    with pytest.raises(UserError, match="1f2b"):
        small_run(parallel="pp", schedule="1f2b")
    assert parse(["--parallel", "pp", "--schedule", "zb-h1", "--micro-batches", "8"]).accumulation == 8
    config = parse(["--dp-shard", "4", "--pp", "2", "--micro-batches", "8"])
    assert config.plan(16, 4).degrees == Degrees(pp=2, dp_replicate=2, dp_shard=4)
    with pytest.raises(UserError, match="pp 2 x dp_shard 4 does not divide 4 ranks: use dp_shard 1 or 2"):
        config.plan(4, 4)
