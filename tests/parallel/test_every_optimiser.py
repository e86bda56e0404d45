"""The optimisers of the registry under every form of distribution that their entries allow: after each step,
the part of each parameter that a rank holds is that of one process, which learns from all the data.

Each class runs under every form. The entries of a class, or of one base class, take turns with the forms (SGD
without and with momentum; Adam and AdamW), and so do the implementations of an entry. The twin is a loop over
the parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from dlo_lib.launch import run_ranks
from dlo_lib.models import Llama, LlamaConfig, MoEConfig
from dlo_lib.optim import train_step
from dlo_lib.optim.entry import OptimizerStep, TrainingForm, UpdateReach
from dlo_lib.optim.registry import OPTIMIZERS
from dlo_lib.parallel.mesh import TOKENS, ParallelMesh
from dlo_lib.parallel.parallelize import make_optimizer, parallelize
from dlo_lib.parallel.plan import ParallelPlan, ZeroStage
from dlo_lib.parallel.protocol import ParallelModel
from dlo_lib.profiling.settings import forms_of, zero_split

STEPS, SEQ, VOCAB = 3, 16, 67
CONFIG = LlamaConfig(VOCAB, 16, 20, 2, 2, 2, 8, tied_embeddings=True, initializer_std=0.3)
EXPERTS = MoEConfig(num_experts=2, top_k=2, intermediate=6, balance_loss=0.0)
PLANS = {
    TrainingForm.DDP: ParallelPlan(dp_replicate=2),
    TrainingForm.ZERO1: ParallelPlan(dp_shard=2, zero_stage=ZeroStage.OPTIMIZER),
    TrainingForm.ZERO2: ParallelPlan(dp_shard=2, zero_stage=ZeroStage.GRADIENTS),
    TrainingForm.FSDP: ParallelPlan(dp_shard=2),
    TrainingForm.TP: ParallelPlan(tp=2),
    TrainingForm.PP: ParallelPlan(pp=2, micro_batches=2),
    TrainingForm.EP: ParallelPlan(dp_shard=2, ep=2),
}
RATES = {"lr": 0.02, "weight_decay": 0.1}
OPTIONS = {"soap": {"max_side": CONFIG.hidden}, "muon": {"dtype": torch.float64}}
"""A gradient with more rows than columns leaves some directions of the longer side without a value, and the
basis of those is arbitrary. bf16 rounds differences of the order of a sum."""


def cases() -> Iterator[tuple[str, OptimizerStep, ParallelPlan]]:
    """Each base class and reach under each form, with one entry and one implementation after the other."""
    by_class: dict[tuple[type, UpdateReach], list[str]] = {}
    for name, entry in OPTIMIZERS.items():
        below = entry.cls.__mro__.index(torch.optim.Optimizer) - 1
        by_class.setdefault((entry.cls.__mro__[below], entry.reach), []).append(name)
    for names in by_class.values():
        pairs = [(name, step) for step in OptimizerStep for name in names if step in OPTIMIZERS[name].steps]
        allowed = [
            plan for plan in PLANS.values() if OPTIMIZERS[names[0]].wrong_under(forms_of(plan)) is None
        ]
        for number in range(max(len(pairs), len(allowed)) if allowed else 0):
            yield *pairs[number % len(pairs)], allowed[number % len(allowed)]


def llama(plan: ParallelPlan) -> Llama:
    torch.manual_seed(3)
    return Llama(replace(CONFIG, moe=EXPERTS if plan.ep > 1 else None)).double()


def micro_batches(step: int, copy: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(10 * step + copy)
    return [(pair[0], pair[1]) for pair in torch.randint(VOCAB, (2, 2, 1 + copy, SEQ), generator=generator)]


@functools.cache
def trained_alone(name: str, experts: bool, copies: int) -> list[dict[str, Tensor]]:
    """Return the parameters after each step."""
    model = llama(ParallelPlan(dp_shard=2, ep=2) if experts else ParallelPlan())
    entry = OPTIMIZERS[name]
    last = list(entry.steps)[-1]
    options = {**entry.arguments(last, **RATES), **OPTIONS.get(name, {})}
    optimizer = entry.cls(entry.groups(model.named_parameters()), **options)
    history = []
    for step in range(STEPS):
        train_step(model, optimizer, [pair for copy in range(copies) for pair in micro_batches(step, copy)])
        history.append({key: param.detach().clone() for key, param in model.named_parameters()})
    return history


def steps_of_a_rank(name: str, how: OptimizerStep, plan: ParallelPlan) -> None:
    mesh, entry = ParallelMesh(plan.degrees), OPTIMIZERS[name]
    plan = replace(plan, zero_split=zero_split(entry))
    spread = parallelize(llama(plan), plan, mesh, device=torch.device("cpu"), seq=SEQ)
    assert isinstance(spread, nn.Module)
    assert isinstance(spread, ParallelModel)
    options = {**entry.arguments(how, **RATES), **OPTIONS.get(name, {})}
    groups = entry.groups(spread.named_parameters())
    optimizer = make_optimizer(spread, plan, mesh, groups, entry.cls, **options)
    copy, copies = mesh.coordinate(*TOKENS), mesh.size(*TOKENS)
    for step, whole in enumerate(trained_alone(name, plan.ep > 1, copies)):
        train_step(
            spread,
            optimizer,
            micro_batches(step, copy),
            group=mesh.group_along(*TOKENS),
            sync_each=plan.stage >= ZeroStage.GRADIENTS,
        )
        assert spread.shards()
        for shard in spread.shards():
            torch.testing.assert_close(
                shard.param.detach(),
                shard.of(whole[shard.name]),
                rtol=0,
                atol=1e-9,
                msg=lambda text, key=shard.name, done=step: (
                    f"{name}, {how}, {plan}, step {done}, {key}: {text}"
                ),
            )


def all_steps_of_a_rank() -> None:
    torch.set_num_threads(1)
    for case in cases():
        steps_of_a_rank(*case)


def test_every_optimiser_is_that_of_one_process_under_every_form():
    run_ranks(all_steps_of_a_rank, 2, timeout=300)


def test_every_optimiser_form_and_implementation_is_among_the_cases():
    tried = list(cases())
    distributed = {name for name, entry in OPTIMIZERS.items() if not entry.in_backward}
    assert {name for name, _, _ in tried} == distributed
    assert set().union(*(forms_of(plan) for _, _, plan in tried)) == set(TrainingForm) - {TrainingForm.ALONE}
    for name in distributed:
        assert {step for other, step, _ in tried if other == name} == set(OPTIMIZERS[name].steps)


@pytest.mark.parametrize("form", PLANS)
def test_a_plan_has_its_form(form: TrainingForm):
    assert form in forms_of(PLANS[form])
