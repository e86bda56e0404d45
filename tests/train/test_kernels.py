"""``--kernels fused``: the same training, for every form of parallelism."""

from __future__ import annotations

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.launch import run_ranks
from dlo_lib.train import train
from dlo_lib.train.__main__ import parse
from tests.train.test_pipeline import assert_learned_the_same

FORMS = {
    "ddp": {"parallel": "ddp"},
    "zero1": {"parallel": "zero1"},
    "zero2": {"parallel": "zero2", "accumulation": 2},
    "fsdp": {"parallel": "fsdp", "checkpointing": True},
    "pp": {"pp": 2, "accumulation": 2},
    "tp": {"tp": 2, "sequence_parallel": True},
    "cp": {"cp": 2},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_fused_ranks_train_the_same_model_as_eager_ones(small_run, form):
    options = {"model": "tiny", "steps": 4, **form}
    eager = run_ranks(train, 2, small_run("eager", **options), timeout=200)
    fused = run_ranks(train, 2, small_run("fused", kernels="fused", **options), timeout=200)
    assert_learned_the_same(fused[0], eager[0])


def test_an_eager_run_resumes_fused(small_run):
    whole = train(small_run("whole"))
    train(small_run("run", steps=3))
    assert_learned_the_same(train(small_run("run", resume=True, kernels="fused")), whole)


def test_an_unknown_choice_is_refused():
    with pytest.raises(UserError, match="kernels"):
        parse(["--kernels", "fast"])
