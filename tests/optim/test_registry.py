"""What an entry states about an optimiser is what the optimiser does."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.optim.entry import OptimizerState, OptimizerStep, StateShape, TrainingForm, UpdateReach
from dlo_lib.optim.in_backward import UpdateInBackward
from dlo_lib.optim.registry import OPTIMIZERS, classes_by_reach, optimizer_entry
from dlo_lib.parallel.sharding.elementwise import ELEMENTWISE, updates_elements, updates_params_alone

SHAPES = ((6, 4), (3,), (), (2, 3, 5))
IN_ALL_STEPS = [(name, step) for name, entry in OPTIMIZERS.items() for step in entry.steps]


def make(name: str, step: OptimizerStep, params: Any, **settings: Any) -> torch.optim.Optimizer:
    entry = OPTIMIZERS[name]
    return entry.cls(params, **entry.arguments(step, **settings))


def params_with_grads(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in SHAPES]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator, dtype=dtype)
    return params


def backward(params: list[nn.Parameter], number: int) -> None:
    """Give each parameter a gradient, by a backward, in which some optimisers update."""
    generator = torch.Generator().manual_seed(number)
    factors = [torch.randn(param.shape, generator=generator).to(param.dtype) for param in params]
    torch.stack([(param * factor).sum() for param, factor in zip(params, factors)]).sum().backward()


def states_of(
    optimizer: torch.optim.Optimizer, param: Tensor
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {key: (tuple(value.shape), value.dtype) for key, value in optimizer.state[param].items()}


@pytest.mark.parametrize(("name", "step"), IN_ALL_STEPS)
def test_an_optimiser_keeps_the_states_of_its_entry(name: str, step: OptimizerStep):
    params = params_with_grads()
    optimizer = make(name, step, params, lr=0.1)
    for number in range(2):
        optimizer.zero_grad()
        backward(params, number)
        optimizer.step()
    for param in params:
        shapes = {state: state.shape.of(param.shape) for state in OPTIMIZERS[name].states}
        declared = {
            state.name: (shape, state.dtype or param.dtype)
            for state, shape in shapes.items()
            if shape is not None
        }
        assert states_of(optimizer, param) == declared
        whole = sum(value.nbytes for value in optimizer.state[param].values() if value.dim())
        if param.dim():
            assert OPTIMIZERS[name].count_state_bytes(param.shape) == whole


def test_the_shapes_of_factored_states_are_those_of_adafactor():
    states = [
        OptimizerState("row_var", StateShape.ROWS),
        OptimizerState("col_var", StateShape.COLUMNS),
        OptimizerState("variance", StateShape.VECTOR),
    ]
    params = params_with_grads()
    optimizer = torch.optim.Adafactor(params)
    optimizer.step()
    for param in params:
        kept = states_of(optimizer, param)
        kept.pop("step")
        shapes = {state.name: state.shape.of(param.shape) for state in states}
        assert {name: shape for name, (shape, _) in kept.items()} == {
            name: shape for name, shape in shapes.items() if shape is not None
        }
        assert sum(state.count_bytes(param.shape) for state in states) == sum(
            optimizer.state[param][name].nbytes for name in kept
        )


@pytest.mark.parametrize(("name", "step"), IN_ALL_STEPS)
def test_the_settings_and_the_loss_scaling_of_an_entry_are_those_of_the_class(name: str, step: OptimizerStep):
    entry = OPTIMIZERS[name]
    assert entry.settings | entry.options.keys() <= inspect.signature(entry.cls).parameters.keys()
    optimizer = make(name, step, params_with_grads(), lr=0.25, weight_decay=0.5)
    assert [optimizer.param_groups[0][key] for key in ("lr", "weight_decay")] == [0.25, 0.5]
    assert getattr(optimizer, "_step_supports_amp_scaling", False) == entry.steps[step].unscales
    with pytest.raises(UserError, match=r"has no warmth: it has .*lr"):
        entry.arguments(step, warmth=1)


@pytest.mark.parametrize("name", [name for name, entry in OPTIMIZERS.items() if not entry.in_backward])
def test_an_update_depends_on_what_the_entry_states(name: str):
    """The class is known by its entry, and a subclass is tried with small parameters."""
    entry = OPTIMIZERS[name]
    kind: Any = type("Unknown", (entry.cls,), {})
    optimizer = kind(params_with_grads(), **entry.arguments(entry.default_step, lr=0.1, weight_decay=0.1))
    assert updates_elements(optimizer) == (entry.reach is UpdateReach.ELEMENT)
    assert updates_params_alone(optimizer) == (entry.reach is not UpdateReach.MODEL)
    assert (entry.cls in ELEMENTWISE) == (entry.reach is UpdateReach.ELEMENT)
    if entry.kernel is not None:
        assert entry.kernel in classes_by_reach(entry.reach)


@pytest.mark.parametrize(("name", "step"), IN_ALL_STEPS)
def test_all_implementations_compute_the_same_update(name: str, step: OptimizerStep):
    mine, other = params_with_grads(torch.float64), params_with_grads(torch.float64)
    pairs = ((mine, make(name, step, mine, lr=0.1, weight_decay=0.3)),)
    pairs += ((other, make(name, next(reversed(OPTIMIZERS[name].steps)), other, lr=0.1, weight_decay=0.3)),)
    for number in range(3):
        for params, optimizer in pairs:
            optimizer.zero_grad()
            backward(params, number)
            optimizer.step()
        for one, its in zip(mine, other):
            torch.testing.assert_close(one, its, rtol=0, atol=1e-13)


def test_the_forms_of_an_optimiser_follow_from_what_an_update_depends_on():
    entry = OPTIMIZERS["adamw"]
    assert entry.wrong_under(set(TrainingForm)) is None
    of_rows = type(entry)(entry.cls, entry.states, entry.steps, reach=UpdateReach.PARAMETER)
    assert of_rows.wrong_under({TrainingForm.ZERO2, TrainingForm.PP}) is None
    assert of_rows.wrong_under({TrainingForm.FSDP, TrainingForm.TP}) is None, "an owner has the whole"
    why = of_rows.wrong_under({TrainingForm.FSDP, TrainingForm.EP})
    assert why == "updates an element by the whole parameter, of which a rank has a part with ep"
    of_all = type(entry)(entry.cls, entry.states, entry.steps, reach=UpdateReach.MODEL)
    assert of_all.wrong_under({TrainingForm.DDP}) is None
    assert of_all.wrong_under({TrainingForm.ZERO1}) is not None


def test_an_unknown_name_is_one_line_with_the_cure():
    with pytest.raises(UserError, match='unknown optimizer "adamv": did you mean adam or adamw'):
        optimizer_entry("adamv")


def test_the_update_in_the_backward_is_that_of_adamw_also_after_a_state_was_loaded():
    mine, theirs = params_with_grads(), params_with_grads()
    options: dict[str, Any] = {"betas": (0.8, 0.9), "eps": 1e-6}

    def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": params[:2], "weight_decay": 0.5}, {"params": params[2:], "lr": 0.02}]

    optimizer, peer = (
        UpdateInBackward(groups(mine), lr=0.1, **options),
        torch.optim.AdamW(groups(theirs), lr=0.1, **options),
    )
    for param in mine:
        param.grad = None
    for number in range(4):
        if number == 2:  # a resumed run
            state = optimizer.state_dict()
            optimizer.remove()
            optimizer = UpdateInBackward(groups(mine), lr=9.0)
            optimizer.load_state_dict(state)
        for both in (optimizer, peer):
            both.param_groups[0]["lr"] *= 0.5  # a schedule
        peer.zero_grad()
        backward(mine, number)
        backward(theirs, number)
        optimizer.step()
        peer.step()
        assert all(param.grad is None for param in mine)
        for one, its in zip(mine, theirs):
            torch.testing.assert_close(one, its)
    assert optimizer.step(lambda: 3) == 3
    optimizer.remove()
    before = [param.detach().clone() for param in mine]
    backward(mine, 9)
    assert all(torch.equal(param, old) and param.grad is not None for param, old in zip(mine, before))
