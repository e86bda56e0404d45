"""``--tp``: matrices cut over ranks train the same model as one process, and resume with another degree."""

from __future__ import annotations

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.launch import run_ranks
from dlo_lib.train import train
from dlo_lib.train.__main__ import parse
from tests.train.test_pipeline import assert_learned_the_same, learned


@pytest.mark.parametrize(
    ("world", "form"),
    [
        (2, {"tp": 2, "sequence_parallel": True, "precision": "fp16"}),
        (8, {"tp": 2, "pp": 2, "dp_shard": 2}),
    ],
)
def test_tensor_parallel_ranks_train_the_same_model_as_one_process(small_run, world, form):
    copies = form.get("dp_shard", 1)
    options = {"model": "tiny", "accumulation": 2, "precision": form.get("precision", "fp32")}
    twin = train(small_run("twin", batch=copies, **options))
    ranks = run_ranks(train, world, small_run("ranks", batch=1, **{**options, **form}), timeout=200)
    assert len({result.loss for result in ranks}) == 1
    if options["precision"] == "fp32":
        assert_learned_the_same(ranks[0], twin)
    assert abs(ranks[0].loss - twin.loss) < 2e-3


def test_a_run_resumes_with_another_degree(small_run):
    options = {"model": "tiny", "batch": 2}
    whole = train(small_run("whole", steps=4, **options))
    run_ranks(train, 2, small_run("run", steps=2, tp=2, sequence_parallel=True, **options))
    resumed = run_ranks(train, 4, small_run("run", steps=4, resume=True, tp=4, **options))
    assert learned(resumed[0])[-1] == pytest.approx(learned(whole)[-1], abs=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sequence-parallel"], "sequence-parallel needs tp 2 or more: use --tp 2"),
        (
            ["--tp", "2", "--sequence-parallel", "--seq", "7"],
            "seq 7 cannot be divided over tp 2 with sequence-parallel: use --seq 8",
        ),
        (["--tp", "0"], "tp is 0: use at least 1"),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        parse(arguments)
