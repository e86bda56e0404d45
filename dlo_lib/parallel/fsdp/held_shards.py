"""Changes of a module after FSDP has wrapped it: what FSDP follows, and what it refuses.

Freezing and thawing a parameter that was trained when it was wrapped is followed. New parameters, other
memory, another dtype, and training a parameter that was frozen are refused (``parallel.held_params``). So is
a gradient that autograd computes for a shard itself, because a computation has then used the rows of this
rank in place of the whole parameter.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.autograd.graph import get_gradient_edge

from dlo_lib.base.errors import UserError
from dlo_lib.parallel.fsdp.absent_param import used_outside
from dlo_lib.parallel.fsdp.param import FSDPParam
from dlo_lib.parallel.held_params import HeldMemory, HeldModule, requires_grad_of


class HeldShards:
    """The parameters of ``root`` when FSDP took them.

    Args:
        root: the module, which holds the shards.
        params: all its parameters.
    """

    def __init__(self, root: nn.Module, params: Sequence[FSDPParam]) -> None:
        self._params, self._shards = params, [param.shard for param in params]
        by_param = [(param.shard, param.whole, param.absent) for param in params]
        held = [tensor for tensors in by_param for tensor in tensors]
        slots = [(*slot, tensors) for param, tensors in zip(params, by_param) for slot in param.owners]
        self._module = HeldModule(root, held, "FSDP", slots)
        self._memory = HeldMemory({param.shard: param.name for param in params}, "FSDP")
        self._trained = self._requires_grad = requires_grad_of(self._shards)
        # Kept, because a node that nothing refers to is freed with its hook.
        self._accumulators = [get_gradient_edge(shard).node for shard in self._shards if shard.requires_grad]
        names = [param.name for param in params if param.shard.requires_grad]
        for node, name in zip(self._accumulators, names):
            node.register_prehook(functools.partial(_refuse_gradient, name))

    def follow(self) -> None:
        """Compare the module with what FSDP took, and freeze or thaw the whole parameters as the shards are.

        Raises:
            UserError: a parameter is new, was moved or cast, or was frozen before wrapping and is not now.
        """
        self._module.check()
        self._memory.check()
        now = requires_grad_of(self._shards)
        if now == self._requires_grad:
            return
        for param, trained, requires_grad in zip(self._params, self._trained, now):
            if requires_grad and not trained:
                raise UserError(
                    f"{param.name} was unfrozen after FSDP had wrapped the module: "
                    "unfreeze first, then wrap it"
                )
            param.whole.requires_grad_(requires_grad)
        self._requires_grad = now


def _refuse_gradient(name: str, gradients: Any) -> None:
    raise UserError(used_outside(name))
