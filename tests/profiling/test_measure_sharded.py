"""Sharded training measured at full size on fake tensors: the values are those of PyTorch's `fully_shard` or
below."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dlo_lib.models import model_config
from dlo_lib.models.counts import parameters as count
from dlo_lib.optim import Phase
from dlo_lib.profiling import Part, measure_memory

GIB = 2**30
FEWER_1B = replace(model_config("llama-3.2-1b"), num_layers=6)


@pytest.mark.parametrize(
    ("ranks", "seq", "checkpointing", "fully_shard"),
    [(8, 2048, False, 15.7), pytest.param(512, 4096, True, 7.4, marks=pytest.mark.slow)],
)
def test_llama_3b_keeps_its_shards_and_has_no_higher_peak_than_the_peer(
    ranks,
    seq,
    checkpointing,
    fully_shard,
):
    options = {"seq": seq, "checkpointing": checkpointing}
    report = measure_memory("llama-3.2-3b", parallel="fsdp", world_size=ranks, **options)
    parameters = count("llama-3.2-3b")
    assert report.peak_by_phase[Phase.OPTIMIZER] == pytest.approx(16 * parameters / ranks, rel=0.01)
    assert report.peak_by_part[Part.WEIGHTS] == pytest.approx(4 * parameters / ranks, rel=0.01)
    assert report.peak_bytes / GIB < fully_shard + 0.05


@pytest.mark.parametrize(
    ("stage", "factor"),
    [("zero1", lambda n: 8 + 8 / n), ("zero2", lambda n: 4 + 12 / n), ("zero3", lambda n: 16 / n)],
)
@pytest.mark.parametrize("ranks", [1, 8, pytest.param(64, marks=pytest.mark.slow)])
def test_the_stages_of_zero_have_the_memory_of_the_paper_between_steps(stage, factor, ranks):
    report = measure_memory(FEWER_1B, seq=256, parallel=stage, world_size=ranks)
    parameters = count(FEWER_1B)
    expected = factor(ranks) * parameters
    assert report.peak_by_phase[Phase.OPTIMIZER] == pytest.approx(expected, rel=0.01, abs=0.01 * GIB)
    assert report.peak_by_part[Part.OPTIMIZER_STATE] == pytest.approx(8 * parameters / ranks, rel=0.01)


def test_hybrid_sharding_has_the_memory_of_sharding_over_one_node():
    hybrid = measure_memory("tiny", seq=64, parallel="hsdp", world_size=64)
    node = measure_memory("tiny", seq=64, parallel="fsdp", world_size=8)
    assert hybrid.peak_bytes == node.peak_bytes
