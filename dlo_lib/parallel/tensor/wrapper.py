"""The wrapper of a model, or of a stage of a pipeline, that ``parallelize_tensor`` has cut.

It wraps the data-parallel wrapper of the model (FSDP or DDP), or the model itself. To the communication of
that wrapper it adds all-reduces of the partial gradients (``layout``) at the end of each step, and it
translates the shards of the wrapper, which are parts of this rank's part, into parts of the whole parameters.

The partial gradients are multiplied by the number of ranks that hold the parameter, and averaged over them.
The result is their sum. Averaging twice changes nothing, so gradients may accumulate after
``finish_grad_sync``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.data.tokens import IGNORE_INDEX
from dlo_lib.optim.step import summed_cross_entropy
from dlo_lib.parallel.held_params import HeldModule
from dlo_lib.parallel.protocol import (
    MemoryObserver,
    ModuleWrapper,
    ParallelModel,
    ParamShard,
    groups_by_param,
    shard_groups,
    whole_params,
)
from dlo_lib.parallel.sharding.buckets import all_reduce_packed
from dlo_lib.parallel.sharding.clip import clip_sharded_grad_norm_
from dlo_lib.parallel.sharding.held_parts import Held, mark_held
from dlo_lib.parallel.sharding.sharded_grad import GradScope, mark, plain
from dlo_lib.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy
from dlo_lib.parallel.tensor.layout import TensorLayout, part_of_state, whole_from_parts

_BUCKET_BYTES = 25 * 2**20
_SHARED_HEADS = (
    "some ranks share heads of keys and values: "
    "call model.clip_grad_norm_, and scale the loss with parallel.grad_scaler.ShardedGradScaler"
)


class TensorParallel(ModuleWrapper):
    """Wraps ``module``, whose parameters are those of ``layout``. All ranks of the group need the same
    inputs.

    If the style of the output projection is ``VocabParallelHead``, the model returns this rank's part of the
    logits, and ``summed_cross_entropy`` computes the loss. After the last backward of a step, call
    ``finish_grad_sync``, as ``train_step`` does.

    ``state_dict`` contains this rank's parts; ``full_state_dict`` returns the whole model.

    Args:
        module: the data-parallel wrapper of the model, or the model itself.
        layout: the result of ``parallelize_tensor``. Call ``scale_partial_grads`` before the data-parallel
            wrapper is created.

    Raises:
        UserError: in forward, a parameter is new or was replaced; the optimiser needs whole matrices.
    """

    holds_every_param = True
    takes_added_grads = False

    def __init__(self, module: nn.Module, layout: TensorLayout) -> None:
        super().__init__()
        self.module, self.layout = module, layout
        self._inner = module if isinstance(module, ParallelModel) else None
        # A data-parallel wrapper compares its parameters itself.
        params = list(module.parameters()) if self._inner is None else []
        self._held = HeldModule(module, params, "TensorParallel") if params else None
        cut = {name for name, part in layout.parts.items() if part.placement.copies < layout.group.ranks}
        parts = [shard.param for shard in self._local_shards() if shard.name in cut]
        mark_held(parts, Held.PARTS, "tensor parallelism")

    @property
    def _device(self) -> torch.device:
        return next(self.module.parameters(), torch.empty(0)).device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._held is not None and not torch.compiler.is_compiling():
            self._held.check()
        return self.module(*args, **kwargs)

    def summed_cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Compute the sum of the losses of the valid tokens, (), equal on all ranks.

        Args:
            logits: (batch, seq, vocab) or this rank's part of the vocabulary, as the model returns them.
            targets: (batch, seq) int64.
        """
        if self.layout.head is None:
            return summed_cross_entropy(logits, targets)
        first, vocab_size = self.layout.head
        return vocab_parallel_cross_entropy(
            logits, targets, first, self.layout.group, vocab_size=vocab_size, ignore_index=IGNORE_INDEX
        )

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside the context do not communicate gradients of parameters. The all-reduces of
        activations take place in every pass."""
        return contextlib.nullcontext() if self._inner is None else self._inner.no_sync()

    @torch.no_grad()
    def finish_grad_sync(self) -> None:
        """Average the gradients that are not averaged yet, and sum the partial gradients over the ranks, in
        messages of 25 MiB. A larger gradient, as that of experts, is summed in place without a copy."""
        if self._inner is not None:
            self._inner.finish_grad_sync()
        shards = self._local_shards()
        with torch._C.DisableTorchFunctionSubclass():
            by_copies: dict[int, list[Tensor]] = {}
            for shard in shards:
                part, grad = self.layout.parts[shard.name], shard.param.grad
                if part.partial and grad is not None:
                    by_copies.setdefault(part.placement.copies, []).append(plain(grad))
            for count, grads in sorted(by_copies.items()):
                all_reduce_packed(grads, self.layout.sum_groups[count], _BUCKET_BYTES)
                torch._foreach_div_(grads, count)
        for shard in shards:
            if shard.param.grad is not None:
                self._mark(shard)

    def shards(self) -> list[ParamShard]:
        """Return the part of every parameter that this rank holds."""
        return self._translated(self._local_shards())

    def unwrapped(self) -> list[nn.Module]:
        return [self.module] if self._inner is None else list(self._inner.unwrapped())

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their norm over all ranks is at most ``max_norm``. A parameter that
        several ranks hold counts once.

        Args:
            norm_type: p > 0 of the p-norm; ``math.inf`` for the largest absolute value.

        Returns the norm before scaling, () fp64, the same on every rank.
        """
        shards = self.shards()
        return clip_sharded_grad_norm_(
            [shard.param for shard in shards],
            max_norm,
            (),
            self._device,
            norm_type=norm_type,
            copies=[shard.param for shard in shards if not shard.counted],
            groups_of=groups_by_param(shards),
        )

    def observe_memory(self, observer: MemoryObserver) -> None:
        if self._inner is not None:
            self._inner.observe_memory(observer)

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the ``state_dict`` of the whole model, on the CPU of every rank; called by every rank."""
        inner = getattr(self.module, "full_state_dict", self.module.state_dict)
        return {name: self._whole(name, value) for name, value in inner().items()}

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load this rank's parts from ``state``, the ``state_dict`` of the whole model; called by every rank.

        Raises:
            UserError: a shape is not that of the model.
        """
        for name, part in self.layout.parts.items():
            if name in state and state[name].shape != part.shape:
                found = tuple(state[name].shape)
                raise UserError(
                    f"{name} is {found} instead of {tuple(part.shape)}: load the state of the same model"
                )
        load = getattr(self.module, "load_full_state_dict", self.module.load_state_dict)
        load(part_of_state(self.layout, state))

    def _whole(self, name: str, value: Tensor) -> Tensor:
        part = self.layout.parts.get(name)
        if part is None or part.placement.copies == self.layout.group.ranks or not part.shape:
            return value.detach().to("cpu", copy=True)
        dim, group = part.placement.dim, self.layout.group
        rows = -(-part.shape[dim] * part.placement.copies // group.ranks)
        shape = list(value.shape)
        shape[dim] = rows  # the last part may be smaller
        padded = value.new_zeros(shape, device=self._device)
        padded.narrow(dim, 0, value.shape[dim]).copy_(value)
        parts = [torch.empty_like(padded) for _ in range(group.ranks)]
        dist.all_gather(parts, padded, group=group.group)
        return whole_from_parts(parts, part).cpu()

    def _mark(self, shard: ParamShard) -> None:
        """Set the ranks that hold the parts of a gradient, for ``torch.nn.utils.clip_grad_norm_``."""
        assert shard.param.grad is not None
        group, copies = self.layout.group, self.layout.parts[shard.name].placement.copies
        groups = shard_groups([shard])
        if copies == 1:
            groups = [group.group, *groups]
        refusal = _SHARED_HEADS if 1 < copies < group.ranks else ""
        if groups or refusal:
            mark(shard.param.grad, GradScope(groups, self._device, refusal))

    def _local_shards(self) -> list[ParamShard]:
        return whole_params(self.module) if self._inner is None else self._inner.shards()

    def _translated(self, shards: list[ParamShard]) -> list[ParamShard]:
        found = []
        for shard in shards:
            part = self.layout.parts[shard.name]
            placement = (part.placement, *shard.placement)
            found.append(replace(shard, shape=part.shape, strides=part.strides, placement=placement))
        return found


def scale_partial_grads(module: nn.Module, layout: TensorLayout) -> None:
    """Multiply each new partial gradient of ``module`` by the number of ranks that hold the parameter. Call
    it once, before the data-parallel wrapper is created."""
    for name, param in module.named_parameters():
        part = layout.parts[name]
        if part.partial and param.requires_grad:
            count = part.placement.copies
            param.register_hook(lambda grad, count=count: grad * count)
