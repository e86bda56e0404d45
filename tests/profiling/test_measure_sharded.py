"""Sharded training measured at true size: the model is nowhere, and the figures are those of PyTorch's `fully_shard` or below."""

from __future__ import annotations

import pytest

from dlo_lib.models.counts import parameters as count
from dlo_lib.optim import Phase
from dlo_lib.profiling import Part, measure_memory

GIB = 2**30


@pytest.mark.parametrize(
    ("ranks", "seq", "checkpointing", "fully_shard"),
    [(8, 2048, False, 15.7), pytest.param(512, 4096, True, 7.4, marks=pytest.mark.slow)],
)
def test_llama_3b_rests_with_its_share_and_peaks_no_higher_than_the_peer(ranks, seq, checkpointing, fully_shard):
    report = measure_memory("llama-3.2-3b", seq=seq, checkpointing=checkpointing, parallel="fsdp", world_size=ranks)
    parameters = count("llama-3.2-3b")
    assert report.peak_by_phase[Phase.OPTIMIZER] == pytest.approx(16 * parameters / ranks, rel=0.01)
    assert report.peak_by_part[Part.WEIGHTS] == pytest.approx(4 * parameters / ranks, rel=0.01)
    assert report.peak_bytes / GIB < fully_shard + 0.05


@pytest.mark.parametrize(
    ("stage", "factor"), [("zero1", lambda n: 8 + 8 / n), ("zero2", lambda n: 4 + 12 / n), ("zero3", lambda n: 16 / n)]
)
@pytest.mark.parametrize("ranks", [1, 8, pytest.param(64, marks=pytest.mark.slow)])
def test_the_stages_of_zero_rest_with_what_the_paper_says(stage, factor, ranks):
    report = measure_memory("llama-3.2-1b", seq=256, parallel=stage, world_size=ranks)
    parameters = count("llama-3.2-1b")
    assert report.peak_by_phase[Phase.OPTIMIZER] == pytest.approx(factor(ranks) * parameters, rel=0.01, abs=0.01 * GIB)
    assert report.peak_by_part[Part.OPTIMIZER_STATE] == pytest.approx(8 * parameters / ranks, rel=0.01)


def test_hybrid_sharding_holds_what_sharding_over_one_node_does():
    hybrid, node = (measure_memory("tiny", seq=64, parallel=form, world_size=ranks) for form, ranks in (("hsdp", 64), ("fsdp", 8)))
    assert hybrid.peak_bytes == node.peak_bytes
