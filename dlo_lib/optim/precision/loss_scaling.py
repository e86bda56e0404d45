"""Loss scaling: the loss is multiplied by a factor before backward, so that small gradients do not become 0
in fp16, and the gradients are divided by it before the optimiser uses them.

If a gradient overflows, the step is skipped. The methods are those of ``torch.amp.GradScaler``, so each class
can replace it in a training loop::

    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)  # optional: before clipping
    scaler.step(optimizer)
    scaler.update()

For gradients that are distributed over ranks, use ``parallel.grad_scaler``.

Paper: P. Micikevicius et al., Mixed Precision Training, section 3.2 (arXiv:1710.03740).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dlo_lib.base.errors import UserError


class StaticLossScaler:
    """Scale the loss by a constant; a step whose gradients are not finite is skipped.

    Attributes:
        skipped: the number of skipped steps.

    Raises:
        UserError: the scale is not positive; from ``unscale_``, if it is called a second time for an
        optimiser
            before ``update``; from ``update``, if no ``step`` came before it.
    """

    def __init__(self, scale: float = 2.0**16) -> None:
        if not scale > 0:
            raise UserError(f"the loss scale is {scale}: use a positive number, such as 65536")
        self._scale = scale
        self._found: dict[int, bool] = {}  # by the id of the optimiser: whether a gradient is not finite
        self._stepped = False
        self.skipped = 0

    def scale(self, loss: Tensor) -> Tensor:
        """Return ``loss`` times the scale."""
        return loss * self._scale

    def get_scale(self) -> float:
        """Return the present scale."""
        return self._scale

    @torch.no_grad()
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of the parameters of ``optimizer`` by the scale, in place."""
        if id(optimizer) in self._found:
            raise UserError("unscale_ was called twice: call it once for each optimiser, before update")
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        # The product is computed in the dtype of the gradient: an fp16 gradient that is multiplied by
        # 2^-16 may become 0, therefore parameters and gradients should be fp32 (autocast or master weights).
        for grad in grads:
            grad.mul_(1 / self._scale)
        # One transfer to the CPU for all gradients.
        finite = torch.stack([torch.isfinite(grad).all() for grad in grads]).all() if grads else None
        self._found[id(optimizer)] = finite is not None and not finite.item()

    def step(self, optimizer: Optimizer) -> Any:
        """Unscale, unless it is done; then call ``optimizer.step()`` if all gradients are finite, and return
        its result."""
        if id(optimizer) not in self._found:
            self.unscale_(optimizer)
        self._stepped = True
        if self._found[id(optimizer)]:
            self.skipped += 1
            return None
        return optimizer.step()

    def update(self) -> None:
        """End the step; a dynamic scale changes here."""
        if not self._stepped:
            raise UserError("update without a step: call step(optimizer) first")
        self._adjust(overflow=any(self._found.values()))
        self._found.clear()
        self._stepped = False

    def _adjust(self, overflow: bool) -> None:
        """Choose the scale of the next step."""

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint needs."""
        return {"scale": self._scale, "skipped": self.skipped}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        self._scale, self.skipped = state_dict["scale"], int(state_dict["skipped"])


class DynamicLossScaler(StaticLossScaler):
    """Scale the loss by the largest factor that does not overflow.

    After an overflow, the scale is multiplied by ``backoff_factor``. After ``growth_interval`` steps in
    succession without one, it is multiplied by ``growth_factor``. The defaults are those of PyTorch.

    Raises:
        UserError: a growth factor of at most 1, a backoff factor outside (0, 1), or an interval below 1.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        super().__init__(init_scale)
        if growth_factor <= 1 or not 0 < backoff_factor < 1 or growth_interval < 1:
            raise UserError(
                f"growth_factor={growth_factor}, backoff_factor={backoff_factor}, "
                f"growth_interval={growth_interval}: use more than 1, between 0 and 1, and at least 1"
            )
        self._growth, self._backoff, self._interval = growth_factor, backoff_factor, growth_interval
        self._good_steps = 0

    def _adjust(self, overflow: bool) -> None:
        if overflow:
            self._scale *= self._backoff
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps == self._interval:
            self._scale *= self._growth
            self._good_steps = 0

    def state_dict(self) -> dict[str, float]:
        return {**super().state_dict(), "good_steps": self._good_steps}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        super().load_state_dict(state_dict)
        self._good_steps = int(state_dict["good_steps"])
