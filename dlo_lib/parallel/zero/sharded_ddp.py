"""ZeRO stage 2: shards the optimiser state and the gradients. During backward, each averaged gradient is sent
to the rank that updates its parameter.

The optimiser of a rank reads only its part of the averaged gradients, so no rank needs to store the rest.
Gradients are packed into buckets as autograd computes them, and the whole gradient is freed. A full bucket is
reduce-scattered while backward continues. The optimiser updates its part and sends the updates to all ranks,
as in stage 1.

    packed gradients  [ A A A A B B | B B C C C C | C D D D - - ]   ->   rank 1 keeps  [ B B C C C C ]

Memory per rank between steps, fp32 and AdamW: 4 Psi + 12 Psi/N bytes (4 weight + 4/N gradient + 8/N
optimiser), and two buckets during backward. Bytes sent per step, with f = (N-1)/N: B_g f + B_p f, the same as
DDP, whose all-reduce is a reduce-scatter and an all-gather. With k backward passes that synchronise, k B_g f
+ B_p f. In ``no_sync``, the whole gradients are stored, packed.

Paper: S. Rajbhandari et al., ZeRO (arXiv:1910.02054), section 5.2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.parallel.backward_pass import without_sync
from dlo_lib.parallel.held_params import HeldModule, refuse_max_norm
from dlo_lib.parallel.protocol import (
    MemoryObserver,
    ModuleWrapper,
    ParamShard,
    process_group,
    whole_params,
)
from dlo_lib.parallel.sharding.buckets import broadcast_packed
from dlo_lib.parallel.sharding.clip import clip_sharded_grad_norm_
from dlo_lib.parallel.sharding.grad_reduction import GradReduceScatter
from dlo_lib.parallel.sharding.sharded_grad import GradScope, RemoteGrad
from dlo_lib.parallel.sharding.transport import BufferPool, Transport, default_transport
from dlo_lib.parallel.zero.flat_params import BucketEntry, ParamBucket, Partition, PartitionBy

MIB = 2**20


@dataclass(eq=False)
class PackedGrad:
    """The gradient of one parameter in a bucket; see ``PackedParam``."""

    name: str
    entry: BucketEntry
    arrived: bool = False
    filled: bool = False

    @property
    def frozen(self) -> bool:
        return not self.entry.param.requires_grad


class FlatGradPack:
    """The gradients of a bucket of parameters, at the offsets of the parameters. Implements ``GradPack``."""

    def __init__(
        self,
        bucket: ParamBucket,
        names: dict[nn.Parameter, str],
        partition: Partition,
        pool: BufferPool,
        transport: Transport,
    ) -> None:
        self.trained = [PackedGrad(names[entry.param], entry) for entry in bucket.entries]
        self.missing = len(self.trained)
        self._bucket, self._partition, self._pool, self._transport = bucket, partition, pool, transport
        self._grad_scope = GradScope([partition.group], bucket.flat.device)
        self._packed: Tensor | None = None
        self._mine: Tensor | None = None

    def _view(self, slot: PackedGrad) -> Tensor:
        flat, entry = self._bucket.flat, slot.entry
        if self._packed is None:
            self._packed = self._pool.take(flat.numel(), flat.dtype)
            if sum(other.entry.param.numel() for other in self.trained) < flat.numel():
                self._packed.zero_()  # because the padding is sent as well
        return self._packed.as_strided(entry.param.shape, entry.strides, entry.offset)

    @torch.no_grad()
    def pack(self, slot: PackedGrad, gradient: Tensor) -> None:
        view, ranks = self._view(slot), self._partition.ranks
        # Divide while copying, which costs no extra pass over the memory, and before the sum, which then does
        # not overflow in fp16.
        view.add_(gradient, alpha=1 / ranks) if slot.filled else torch.div(gradient, ranks, out=view)
        self.missing -= not slot.arrived
        slot.arrived = slot.filled = True

    @torch.no_grad()
    def start_reduce_scatter(self) -> list[PackedGrad]:
        absent = [slot for slot in self.trained if not slot.filled]
        for slot in absent:
            self._view(slot).zero_()
        assert self._packed is not None
        first, last = self._partition.part_of(self._bucket)
        if self._bucket.owner is None:
            self._mine = self._packed.new_empty(last - first)
            group = self._partition.group
            self._wait_sum = self._transport.reduce_scatter(self._mine, self._packed, group, self._pool)
        else:
            group, owner = self._partition.group, self._bucket.owner
            work = dist.reduce(self._packed, group=group, group_dst=owner, async_op=True)
            assert work is not None
            self._mine, self._wait_sum = self._packed[first:last], work.wait
        for slot in self.trained:
            slot.filled = False
        return absent

    @torch.no_grad()
    def wait_reduce_scatter(self) -> None:
        self._wait_sum()
        del self._wait_sum  # it keeps the sent tensor alive
        self._release_packed()

    @torch.no_grad()
    def assign_grads(self, unused: set[PackedGrad]) -> None:
        assert self._mine is not None
        first, _ = self._partition.part_of(self._bucket)
        for slot in self.trained:
            param, piece = slot.entry.param, self._partition.pieces.get(slot.entry.param)
            if param.grad is None and slot not in unused:
                shard = None if piece is None else piece.shard
                param.grad = RemoteGrad(param, shard, self._grad_scope)
            if piece is None:
                continue
            start = slot.entry.offset + piece.start - first
            part = self._mine[start : start + piece.stop - piece.start]
            if piece.whole:
                part = part.as_strided(slot.entry.param.shape, piece.strides, part.storage_offset())
            mean = part.to(piece.shard.device, piece.shard.dtype)
            if piece.shard.grad is not None:
                piece.shard.grad.add_(mean)
            elif slot not in unused:
                piece.shard.grad = mean
        self._mine = None

    def drop_grads(self) -> None:
        self._mine = None
        self._release_packed()
        for slot in self.trained:
            slot.filled = False

    def _release_packed(self) -> None:
        owned = self._bucket.owner is not None and self._bucket.owner == self._partition.rank
        if self._packed is not None and not owned:  # the owner of the whole bucket keeps it as the gradients
            self._pool.give(self._packed)
        self._packed = None

    def finalize_backward(self) -> None:
        self.missing = len(self.trained)
        for slot in self.trained:
            slot.arrived = False


class ShardedDDP(ModuleWrapper):
    """Data parallelism that reduces each averaged gradient to the rank that updates its parameter.

    Create the optimiser afterwards:
    ``ShardedOptimizer(model.parameters(), optimizer_cls, partition=model.partition)``.

    Args:
        module: has the same structure on every rank. Its parameters and buffers take the values of the first
            rank of the group. The parameters are moved into flat memory (``zero.flat_params``), so it must be
            on its device.
        group: the ranks; None for all ranks.
        split: ``PartitionBy.PARAMETERS`` for optimisers that need whole parameters, that is all except those
            in ``sharding.elementwise.ELEMENTWISE``.
        bucket_bytes: the largest size of a bucket. A larger parameter is a bucket by itself.
        transport: how gradients and updates are exchanged; None for the cheaper transport. With
            ``CollectiveTransport()`` a trace shows the collectives by name.
        keep_buffers: whether the memory of a bucket is reused for the next one; None: on the CPU only
            (``sharding.transport`` gives the reason).
        find_unused_parameters: allows parameters without a gradient, as in ``DDP``. A parameter that no rank
            used keeps the gradient None.

    ``no_sync``, ``finish_grad_sync`` and errors are as in ``DDP``. After backward, the gradients are in
    ``.grad`` of the shards of the optimiser. ``.grad`` of the parameters is a ``RemoteGrad`` without memory,
    on which ``nn.utils.clip_grad_norm_`` and ``torch.amp.GradScaler`` work. ``clip_grad_norm_`` and
    ``ShardedGradScaler`` need fewer messages.

    Raises:
        UserError: there is no process group; a parameter has no gradient (see ``find_unused_parameters``), a
            sparse gradient, or two gradients in one backward pass; the module was changed after wrapping
            (``held_params``); an embedding has ``max_norm``.
    """

    holds_every_param = True
    takes_added_grads = False

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None = None,
        *,
        split: PartitionBy = PartitionBy.ELEMENTS,
        bucket_bytes: int = 25 * MIB,
        transport: Transport | None = None,
        keep_buffers: bool | None = None,
        find_unused_parameters: bool = False,
    ) -> None:
        super().__init__()
        group = process_group(group, "ShardedDDP")
        refuse_max_norm(module)
        self.module = module
        self.group: dist.ProcessGroup = group
        broadcast_packed([*module.parameters(), *module.buffers()], group, bucket_bytes)
        names = {param: name for name, param in module.named_parameters() if param.requires_grad}
        # Autograd computes the gradients of the last layer first, so its parameters are in the first bucket.
        self.partition = Partition(
            reversed(names), group, split=split, bucket_bytes=bucket_bytes, transport=transport
        )
        self._device = device = next(iter(names), torch.empty(0)).device
        self.pool = BufferPool(device, keep_buffers if keep_buffers is not None else device.type == "cpu")
        transport = transport or default_transport(group, device)
        self.buckets = [
            FlatGradPack(bucket, names, self.partition, self.pool, transport)
            for bucket in self.partition.buckets
        ]
        self._grad_reduction: GradReduceScatter[PackedGrad] = GradReduceScatter(
            self.buckets,
            [group],
            device,
            find_unused=find_unused_parameters,
        )
        self.partition.discard_unaveraged = self._grad_reduction.discard
        self._held = HeldModule(module, list(module.parameters()), "ShardedDDP")
        for bucket in self.buckets:
            for slot in bucket.trained:
                hook: Callable[[Tensor], None] = functools.partial(
                    self._grad_reduction.on_gradient, bucket, slot
                )
                slot.entry.param.register_hook(functools.partial(_drop_remote_grad, slot.entry.param))
                slot.entry.param.register_post_accumulate_grad_hook(hook)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            self._held.check()
            self.partition.check()
        self._grad_reduction.recover()
        self.pool.release()  # free the buffers of the last backward, because forward needs the memory first
        if torch.is_grad_enabled():
            # In the order of forward: the bucket of the first layers is last
            for bucket in reversed(self.buckets):
                self._grad_reduction.expect(bucket)
        return self.module(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the shards, and those of ``no_sync`` that are not averaged yet."""
        self.partition.discard_unaveraged()
        for param in self.parameters():
            param.grad = None
        for piece in self.partition.pieces.values():
            if set_to_none:
                piece.shard.grad = None
            elif piece.shard.grad is not None:
                piece.shard.grad.zero_()

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside the context accumulate whole gradients on this rank, without a reduction.
        The next backward pass outside averages their sum."""
        return without_sync(self._grad_reduction)

    def finish_grad_sync(self) -> None:
        """Average the gradients that are not averaged yet. After a backward pass outside ``no_sync`` there
        are none."""
        self._grad_reduction.finish()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their norm over all ranks is at most ``max_norm``.

        Args:
            norm_type: p > 0 of the p-norm; ``math.inf`` for the largest absolute value.

        Returns the norm before scaling, () fp64, the same on every rank.
        """
        pieces = (piece.shard for piece in self.partition.pieces.values())
        return clip_sharded_grad_norm_(pieces, max_norm, [self.group], self._device, norm_type=norm_type)

    def shards(self) -> list[ParamShard]:
        """Return the parameters of the module, which are whole. Only the gradients and the optimiser state
        are sharded."""
        return whole_params(self.module)

    def unwrapped(self) -> list[nn.Module]:
        return [self.module]

    def observe_memory(self, observer: MemoryObserver) -> None:
        """Report the buffers of packed gradients. The optimiser reports the flat memory of the parameters."""
        self.pool.on_take = lambda message: observer.buffers([message])


def _drop_remote_grad(param: Tensor, gradient: Tensor) -> None:
    """Clear ``.grad`` before autograd adds ``gradient`` to it. The shard keeps what was averaged before."""
    if isinstance(param.grad, RemoteGrad):
        param.grad = None
