"""A chosen plan as a configuration of other software."""

from __future__ import annotations

import itertools
import tomllib
from dataclasses import replace

import numpy as np
import pytest

from dlo_lib.hardware import GpuNodes, gpu, link
from dlo_lib.planner import LIBRARY, ModelSizes, PlanRequest, Plans, step_cost
from dlo_lib.planner.search import Found
from dlo_lib.planner.write import megatron_arguments, torchtitan_config

NODES = GpuNodes(gpu("h100-80"), 4, link("ndr"), 4)


@pytest.fixture
def found():
    """One plan with a pipeline, one without, both with whole parameters in shards and four micro-batches."""
    plans = Plans.of(pp=[2, 1], dp_shard=[4, 8], stage=3, micro_batch=2, micro_batches=[4, 2])
    request = PlanRequest("llama-3.1-8b", NODES, 8, 32, 4096)
    cost = step_cost(ModelSizes.of("llama-3.1-8b"), plans, 4096, NODES, LIBRARY)
    return Found(request, LIBRARY, plans, np.zeros(2), cost, 2)


def test_torchtitan_runs_its_local_batch_in_one_forward_except_in_a_pipeline(found):
    piped, plain = (tomllib.loads(torchtitan_config(found, row)) for row in (0, 1))
    assert piped["training"]["local_batch_size"] == 8
    assert piped["parallelism"]["pipeline_parallel_microbatch_size"] == 2
    assert plain["training"]["local_batch_size"] == 2
    assert plain["training"]["global_batch_size"] == 32


def test_torchtitan_shards_what_it_cannot_copy(found):
    """Four copies of a pipeline, then of two shards with ZeRO-1: it has neither. Copies alone are its DDP."""
    plans = Plans.of(pp=[2, 1, 1], dp_replicate=[4, 4, 8], dp_shard=[1, 2, 1], stage=[0, 1, 0], micro_batch=2)
    found = replace(found, plans=plans)
    piped, zero_1, ddp = (tomllib.loads(torchtitan_config(found, row))["parallelism"] for row in range(3))
    degrees = ("data_parallel_replicate_degree", "data_parallel_shard_degree")
    assert [piped[name] for name in degrees] == [1, 4]
    assert [zero_1[name] for name in degrees] == [4, 2]
    assert [ddp[name] for name in degrees] == [8, 1]
    assert piped["fsdp_reshard_after_forward"] == zero_1["fsdp_reshard_after_forward"] == "never"
    assert "fsdp_reshard_after_forward" not in ddp
    assert "# torchtitan has no ZeRO-1" in torchtitan_config(found, 1)


def test_megatron_has_no_fsdp2_in_a_pipeline(found):
    piped, plain = (megatron_arguments(found, row) for row in (0, 1))
    assert "--use-torch-fsdp2" not in piped
    assert "--use-distributed-optimizer" in piped
    assert "--use-torch-fsdp2" in plain
    assert "--use-distributed-optimizer" not in plain
    whole = replace(found, plans=replace(found.plans, stage=np.zeros(2, int)))
    assert "--use-distributed-optimizer" not in megatron_arguments(whole, 0)


def test_megatron_knows_the_experts_of_a_model(found):
    assert "--num-experts" not in megatron_arguments(found, 1)
    found = replace(found, request=replace(found.request, model="tiny-moe"))
    words = megatron_arguments(found, 1)
    given = dict(itertools.pairwise(words))
    names = ("--num-experts", "--moe-router-topk", "--moe-ffn-hidden-size", "--moe-layer-freq")
    assert [given[name] for name in names] == ["8", "2", "96", "([0]*1+[1])*1"]
    assert given["--moe-shared-expert-intermediate-size"] == "96"
