"""The memory of a rank of a mesh, measured on fake tensors: each part is that of its closed formula
(``mesh_formula``), within 3 %. `make combinations` measures every stage with all 80 blocks.
"""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore

from dlo_lib.base.errors import UserError
from dlo_lib.models import LlamaConfig, model_config
from dlo_lib.optim import train_step
from dlo_lib.parallel.pipeline.p2p import StageP2P
from dlo_lib.parallel.pipeline.runtime import Pipeline
from dlo_lib.parallel.pipeline.schedules import one_f_one_b
from dlo_lib.parallel.plan import ParallelPlan
from dlo_lib.profiling import Part, measure_memory
from tests.profiling.mesh_formula import closed_formula, parameters_and_blocks

SEQ = 4096


LLAMA = model_config("llama-3.1-70b")
PLAN = ParallelPlan(tp=8, pp=8, dp_shard=8, micro_batches=8)
FEWER = 24
"""Blocks in `make test`, where the last stage is that of all 80, so that it has some of them."""


def assert_within_3_percent(config: LlamaConfig, plan: ParallelPlan, rank: int, seq: int = SEQ) -> None:
    report = measure_memory(config, seq=seq, parallel=plan, world_size=512, rank=rank)
    formula = closed_formula(config, plan, seq, rank)
    assert formula.keys() == set(Part)
    for part, expected in formula.items():
        print(rank, plan.sequence_parallel, part.value, report.peak_by_part[part], expected)
        assert report.peak_by_part[part] == pytest.approx(expected, rel=0.03), (rank, part)


def test_llama_70b_on_512_ranks(request):
    """tp 8 x pp 8 x dp 8, each matrix at its true size; the first, a middle and the last stage. With 24
    blocks, the last stage has none of them."""
    cases = [(0, FEWER, True), (256, FEWER, False), (448, 80, True), (448, 80, False), (448, FEWER, True)]
    if request.config.getoption("--full-size"):
        cases += [(64 * stage, 80, sequence) for stage in range(8) for sequence in (True, False)]
    for rank, blocks, sequence_parallel in cases:
        plan = replace(PLAN, sequence_parallel=sequence_parallel)
        assert_within_3_percent(replace(LLAMA, num_layers=blocks), plan, rank)


def test_llama_70b_with_a_ring():
    """tp 8 x pp 4 x cp 4 x dp 4: a rank of the second stage has 4096 of 16384 tokens."""
    plan = ParallelPlan(tp=8, pp=4, cp=4, dp_shard=4, micro_batches=4, sequence_parallel=True)
    assert_within_3_percent(replace(LLAMA, num_layers=12), plan, 128, seq=4 * SEQ)


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


def test_a_pipeline_keeps_no_output_after_its_send():
    """The graph of a stage of two linears does not need its output, which is sent."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        stage = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        pipeline = Pipeline({0: stage}, one_f_one_b(2, 2))
        pipeline.simulate_messages((1, 4), (1, 4), torch.float32)
        sent: list[StorageWeakRef] = []
        kept: list[int] = []

        def watch(_: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            sent.append(StorageWeakRef(output.untyped_storage()))
            output.register_hook(lambda grad: kept.append(sum(not output.expired() for output in sent)))

        stage.register_forward_hook(watch)
        train_step(
            pipeline,
            torch.optim.SGD(stage.parameters(), lr=0.1),
            [(torch.ones(1, 4), torch.ones(1, 4, dtype=torch.int64))] * 2,
        )
        assert kept == [0, 0]
    finally:
        dist.destroy_process_group()


def test_copies_of_a_stage():
    """tp 2 x pp 2 x two copies: each holds its part of the stage whole, with the state of AdamW."""
    config = replace(model_config("llama-3.2-1b"), num_layers=2, tied_embeddings=False)
    plan = ParallelPlan(tp=2, pp=2, dp_replicate=2, micro_batches=2)
    for rank in (0, 7):
        report = measure_memory(config, seq=64, parallel=plan, world_size=8, rank=rank)
        parameters, _ = parameters_and_blocks(config, plan, 64, stage=rank // 4)
        held = report.peak_by_part
        assert held[Part.WEIGHTS] == pytest.approx(4 * parameters, rel=0.03)
        assert held[Part.OPTIMIZER_STATE] == pytest.approx(8 * parameters, rel=0.03)
        assert held[Part.GRADIENTS] >= 4 * parameters
        assert (held[Part.LOGITS_AND_LOSS] > 0) == (rank == 7)


def test_plans_that_are_not_measured_are_refused():
    with pytest.raises(UserError, match="are not measured with cp: use precision bf16, or a plan with cp 1"):
        measure_memory("llama-3.2-1b", precision="fp32", parallel=ParallelPlan(cp=2), world_size=2)
    with pytest.raises(UserError, match="18 tokens cannot be divided .*: use a multiple of 4"):
        measure_memory("tiny", seq=18, parallel=ParallelPlan(cp=2), world_size=2)
    with pytest.raises(UserError, match="rank is 2 of 2 ranks: use 0 to 1"):
        measure_memory("tiny", parallel=ParallelPlan(tp=2), world_size=2, rank=2)
