"""LAMB and LARS on parts of parameters: their steps, their traffic, and their memory.
``test_every_optimiser`` runs them under every form."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from dlo_lib.base.errors import UserError
from dlo_lib.comm.tracing.recorder import trace_collectives
from dlo_lib.launch import run_ranks
from dlo_lib.models import Llama, LlamaConfig, model_config
from dlo_lib.models.counts import parameters
from dlo_lib.optim import train_step
from dlo_lib.optim.lamb import LAMB
from dlo_lib.optim.lars import LARS
from dlo_lib.parallel import FSDP
from dlo_lib.parallel.mesh import TOKENS, ParallelMesh
from dlo_lib.parallel.parallelize import make_optimizer, parallelize
from dlo_lib.parallel.plan import ParallelPlan
from dlo_lib.parallel.protocol import ParallelModel
from dlo_lib.profiling import Part, measure_memory
from tests.parallel.test_owned_params import SHAPES, Net, inputs

RANKS = 3
OPTIMIZERS = {"lamb": (LAMB, {"lr": 0.1}), "lars": (LARS, {"lr": 0.1, "trust": 0.5, "weight_decay": 0.1})}


def rank_steps_as_one_process(name: str, foreach: bool) -> int:
    """Return the bytes that this rank gives to all-reduces in a step."""
    cls, options = OPTIMIZERS[name]
    plan = ParallelPlan(dp_shard=RANKS)
    mesh = ParallelMesh(plan.degrees)
    model, twin = FSDP(Net()), Net()
    params = [shard.param for shard in model.shards()]
    optimizer = make_optimizer(model, plan, mesh, params, cls, **options, foreach=foreach)
    alone = cls(twin.parameters(), **options)
    whole = dict(twin.named_parameters())
    for step in range(4):
        model(inputs(step, dist.get_rank())).backward()
        torch.stack([twin(inputs(step, rank)) for rank in range(RANKS)]).mean().backward()
        if step == 2:  # the bias, which the last rank has a part of, gets no gradient
            for shard in model.shards():
                if shard.shape == (5,):
                    shard.param.grad = whole[shard.name].grad = None
        with trace_collectives() as trace:
            optimizer.step()
        alone.step()
        optimizer.zero_grad()
        alone.zero_grad()
        for shard in model.shards():
            part = shard.of(whole[shard.name].detach())
            torch.testing.assert_close(shard.param.detach(), part, rtol=0, atol=1e-12)
    kinds = {call.kind.value for call in trace.calls(dist.get_rank())}
    assert kinds == {"all_reduce"}
    return trace.bytes("all_reduce", dist.get_rank())


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_uneven_parts_step_as_one_process_and_send_two_numbers_a_parameter(name: str, foreach: bool):
    """Rank 2 has no rows of (2, 5), and only rank 0 has the single number: a flag in fp32 of each."""
    found = run_ranks(rank_steps_as_one_process, RANKS, name, foreach)
    assert found == [2 * 8 * len(SHAPES) + 2 * 4] * RANKS


def rank_of_two_dimensions() -> None:
    """Ranks of tp have copies of norms and parts of matrices, and those of FSDP have rows of both."""
    torch.set_num_threads(1)
    plan = ParallelPlan(tp=2, dp_shard=2)
    mesh = ParallelMesh(plan.degrees)
    config = LlamaConfig(67, 12, 20, 1, 2, 2, 6, tied_embeddings=False)

    def llama() -> Llama:
        torch.manual_seed(0)
        return Llama(config).double()

    for cls, options in OPTIMIZERS.values():
        model, twin = parallelize(llama(), plan, mesh, device=torch.device("cpu"), seq=8), llama()
        assert isinstance(model, ParallelModel)
        optimizer = make_optimizer(model, plan, mesh, model.parameters(), cls, **options)
        alone = cls(twin.parameters(), **options)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            pairs = [tuple(torch.randint(67, (2, 2, 8), generator=generator)) for _ in range(2)]
            mine = pairs[mesh.coordinate(*TOKENS)]
            train_step(model, optimizer, [mine], group=mesh.group_along(*TOKENS))  # type: ignore[list-item]
            train_step(twin, alone, pairs)  # type: ignore[arg-type]
        whole = dict(twin.named_parameters())
        for shard in model.shards():
            part = shard.of(whole[shard.name].detach())
            torch.testing.assert_close(shard.param.detach(), part, rtol=0, atol=1e-10)


def test_each_part_counts_once_in_two_dimensions():
    run_ranks(rank_of_two_dimensions, 4)


def rank_is_refused() -> None:
    model = FSDP(Net())
    optimizer = LAMB([shard.param for shard in model.shards()])
    model(inputs(0, dist.get_rank())).backward()
    with pytest.raises(UserError):
        optimizer.step()


def test_parts_without_the_sums_over_ranks_are_refused():
    run_ranks(rank_is_refused, 2)


@pytest.mark.parametrize("plan", [ParallelPlan(dp_shard=2), ParallelPlan(tp=2)])
def test_no_rank_has_more_than_its_parts(plan: ParallelPlan):
    """An owner would have a whole copy of what it owns."""
    config = replace(model_config("tiny"), tied_embeddings=True)
    measured = {
        name: measure_memory(config, seq=16, parallel=plan, world_size=2, optimizer=name, fused=False)
        for name in ("lamb", "adamw", "muon")
    }
    lamb, adamw, muon = (report.peak_by_part for report in measured.values())
    assert lamb[Part.WEIGHTS] == adamw[Part.WEIGHTS] == pytest.approx(4 * parameters(config) / 2, rel=0.02)
    assert lamb[Part.OPTIMIZER_STATE] == adamw[Part.OPTIMIZER_STATE]
    assert muon[Part.WEIGHTS] > 1.9 * lamb[Part.WEIGHTS]
