"""Updates in fp32 of weights that are stored in 16 bits: with master weights, or with stochastic rounding.

The bf16 numbers just above 1 have a distance of 2^-7. An update below half of that is lost, in every step,
and the weight never moves. Master weights are an fp32 copy that keeps the sum of the updates. Stochastic
rounding needs no copy: it applies an update with a probability that is proportional to it, and the mean
over many steps is right.

Papers: P. Micikevicius et al., Mixed Precision Training, section 3.1 (arXiv:1710.03740); S. Gupta et al.,
Deep Learning with Limited Numerical Precision (arXiv:1502.02551).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dlo_lib.base.errors import UserError
from dlo_lib.optim.precision.rounding import stochastic_round

Params = Iterable[nn.Parameter] | Iterable[dict[str, Any]]
MakeOptimizer = Callable[[list[dict[str, Any]]], Optimizer]


class _UpdateInFP32(Optimizer):
    """An optimiser over fp32 tensors in the place of low-precision parameters.

    The parameter groups are those of the model, so that learning-rate schedules, clipping, loss scaling and
    ``zero_grad`` work as with any optimiser. Before a step, the groups of the inner optimiser get their
    values.
    """

    def __init__(self, params: Params, optimizer: MakeOptimizer) -> None:
        super().__init__(params, {})
        self.fp32 = {p: _fp32(p) for group in self.param_groups for p in group["params"]}
        if all(value is param for param, value in self.fp32.items()):
            raise UserError("all parameters are fp32 or wider: use the optimiser alone")
        self._inner = optimizer(
            [{**group, "params": [self.fp32[p] for p in group["params"]]} for group in self.param_groups]
        )
        self.defaults = self._inner.defaults
        self._copy_options(self._inner.param_groups, self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_inner"):
            raise UserError("a parameter group cannot be added later: give all groups to the constructor")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient, in fp32, and round the results.

        ``closure`` computes the loss and the gradients once more; ``step`` returns its result.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._copy_options(self.param_groups, self._inner.param_groups)
        updated = [(p, value) for p, value in self.fp32.items() if value is not p and p.grad is not None]
        for param, value in updated:
            self._before(param, value)
            assert param.grad is not None
            value.grad = param.grad.float()
        self._inner.step()
        for param, value in updated:
            value.grad = None
            self._after(param, value)
        return loss

    def _before(self, param: Tensor, value: Tensor) -> None:
        """Prepare the fp32 ``value`` of ``param`` for the update."""

    def _after(self, param: Tensor, value: Tensor) -> None:
        """Round the updated ``value`` into ``param``."""
        raise NotImplementedError

    @staticmethod
    def _copy_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
        for given, group in zip(source, target, strict=True):
            group.update({name: option for name, option in given.items() if name != "params"})

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimiser."""
        self._copy_options(self.param_groups, self._inner.param_groups)
        return {"optimizer": self._inner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._inner.load_state_dict(state_dict["optimizer"])
        self._copy_options(self._inner.param_groups, self.param_groups)


def _fp32(param: nn.Parameter) -> Tensor:
    return param if param.dtype.itemsize >= 4 else param.detach().float()


class MasterWeights(_UpdateInFP32):
    """An optimiser that updates fp32 master weights, and rounds them to the parameters.

    Memory for each parameter in 16 bits: 2 bytes for the weight, 2 for its gradient, 4 for the master weight,
    and the fp32 state of the optimiser, 8 with Adam. The gradients in fp32 exist only during ``step``.

    Args:
        params: parameters or parameter groups, as for the optimiser. fp32 parameters among them are updated
            themselves.
        optimizer: creates the inner optimiser from parameter groups, for instance
            ``functools.partial(torch.optim.AdamW, lr=1e-3)``.

    Raises:
        UserError: no parameter has less than 32 bits.
    """

    def _after(self, param: Tensor, value: Tensor) -> None:
        param.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimiser, and the master weights in the order of the parameters."""
        return {**super().state_dict(), "masters": [value.detach() for value in self.fp32.values()]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. The parameters become the rounded master weights.

        Raises:
            UserError: the master weights have other shapes.
        """
        stored = state_dict["masters"]
        if [value.shape for value in stored] != [value.shape for value in self.fp32.values()]:
            raise UserError("these master weights have other shapes: load the state of the same model")
        super().load_state_dict(state_dict)
        for (param, value), saved in zip(self.fp32.items(), stored, strict=True):
            value.copy_(saved)
            if value is not param:
                param.copy_(value)


class StochasticRounding(_UpdateInFP32):
    """An optimiser that updates bf16 parameters without master weights, by stochastic rounding.

    A step converts the parameters to fp32, updates them, and rounds the results at random. Memory for each
    parameter: 4 bytes less than with master weights between two steps, and the same during a step.

    Args:
        params: parameters or parameter groups of bf16; fp32 parameters among them are updated themselves.
        optimizer: creates the inner optimiser from parameter groups, as for :class:`MasterWeights`.
        generator: the source of the random numbers.

    Raises:
        UserError: a parameter has another dtype, or all are fp32.
    """

    def __init__(
        self, params: Params, optimizer: MakeOptimizer, generator: torch.Generator | None = None
    ) -> None:
        super().__init__(params, optimizer)
        self._generator = generator
        for param, value in self.fp32.items():
            if value is param:
                continue
            if param.dtype != torch.bfloat16:
                raise UserError(f"stochastic rounding is for bf16, not {param.dtype}: use MasterWeights")
            value.data = value.new_empty(0)

    def _before(self, param: Tensor, value: Tensor) -> None:
        value.data = param.float()

    def _after(self, param: Tensor, value: Tensor) -> None:
        param.copy_(stochastic_round(value, self._generator))
        value.data = value.new_empty(0)
