"""Adam's averages of all parameters as one tensor: what 1-bit Adam, 0/1 Adam and 1-bit LAMB share.

These optimisers communicate themselves, so gradients are those of each rank: the model is not in DDP, or its
backward is in ``model.no_sync()``. A message is one tensor of all parameters, so that a bit for each element
is not lost in the overhead of many messages. The averages are corrected for their start at zero; after
``frozen_at``, the correction of the variance stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from dlo_lib.base.errors import UserError
from dlo_lib.comm.compression.one_bit_mean import OneBitMean


class FlatMoments(torch.optim.Optimizer):
    """An optimiser whose averages are flat; a subclass defines :meth:`update`. All parameters have one dtype.

    Args:
        params: parameters or parameter groups. Every rank has the same ones, with equal values.
        lr, weight_decay: of each group.
        betas: the factors b1 and b2.
        eps: the constant beside the root.
        group: the ranks; None is all of them.
        error_feedback: False to lose what the signs leave out, to compare.

    Attributes:
        steps: the number of steps.
        frozen_at: the last step that changed the variance; 0 while it changes.
        momentum, variance: m and v, (elements,).
    """

    kept: tuple[str, ...] = ("steps", "frozen_at", "momentum", "variance")
    """The attributes of the state."""

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        group: dist.ProcessGroup | None,
        error_feedback: bool,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.betas, self.eps, self.process_group = betas, eps, group
        self.steps, self.frozen_at = 0, 0
        self._mean = OneBitMean(group, error_feedback)
        self.params = [param for each in self.param_groups for param in each["params"]]
        self.sizes = [param.numel() for param in self.params]
        self.momentum = torch.zeros(sum(self.sizes), dtype=self.params[0].dtype, device=self.params[0].device)
        self.variance = torch.zeros_like(self.momentum)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Communicate, and update all parameters. Every rank calls it.

        Args:
            closure: computes the gradients and returns the loss, which is the result.

        Raises:
            UserError: a parameter has no gradient, or a sparse one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradient = self._gradient()
        self.steps += 1
        self.update(gradient)
        return loss

    def update(self, gradient: Tensor) -> None:
        """Update the parameters from the gradient of this rank, (elements,), which may change."""
        raise NotImplementedError

    def exact_mean(self, x: Tensor) -> Tensor:
        """Return the mean of ``x`` over the ranks, in place."""
        dist.all_reduce(x, group=self.process_group)
        return x.div_(dist.get_world_size(self.process_group))

    def one_bit_mean(self, x: Tensor) -> Tensor:
        """Return the mean of ``x`` over the ranks by its signs, with error feedback."""
        return self._mean(x)

    def corrected_variance(self) -> Tensor:
        """Return v', a new tensor."""
        return self.variance / (1 - self.betas[1] ** (self.frozen_at or self.steps))

    def by_param(self, flat: Tensor) -> list[Tensor]:
        """Return the parts of ``flat`` with the shapes of the parameters, views."""
        parts = flat.split(self.sizes)
        return [part.view(param.shape) for part, param in zip(parts, self.params, strict=True)]

    def _gradient(self) -> Tensor:
        grads = []
        for number, param in enumerate(self.params):
            if param.grad is None or param.grad.layout is not torch.strided:
                kind = "no gradient" if param.grad is None else "a sparse gradient"
                raise UserError(
                    f"parameter {number} has {kind}, and {type(self).__name__} sends one tensor of all: give "
                    "it only parameters that every step uses, with sparse=False in embeddings"
                )
            grads.append(param.grad.flatten())
        return torch.cat(grads)

    def rates(self) -> list[tuple[float, float]]:
        """Return the learning rate and the weight decay of each parameter."""
        return [(group["lr"], group["weight_decay"]) for group in self.param_groups for _ in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, which includes its errors: each rank saves its state."""
        kept = {name: copy(getattr(self, name)) for name in self.kept}
        return {**super().state_dict(), "flat": {**kept, "errors": self._mean.state_dict()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the state of the same rank."""
        kept = state_dict["flat"]
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        for name in self.kept:
            value = kept[name]
            if isinstance(value, Tensor):
                getattr(self, name).copy_(value)
            else:
                setattr(self, name, list(value) if isinstance(value, list) else value)
        self._mean.load_state_dict(kept["errors"])
