"""An average of the weights of which ranks hold parts: that of one process after each step, and in use."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dlo_lib.launch import run_ranks
from dlo_lib.models import Llama, LlamaConfig
from dlo_lib.optim import train_step
from dlo_lib.optim.adafactor import Adafactor
from dlo_lib.optim.averaging import AVERAGE, Averaging, WeightAverage
from dlo_lib.optim.lamb import LAMB
from dlo_lib.parallel.mesh import TOKENS, ParallelMesh
from dlo_lib.parallel.parallelize import make_optimizer, parallelize
from dlo_lib.parallel.plan import ParallelPlan, ZeroStage
from dlo_lib.parallel.protocol import ParallelModel, averaged_optimizer, holds_parts, stepped_shards
from dlo_lib.parallel.zero.flat_params import PartitionBy

CONFIG = LlamaConfig(67, 16, 20, 1, 2, 2, 8, tied_embeddings=True)
FSDP = ParallelPlan(dp_shard=2)
ZERO1 = ParallelPlan(dp_shard=2, zero_stage=ZeroStage.OPTIMIZER)
ZERO2 = ParallelPlan(dp_shard=2, zero_stage=ZeroStage.GRADIENTS)
WHOLE_PARTS = ParallelPlan(dp_shard=2, zero_stage=ZeroStage.OPTIMIZER, zero_split=PartitionBy.PARAMETERS)
CASES = {
    "fsdp": (FSDP, torch.optim.AdamW),
    "fsdp, owner": (FSDP, Adafactor),
    "fsdp, norms": (FSDP, LAMB),
    "tp": (ParallelPlan(tp=2), torch.optim.AdamW),
    "tp, owner": (ParallelPlan(tp=2), Adafactor),
    "zero1": (ZERO1, torch.optim.AdamW),
    "zero2": (ZERO2, torch.optim.AdamW),
    "zero1, whole": (WHOLE_PARTS, Adafactor),
}


def tokens(step: int) -> torch.Tensor:
    return torch.randint(67, (2, 8), generator=torch.Generator().manual_seed(step))


def llama() -> Llama:
    torch.manual_seed(0)
    return Llama(CONFIG).double()


def loss_of(model: nn.Module, of_vocabulary: int = 1) -> float:
    """A number that depends on every weight.

    Args:
        of_vocabulary: the number of ranks that have different logits.
    """
    with torch.no_grad():
        total = model(tokens(9)).square().sum()
    if of_vocabulary > 1:
        dist.all_reduce(total)
    return float(total)


def rank_averages(plan: ParallelPlan, cls: type[torch.optim.Optimizer], kind: Averaging) -> None:
    mesh = ParallelMesh(plan.degrees)
    model, twin = parallelize(llama(), plan, mesh, device=torch.device("cpu"), seq=8), llama()
    assert isinstance(model, ParallelModel)
    optimizer = make_optimizer(model, plan, mesh, model.parameters(), cls, lr=0.05)
    alone = cls(twin.parameters(), lr=0.05)  # type: ignore[call-arg]
    holder, send = averaged_optimizer(optimizer), getattr(optimizer, "sync_params", None)
    average = WeightAverage(holder, kind, decay=0.9, start=2, after_swap=send)
    expected = WeightAverage(alone, kind, decay=0.9, start=2)
    for step in range(1, 5):
        data = [(tokens(step), tokens(100 + step))]  # the same on each rank
        train_step(
            model,
            optimizer,
            data,
            group=mesh.group_along(*TOKENS),
            sync_each=plan.stage >= ZeroStage.GRADIENTS,
        )
        average.after_step(step)
        train_step(twin, alone, data)
        expected.after_step(step)
    whole = {name: alone.state[param][AVERAGE] for name, param in twin.named_parameters()}
    shards = model.shards() if holds_parts(optimizer) else stepped_shards(model, optimizer)
    assert shards
    for shard in shards:
        held = holder.state[shard.param][AVERAGE]
        assert held.shape == shard.param.shape
        torch.testing.assert_close(held, shard.of(whole[shard.name]), rtol=0, atol=1e-9)
    before = loss_of(model, plan.tp)
    with average.swapped(), expected.swapped():
        assert loss_of(model, plan.tp) == pytest.approx(loss_of(twin), abs=1e-9)
        assert abs(loss_of(model, plan.tp) - before) > 1e-6
    assert loss_of(model, plan.tp) == before


def every_rank_averages(kind: Averaging) -> None:
    torch.set_num_threads(1)
    for name, (plan, cls) in CASES.items():
        try:
            rank_averages(plan, cls, kind)
        except BaseException as error:
            error.add_note(f"{name} on rank {dist.get_rank()}")
            raise


@pytest.mark.parametrize("kind", [Averaging.EMA, Averaging.SWA])
def test_each_rank_averages_its_part_as_one_process_the_whole(kind: Averaging):
    run_ranks(every_rank_averages, 2, kind, timeout=300)
