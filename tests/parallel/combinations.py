"""Plans on eight ranks against one process that trains on all the data: a small Llama, with experts or
without, in several plans one after another on the same ranks.

Each plan trains from the start; then it continues the checkpoint that the plan before it with the same
setting has written on the way. Losses, norms and all parameters are compared with the twin.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.data.tokens import IGNORE_INDEX
from dlo_lib.models import Llama, LlamaConfig, MoEConfig
from dlo_lib.optim import train_step
from dlo_lib.parallel.checkpoint import load_sharded, save_sharded
from dlo_lib.parallel.context import ContextKind, SequencePlacement
from dlo_lib.parallel.fsdp.deferred_init import deferred_init
from dlo_lib.parallel.mesh import DIMENSIONS, SEQUENCES, TOKENS, Degrees, ParallelMesh
from dlo_lib.parallel.parallelize import local_tokens, make_optimizer, parallelize
from dlo_lib.parallel.pipeline.table import ScheduleKind
from dlo_lib.parallel.plan import ParallelPlan, ZeroStage
from dlo_lib.parallel.protocol import ParallelModel

RANKS, STEPS, SAVED, MICRO_BATCHES, SEQUENCES_EACH, SEQ, VOCAB, MAX_NORM = 8, 4, 2, 2, 8, 16, 31, 0.3
EXPERTS = MoEConfig(
    num_experts=8, top_k=2, intermediate=8, shared_intermediate=8, every=2, balance_loss=0.3, z_loss=0.05
)


@dataclass(frozen=True)
class Setting:
    """What the twin shares with the ranks."""

    experts: bool = False
    tied: bool = True
    checkpointing: bool = True
    single: bool = False
    """Whether numbers are fp32 instead of fp64."""

    def model(self) -> Llama:
        config = LlamaConfig(
            VOCAB, 16, 24, 2, 4, 2, 4, tied_embeddings=self.tied, moe=EXPERTS if self.experts else None
        )
        return Llama(
            config, checkpointing=self.checkpointing, dtype=torch.float32 if self.single else torch.float64
        )


@dataclass(frozen=True)
class Case:
    """A plan of eight ranks, and what it trains."""

    plan: ParallelPlan
    setting: Setting = Setting()


@dataclass
class History:
    """Losses and norms of the steps that were taken, and the weights of the twin at the end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Differences:
    """The largest differences of a rank to the twin: relative ones of losses and norms, and that of a
    parameter."""

    loss: float
    norm: float
    weight: float

    @classmethod
    def between(cls, mine: History, twin: History, spread: ParallelModel) -> Differences:
        taken = len(mine.losses)
        assert taken > 0
        weight = 0.0
        for shard in spread.shards():
            part = twin.weights[shard.name]
            for box in shard.boxes():  # none if the rank holds no row
                assert box.sizes == shard.param.shape
                for dim, (first, size) in enumerate(zip(box.whole, box.sizes)):
                    part = part.narrow(dim, first, size)
                weight = max(weight, float((part - shard.param.detach()).abs().max()))
        return cls(
            _relative(mine.losses, twin.losses[-taken:]), _relative(mine.norms, twin.norms[-taken:]), weight
        )


@dataclass(frozen=True)
class Attempt:
    """A case on one rank: its differences to the twin, or the message of the refusal."""

    case: Case
    continued: bool
    differences: Differences
    refusal: str = ""


def _relative(ours: list[float], theirs: list[float]) -> float:
    return max(abs(one - other) / other for one, other in zip(ours, theirs, strict=True))


def batch(step: int, number: int) -> tuple[Tensor, Tensor]:
    """A micro-batch of all copies of the model, with unequal numbers of valid tokens."""
    random = torch.Generator().manual_seed(10 * step + number)
    tokens = torch.randint(VOCAB, (SEQUENCES_EACH, SEQ + 1), generator=random)
    targets = tokens[:, 1:].clone()
    ignored = torch.rand(SEQUENCES_EACH, generator=random).unsqueeze(1)
    targets[torch.rand(targets.shape, generator=random) < ignored] = IGNORE_INDEX
    return tokens[:, :-1], targets


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


@functools.cache
def trained_alone(setting: Setting) -> History:
    """The twin; its last weights are those after ``STEPS`` steps."""
    torch.manual_seed(5)
    model = setting.model()
    optimizer = adamw(list(model.parameters()))
    history = History()
    for step in range(STEPS):
        pairs = [batch(step, number) for number in range(MICRO_BATCHES)]
        result = train_step(model, optimizer, pairs, max_norm=MAX_NORM)
        history.losses.append(float(result.loss))
        assert result.grad_norm is not None
        history.norms.append(float(result.grad_norm))
    assert max(history.norms) > MAX_NORM, "nothing was clipped"
    history.weights = {name: value.detach() for name, value in model.state_dict().items()}
    return history


def trained(
    case: Case, ranks: ParallelMesh, twin: History, read: Path | None = None, write: Path | None = None
) -> Differences:
    """Train to the end on this rank. ``read`` is the checkpoint from which to continue, and ``write`` the one
    to write after ``SAVED`` steps."""
    setting, plan = case.setting, replace(case.plan, micro_batches=MICRO_BATCHES).over(len(ranks.ranks))
    mesh = ranks.reshaped(plan.degrees)
    torch.manual_seed(5)
    model, values = setting.model(), None
    if plan.builds_in_parts:
        torch.manual_seed(5)
        with deferred_init() as init:
            model = setting.model()
        values = init.value
    spread = parallelize(model, plan, mesh, values=values, device=torch.device("cpu"), seq=SEQ)
    assert isinstance(spread, ParallelModel)
    optimizer = make_optimizer(
        spread, plan, mesh, list(spread.parameters()), torch.optim.AdamW, lr=1e-2, fused=True
    )
    if read is not None:
        load_sharded(read, spread, optimizer)
    history = History()
    copies, copy = mesh.size(*SEQUENCES), mesh.coordinate(*SEQUENCES)
    for step in range(SAVED if read is not None else 0, STEPS):
        if write is not None and step == SAVED:
            save_sharded(write, spread, optimizer)
        pairs = []
        for number in range(MICRO_BATCHES):
            inputs, targets = (part.chunk(copies)[copy] for part in batch(step, number))
            pairs.append(local_tokens(plan, mesh, (inputs, targets)))
        result = train_step(
            spread,
            optimizer,
            pairs,
            max_norm=MAX_NORM,
            group=mesh.group_along(*TOKENS),
            sync_each=plan.stage >= ZeroStage.GRADIENTS,
        )
        history.losses.append(float(result.loss))
        assert result.grad_norm is not None
        history.norms.append(float(result.grad_norm))
    return Differences.between(history, twin, spread)


def trained_in_turn(cases: Sequence[Case], twins: dict[Setting, History], folder: Path) -> list[Attempt]:
    """For each case a run from the start, and one that continues the checkpoint of the case before it with
    the same setting, if there is one."""
    torch.set_num_threads(1)
    ranks = ParallelMesh(Degrees(dp_replicate=0))
    found: list[Attempt] = []
    before: dict[Setting, Path] = {}
    for number, case in enumerate(cases):
        continued = any(later.setting == case.setting for later in cases[number + 1 :])
        saved = folder / str(number)
        twin = twins[case.setting]
        try:
            found.append(Attempt(case, False, trained(case, ranks, twin, write=saved if continued else None)))
        except UserError as error:  # every rank raises it, before the first step
            found.append(Attempt(case, False, Differences(0, 0, 0), str(error)))
            continue
        if case.setting in before:
            found.append(Attempt(case, True, trained(case, ranks, twin, read=before[case.setting])))
        before[case.setting] = saved
    return found


def degrees_above_one(plan: ParallelPlan) -> list[str]:
    """The dimensions in which a plan divides something, ``ep`` included."""
    return [name for name in (*DIMENSIONS, "ep") if getattr(plan, name) > 1]


DENSE, MIXTURE = Setting(), Setting(experts=True)
SINGLE = Setting(experts=True, single=True)
CASES = {
    "pp x fsdp x tp": Case(ParallelPlan(pp=2, dp_shard=2, tp=2)),
    "pp x cp x tp and sp": Case(ParallelPlan(pp=2, cp=2, tp=2, sequence_parallel=True)),
    "fsdp x cp x tp": Case(ParallelPlan(dp_shard=2, cp=2, tp=2)),
    "pp x fsdp x cp": Case(ParallelPlan(pp=2, dp_shard=2, cp=2)),
    "pp x ddp x cp, zb-h1": Case(ParallelPlan(pp=2, dp_replicate=2, cp=2, schedule=ScheduleKind.ZB_H1)),
    "ddp x cp x tp, striped": Case(
        ParallelPlan(dp_replicate=2, cp=2, tp=2, sequence_placement=SequencePlacement.STRIPED)
    ),
    "hsdp x cp": Case(ParallelPlan(dp_replicate=2, dp_shard=2, cp=2)),
    "cp 4 x tp and sp": Case(ParallelPlan(cp=4, tp=2, sequence_parallel=True)),
    "fsdp x cp 4, ring of all-to-all": Case(
        ParallelPlan(dp_shard=2, cp=4, context_kind=ContextKind.COMBINED, context_inner=2)
    ),
    "fsdp x tp 4 and sp": Case(ParallelPlan(dp_shard=2, tp=4, sequence_parallel=True)),
    "zero 1 x cp": Case(ParallelPlan(dp_shard=4, cp=2, zero_stage=ZeroStage.OPTIMIZER)),
    "zero 2 x cp": Case(ParallelPlan(dp_shard=4, cp=2, zero_stage=ZeroStage.GRADIENTS)),
    "pp 4 x tp": Case(ParallelPlan(pp=4, tp=2)),
    "pp x fsdp x tp, ep": Case(ParallelPlan(pp=2, dp_shard=2, tp=2, ep=2), MIXTURE),
    "fsdp x cp x tp, ep 4": Case(ParallelPlan(dp_shard=2, cp=2, tp=2, ep=4), MIXTURE),
    "pp x fsdp x cp, ep": Case(ParallelPlan(pp=2, dp_shard=2, cp=2, ep=2), MIXTURE),
    "fsdp, ep 4": Case(ParallelPlan(dp_shard=8, ep=4), MIXTURE),
    "ddp, ep 4": Case(ParallelPlan(dp_replicate=2, dp_shard=4, ep=4, zero_stage=ZeroStage.NONE), MIXTURE),
    "hsdp x tp and sp, ep": Case(
        ParallelPlan(dp_replicate=2, dp_shard=2, tp=2, ep=2, sequence_parallel=True), MIXTURE
    ),
    "pp x cp x tp, ep": Case(ParallelPlan(pp=2, cp=2, tp=2, ep=2), MIXTURE),
    "pp x ddp, ep, zb-h1": Case(
        ParallelPlan(pp=2, dp_shard=4, ep=2, zero_stage=ZeroStage.NONE, schedule=ScheduleKind.ZB_H1),
        MIXTURE,
    ),
    "pp x fsdp x cp, whole experts": Case(ParallelPlan(pp=2, dp_shard=2, cp=2), MIXTURE),
    "pp x fsdp x tp and sp, ep, fp32": Case(
        ParallelPlan(pp=2, dp_shard=2, tp=2, ep=2, sequence_parallel=True), SINGLE
    ),
    "pp x cp x tp, ep, fp32": Case(ParallelPlan(pp=2, cp=2, tp=2, ep=2), SINGLE),
}
