"""Plans with tensor parallelism learn what one process learns from all the data, over 4 steps."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.data.tokens import IGNORE_INDEX
from dlo_lib.launch import run_ranks
from dlo_lib.models import Llama, model_config
from dlo_lib.optim import train_step
from dlo_lib.parallel.checkpoint import load_sharded, save_sharded
from dlo_lib.parallel.fsdp.deferred_init import deferred_init
from dlo_lib.parallel.mesh import ParallelMesh
from dlo_lib.parallel.parallelize import make_optimizer, parallelize
from dlo_lib.parallel.pipeline.table import ScheduleKind
from dlo_lib.parallel.plan import ParallelPlan
from dlo_lib.parallel.protocol import ParallelModel
from dlo_lib.parallel.tensor import TensorParallel

STEPS, SEQ = 4, 8
CONFIG = replace(
    model_config("tiny"),
    num_layers=2,
    hidden=32,
    intermediate=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=61,
)
WITH_DATA = ("dp_replicate", "dp_shard")


@dataclass(frozen=True)
class Setting:
    """What the twin shares with the ranks."""

    tied: bool = True
    frozen: bool = False
    checkpointing: bool = False
    micro_batches: int = 2
    dtype: torch.dtype = torch.float64
    max_norm: float = 0.3

    def model(self) -> Llama:
        config = replace(CONFIG, tied_embeddings=self.tied)
        model = Llama(config, checkpointing=self.checkpointing, dtype=self.dtype)
        if self.frozen:
            model.embed_tokens.requires_grad_(False)
            model.layers[0].self_attn.k_proj.requires_grad_(False)
            model.layers[1].input_layernorm.requires_grad_(False)
        return model

    def batches(self, step: int, copy: int) -> list[tuple[Tensor, Tensor]]:
        """Of one copy of the model: unequal micro-batches with unequal numbers of valid tokens."""
        generator = torch.Generator().manual_seed(1000 * copy + step)
        made = []
        for number in range(self.micro_batches):
            tokens, targets = torch.randint(61, (2, 2 if number else 1, SEQ), generator=generator)
            targets[0, : (3 * number + copy) % 8] = IGNORE_INDEX
            made.append((tokens, targets))
        return made


@dataclass
class History:
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


@functools.cache
def trained_alone(setting: Setting, copies: int) -> History:
    torch.manual_seed(5)
    model = setting.model()
    optimizer = adamw([param for param in model.parameters() if param.requires_grad])
    history = History([], [], {})
    for step in range(STEPS):
        pairs = [pair for copy in range(copies) for pair in setting.batches(step, copy)]
        result = train_step(model, optimizer, pairs, max_norm=setting.max_norm)
        history.losses.append(float(result.loss))
        assert result.grad_norm is not None
        history.norms.append(float(result.grad_norm))
    assert max(history.norms) > setting.max_norm, "nothing was clipped"
    history.weights = {name: value.detach() for name, value in model.state_dict().items()}
    return history


def build(plan: ParallelPlan, setting: Setting) -> tuple[ParallelMesh, nn.Module, torch.optim.Optimizer]:
    mesh = ParallelMesh(plan.degrees)
    torch.manual_seed(5)
    with deferred_init() as init:
        model = setting.model()
    spread = parallelize(model, plan, mesh, values=init.value, device=torch.device("cpu"), seq=SEQ)
    trained = [param for param in spread.parameters() if param.requires_grad]
    return mesh, spread, make_optimizer(spread, plan, mesh, trained, torch.optim.AdamW, lr=1e-2)


def trained(
    plan: ParallelPlan, setting: Setting, first: int = 0, last: int = STEPS, folder: str = ""
) -> History:
    """Train steps ``first`` to ``last``. With a folder, a run that begins later reads the
    checkpoint there, and a run that ends earlier writes it."""
    torch.set_num_threads(1)
    mesh, spread, optimizer = build(plan, setting)
    if first:
        load_sharded(folder, spread, optimizer)
    history = History([], [], {})
    for step in range(first, last):
        result = train_step(
            spread,
            optimizer,
            setting.batches(step, mesh.coordinate(*WITH_DATA)),
            max_norm=setting.max_norm,
            group=mesh.group_along(*WITH_DATA),
            sync_each=plan.stage >= 2,
        )
        history.losses.append(float(result.loss))
        assert result.grad_norm is not None
        history.norms.append(float(result.grad_norm))
    if folder and last < STEPS:
        save_sharded(folder, spread, optimizer)
    assert isinstance(spread, ParallelModel)
    if isinstance(spread, TensorParallel):
        history.weights = spread.full_state_dict()
    return history


def assert_twin(ranks: list[History], twin: History, first: int = 0, within: float = 1e-10) -> None:
    for history in ranks:
        assert history.losses == pytest.approx(twin.losses[first:], rel=within, abs=0)
        assert history.norms == pytest.approx(twin.norms[first:], rel=within * 10, abs=0)
        for name, value in history.weights.items():
            torch.testing.assert_close(value, twin.weights[name], atol=1e-8, rtol=0)


PLANS = {
    "tp": ParallelPlan(tp=2),
    "tp, heads of keys shared by two ranks": ParallelPlan(tp=4),
    "tp and sp, heads shared": ParallelPlan(tp=4, sequence_parallel=True),
    "async tp, heads shared": ParallelPlan(tp=4, sequence_parallel=True, async_tp=True),
    "tp and sp": ParallelPlan(tp=2, sequence_parallel=True),
    "tp x ddp": ParallelPlan(tp=2, dp_replicate=2),
    "tp x fsdp": ParallelPlan(tp=2, dp_shard=2),
    "tp and sp x fsdp": ParallelPlan(tp=2, dp_shard=2, sequence_parallel=True),
    "pp x tp": ParallelPlan(pp=2, tp=2),
    "pp x tp and sp": ParallelPlan(pp=2, tp=2, sequence_parallel=True),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_with_tp_learns_what_one_process_learns(name):
    plan = replace(PLANS[name], micro_batches=2)
    world = plan.pp * plan.tp * plan.dp_replicate * plan.dp_shard
    copies = plan.dp_replicate * plan.dp_shard
    assert_twin(run_ranks(trained, world, plan, Setting()), trained_alone(Setting(), copies))


@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(tp=2, dp_shard=2, pp=2, micro_batches=2, sequence_parallel=True),
        ParallelPlan(tp=2, dp_shard=2, dp_replicate=2),
    ],
    ids=["pp x fsdp x tp and sp", "hsdp x tp"],
)
def test_three_dimensions_on_eight_ranks(plan):
    copies = plan.dp_replicate * plan.dp_shard
    assert_twin(run_ranks(trained, 8, plan, Setting(), timeout=200), trained_alone(Setting(), copies))


@pytest.mark.parametrize(
    "setting",
    [
        Setting(tied=False, checkpointing=True, micro_batches=1),
        Setting(tied=False, frozen=True),
        Setting(checkpointing=True, micro_batches=3),
    ],
    ids=["untied, checkpointing", "frozen", "tied, checkpointing, accumulation"],
)
def test_variants_of_the_model_with_sequence_parallelism(setting):
    plan = ParallelPlan(tp=2, sequence_parallel=True)
    assert_twin(run_ranks(trained, 2, plan, setting), trained_alone(setting, 1))


def test_fp32_losses():
    setting = Setting(dtype=torch.float32)
    twin = trained_alone(setting, 1)
    for history in run_ranks(trained, 2, ParallelPlan(tp=2, sequence_parallel=True), setting):
        assert history.losses == pytest.approx(twin.losses, rel=1e-5, abs=0)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (ParallelPlan(tp=2), ParallelPlan()),
        (ParallelPlan(), ParallelPlan(tp=4)),
        (ParallelPlan(tp=2, dp_shard=2), ParallelPlan(dp_shard=2)),
        (ParallelPlan(dp_shard=2), ParallelPlan(tp=2, dp_shard=2, sequence_parallel=True)),
        (ParallelPlan(pp=2, tp=2, micro_batches=2), ParallelPlan(tp=2)),
    ],
    ids=["tp 2 to 1", "1 to tp 4", "tp x fsdp to fsdp", "fsdp to tp x fsdp", "pp x tp to tp"],
)
def test_a_checkpoint_of_one_plan_is_resumed_by_another(before, after, tmp_path):
    setting = Setting()

    def world(plan: ParallelPlan) -> int:
        return plan.pp * plan.tp * plan.dp_shard

    run_ranks(trained, world(before), before, setting, 0, STEPS - 1, str(tmp_path))
    ranks = run_ranks(trained, world(after), after, setting, STEPS - 1, STEPS, str(tmp_path))
    assert_twin(ranks, trained_alone(setting, after.dp_shard), first=STEPS - 1)


def clipped_by_pytorch(plan: ParallelPlan) -> float:
    mesh, spread, _ = build(plan, Setting(micro_batches=1))
    tokens, targets = Setting().batches(0, mesh.coordinate(*WITH_DATA))[0]
    loss = spread.summed_cross_entropy(spread(tokens), targets)
    loss.backward()
    spread.finish_grad_sync()
    before = float(nn.utils.clip_grad_norm_(spread.parameters(), 0.1))
    after = float(spread.clip_grad_norm_(1e9))
    assert after == pytest.approx(0.1, rel=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.zeros(()))
    optimizer = torch.optim.SGD(spread.parameters(), lr=1.0)
    broken = next(shard.param for shard in spread.shards() if shard.name.endswith("0.mlp.up_proj.weight"))
    if dist.get_rank() == dist.get_world_size() - 1:
        broken.grad[0, 0] = torch.inf
    weight = broken.detach().clone()
    scaler.step(optimizer)
    assert torch.equal(broken.detach(), weight), "this rank made a step that another one skipped"
    return before


@pytest.mark.parametrize("plan", [ParallelPlan(tp=2, sequence_parallel=True), ParallelPlan(tp=2, dp_shard=2)])
def test_the_functions_of_pytorch_clip_and_scale_over_all_ranks(plan):
    norms = run_ranks(clipped_by_pytorch, plan.tp * plan.dp_shard, plan)
    assert len(set(norms)) == 1
    assert norms[0] > 0.1


def refused() -> None:
    mesh = ParallelMesh(ParallelPlan(tp=2).degrees)
    with pytest.raises(UserError, match="the styles of a Linear are not known: give styles, or use tp 1"):
        parallelize(nn.Linear(2, 2), ParallelPlan(tp=2), mesh)
    plan = ParallelPlan(tp=2, schedule=ScheduleKind.ZB_H1, micro_batches=2)
    with pytest.raises(UserError, match="splits the backward, which sharded stages cannot"):
        parallelize(Llama(CONFIG), plan, mesh)


def test_what_a_plan_with_tp_refuses():
    run_ranks(refused, 2)
