"""``--parallel pp``: a pipeline learns what one process learns, goes on with other cuts, and takes every schedule by its name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dlo_lib.errors import UserError
from dlo_lib.launch import RankFailure, run_ranks
from dlo_lib.parallel.pipeline.build import ScheduleKind
from dlo_lib.train import TrainResult, read_metrics, train
from dlo_lib.train.__main__ import parse


def learned(result: TrainResult) -> list[tuple[float, float, int]]:
    return [(line.loss, line.grad_norm, line.tokens) for line in read_metrics(result.out)]


def assert_learned_the_same(one: TrainResult, other: TrainResult) -> None:
    for (loss, norm, tokens), (its_loss, its_norm, its_tokens) in zip(learned(one), learned(other), strict=True):
        assert abs(loss - its_loss) < 1e-4
        assert abs(norm - its_norm) < 1e-3
        assert tokens == its_tokens


@pytest.mark.parametrize("schedule", [kind.value for kind in ScheduleKind])
def test_a_pipeline_learns_what_one_process_learns_by_every_schedule(small_run, schedule):
    twin = train(small_run("twin", model="tiny", batch=1, accumulation=4, steps=3))
    ranks = run_ranks(train, 2, small_run("ranks", model="tiny", batch=1, accumulation=4, steps=3, parallel="pp", schedule=schedule))
    assert len({result.loss for result in ranks}) == 1
    assert_learned_the_same(ranks[0], twin)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_two_pipelines_learn_from_data_of_their_own(small_run, precision):
    twin = train(small_run("twin", model="tiny", batch=2, accumulation=3, precision=precision))
    form = {"parallel": "pp", "shard_size": 2, "batch": 1, "accumulation": 3, "precision": precision}
    ranks = run_ranks(train, 4, small_run("ranks", model="tiny", **form))
    if precision == "fp32":
        assert_learned_the_same(ranks[0], twin)
    assert abs(ranks[0].loss - twin.loss) < 2e-3
    assert ranks[0].tokens == twin.tokens


def test_it_goes_on_where_it_stopped_on_other_ranks_with_other_cuts(small_run):
    """The schedule and the number of ranks change nothing but the order of sums."""
    twin = train(small_run("twin", model="tiny", batch=1, accumulation=4))
    first = small_run("pipeline", model="tiny", batch=1, accumulation=4, parallel="pp", schedule="zb-v")
    run_ranks(train, 2, replace(first, steps=2))
    run_ranks(train, 2, replace(first, steps=4, resume=True))
    last = run_ranks(train, 1, replace(first, resume=True))
    assert_learned_the_same(last[0], twin)


def test_what_a_pipeline_cannot_do_is_said(small_run):
    with pytest.raises(RankFailure, match="4 pieces cannot make 8 stages"):
        run_ranks(train, 4, small_run(model="tiny", parallel="pp", schedule="zb-v"))
    with pytest.raises(UserError, match="1f2b"):
        small_run(parallel="pp", schedule="1f2b")
    assert parse(["--parallel", "pp", "--schedule", "zb-h1", "--micro-batches", "8"]).accumulation == 8
