"""AdamW inside the backward, in the place of an optimiser.

The backward updates each parameter when its gradient is complete, and frees the gradient (LOMO,
arXiv:2306.09782; ``kernels.adamw``). ``step`` and ``zero_grad`` then find no gradient. Learning rates,
parameter groups and ``state_dict`` are those of any optimiser, so that schedules and checkpoints work.

Each backward is one step: gradients cannot be accumulated, clipped, averaged over ranks or discarded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from torch.utils.hooks import RemovableHandle

from dlo_lib.kernels.adamw import FusedAdamW


class UpdateInBackward(torch.optim.Optimizer):
    """AdamW whose updates run in the backward.

    Args:
        params: parameters or parameter groups. A hook of each parameter runs when its gradient is complete.
        lr, betas, eps, weight_decay: as in ``torch.optim.AdamW``.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        self._updates: dict[Tensor, FusedAdamW] = {}
        self._hooks: list[RemovableHandle] = []
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "fused": True})  # a loaded state is then that of a fused step

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        number = len(self.param_groups) - 1
        for param in self.param_groups[number]["params"]:
            self._updates[param] = FusedAdamW([param])
            hook = functools.partial(self._update, number)
            self._hooks.append(param.register_post_accumulate_grad_hook(hook))

    def remove(self) -> None:
        """Remove the hooks: backwards leave gradients again. The state remains."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _update(self, number: int, param: Tensor) -> None:
        """Update a parameter of group ``number`` and free its gradient."""
        optimizer = self._updates[param]
        group = self.param_groups[number]
        optimizer.param_groups[0].update({key: value for key, value in group.items() if key != "params"})
        optimizer.state = self.state  # loading a state replaces it
        optimizer.step()
        param.grad = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Return the result of ``closure``, whose backward updates the parameters."""
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()
