"""The step that the optimisers of this library share: for each group, the parameters with a gradient.

The functions ``torch._foreach_*`` compute one operation for a list of tensors, on a GPU with few kernels.
Their temporary tensors live for all parameters of the list. With ``foreach=False`` the list has one
parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dlo_lib.base.errors import UserError

Group = dict[str, Any]


class NormsOverRanks(Protocol):
    """Computes norms where ranks hold parts of parameters (``parallel.whole_norms``)."""

    def begin(self) -> None:
        """Prepare a step; called when the gradients are complete."""

    def __call__(self, params: Sequence[Tensor], norms: Sequence[Tensor]) -> list[Tensor]:
        """Return the norms of the whole tensors, given those of the parts of this rank, as ``params`` are."""


class ForeachOptimizer(torch.optim.Optimizer):
    """An optimiser with the step of this module; a subclass defines :meth:`update`. Its groups have the key
    ``foreach``. One that needs norms of parameters, and otherwise treats each element by itself, calls
    :meth:`norms` once in each update.
    """

    over_ranks: NormsOverRanks | None = None
    """Where the parameters are parts, computes the norms of the whole ones."""

    @property
    def updates_shards(self) -> bool:
        """Whether the update is right for parts of parameters, although it depends on whole ones."""
        return self.over_ranks is not None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters that have a gradient.

        Args:
            closure: computes the gradients and returns the loss, which is the result.

        Raises:
            UserError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.over_ranks is not None:
            self.over_ranks.begin()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            for some in self._lists(params, group):
                grads = [param.grad for param in some if param.grad is not None]
                if any(grad.layout is not torch.strided for grad in grads):
                    raise UserError(
                        f"a gradient is sparse, and {type(self).__name__} needs dense ones: use sparse=False "
                        "in the embedding"
                    )
                # A gradient that knows that it is a part computes a norm over the ranks (parallel.sharding).
                # Here a parameter is whole, or its update needs no norm, or it calls ``norms``.
                with torch._C.DisableTorchFunctionSubclass():
                    self.update(some, grads, group)
        return loss

    def _lists(self, params: list[Tensor], group: Group) -> list[list[Tensor]]:
        if not group["foreach"]:
            return [[param] for param in params]
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for param in params:  # an operation on a list is only fast with one device and one dtype
            kinds.setdefault((param.device, param.dtype), []).append(param)
        return [*kinds.values()]

    def update(self, params: list[Tensor], grads: list[Tensor], group: Group) -> None:
        """Update ``params`` from their gradients; ``grads`` must not change."""
        raise NotImplementedError

    def norms(self, params: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the norm of each tensor, 0-dimensional; of the whole tensor if this rank has a part.

        Args:
            params: the parameter that has the shape of each tensor.
        """
        local = [*torch._foreach_norm([*tensors])]
        return local if self.over_ranks is None else self.over_ranks(params, local)

    def kept(self, params: list[Tensor], name: str) -> list[Tensor]:
        """Return the state ``name`` of each parameter; in its first step, zeros of its shape and dtype."""
        for param in params:
            if name not in self.state[param]:
                self.state[param][name] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return [self.state[param][name] for param in params]

    def counted(self, params: list[Tensor]) -> list[int]:
        """Count this step of each parameter, and return how many it has made. A parameter without a gradient
        makes none."""
        for param in params:
            if (
                "step" not in self.state[param]
            ):  # on the CPU, as in PyTorch: reading it does not wait for a GPU
                self.state[param]["step"] = torch.tensor(0.0, dtype=torch.float32)
        steps = [self.state[param]["step"] for param in params]
        torch._foreach_add_(steps, 1.0)
        return [int(step.item()) for step in steps]
