"""The memory of a rank of a mesh, measured on fake tensors: each part is that of its closed formula, within
3 %.

With t = tp, p = pp, N = dp_shard, r the stage of the rank, Psi_r the parameters of this rank's part of the
stage, L_r its blocks and T the tokens of a micro-batch:

    weights 4 Psi_r / N        gradients 4 Psi_r / N        AdamW 8 Psi_r / N        (fp32)
    units   2 Psi_r for the bf16 parameters, which are kept, and 4 Psi_r for the accumulated gradients
    activations   min(micro-batches, p - r) * T * (L_r (4 h + 12 h / s + (4 q + 4 k + 8 f) / t) + 2 h / s)

where s is t with sequence parallelism and 1 without. The last term is the bf16 input of the stage, which
waits for its gradient; the first stage has tokens instead. `make combinations` measures all 80 blocks.
"""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from dlo_lib.errors import UserError
from dlo_lib.models import LlamaConfig, model_config
from dlo_lib.parallel.pipeline.p2p import StageP2P
from dlo_lib.parallel.pipeline.partition import counted_costs, partition
from dlo_lib.parallel.plan import ParallelPlan
from dlo_lib.profiling import Part, measure_memory

SEQ = 4096


def parameters_and_blocks(config: LlamaConfig, plan: ParallelPlan, stage: int) -> tuple[int, int]:
    """Psi_r and L_r."""
    pieces = partition(counted_costs(config, SEQ), plan.pp)[stage]
    blocks = sum(1 <= piece <= config.num_layers for piece in pieces)
    heads = config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    block = config.hidden * (heads + 3 * config.intermediate) // plan.tp + 2 * config.hidden
    table = config.vocab_size * config.hidden // plan.tp
    ends = (0 in pieces) * table + (config.num_layers + 1 in pieces) * (table + config.hidden)
    return blocks * block + ends, blocks


def closed_formula(config: LlamaConfig, plan: ParallelPlan, rank: int) -> dict[Part, float]:
    stage = rank // (plan.dp_shard * plan.tp)
    parameters, blocks = parameters_and_blocks(config, plan, stage)
    in_flight = min(plan.micro_batches, plan.pp - stage)
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    cut = 4 * queries + 4 * keys + 8 * config.intermediate
    sequence = plan.tp if plan.sequence_parallel else 1
    per_block = 4 * config.hidden + 12 * config.hidden / sequence + cut / plan.tp
    per_token = blocks * per_block + (2 * config.hidden / sequence if stage else 0)
    return {
        Part.WEIGHTS: 4 * parameters / plan.dp_shard,
        Part.GRADIENTS: 4 * parameters / plan.dp_shard,
        Part.OPTIMIZER_STATE: 8 * parameters / plan.dp_shard,
        Part.UNITS: 6 * parameters,
        Part.ACTIVATIONS: in_flight * SEQ * per_token,
    }


def test_llama_70b_on_512_ranks(request):
    """tp 8 x pp 8 x dp 8, each matrix at its true size; fewer blocks in `make test`."""
    every = request.config.getoption("--full-size")
    config = replace(model_config("llama-3.1-70b"), num_layers=80 if every else 24)
    plan = ParallelPlan(tp=8, pp=8, dp_shard=8, micro_batches=8)
    plans = [replace(plan, sequence_parallel=True), plan]
    for rank, chosen in [(0, plans[0]), (64, plans[1])] if every else [(0, plans[0])]:
        report = measure_memory(config, seq=SEQ, parallel=chosen, world_size=512, rank=rank)
        for part, expected in closed_formula(config, chosen, rank).items():
            print(rank, part.value, report.peak_by_part[part], expected)
            assert report.peak_by_part[part] == pytest.approx(expected, rel=0.03), (rank, part)


def test_a_simulated_send_keeps_no_tensor():
    """The work of a fake process group never reports that it has completed."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        assert dist.group.WORLD is not None
        p2p = StageP2P(dist.group.WORLD, torch.device("cpu"))
        p2p.simulate(2, (1, 4), (1, 4, 8), torch.float32)
        output = torch.zeros(1, 4, 8)
        sent = weakref.ref(output)
        p2p.send_output(1, 0, (1, 4), output)
        del output
        assert sent() is None
    finally:
        dist.destroy_process_group()


def test_copies_of_a_stage():
    """tp 2 x pp 2 x two copies: each holds its part of the stage whole, with the state of AdamW."""
    config = replace(model_config("llama-3.2-1b"), num_layers=2, tied_embeddings=False)
    plan = ParallelPlan(tp=2, pp=2, dp_replicate=2, micro_batches=2)
    for rank in (0, 7):
        report = measure_memory(config, seq=64, parallel=plan, world_size=8, rank=rank)
        parameters, _ = parameters_and_blocks(config, plan, stage=rank // 4)
        held = report.peak_by_part
        assert held[Part.WEIGHTS] == pytest.approx(4 * parameters, rel=0.03)
        assert held[Part.OPTIMIZER_STATE] == pytest.approx(8 * parameters, rel=0.03)
        assert held[Part.GRADIENTS] >= 4 * parameters
        assert (held[Part.LOGITS_AND_LOSS] > 0) == (rank == 7)


def test_plans_that_are_not_measured_are_refused():
    with pytest.raises(UserError, match="is not measured on fake tensors: use a plan with cp 1"):
        measure_memory("tiny", parallel=ParallelPlan(cp=2), world_size=2)
    with pytest.raises(UserError, match="rank is 2 of 2 ranks: use 0 to 1"):
        measure_memory("tiny", parallel=ParallelPlan(tp=2), world_size=2, rank=2)
