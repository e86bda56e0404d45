"""Ordinary PyTorch calls on each parallel form do what they do on the unwrapped model, or are refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from dlo_lib.base.errors import UserError
from dlo_lib.launch import run_ranks
from dlo_lib.parallel import FSDP
from dlo_lib.parallel.mesh import inner_group
from dlo_lib.parallel.nested import map_tensors, tensors_in
from dlo_lib.parallel.pipeline.runtime import Pipeline
from dlo_lib.parallel.pipeline.schedules import one_f_one_b
from dlo_lib.parallel.sharding.sharded_grad import RemoteGrad, ShardedGrad
from dlo_lib.parallel.zero import ShardedDDP
from tests.parallel.forms import Spread, adamw, ddp, fsdp, stage_1, stage_2

RANKS = 3


class Net(nn.Module):
    """Odd sizes, a tied table, a frozen layer, a number, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.out = nn.Linear(5, 5, bias=False)
        self.out.weight = self.layers[0].weight
        self.register_buffer("seen", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.out(self.frozen(x)) * self.gain


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Net().double()


def plain(module: nn.Module) -> Spread:
    return module, adamw(module)


def hybrid(module: nn.Module) -> Spread:
    """Each rank is a separate shard group; the other ranks hold replicas."""
    model = FSDP(module, inner_group(dist.group.WORLD, 1), replicas=dist.group.WORLD)
    return model, adamw(model)


FORMS: list[Callable[[nn.Module], Spread]] = [ddp, stage_1, stage_2, fsdp, hybrid]


def batch(step: int) -> Tensor:
    return torch.randn(2 * RANKS, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def own(x: Tensor) -> Tensor:
    """The part of a batch that this rank processes."""
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def weights_of(model: nn.Module, module: nn.Module) -> dict[str, Tensor]:
    return model.full_state_dict() if isinstance(model, FSDP) else dict(module.state_dict())


# -- clipping and loss scaling


@pytest.mark.parametrize("power", [2.0, 1.0, math.inf, 3.0])
@pytest.mark.parametrize("form", FORMS)
def test_clip_grad_norm_of_pytorch_is_that_of_the_unwrapped_model(form, power):
    def norms() -> None:
        module = net()
        (model, optimizer), (twin, its) = form(module), plain(net())
        for step in range(3):
            twin(batch(step)).square().mean().backward()
            model(own(batch(step))).square().mean().backward()
            expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.002, power)
            if step == 1:  # our own call gives the same
                got = model.clip_grad_norm_(0.002, power)
            else:
                got = nn.utils.clip_grad_norm_(model.parameters(), 0.002, power)
            assert math.isclose(got.item(), expected.item(), rel_tol=1e-9)
            assert expected > 0.002, "otherwise nothing would be clipped"
            for one in (optimizer, its):
                one.step()
                one.zero_grad(set_to_none=step != 0)
        for name, value in weights_of(model, module).items():
            torch.testing.assert_close(value, twin.state_dict()[name])

    run_ranks(norms, RANKS)


@pytest.mark.parametrize("form", FORMS)
def test_the_grad_scaler_of_pytorch_skips_a_step_on_all_ranks(form):
    def scaled() -> None:
        module = net()
        (model, optimizer), (twin, its) = form(module), plain(net())
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(3):
            loss = model(own(batch(step))).square().mean()
            if step == 1 and dist.get_rank() == RANKS - 1:
                loss = loss * math.inf
            scaler.scale(loss).backward()
            if step == 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.002)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if step != 1:
                twin(batch(step)).square().mean().backward()
                if step == 2:
                    nn.utils.clip_grad_norm_(twin.parameters(), 0.002)
                its.step()
                its.zero_grad()
            assert scaler.get_scale() == (8.0 if step == 0 else 4.0)
        for name, value in weights_of(model, module).items():
            torch.testing.assert_close(value, twin.state_dict()[name])

    run_ranks(scaled, RANKS)


def test_the_norm_of_one_gradient_is_that_of_the_whole():
    def norms() -> None:
        model, twin = FSDP(net()), net()
        model(own(batch(0))).square().mean().backward()
        twin(batch(0)).square().mean().backward()
        for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
            if its.grad is None:
                continue
            assert type(mine.grad) is ShardedGrad
            for norm in (torch.linalg.vector_norm, torch.norm, Tensor.norm):
                torch.testing.assert_close(norm(mine.grad), its.grad.norm())
            torch.testing.assert_close(mine.grad.detach().norm(1), its.grad.norm(1))
            torch.testing.assert_close(mine.grad.data.norm(math.inf), its.grad.norm(math.inf))
            torch.testing.assert_close((mine.grad + 1).norm(), (its.grad + 1).norm())

    run_ranks(norms, RANKS)


def test_stage_2_refuses_what_needs_a_whole_gradient_and_accumulates_as_before():
    def accumulate() -> None:
        model, twin = ShardedDDP(net()), net()
        for step in range(2):  # two backward passes without no_sync, no optimiser in between
            model(own(batch(step))).square().mean().backward()
            twin(batch(step)).square().mean().backward()
        weight = model.module.layers[1].weight
        assert isinstance(weight.grad, RemoteGrad)
        torch.testing.assert_close(weight.grad.norm(), twin.layers[1].weight.grad.norm())
        with pytest.raises(UserError, match=r"add needs the whole gradient.*ShardedOptimizer"):
            weight.grad + 1
        with pytest.raises(UserError, match="ShardedOptimizer"):
            adamw(model).step()
        model.zero_grad()
        assert weight.grad is None

    run_ranks(accumulate, RANKS)


# -- state_dict and PyTorch's distributed checkpoints


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()


def same(mine: Any, its: Any) -> None:
    """The same containers, with equal values and close tensors."""
    if isinstance(its, dict):
        assert mine.keys() == its.keys()
        for key, value in its.items():
            same(mine[key], value)
    elif isinstance(its, list | tuple):
        for one, other in zip(mine, its, strict=True):
            same(one, other)
    elif isinstance(its, Tensor):
        torch.testing.assert_close(mine, its, rtol=1e-9, atol=1e-12)
    else:
        assert mine == its


WHOLE = StateDictOptions(full_state_dict=True)


@pytest.mark.parametrize("form", [ddp, fsdp, hybrid])
def test_get_state_dict_and_dcp_work(form, tmp_path: Path):
    folder = str(tmp_path / "checkpoint")

    def round_trip() -> None:
        (model, optimizer), (twin, its) = form(net()), plain(net())
        for one in ((model, optimizer), (twin, its)):
            train(*one, 3)
        same(get_state_dict(model, optimizer, options=WHOLE), get_state_dict(twin, its))
        states = get_state_dict(model, optimizer)
        dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)

        other, its_optimizer = form(net(7))
        stored = dict(zip(("model", "optimizer"), get_state_dict(other, its_optimizer)))
        dcp.load(stored, checkpoint_id=folder)
        set_state_dict(
            other, its_optimizer, model_state_dict=stored["model"], optim_state_dict=stored["optimizer"]
        )
        for one in ((other, its_optimizer), (twin, its)):
            train(*one, 2)
        same(get_state_dict(other, its_optimizer, options=WHOLE), get_state_dict(twin, its))

    run_ranks(round_trip, RANKS)


@pytest.mark.parametrize("form", [ddp, fsdp, hybrid])
def test_a_state_of_the_unwrapped_model_loads(form):
    def load() -> None:
        twin, its = plain(net())
        train(twin, its, 2)
        model, optimizer = form(net(1))
        model.load_state_dict(twin.state_dict())
        optimizer.load_state_dict(copy.deepcopy(its.state_dict()))  # before the first step
        for one in ((model, optimizer), (twin, its)):
            train(*one, 2)
        same(get_state_dict(model, optimizer, options=WHOLE), get_state_dict(twin, its))
        optimizer.load_state_dict(copy.deepcopy(its.state_dict()))  # after it
        train(model, optimizer, 1)
        train(twin, its, 1)
        same(get_state_dict(model, optimizer, options=WHOLE), get_state_dict(twin, its))

        third, third_optimizer = form(net(2))
        whole = get_state_dict(twin, its)
        values = {name: value.clone() for name, value in whole[0].items()}
        set_state_dict(
            third, third_optimizer, model_state_dict=values, optim_state_dict=whole[1], options=WHOLE
        )
        same(get_state_dict(third, third_optimizer, options=WHOLE), get_state_dict(twin, its))

        fourth, _ = form(net(3))
        from_rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        values = {name: value.clone() for name, value in get_model_state_dict(twin).items()}
        set_model_state_dict(fourth, values if dist.get_rank() == 0 else {}, options=from_rank_0)
        same(get_model_state_dict(fourth, options=WHOLE), get_model_state_dict(twin))

    run_ranks(load, RANKS)


def test_a_state_of_another_model_is_refused_and_shards_are_not_replaced():
    def load() -> None:
        model = FSDP(net())
        state = dict(net().state_dict())
        with pytest.raises(RuntimeError, match=r"Missing key.*gain"):
            model.load_state_dict({name: value for name, value in state.items() if name != "gain"})
        with pytest.raises(UserError, match=r"gain is \(3,\) instead of \(\): load the state of the same"):
            model.load_state_dict(state | {"gain": torch.ones(3)})
        with pytest.raises(UserError, match="leave assign out"):
            model.load_state_dict(state, assign=True)
        optimizer = adamw(model)
        train(model, optimizer, 1)
        held = optimizer.state[model.module.layers[1].weight]
        held["row_sums"] = torch.zeros(1)
        with pytest.raises(UserError, match=r"keeps row_sums of shape \(1,\)"):
            optimizer.state_dict()

    run_ranks(load, RANKS)


@pytest.mark.parametrize("form", FORMS)
def test_names_are_those_of_the_unwrapped_model(form):
    def names() -> None:
        twin, (model, _) = net(), form(net())
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in twin.named_parameters()]
        assert [name for name, _ in model.named_buffers()] == [name for name, _ in twin.named_buffers()]
        assert list(model.state_dict()) == list(twin.state_dict())

    run_ranks(names, RANKS)


def test_zero_refuses_the_state_of_one_rank_in_one_sentence():
    def refuse() -> None:
        for form in (stage_1, stage_2):
            model, optimizer = form(net())
            same(get_model_state_dict(model), dict(net().state_dict()))
            model(own(batch(0))).square().mean().backward()
            with pytest.raises(UserError, match=r"use full_state_dict\(\) or parallel.checkpoint.save_shard"):
                get_state_dict(model, optimizer)

    run_ranks(refuse, 2)


# -- a pipeline


def half(number: int) -> nn.Module:
    whole = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    return nn.ModuleDict({str(index): whole[index] for index in ((0, 1), (2, 3))[number]})


class Stage(nn.Module):
    """Two of four layers, with their numbers in the whole as names."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layers = half(number)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def test_a_pipeline_has_the_state_of_its_stages_and_refuses_norms_of_one_rank(tmp_path: Path):
    folder = str(tmp_path / "checkpoint")

    def steps() -> None:
        torch.manual_seed(0)
        rank = dist.get_rank()
        pipeline = Pipeline({rank: Stage(rank)}, one_f_one_b(2, 2))
        micro_batches = [(torch.randn(3, 4), torch.randn(3, 4)) for _ in range(2)]
        pipeline.accumulate_gradients(micro_batches, nn.functional.mse_loss)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        for call in (
            lambda: nn.utils.clip_grad_norm_(pipeline.parameters(), 1.0),
            lambda: scaler.unscale_(adamw(pipeline)),
        ):
            with pytest.raises(UserError, match=r"call pipeline.clip_grad_norm_.*ShardedGradScaler"):
                call()
        assert pipeline.clip_grad_norm_(1.0, math.inf) > 0
        assert list(pipeline.state_dict()) == [f"layers.{2 * rank}.weight", f"layers.{2 * rank}.bias"]
        with pytest.raises(UserError, match="save pipeline.state_dict"):
            get_state_dict(pipeline, adamw(pipeline))
        dcp.save(pipeline.state_dict(), checkpoint_id=folder)
        before = copy.deepcopy(pipeline.state_dict())
        for param in pipeline.parameters():
            nn.init.zeros_(param)
        state = pipeline.state_dict()
        dcp.load(state, checkpoint_id=folder)
        pipeline.load_state_dict(state)
        torch.testing.assert_close(pipeline.state_dict(), before, rtol=0, atol=0)

    run_ranks(steps, 2)


# -- hooks, and what modules pass to each other


@dataclass(frozen=True)
class Passed:
    x: Tensor
    others: list[Tensor] = field(default_factory=list)
    depth: int = 0


class PassesDataclasses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, given: Passed) -> Passed:
        x = torch.tanh(self.linear(given.x)) + given.others[0]
        return Passed(x, [given.others[0] * 1.1], given.depth + 1)


class DataclassNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([PassesDataclasses() for _ in range(3)])

    def forward(self, x: Tensor) -> dict[str, Passed]:
        given = Passed(x, [2 * x])
        for layer in self.layers:
            given = layer(given)
        return {"out": given}


@pytest.mark.parametrize("form", FORMS)
def test_dataclasses_between_units_and_hooks_from_before_wrapping(form):
    def learn() -> None:
        torch.manual_seed(0)
        module = DataclassNet().double()
        twin = copy.deepcopy(module)
        seen: list[tuple[int, ...]] = []
        for one in (module, twin):
            one.layers[1].linear.weight.register_hook(lambda grad: 3 * grad)
            one.layers[2].linear.weight.register_hook(lambda grad: seen.append(tuple(grad.shape)))
        removed = module.layers[0].linear.weight.register_hook(lambda grad: 100 * grad)
        (model, optimizer), (_, its) = form(module), plain(twin)
        removed.remove()
        for step in range(3):
            for called, its_optimizer, x in ((model, optimizer, own(batch(step))), (twin, its, batch(step))):
                out = called(x)["out"]
                assert out.depth == 3
                its_optimizer.zero_grad()
                (out.x.square().mean() + out.others[0].mean()).backward()
                its_optimizer.step()
        assert seen == [(5, 5)] * 6
        for name, value in weights_of(model, module).items():
            torch.testing.assert_close(value, twin.state_dict()[name])

    run_ranks(learn, RANKS)


def test_hooks_of_the_shards_get_their_averaged_gradients():
    def learn() -> None:
        """The optimiser steps in backward, and a hook scales a gradient."""
        model, twin = FSDP(net()), net()
        weight = "layers.1.weight"
        for one in (model, twin):
            dict(one.named_parameters())[weight].register_hook(lambda grad: 0.5 * grad)
        optimizers = {
            param: torch.optim.SGD([param], lr=0.1) for param in model.parameters() if param.requires_grad
        }

        def update(param: Tensor) -> None:
            optimizers[param].step()
            optimizers[param].zero_grad()

        for param in optimizers:
            param.register_post_accumulate_grad_hook(update)
        for step in range(2):
            model(own(batch(step))).square().mean().backward()
            twin(batch(step)).square().mean().backward()
            with torch.no_grad():
                for param in twin.parameters():
                    if param.grad is not None:
                        param -= 0.1 * param.grad
                        param.grad = None
        for name, value in model.full_state_dict().items():
            torch.testing.assert_close(value, twin.state_dict()[name])

    run_ranks(learn, RANKS)


def test_tensors_are_found_in_containers_and_dataclasses():
    @dataclass
    class Inner:
        x: Tensor
        unset: int = field(init=False)

    value = {"a": [Passed(torch.ones(1), [torch.ones(2)])], "b": (Inner(torch.ones(3)), "text"), "c": Inner}
    assert [len(tensor) for tensor in tensors_in(value)] == [1, 2, 3]
    doubled = map_tensors(lambda tensor: 2 * tensor, value)
    assert [tensor.sum().item() for tensor in tensors_in(doubled)] == [2, 4, 6]
    assert [tensor.sum().item() for tensor in tensors_in(value)] == [1, 2, 3], "the value itself is unchanged"
    assert doubled["b"][1] == "text"
    assert map_tensors(lambda tensor: tensor, value)["a"][0] is value["a"][0], "what is unchanged is no copy"
