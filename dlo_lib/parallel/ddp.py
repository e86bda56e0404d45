"""Data parallelism: every rank holds the whole model, sees its own part of the batch, and the ranks average their gradients.

Gradients are copied as they arrive into buckets, flat tensors ordered as backward produces them, and a full bucket is averaged by an
asynchronous all-reduce while backward computes the gradients of the layers before it. Only the last bucket's communication, and what
did not fit behind the computation, is waited for.

    gradient = sum over ranks of (rank's gradient / N)          divided before the sum: no overflow in fp16, and the division costs
                                                                nothing because it is the copy into the bucket

Bytes sent per rank and step: 2 * B_g * (N-1)/N, with B_g the bytes of all gradients (ring all-reduce), however many micro-batches are
accumulated in ``no_sync``. Memory beside the model's own: with gradients as bucket views none but a bucket in the making, for the
buckets *are* the gradients, and go with ``zero_grad`` unless they are kept; without, B_g more, all the time.

Paper: S. Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training (arXiv:2006.15704).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.errors import UserError
from dlo_lib.parallel.buckets import Bucket, Slot, broadcast_from_first, cut_into_buckets

MIB = 2**20


class DDP(nn.Module):
    """``module`` with its gradients averaged over ``group`` at the end of every backward pass.

    Args:
        module: the same on every rank in structure; parameters and buffers take the values of the group's first rank.
            Parameters that do not require gradients when it is wrapped stay out of the communication.
        group: the ranks; None for all.
        bucket_bytes: the most a bucket holds (a larger parameter is a bucket of its own).
        first_bucket_bytes: the same for the first bucket, small so that communication starts early.
        gradient_as_bucket_view: ``.grad`` is a view of the bucket; False keeps buckets and gradients apart and copies back.
        keep_buckets: whether views' buckets keep their memory from ``zero_grad`` to the next backward. None: on CPU only. There, memory
            that was given back costs a page fault for every 4 KiB when it is taken again; an accelerator's caching allocator has
            it back for nothing, and meanwhile forward can use it.
        broadcast_buffers: before each training forward that will be synchronised, persistent buffers (running statistics) take
            the first rank's values. Buffers that are no part of a checkpoint are constants and are sent only once, at the start.
        find_unused_parameters: allow parameters that get no gradient. One that some rank used gets the average (a rank without
            contributes zeros); one that no rank used keeps None. Costs one more small all-reduce a step, because a rank cannot
            know by itself what the others used. Without it a missing gradient raises.

    Gradients accumulate as without DDP, in ``no_sync`` (cheap) or with an average per backward (right as well). Backward hooks do all
    the work, so a plain ``loss.backward()`` is enough; ``finish_grad_sync`` is needed only where backward may have reached no
    parameter at all on some rank. After an exception inside backward, zero the gradients before the next one.

    Raises:
        UserError: no process group; ranks hold different modules; a parameter without gradient (see above), unfrozen after wrapping,
            with a sparse gradient, or reached twice in one backward (reentrant checkpointing).
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None = None,
        *,
        bucket_bytes: int = 25 * MIB,
        first_bucket_bytes: int = 1 * MIB,
        gradient_as_bucket_view: bool = True,
        keep_buckets: bool | None = None,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
    ) -> None:
        super().__init__()
        group = group if group is not None else dist.group.WORLD
        if group is None:
            raise UserError("DDP needs a process group: start with torchrun or srun, or call launch.run_ranks")
        self.module = module
        self.group: dist.ProcessGroup = group
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.find_unused_parameters = find_unused_parameters
        self._bucket_bytes, self._first_bucket_bytes = bucket_bytes, first_bucket_bytes
        self._world_size = dist.get_world_size(group)
        self._device = next(module.parameters(), torch.empty(0)).device
        self._keep_buckets = keep_buckets if keep_buckets is not None else self._device.type == "cpu"
        self._named_params = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
        self._frozen = [param for param in module.parameters() if not param.requires_grad]
        self._check_same_module()
        broadcast_from_first([*module.parameters(), *module.buffers()], group, bucket_bytes)
        saved = {id(tensor) for tensor in module.state_dict(keep_vars=True).values()} if broadcast_buffers else set()
        self._running_buffers = [buffer for buffer in module.buffers() if id(buffer) in saved]

        self._sync = True  # False inside no_sync
        self._unsynced = False  # a forward has been run whose gradients are not averaged yet
        self._end_of_backward: weakref.ref[Callable[[], None]] | None = None  # set while a backward pass runs
        self._launched = 0  # buckets[:launched] are on their way
        self._arrivals: list[int] | None = []  # the order of the first pass; None once the buckets follow it
        self._make_buckets(list(reversed(range(len(self._named_params)))))  # the last layer's gradient comes first
        weak_self = weakref.ref(self)  # hooks must not keep a discarded DDP alive, or it would go on communicating
        hooks = [
            param.register_post_accumulate_grad_hook(functools.partial(_call_on_gradient, weak_self, index))
            for index, (_, param) in enumerate(self._named_params)
        ]
        weakref.finalize(self, lambda: [hook.remove() for hook in hooks])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._recover()
        if torch.is_grad_enabled():
            if any(param.requires_grad for param in self._frozen):
                raise UserError("a parameter was unfrozen after DDP had wrapped the module: unfreeze first, then wrap again")
            if self.training and self._sync and self._running_buffers:
                broadcast_from_first(self._running_buffers, self.group, self._bucket_bytes)
            self._unsynced = True
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add to the local gradients without communication; the next one outside averages the sum."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def finish_grad_sync(self) -> None:
        """Average what is not averaged yet; nothing is left to do after a backward pass outside ``no_sync``."""
        self._recover()
        if self._unsynced:
            self._finish()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own, without a prefix: a checkpoint does not know how it was trained."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def __getstate__(self) -> Any:
        raise UserError("a DDP cannot be copied or pickled, for it belongs to a process group: copy its .module and wrap the copy")

    def _check_same_module(self) -> None:
        layout = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in [*self.module.parameters(), *self.module.buffers()]]
        trained = [name for name, _ in self._named_params]
        mine = zlib.crc32(repr((layout, trained)).encode())
        if self._from_first([mine]) != [mine]:
            raise UserError("this rank's module differs from the first rank's in its parameters: build the same one on every rank")

    def _from_first(self, values: list[int]) -> list[int]:
        """The first rank's ``values``; the fake backend delivers nothing, so there everyone keeps its own."""
        tensor = torch.tensor(values, dtype=torch.int64, device=self._device)
        dist.broadcast(tensor, dist.get_global_rank(self.group, 0), group=self.group)
        return values if dist.get_backend(self.group) == "fake" else tensor.tolist()

    def _make_buckets(self, order: list[int]) -> None:
        """Cut the parameters into buckets in the ``order`` (indices) in which their gradients are expected."""
        params = [self._named_params[index][1] for index in order]
        self._buckets: list[Bucket] = []
        slots: dict[int, Slot] = {}
        for positions in cut_into_buckets(params, self._bucket_bytes, self._first_bucket_bytes):
            bucket = Bucket()
            for index in (order[position] for position in positions):
                slots[index] = bucket.add(index, *self._named_params[index], len(self._buckets))
            self._buckets.append(bucket)
        self._slots = [slots[index] for index in range(len(slots))]

    def _on_gradient(self, index: int) -> None:
        """``.grad`` of a parameter is complete: into its bucket with it, and off with every bucket whose turn has come."""
        if not self._sync:
            return
        if self._end_of_backward is None or self._end_of_backward() is None:
            self._recover()
            end = functools.partial(self._finish)  # kept alive by the engine alone, so its death tells of an interrupted backward
            self._end_of_backward = weakref.ref(end)
            torch.autograd.Variable._execution_engine.queue_callback(end)
        slot = self._slots[index]
        if slot.arrived:
            raise UserError(f"{slot.name} got a second gradient in one backward: use checkpoint(..., use_reentrant=False)")
        self._put(slot)
        if self._arrivals is not None:
            self._arrivals.append(index)
        # Strictly in the order of the buckets, which is the same on every rank; the order of arrival need not be.
        while self._launched < len(self._buckets) and not self._buckets[self._launched].missing:
            self._launch()

    def _put(self, slot: Slot) -> None:
        grad = slot.param.grad
        assert grad is not None
        if grad.layout is not torch.strided:
            raise UserError(f"{slot.name} has a sparse gradient, which DDP does not average: use sparse=False in its embedding")
        bucket = self._buckets[slot.bucket]
        view = bucket.view(slot)
        torch.div(grad, self._world_size, out=view)
        if self.gradient_as_bucket_view:
            slot.param.grad = view  # what autograd had made is freed here
        slot.arrived = True
        bucket.missing -= 1

    def _launch(self) -> None:
        bucket = self._buckets[self._launched]
        self._launched += 1
        # Meets the same bucket of the other ranks; backward goes on meanwhile, and _finish waits.
        bucket.work = dist.all_reduce(bucket.allocate(), group=self.group, async_op=True)

    def _recover(self) -> None:
        """After an exception inside backward: the engine has dropped our callback without calling it.

        The other ranks may have come further or not so far. So this one issues what it still owes them, and since its gradients
        are missing there, it sends NaN: nobody steps on a sum that is not one without seeing it.
        """
        if self._end_of_backward is not None and self._end_of_backward() is None:
            self._finish(interrupted=True)

    def _finish(self, interrupted: bool = False) -> None:
        """Launch the buckets that lack gradients, wait for all, and leave the averages in ``.grad``."""
        self._end_of_backward = None
        self._unsynced = False
        absent: list[Slot] = []
        try:
            while self._launched < len(self._buckets):
                bucket = self._buckets[self._launched]
                for slot in bucket.slots:
                    if not slot.arrived and slot.param.grad is not None:  # from an earlier micro-batch
                        self._put(slot)
                    elif not slot.arrived:
                        bucket.view(slot).zero_()
                        absent.append(slot)
                if interrupted:
                    bucket.allocate().fill_(torch.nan)
                self._launch()
            used = self._used_anywhere(absent) if self.find_unused_parameters else []
            for bucket in self._buckets:
                assert bucket.work is not None
                bucket.work.wait()
            if not interrupted:
                self._hand_over(used)
        finally:
            self._launched = 0
            for bucket in self._buckets:
                bucket.reset(self._keep_buckets or not self.gradient_as_bucket_view)
        if self._arrivals is not None:
            never = set(range(len(self._slots))).difference(self._arrivals)
            self._make_buckets(self._from_first(self._arrivals + sorted(never, reverse=True)))
            self._arrivals = None
        unexpected = [slot.name for slot in sorted(absent, key=lambda slot: slot.index) if slot.param.requires_grad]
        if unexpected and not self.find_unused_parameters and not interrupted:
            raise UserError(
                f"no gradient on this rank for {', '.join(unexpected)}: freeze what is not trained before wrapping, "
                "or pass find_unused_parameters=True"
            )

    def _used_anywhere(self, absent: list[Slot]) -> list[Slot]:
        """Those of ``absent`` that got a gradient on another rank."""
        missing = {slot.index for slot in absent}
        flags = [int(index not in missing) for index in range(len(self._slots))]
        used = torch.tensor(flags, dtype=torch.int32, device=self._device)
        dist.all_reduce(used, dist.ReduceOp.MAX, group=self.group)
        if not absent:
            return []  # spares an accelerator the wait for the host to read
        flags = used.tolist()
        return [slot for slot in absent if flags[slot.index]]

    def _hand_over(self, used: list[Slot]) -> None:
        """Give the averages to parameters whose ``.grad`` is not their bucket's view already."""
        for slot in self._slots if not self.gradient_as_bucket_view else used:
            view = self._buckets[slot.bucket].view(slot)
            if slot.param.grad is not None:
                slot.param.grad.copy_(view)
            elif slot in used:
                slot.param.grad = view if self.gradient_as_bucket_view else view.clone()


def _call_on_gradient(ddp: weakref.ref[DDP], index: int, param: Tensor) -> None:
    alive = ddp()
    if alive is not None:
        alive._on_gradient(index)
