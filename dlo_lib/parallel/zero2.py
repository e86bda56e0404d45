"""ZeRO stage 2: gradients, too, are kept in shards; each goes to the rank that updates its parameter, during backward.

Stage 1 needs only its own part of the averaged gradients, so nobody has to hold the rest. Gradients are packed into buckets as they arrive;
a full bucket is reduce-scattered while backward goes on, and what autograd had made is freed. The optimiser finds its part and sends the
updates to all, as in stage 1.

    gradients packed, whole  [ A A A A B B | B B C C C C | C D D D - - ]   ->   rank 1 keeps  [ B B C C C C ]  of the mean

Memory per rank at rest, fp32 and AdamW: 4 Psi + 12 Psi/N bytes (4 weight + 4/N gradient + 8/N optimiser), and two buckets during backward.
Bytes sent: B_g f + B_p f, f = (N-1)/N: as much as DDP's all-reduce, which is a reduce-scatter and an all-gather too; times the backward
passes for the former, where each synchronises. In ``no_sync`` whole gradients are kept, packed.

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

from dlo_lib.errors import UserError
from dlo_lib.parallel.backward_pass import without_sync
from dlo_lib.parallel.buckets import broadcast_packed
from dlo_lib.parallel.clip import clip_sharded_grad_norm_
from dlo_lib.parallel.partition import FlatBucket, Partition, Place, Split
from dlo_lib.parallel.pool import Pool
from dlo_lib.parallel.reduction import Reduction
from dlo_lib.parallel.wire import Wire, best_wire

MIB = 2**20


@dataclass(eq=False)
class Slot:
    """A parameter of a bucket: ``arrived`` in this pass, ``filled`` in this or one before that was not sent."""

    name: str
    place: Place
    arrived: bool = False
    filled: bool = False


class GradientBucket:
    """The gradients of a bucket of parameters, laid out as these are, on their way to their owners."""

    def __init__(self, bucket: FlatBucket, names: dict[nn.Parameter, str], partition: Partition, pool: Pool, wire: Wire) -> None:
        self.trained = [Slot(names[place.param], place) for place in bucket.places]
        self.missing = len(self.trained)
        self._bucket, self._partition, self._pool, self._wire = bucket, partition, pool, wire
        self._packed: Tensor | None = None
        self._mine: Tensor | None = None

    def _view(self, slot: Slot) -> Tensor:
        flat, place = self._bucket.flat, slot.place
        if self._packed is None:
            self._packed = self._pool.take(flat.numel(), flat.dtype)
            if sum(other.place.param.numel() for other in self.trained) < flat.numel():
                self._packed.zero_()  # the padding, which is sent along
        return self._packed.as_strided(place.param.shape, place.strides, place.offset)

    @torch.no_grad()
    def pack(self, slot: Slot, gradient: Tensor) -> None:
        view, ranks = self._view(slot), self._partition.ranks
        # Divided here, where it costs nothing, and before the sum: no overflow in fp16.
        view.add_(gradient, alpha=1 / ranks) if slot.filled else torch.div(gradient, ranks, out=view)
        self.missing -= not slot.arrived
        slot.arrived = slot.filled = True

    @torch.no_grad()
    def start_reduce(self) -> list[Slot]:
        absent = [slot for slot in self.trained if not slot.filled]
        for slot in absent:
            self._view(slot).zero_()
        assert self._packed is not None
        first, last = self._partition.part_of(self._bucket)
        if self._bucket.owner is None:
            self._mine = self._packed.new_empty(last - first)
            self._summed = self._wire.reduce_scatter(self._mine, self._packed, self._partition.group, self._pool)
        else:
            work = dist.reduce(self._packed, group=self._partition.group, group_dst=self._bucket.owner, async_op=True)
            assert work is not None
            self._mine, self._summed = self._packed[first:last], work.wait
        for slot in self.trained:
            slot.filled = False
        return absent

    @torch.no_grad()
    def settle_reduce(self) -> None:
        self._summed()
        del self._summed  # and with it what was sent
        self._give_packed()

    @torch.no_grad()
    def hand_over(self, unused: set[Slot]) -> None:
        assert self._mine is not None
        first, _ = self._partition.part_of(self._bucket)
        for slot in self.trained:
            piece = self._partition.pieces.get(slot.place.param)
            if piece is None:
                continue
            start = slot.place.offset + piece.start - first
            part = self._mine[start : start + piece.stop - piece.start]
            shaped = part.as_strided(slot.place.param.shape, piece.strides, part.storage_offset()) if piece.whole else part
            mean = shaped.to(piece.shard.device, piece.shard.dtype)
            if piece.shard.grad is not None:
                piece.shard.grad.add_(mean)
            elif slot not in unused:
                piece.shard.grad = mean
        self._mine = None

    def drop_gradients(self) -> None:
        self._mine = None
        self._give_packed()
        for slot in self.trained:
            slot.filled = False

    def _give_packed(self) -> None:
        if self._packed is not None and (self._bucket.owner is None or self._bucket.owner != self._partition.rank):
            self._pool.give(self._packed)  # an owner of it all keeps it: it has become its gradients
        self._packed = None

    def end_pass(self) -> None:
        self.missing = len(self.trained)
        for slot in self.trained:
            slot.arrived = False


class ShardedDDP(nn.Module):
    """``module`` whose averaged gradients each go to the rank that updates the parameter. Make the optimiser afterwards, as
    ``ShardedOptimizer(model.parameters(), optimizer_cls, partition=model.partition)``.

    Args:
        module: the same on every rank in structure; parameters and buffers take the values of the group's first rank. Parameters are
            moved into flat memory (``parallel.partition``), so it must be on its device.
        group: the ranks; None for all.
        split: what is dealt out; ``Split.PARAMETERS`` for optimisers that need whole ones (``zero.ELEMENTWISE`` lists those that do not).
        bucket_bytes: the most a bucket holds (a larger parameter is a bucket of its own).
        wire: how gradients and updates travel; None for the cheaper way. ``Collectives()`` shows a trace their names.
        keep_buffers: whether the memory of buckets is kept for the next one. None: on CPU only (``parallel.pool`` says why).
        find_unused_parameters: as for ``DDP``: allow parameters without gradient. One that no rank used keeps None.

    ``no_sync``, ``finish_grad_sync`` and errors are as for ``DDP``. After backward ``.grad`` of the parameters is None: gradients are
    with the optimiser, in ``.grad`` of its pieces, so clip with ``clip_grad_norm_`` and scale with ``ShardedGradScaler``.

    Raises:
        UserError: no process group; a parameter without gradient (see above), with a sparse one, or reached twice in one backward.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None = None,
        *,
        split: Split = Split.ELEMENTS,
        bucket_bytes: int = 25 * MIB,
        wire: Wire | None = None,
        keep_buffers: bool | None = None,
        find_unused_parameters: bool = False,
    ) -> None:
        super().__init__()
        group = group if group is not None else dist.group.WORLD
        if group is None:
            raise UserError("ShardedDDP needs a process group: start with torchrun or srun, or call launch.run_ranks")
        self.module = module
        self.group: dist.ProcessGroup = group
        broadcast_packed([*module.parameters(), *module.buffers()], group, bucket_bytes)
        names = {param: name for name, param in module.named_parameters() if param.requires_grad}
        # The last layer's gradients come first, so its parameters are in the first bucket.
        self.partition = Partition(reversed(names), group, split=split, bucket_bytes=bucket_bytes, wire=wire)
        self._device = device = next(iter(names), torch.empty(0)).device
        self.pool = Pool(device, keep_buffers if keep_buffers is not None else device.type == "cpu")
        wire = wire or best_wire(group, device)
        self.buckets = [GradientBucket(bucket, names, self.partition, self.pool, wire) for bucket in self.partition.buckets]
        self._reduction: Reduction[Slot] = Reduction(self.buckets, [group], device, find_unused=find_unused_parameters)
        for bucket in self.buckets:
            for slot in bucket.trained:
                hook: Callable[[Tensor], None] = functools.partial(self._reduction.on_gradient, bucket, slot)
                slot.place.param.register_post_accumulate_grad_hook(hook)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._reduction.recover()
        self.pool.release()  # as in FSDP: needed late, when this forward's activations have gone
        if torch.is_grad_enabled():
            for bucket in reversed(self.buckets):  # that of the first layers fills last
                self._reduction.expect(bucket)
        return self.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside add to local, whole gradients; the next one outside averages the sum."""
        return without_sync(self._reduction)

    def finish_grad_sync(self) -> None:
        """Average what is not averaged yet; nothing is left to do after a backward pass outside ``no_sync``."""
        self._reduction.finish()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their 2-norm over all ranks is at most ``max_norm``; the norm before, ()."""
        pieces = (piece.shard for piece in self.partition.pieces.values())
        return clip_sharded_grad_norm_(pieces, max_norm, self.group, self._device)
