"""Optimisers that the library does not know: a sharded form steps as one process does, or refuses them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.launch import run_ranks
from dlo_lib.models.moe import MoELayer
from dlo_lib.models.router import MoEConfig
from dlo_lib.parallel import DDP, FSDP
from dlo_lib.parallel.expert import ExpertParallel, parallelize_experts
from dlo_lib.parallel.pipeline.runtime import Pipeline
from dlo_lib.parallel.pipeline.schedules import one_f_one_b
from dlo_lib.parallel.sharding.elementwise import updates_elements, updates_params
from dlo_lib.parallel.tensor.apply import parallelize_tensor
from dlo_lib.parallel.tensor.style import ColumnParallel, RowParallel
from dlo_lib.parallel.tensor.wrapper import TensorParallel
from dlo_lib.parallel.zero import ShardedDDP, ShardedOptimizer
from dlo_lib.parallel.zero.flat_params import PartitionBy
from tests.parallel.sharding.foreign import ClippedLars, Lars, Lion, Prodigy

RANKS = 2
COUPLED = [Prodigy, ClippedLars]
"""An update of a parameter depends on the others."""


class Needed(Lars):
    """Needs a closure."""

    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()
        super().step()


class Known(ClippedLars):
    updates_each_param = True


class Names(Lion):
    """Keeps the parameters in an attribute, through which a copy would change them."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.all = [param for group in self.param_groups for param in group["params"]]

    def step(self, closure: Any = None) -> None:
        for param in self.all:
            param.data.mul_(0.5)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def test_an_optimiser_is_known_by_what_its_updates_depend_on():
    params = [*net().parameters(), nn.Parameter(torch.ones(()))]
    for lr in (0.0, 0.1):  # 0: at the begin of a warm-up
        groups: list[dict[str, Any]] = [{"params": params[:1]}, {"params": params[1:], "lr": lr}]
        for kind, each_param, each_element in (
            (Lion, True, True),
            (Lars, True, False),
            (Needed, True, False),
            (Known, True, False),
            (ClippedLars, False, False),
            (Prodigy, False, False),
            (torch.optim.LBFGS, False, False),
        ):
            some = [{"params": params}] if kind is torch.optim.LBFGS else groups
            before = [param.detach().clone() for param in params]
            assert updates_params(kind, some, {"lr": lr}) == each_param, kind
            assert updates_elements(kind(some, lr=lr)) == each_element, kind
            assert all(torch.equal(param, old) for param, old in zip(params, before))
    assert not updates_elements(Names(params))
    assert all(torch.equal(param, old) for param, old in zip(params, before))


def stages(module: nn.Module, kind: Any, stage: int, lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    if stage == 0:
        return DDP(module), kind(module.parameters(), lr=lr)
    if stage == 1:
        return DDP(module), ShardedOptimizer(module.parameters(), kind, lr=lr)
    model = ShardedDDP(module, split=PartitionBy.PARAMETERS)
    return model, ShardedOptimizer(model.parameters(), kind, partition=model.partition, lr=lr)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_each_stage_steps_as_one_process_or_refuses():
    def compare() -> None:
        for kind, lr in ((Lion, 0.1), (Lars, 0.1), (Prodigy, 1.0), (ClippedLars, 0.1)):
            for stage in (0, 1, 2):
                module, twin = net(), net()
                if stage and kind in COUPLED:
                    with pytest.raises(
                        UserError, match=rf"{kind.__name__} does not update each parameter by"
                    ):
                        stages(module, kind, stage, lr)
                    continue
                model, optimizer = stages(module, kind, stage, lr)
                its = kind(twin.parameters(), lr=lr)
                for step in range(3):
                    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).double()
                    train(model, optimizer, x)
                    train(twin, its, x)
                    for mine, other in zip(module.parameters(), twin.parameters()):
                        torch.testing.assert_close(mine, other, msg=f"{kind}, stage {stage}, step {step}")
        for kind in COUPLED:
            model = FSDP(net())
            optimizer = kind(model.parameters())
            model(torch.ones(1, 5).double()).sum().backward()
            with pytest.raises(UserError, match=rf"{kind.__name__} does not update each element"):
                optimizer.step()
        optimizer = ShardedOptimizer(list(net().parameters())[:1], Lion)
        with pytest.raises(UserError, match="each parameter by itself"):
            optimizer._cls = Prodigy
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})

    run_ranks(compare, RANKS)


def test_one_rank_steps_with_any_optimiser():
    def step() -> None:
        module = net()
        model, optimizer = stages(module, Prodigy, 1, 1.0)
        train(model, optimizer, torch.ones(1, 5).double())

    run_ranks(step, 1)


def tensor_parallel() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    layout = parallelize_tensor(module, dist.group.WORLD, {"0": ColumnParallel(), "2": RowParallel()})
    return TensorParallel(module, layout)


def expert_parallel() -> nn.Module:
    module = MoELayer(MoEConfig(num_experts=4, top_k=2, intermediate=4), 4, dtype=torch.float64)
    layout = parallelize_experts(module)
    return ExpertParallel(DDP(module, layout.batch, reduced_over=layout.reduced_over(module)), layout)


def pipeline() -> nn.Module:
    return Pipeline({dist.get_rank(): nn.Linear(4, 4).double()}, one_f_one_b(RANKS, 1))


def test_forms_that_cut_a_model_refuse_what_needs_more_than_the_part_of_a_rank():
    def compare() -> None:
        torch.manual_seed(0)
        for form, refused in (
            (tensor_parallel, [Lars, torch.optim.Adafactor, *COUPLED]),
            (expert_parallel, [Lars, torch.optim.Adafactor, *COUPLED]),
            (pipeline, COUPLED),
        ):
            model = form()
            for kind in (torch.optim.AdamW, Lion, Lars, torch.optim.Adafactor, *COUPLED):
                optimizer = kind(model.parameters(), lr=0.1)
                for param in model.parameters():
                    param.grad = torch.ones_like(param)
                before = [param.detach().clone() for param in model.parameters()]
                if kind not in refused:
                    optimizer.step()
                    continue
                with pytest.raises(UserError, match=rf"{kind.__name__} does not update each .* gives it"):
                    optimizer.step()
                assert all(torch.equal(param, old) for param, old in zip(model.parameters(), before))
        whole = list(net().parameters())
        Prodigy(whole).step()  # of no form

    run_ranks(compare, RANKS)
