"""An optimiser of whole parameters under FSDP and tensor parallelism: traffic, owners, memory and refusals.
``test_every_optimiser`` compares its steps with those of one process."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dlo_lib.base.errors import UserError
from dlo_lib.comm.tracing.recorder import trace_collectives
from dlo_lib.launch import run_ranks
from dlo_lib.models import Llama, LlamaConfig, model_config
from dlo_lib.models.counts import parameters
from dlo_lib.optim.adafactor import Adafactor
from dlo_lib.optim.entry import TrainingForm
from dlo_lib.optim.muon import Muon
from dlo_lib.optim.registry import OPTIMIZERS
from dlo_lib.parallel import FSDP
from dlo_lib.parallel.mesh import ParallelMesh
from dlo_lib.parallel.owned_params import OwnerOptimizer
from dlo_lib.parallel.parallelize import make_optimizer, parallelize
from dlo_lib.parallel.plan import ParallelPlan
from dlo_lib.parallel.protocol import ParallelModel, ShardBox
from dlo_lib.profiling import Part, measure_memory
from dlo_lib.profiling.sizes import embedding_shapes, parameter_shapes

RANKS = 3
SHAPES = ((7, 5), (5,), (5, 8), (2, 5), ())
"""With three ranks: rows that cannot be divided, fewer rows than ranks, and a single number."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.values = nn.ParameterList(
            nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in SHAPES
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide, bias, out, few, scale = self.values
        return scale * ((torch.tanh(x @ wide + bias) @ out).sum() + (few * bias).square().sum())


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(6, 7, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def owned(model: FSDP, cls: type[torch.optim.Optimizer], **options: object) -> OwnerOptimizer:
    params = [shard.param for shard in model.shards()]
    assert dist.group.WORLD is not None
    return OwnerOptimizer(params, cls, shards=model.shards(), group=dist.group.WORLD, **options)


def rank_steps_as_one_process() -> tuple[int, int, int]:
    """Return the bytes that this rank sends in a step, those that it should send, and the elements that it
    owns."""
    model, twin = FSDP(Net()), Net()
    optimizer = owned(model, Adafactor, lr=0.1)
    alone = Adafactor(twin.parameters(), lr=0.1)
    for step in range(3):
        model(inputs(step, dist.get_rank())).backward()
        torch.stack([twin(inputs(step, rank)) for rank in range(RANKS)]).mean().backward()
        with trace_collectives() as trace:
            optimizer.step()
        alone.step()
        optimizer.zero_grad()
        alone.zero_grad()
        whole = dict(twin.named_parameters())
        for shard in model.shards():
            torch.testing.assert_close(shard.param.detach(), shard.of(whole[shard.name].detach()))
    own = {shard.name: shard.shape.numel() for shard in optimizer.shards(model.shards())}
    # A gradient and a value of each element to its owner, and back to those that hold it. The messages have
    # the parts that stay on a rank too.
    expected = 2 * sum(shard.param.numel() for shard in model.shards()) + sum(own.values())
    return trace.bytes("all_to_all", dist.get_rank()), 8 * expected, sum(own.values())


def test_uneven_parts_step_as_one_process_with_the_bytes_of_the_docstring():
    found = run_ranks(rank_steps_as_one_process, RANKS)
    assert [sent for sent, _, _ in found] == [expected for _, expected, _ in found]
    # (5, 8) and then (7, 5); (2, 5), of which rank 2 has no rows; (5,); and the number, which rank 0 has
    assert [mine for _, _, mine in found] == [40 + 1, 35 + 10, 5]


def rank_takes_loaded_values() -> None:
    model = FSDP(Net())
    optimizer = owned(model, Muon, lr=0.1, weight_decay=0.0)
    for number in range(2):
        with torch.no_grad():  # as loading a checkpoint does
            for shard in model.shards():
                shard.param.fill_(number)
        before = [shard.param.detach().clone() for shard in model.shards()]
        model(inputs(0, 0)).backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step()
        optimizer.zero_grad()
        for shard, old in zip(model.shards(), before, strict=True):
            assert torch.equal(shard.param, old)


def test_values_that_were_loaded_meanwhile_count():
    run_ranks(rank_takes_loaded_values, 2)


def rank_is_refused() -> None:
    model = FSDP(Net())
    optimizer = owned(model, Muon)
    with pytest.raises(UserError, match="save_sharded"):
        optimizer.state_dict()
    with pytest.raises(UserError, match="load_sharded"):
        optimizer.load_state_dict({})
    assert dist.group.WORLD is not None
    with pytest.raises(UserError, match="give it those of the model"):
        OwnerOptimizer([nn.Parameter(torch.ones(2))], Muon, shards=model.shards(), group=dist.group.WORLD)


def test_what_it_cannot_do_is_refused_in_one_sentence():
    run_ranks(rank_is_refused, 2)
    for name in ("muon", "lamb", "adafactor"):
        entry = OPTIMIZERS[name]
        assert entry.wrong_under({TrainingForm.FSDP, TrainingForm.TP}) is None
        assert "of which a rank has a part with zero1 with tp" in str(
            entry.wrong_under({TrainingForm.ZERO1, TrainingForm.TP})
        )


def rank_compares_what_the_others_hold() -> None:
    plan = ParallelPlan(tp=2, dp_shard=2)
    mesh = ParallelMesh(plan.degrees)
    # three rows over two ranks of FSDP, and halves of odd vocabularies
    config = LlamaConfig(67, 12, 20, 1, 2, 2, 6, tied_embeddings=False)
    model = parallelize(Llama(config), plan, mesh, device=torch.device("cpu"))
    assert isinstance(model, ParallelModel)
    shards = model.shards()
    params = [shard.param for shard in shards]
    optimizer = make_optimizer(model, plan, mesh, params, Adafactor, lr=0.1)
    assert isinstance(optimizer, OwnerOptimizer)
    mine = [
        (shard.boxes() if shard.param.numel() else [], shard.counted and shard.param.numel() > 0)
        for shard in shards
    ]
    every: list[list[tuple[list[ShardBox], bool]]] = [[] for _ in range(4)]
    dist.all_gather_object(every, mine)
    known = [
        [(list(param.ranks[rank].boxes), param.ranks[rank].sends) for param in optimizer._params]
        for rank in range(4)
    ]
    assert known == every
    assert len({str(held) for held in every}) == 4


def test_what_other_ranks_hold_follows_from_the_mesh():
    run_ranks(rank_compares_what_the_others_hold, 4)


@pytest.mark.parametrize("name", ["adafactor", "muon", "soap"])
@pytest.mark.parametrize(
    ("plan", "ranks"), [(ParallelPlan(dp_shard=3), 3), (ParallelPlan(tp=2, dp_shard=2), 4)]
)
def test_the_memory_of_owners_is_measured(name: str, plan: ParallelPlan, ranks: int):
    """The ranks together have one more copy of the parameters, and the state once."""
    every = range(ranks)
    measured = functools.partial(measure_memory, "tiny", seq=16, parallel=plan, world_size=ranks)
    reports = [measured(optimizer=name, rank=rank).peak_by_part for rank in every]
    elementwise = [measured(optimizer="sgd", rank=rank).peak_by_part for rank in every]
    copies = [one[Part.WEIGHTS] - two[Part.WEIGHTS] for one, two in zip(reports, elementwise)]
    config = model_config("tiny")
    assert sum(copies) == 4 * parameters(config)
    embeddings = embedding_shapes(config)
    shapes = [(parameter_shapes(config) - embeddings, False), (embeddings, True)]
    # A number of steps has 4 bytes, which the entry does not count.
    states = OPTIMIZERS[name].states
    state = sum(
        count * (4 if one.shape.of(shape, embedding) == () else one.count_bytes(shape, embedding=embedding))
        for some, embedding in shapes
        for shape, count in some.items()
        for one in states
    )
    assert sum(one[Part.OPTIMIZER_STATE] for one in reports) == state
    # while the parts are exchanged: a gradient and a value of each element that a rank sends and receives
    for report, copy in zip(reports, copies):
        assert report[Part.STEP_TEMPORARIES] >= 2 * copy
