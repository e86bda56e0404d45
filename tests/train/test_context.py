"""``--cp``: ranks with parts of each sequence train the same model as one process, and resume with another
degree."""

from __future__ import annotations

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.launch import run_ranks
from dlo_lib.train import TrainConfig, TrainResult, train
from dlo_lib.train.__main__ import parse
from tests.train.test_pipeline import assert_learned_the_same


def trained_in_turn(configs: list[TrainConfig]) -> list[TrainResult]:
    """Several runs on the same ranks, which start once."""
    return [train(config) for config in configs]


def test_ranks_with_parts_of_sequences_train_the_same_model_as_one_process(small_run, capfd):
    options = {"batch": 2, "accumulation": 2}
    twin = train(small_run("twin", **options))
    configs = [
        small_run("ring", cp=2, **options),
        small_run("ulysses", cp=2, context_kind="ulysses", parallel="fsdp", **options),
        small_run("resumed", cp=2, steps=3, **options),
        small_run("resumed", cp=2, resume=True, context_kind="ulysses", **options),
    ]
    by_rank = run_ranks(trained_in_turn, 2, configs)
    for results in zip(*by_rank):
        assert len({result.loss for result in results}) == 1
    assert capfd.readouterr().out.count("of 4 sequences of 32 tokens") == 5, "the twin and four runs"
    ring, ulysses, _, resumed = by_rank[0]
    for result in (ring, ulysses, resumed):
        assert_learned_the_same(result, twin)
        assert result.tokens == twin.tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cp", "2", "--seq", "30"], "seq 30 cannot be divided over cp 2: use --seq 32"),
        (["--cp", "0"], "cp is 0: use at least 1"),
        (["--cp", "2", "--context-kind", "star"], "star"),
        (["--cp", "4", "--context-kind", "combined"], "kind combined with inner None: inner is the number"),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        parse(arguments)
