"""The wrapper of a model whose experts ``parallelize_experts`` has cut, around its data-parallel wrapper.

The inner wrapper averages the gradients, those of experts over the ranks that hold them. This wrapper adds
the placement of the experts: checkpoints re-shard them between degrees, and clipping counts each expert once.

    norm^2 = sum over the ep ranks of |gradients of its experts|^2  +  |all other gradients|^2

Cost: one all-reduce of a scalar in each clipping; with FSDP three.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.parallel.expert.apply import ExpertLayout
from dlo_lib.parallel.protocol import (
    MemoryObserver,
    ModuleWrapper,
    ParallelModel,
    ParamShard,
    groups_by_param,
    shard_groups,
)
from dlo_lib.parallel.sharding.clip import clip_sharded_grad_norm_
from dlo_lib.parallel.sharding.held_parts import Held, mark_held
from dlo_lib.parallel.sharding.sharded_grad import GradScope, mark


class ExpertParallel(ModuleWrapper):
    """Wraps ``module``, a ``DDP`` or an ``FSDP`` of the model that ``parallelize_experts`` has cut.

    ``state_dict`` contains the experts of this rank; ``full_state_dict`` returns the whole model.

    Args:
        module: the data-parallel wrapper, which must sum the gradients of experts over ``layout.replicas``
            (argument ``reduced_over`` of DDP), or shard them over ``layout.shards`` (argument
            ``sharded_over`` of FSDP).
        layout: the result of ``parallelize_experts``.

    Raises:
        UserError: the wrapper sums the gradients of experts over other ranks; later, the optimiser needs the
            parameters of all experts.
    """

    holds_every_param = True

    def __init__(self, module: nn.Module, layout: ExpertLayout) -> None:
        super().__init__()
        assert isinstance(module, ParallelModel)
        reduced = getattr(module, "reduced_over", None) == layout.reduced_over(module)
        sharded = getattr(module, "sharded_over", None) == layout.sharded_over(module)
        if not reduced and not sharded:
            raise UserError(
                f"{type(module).__name__} would mix the gradients of different experts: "
                "wrap with DDP(model, layout.batch, reduced_over=layout.reduced_over(model)), "
                "or with FSDP(..., sharded_over=layout.sharded_over(model))"
            )
        self.module, self.layout = module, layout
        self._inner: ParallelModel = module
        self.takes_added_grads = module.takes_added_grads
        if dist.get_world_size(layout.group) > 1:
            parts = [shard.param for shard in module.shards() if shard.name in layout.parts]
            mark_held(parts, Held.PARTS, "expert parallelism")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside the context do not communicate gradients of parameters. Tokens are exchanged
        in every pass."""
        return self._inner.no_sync()

    def finish_grad_sync(self) -> None:
        """Average the gradients that are not averaged yet."""
        self._inner.finish_grad_sync()
        for shard in self.shards():
            if shard.name in self.layout.parts and shard.param.grad is not None:
                # For torch.nn.utils.clip_grad_norm_
                device = shard.param.grad.device
                mark(shard.param.grad, GradScope(shard_groups([shard]), device))

    def shards(self) -> list[ParamShard]:
        """Return every parameter, of the experts the part of this rank."""
        return [self._translated(shard) for shard in self._inner.shards()]

    def unwrapped(self) -> list[nn.Module]:
        return list(self._inner.unwrapped())

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their norm over all ranks is at most ``max_norm``. Each expert counts
        once, and so does each parameter that all ranks hold.

        Args:
            norm_type: p > 0 of the p-norm; ``math.inf`` for the largest absolute value.

        Returns the norm before scaling, () fp64, the same on every rank.
        """
        shards = self.shards()
        return clip_sharded_grad_norm_(
            [shard.param for shard in shards],
            max_norm,
            (),
            next(self.module.parameters()).device,
            norm_type=norm_type,
            groups_of=groups_by_param(shards),
        )

    def observe_memory(self, observer: MemoryObserver) -> None:
        self._inner.observe_memory(observer)

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the ``state_dict`` of the whole model, on the CPU of every rank; called by every rank.

        In addition to the result, the whole experts of one layer are in memory.
        """
        state: dict[str, Tensor] = {}
        inner = getattr(self.module, "full_state_dict", self.module.state_dict)
        for name, value in inner().items():
            if name in self.layout.parts:
                mine = value.detach().contiguous().to(next(self.module.parameters()).device)
                parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.layout.group))]
                dist.all_gather(parts, mine, group=self.layout.group)
                value = torch.cat(parts)
            state[name] = value.detach().to("cpu", copy=True)
        return state

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the parameters of this rank from ``state``, the ``state_dict`` of the whole model.

        Raises:
            UserError: the shape of experts is not that of the model.
        """
        own = dict(state)
        ranks, rank = dist.get_world_size(self.layout.group), dist.get_rank(self.layout.group)
        for name, part in self.layout.parts.items():
            if name in own:
                if own[name].shape != part.shape:
                    found = f"{tuple(own[name].shape)} instead of {tuple(part.shape)}"
                    raise UserError(f"{name} is {found}: load the state of the same model")
                own[name] = own[name].chunk(ranks)[rank]
        getattr(self.module, "load_full_state_dict", self.module.load_state_dict)(own)

    def _translated(self, shard: ParamShard) -> ParamShard:
        part = self.layout.parts.get(shard.name)
        if part is None:
            return shard
        placement = (part.placement, *shard.placement)
        return replace(shard, shape=part.shape, strides=part.strides, placement=placement)
