"""A function of a sharded gradient is that of the whole gradient, or refused: never that of one rank."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.launch import run_ranks
from dlo_lib.parallel import FSDP
from dlo_lib.parallel.sharding.operations import Effect, operation
from tests.parallel.forms import stage_2

NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "vector_norm": torch.linalg.vector_norm,
    "vector_norm in fp64": lambda g: torch.linalg.vector_norm(g, dtype=torch.float64),
    "linalg.norm": torch.linalg.norm,
    "norm": lambda g: g.norm(3),
    "torch.norm in fp64": lambda g: torch.norm(g.float(), dtype=torch.float64),
    "frobenius": lambda g: g.norm("fro"),
    "norm of all dimensions": lambda g: g.norm(dim=tuple(range(g.dim()))),
    "flatten": lambda g: g.flatten().norm(),
    "view": lambda g: g.view(-1).norm(),
    "detached and cast": lambda g: g.detach().float().norm(),
    "bfloat16 and back": lambda g: g.bfloat16().double().norm(),
    "clone": lambda g: g.clone().norm(),
    "data": lambda g: g.data.norm(),
    "pow, sum": lambda g: g.pow(2).sum(),
    "times itself": lambda g: (g * g).sum().sqrt(),
    "operator": lambda g: (g**2).sum(),
    "reversed operators": lambda g: (2.0 / (1 + g.abs()) - g / 3).sum(),
    "abs, max": lambda g: g.abs().max(),
    "amax": lambda g: torch.amax(-g),
    "min": lambda g: g.min(),
    "mean": lambda g: g.square().mean(),
    "sum in fp64": lambda g: torch.sum(g.float(), dtype=torch.float64),
    "isfinite": lambda g: torch.isfinite(g).all(),
    "comparison": lambda g: (g.abs() > 0.01).any(),
    "count": lambda g: (g > 0).sum(),
    "rows, then all": lambda g: g.pow(2).sum(dim=-1).sum(),
    "a list": lambda g: torch._foreach_norm([g, 2 * g], 2)[1],
    "a list, not a norm": lambda g: torch._foreach_norm(torch._foreach_mul([g], 3.0), 1, dtype=torch.float64)[
        0
    ],
    "total norm": lambda g: nn.utils.get_total_norm([g.float()]),
    "total norm, foreach": lambda g: nn.utils.get_total_norm([g], math.inf, foreach=True),
    "total norm, one by one": lambda g: nn.utils.get_total_norm([g], foreach=False),
    "cat": lambda g: torch.cat([g.flatten(), g.flatten()]).norm(),
}
REFUSED: dict[str, Callable[[Tensor], object]] = {
    "matmul": lambda g: g @ g.T,
    "in place": lambda g: torch.zeros(5, 5, dtype=g.dtype).addmm_(g.T, g),
    "out": lambda g: torch.mm(g.T, g, out=torch.zeros(5, 5, dtype=g.dtype)),
    "svd": torch.linalg.svdvals,
    "nuclear": lambda g: g.norm("nuc"),
    "matrix 2-norm": lambda g: torch.linalg.norm(g, 2),
    "columns": lambda g: g.sum(dim=0),
    "mean of columns": lambda g: g.mean(dim=0),
    "norm of columns": lambda g: torch.linalg.vector_norm(g, 2, 0),
    "rows of the transpose": lambda g: g.T.sum(dim=1),
    "first row": lambda g: g[:1].norm(),
    "sum of a mask": lambda g: g[g > 0].sum(),
    "std": lambda g: g.std(),
    "median": lambda g: g.median(),
    "sort": lambda g: g.flatten().sort(),
    "quantile": lambda g: g.flatten().quantile(0.9),
    "cat with another": lambda g: torch.cat([g.flatten(), torch.ones(1, dtype=g.dtype)]),
}


class Net(nn.Module):
    """7 x 5 and 1 x 5: ranks have unequal parts, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(5, 7, bias=False)
        self.narrow = nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(torch.tanh(self.wide(x)))


def with_gradients(wrap: Callable[[nn.Module], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    module = Net().double()
    twin, model = copy.deepcopy(module), wrap(module)
    x = torch.randn(6, 5, dtype=torch.float64)
    for called in (model, twin):
        called(x).square().sum().backward()
    return model, twin


def test_a_number_of_a_sharded_gradient_is_that_of_the_whole_and_other_functions_are_refused():
    def compare() -> None:
        model, twin = with_gradients(FSDP)
        for mine, whole in zip(model.parameters(), twin.parameters(), strict=True):
            for name, function in NUMBERS.items():
                torch.testing.assert_close(
                    function(mine.grad),
                    function(whole.grad),
                    rtol=1e-5,
                    atol=1e-6,
                    msg=f"{name}: {{}}".format,
                )
        gradient = model.module.wide.weight.grad
        for name, function in REFUSED.items():
            with pytest.raises(UserError, match=r"use elementwise|take the norm of the gradient itself"):
                function(gradient)
                pytest.fail(f"{name} is a rank's own value")
        rows = twin.wide.weight.grad.chunk(dist.get_world_size())[dist.get_rank()]
        for dim in (1, -1):  # a row is whole on its rank
            torch.testing.assert_close(gradient.sum(dim), rows.sum(dim), check_dtype=True)
            torch.testing.assert_close(gradient.amax(dim), rows.amax(dim))
            torch.testing.assert_close(torch.linalg.vector_norm(gradient, 2, dim), rows.norm(dim=dim))
        assert type(torch.zeros_like(gradient)) is Tensor
        buffer = torch.zeros_like(gradient).lerp_(gradient, 0.5)
        assert type(buffer) is Tensor, "the state of an optimiser is plain"
        copied = copy.deepcopy(gradient)
        assert copied.tolist() == gradient.tolist()
        torch.testing.assert_close(copied, rows)
        if dist.get_rank() == 1:  # on one rank, NaN is the maximum of all
            gradient.view(-1)[0] = math.nan
        assert gradient.max().isnan()

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer.step()
        assert {type(state["momentum_buffer"]) for state in optimizer.state.values()} == {Tensor}

    run_ranks(compare, 3)


def test_a_number_of_a_remote_gradient_is_that_of_the_whole_or_refused():
    def compare() -> None:
        model, twin = with_gradients(lambda module: stage_2(module)[0])
        for mine, whole in zip(model.parameters(), twin.parameters(), strict=True):
            refused = 0
            for name, function in NUMBERS.items():
                try:
                    found = function(mine.grad)
                except UserError:
                    refused += 1
                    continue
                torch.testing.assert_close(found, function(whole.grad), rtol=1e-5, atol=1e-6, msg=name)
            assert refused < len(NUMBERS) - 8

    run_ranks(compare, 3)


def test_pytorchs_optimisers_do_not_mix_elements_unless_they_need_matrices():
    known = {
        torch.addcdiv,
        Tensor.lerp_,
        torch._foreach_addcmul_,
        torch._foreach_sub,
        Tensor.__rsub__,
        torch.where,
    }
    assert {operation(function).effect for function in known} <= {Effect.PART}
    mixed = {
        torch.matmul,
        Tensor.__matmul__,
        torch.addmm,
        torch.softmax,
        torch.cumsum,
        torch.einsum,
        torch.var,
    }
    assert {operation(function).effect for function in mixed} == {Effect.MIXED}
