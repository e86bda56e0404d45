"""Ranks that follow a plan learn what one process learns from all the data, in every composition; what a
plan cannot do is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from dlo_lib.base.errors import UserError
from dlo_lib.data.tokens import IGNORE_INDEX
from dlo_lib.launch import RankFailure, run_ranks
from dlo_lib.models import Llama, model_config
from dlo_lib.optim import train_step
from dlo_lib.parallel import FSDP
from dlo_lib.parallel.checkpoint import load_sharded, save_sharded
from dlo_lib.parallel.fsdp.deferred_init import deferred_init
from dlo_lib.parallel.mesh import Degrees, ParallelMesh
from dlo_lib.parallel.parallelize import make_optimizer, parallelize
from dlo_lib.parallel.pipeline.table import ScheduleKind
from dlo_lib.parallel.plan import ParallelPlan, ShortForm, ZeroStage

STEPS, MICRO_BATCHES, SEQ = 3, 3, 9
CONFIG = replace(
    model_config("tiny"),
    num_layers=4,
    hidden=32,
    intermediate=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=61,
)
WITH_DATA = ("dp_replicate", "dp_shard")


def batches(step: int, copy: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of one copy of the model: unequal micro-batches with unequal numbers of valid tokens."""
    generator = torch.Generator().manual_seed(1000 * copy + step)
    made = []
    for number in range(MICRO_BATCHES):
        tokens, targets = torch.randint(
            0, CONFIG.vocab_size, (2, 2 if number else 1, SEQ), generator=generator
        )
        targets[0, : (3 * number + copy) % 8] = IGNORE_INDEX
        made.append((tokens, targets))
    return made


def trained_alone(copies: int) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(5)
    model = Llama(CONFIG, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    together = [[pair for copy in range(copies) for pair in batches(step, copy)] for step in range(STEPS)]
    results = [train_step(model, optimizer, pairs, max_norm=0.3) for pairs in together]
    norms = [float(result.grad_norm) for result in results if result.grad_norm is not None]
    assert max(norms) > 0.3, "nothing was clipped"
    return [float(result.loss) for result in results], norms, dict(model.named_parameters())


def trained(
    plan: ParallelPlan, steps: int = STEPS, folder: str | None = None
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, norms and this rank's parts; the last step of a resumed run is taken with
    what ``folder`` holds."""
    torch.set_num_threads(1)
    plan = plan.over(dist.get_world_size())
    mesh = ParallelMesh(plan.degrees)
    torch.manual_seed(5)
    with deferred_init() as recipe:
        model = Llama(CONFIG, dtype=torch.float64)
    if not plan.builds_in_parts:
        torch.manual_seed(5)
        model = Llama(CONFIG, dtype=torch.float64)
    values = recipe.value if plan.builds_in_parts else None
    spread = parallelize(model, plan, mesh, values=values, device=torch.device("cpu"), seq=SEQ)
    optimizer = make_optimizer(spread, plan, mesh, spread.parameters(), torch.optim.AdamW, lr=1e-2)
    first = 0
    if folder is not None and steps == STEPS:
        load_sharded(folder, spread, optimizer)
        first = STEPS - 1
    results = []
    for step in range(first, steps):
        pairs = batches(step, mesh.coordinate(*WITH_DATA))
        results.append(
            train_step(
                spread,
                optimizer,
                pairs,
                max_norm=0.3,
                group=mesh.group_along(*WITH_DATA),
                sync_each=plan.stage >= 2,
            )
        )
    if folder is not None and steps < STEPS:
        save_sharded(folder, spread, optimizer)
    parts = {
        shard.name: (shard.param.detach(), mesh.coordinate("dp_shard") if shard.placement else None)
        for shard in spread.shards()
    }
    return [float(result.loss) for result in results], [float(result.grad_norm) for result in results], parts


def assert_twin(ranks: list, copies: int, last: int = STEPS) -> None:
    losses, norms, weights = trained_alone(copies)
    seen = set()
    for rank_losses, rank_norms, parts in ranks:
        torch.testing.assert_close(rank_losses, losses[-last:], atol=1e-10, rtol=0)
        torch.testing.assert_close(rank_norms, norms[-last:], atol=1e-9, rtol=0)
        for name, (part, place) in parts.items():
            whole = weights[name].detach()
            if place is not None:
                rows = -(
                    -len(whole)
                    // (
                        max(each for _, _, other in ranks for _, each in other.values() if each is not None)
                        + 1
                    )
                )
                whole = whole[place * rows : (place + 1) * rows]
            torch.testing.assert_close(part, whole, atol=1e-8, rtol=0)
            seen.add(name)
    assert seen == set(weights)


@pytest.mark.parametrize(
    ("world", "plan"),
    [
        (2, ParallelPlan(dp_replicate=2)),
        (2, ParallelPlan(dp_shard=2, zero_stage=ZeroStage.OPTIMIZER)),
        (2, ParallelPlan(dp_shard=2, zero_stage=ZeroStage.GRADIENTS)),
        (3, ParallelPlan(dp_shard=0)),
        (4, ParallelPlan(dp_replicate=2, dp_shard=2)),
        (4, ParallelPlan(pp=2, dp_replicate=2)),
        (4, ParallelPlan(pp=2, dp_shard=2)),
        (4, ParallelPlan(pp=2, dp_shard=2, reshard_after_forward=True)),
        (4, ParallelPlan(pp=2, dp_shard=2, schedule=ScheduleKind.AFAB)),
        (4, ParallelPlan(pp=4, schedule=ScheduleKind.ZB_H1)),
    ],
    ids=[
        "ddp",
        "zero 1",
        "zero 2",
        "fsdp",
        "hsdp",
        "pp x ddp",
        "pp x fsdp",
        "pp x fsdp, freed",
        "pp x fsdp, afab",
        "pp",
    ],
)
def test_a_plan_learns_what_one_process_learns(world, plan):
    plan = replace(plan, micro_batches=MICRO_BATCHES)
    assert_twin(run_ranks(trained, world, plan, timeout=200), world // plan.pp)


def test_sharded_stages_continue_where_others_stopped(tmp_path):
    """Saved by two stages of two shards each, continued without a pipeline by two shards,
    which read the same data."""
    plan = ParallelPlan(pp=2, dp_shard=2, micro_batches=MICRO_BATCHES)
    run_ranks(trained, 4, plan, STEPS - 1, str(tmp_path), timeout=200)
    assert_twin(run_ranks(trained, 2, ParallelPlan(dp_shard=2), STEPS, str(tmp_path), timeout=200), 2, last=1)


def test_what_the_recipe_refuses():
    def refused() -> None:
        mesh = ParallelMesh(Degrees(dp_shard=2))
        with pytest.raises(UserError, match=r"make the mesh with ParallelMesh\(plan.degrees\)"):
            parallelize(torch.nn.Linear(2, 2), ParallelPlan(dp_replicate=2), mesh)
        with pytest.raises(UserError, match="a pipeline is cut out of a Llama, not out of a Linear"):
            parallelize(torch.nn.Linear(2, 2), ParallelPlan(pp=2), ParallelMesh(Degrees(pp=2)))
        assert isinstance(parallelize(torch.nn.Linear(2, 2), ParallelPlan(dp_shard=2), mesh), FSDP)

    run_ranks(refused, 2)
    linear = torch.nn.Linear(2, 2)
    assert parallelize(linear, ParallelPlan(), None) is linear
    with pytest.raises(RankFailure, match="splits the backward, which sharded stages cannot"):
        run_ranks(
            trained,
            4,
            ParallelPlan(pp=2, dp_shard=2, schedule=ScheduleKind.ZB_H1, micro_batches=MICRO_BATCHES),
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cp": 4, "context_inner": 2}, "kind ring with inner 2: inner is the number of ranks"),
        ({"sequence_parallel": True}, "sequence parallelism is along tp, which is 1: use tp 2 or more"),
        ({"tp": 2, "dp_shard": 2, "zero_stage": ZeroStage.GRADIENTS}, "ZeRO stage 2 with tp is not in"),
        ({"ep": 2, "dp_shard": 2, "zero_stage": ZeroStage.GRADIENTS}, "ZeRO stage 2 with ep is not in"),
        (
            {"dp_shard": 2, "zero_stage": ZeroStage.NONE},
            "nothing is sharded: use dp_replicate, or ZeRO stage 1, 2 or 3",
        ),
        (
            {"dp_shard": 2, "dp_replicate": 2, "zero_stage": ZeroStage.GRADIENTS},
            "ZeRO stage 2 is over all copies of the model",
        ),
        (
            {"dp_shard": 2, "pp": 2, "zero_stage": ZeroStage.OPTIMIZER},
            "ZeRO stage 1 in a pipeline is not in the library yet",
        ),
    ],
)
def test_plans_that_contradict_themselves_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        ParallelPlan(**options)


@pytest.mark.parametrize(
    ("form", "given", "degrees", "stage"),
    [
        ("ddp", {}, Degrees(dp_replicate=8), ZeroStage.NONE),
        ("zero1", {}, Degrees(dp_shard=8), ZeroStage.OPTIMIZER),
        ("zero2", {}, Degrees(dp_shard=8), ZeroStage.GRADIENTS),
        ("zero3", {}, Degrees(dp_shard=8), ZeroStage.PARAMETERS),
        ("fsdp", {"pp": 2}, Degrees(pp=2, dp_shard=4), ZeroStage.PARAMETERS),
        ("fsdp", {"dp_shard": 2}, Degrees(dp_replicate=4, dp_shard=2), ZeroStage.PARAMETERS),
        ("hsdp", {}, Degrees(dp_replicate=2, dp_shard=4), ZeroStage.PARAMETERS),
        ("hsdp", {"dp_shard": 2}, Degrees(dp_replicate=4, dp_shard=2), ZeroStage.PARAMETERS),
        ("pp", {}, Degrees(pp=4, dp_replicate=2), ZeroStage.NONE),
        ("pp", {"pp": 2, "dp_shard": 4}, Degrees(pp=2, dp_shard=4), ZeroStage.PARAMETERS),
        ("none", {"pp": 2, "dp_shard": 2}, Degrees(pp=2, dp_replicate=2, dp_shard=2), ZeroStage.PARAMETERS),
        ("none", {"dp_replicate": 8}, Degrees(dp_replicate=8), ZeroStage.NONE),
        ("none", {"tp": 4}, Degrees(dp_replicate=2, tp=4), ZeroStage.NONE),
        ("none", {"tp": 2, "pp": 2, "dp_shard": 2}, Degrees(pp=2, dp_shard=2, tp=2), ZeroStage.PARAMETERS),
        ("fsdp", {"tp": 2}, Degrees(dp_shard=4, tp=2), ZeroStage.PARAMETERS),
        ("none", {"cp": 4}, Degrees(dp_replicate=2, cp=4), ZeroStage.NONE),
        ("none", {"ep": 2}, Degrees(dp_replicate=4, dp_shard=2, ep=2), ZeroStage.NONE),
        ("ddp", {"ep": 4, "cp": 2}, Degrees(dp_replicate=2, dp_shard=2, cp=2, ep=4), ZeroStage.NONE),
        ("fsdp", {"ep": 4}, Degrees(dp_shard=8, ep=4), ZeroStage.PARAMETERS),
        ("none", {"ep": 2, "dp_shard": 4}, Degrees(dp_replicate=2, dp_shard=4, ep=2), ZeroStage.PARAMETERS),
        ("fsdp", {"cp": 8}, Degrees(cp=8), ZeroStage.PARAMETERS),
    ],
)
def test_short_forms_of_plans_on_eight_ranks_of_two_nodes(form, given, degrees, stage):
    plan = ShortForm(form).plan(8, 4, **given)
    assert plan.degrees == degrees
    assert plan.stage is stage
    assert plan.pipelined == (degrees.pp > 1)


def test_a_short_form_that_does_not_fit_says_what_would():
    with pytest.raises(UserError, match="dp_shard 3 does not divide 8 ranks: use dp_shard 1, 2, 4 or 8"):
        ShortForm.HSDP.plan(8, 4, dp_shard=3)
    with pytest.raises(UserError, match="parallel none trains on one rank, this job has 8"):
        ShortForm.NONE.plan(8, 4)
    alone = ShortForm.PP.plan(1, 1)
    assert alone.pipelined
    assert alone.saves_in_parts
