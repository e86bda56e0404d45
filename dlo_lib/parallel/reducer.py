"""The gradients of a data-parallel backward pass: into buckets as they arrive, and averaged over the ranks while others are computed.

A bucket is sent when it is full and every bucket before it has been sent: strictly in their order, which is the same on every rank,
while the order in which gradients arrive need not be. What did not hide behind computation is waited for at the end of backward.

    gradient = sum over ranks of (rank's gradient / N)

The first pass records the order in which gradients were complete on the first rank, and the buckets are cut anew to follow it.

Paper: S. Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training (arXiv:2006.15704), section 3.2.
"""

from __future__ import annotations

import enum

import torch
import torch.distributed as dist
from torch import nn

from dlo_lib.errors import UserError
from dlo_lib.parallel.backward_pass import BackwardPass, used_on_any_rank
from dlo_lib.parallel.buckets import Bucket, Slot, cut_into_buckets
from dlo_lib.parallel.comm_hooks import CommHook, GradBucket
from dlo_lib.parallel.join import Joining, Phase
from dlo_lib.parallel.static_graph import StaticGraph


class End(enum.Enum):
    """How a backward pass came to its end on this rank: as it should, by an exception, or it was the other ranks' alone."""

    COMPLETE = enum.auto()
    INTERRUPTED = enum.auto()
    SHADOW = enum.auto()


class Reducer:
    """Averages the gradients of ``named_params`` over ``group``; the arguments are those of :class:`DDP`."""

    def __init__(
        self,
        named_params: list[tuple[str, nn.Parameter]],
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        bucket_bytes: int,
        first_bucket_bytes: int,
        gradient_as_bucket_view: bool,
        keep_buckets: bool,
        comm_hook: CommHook,
        static_graph: bool,
        find_unused_parameters: bool,
    ) -> None:
        self.sync = True
        """False inside ``no_sync``."""
        self.unsynced = False
        """A forward has been run whose gradients are not averaged yet."""
        self.joining: Joining | None = None
        """Set inside ``join``."""
        self._named_params, self._group, self._device = named_params, group, device
        self._bucket_bytes, self._first_bucket_bytes = bucket_bytes, first_bucket_bytes
        self._views, self._keep_buckets, self._find_unused = gradient_as_bucket_view, keep_buckets, find_unused_parameters
        self._comm_hook = comm_hook
        self._static = StaticGraph([name for name, _ in named_params]) if static_graph else None
        self._world_size = self._divisor = dist.get_world_size(group)
        self._pass = BackwardPass()
        self._launched = 0  # buckets[:launched] are on their way
        self._arrivals: list[int] | None = []  # the order of the first pass; None once the buckets follow it
        self._make_buckets(list(reversed(range(len(named_params)))))  # the last layer's gradient comes first

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
        self._slots = slots

    def on_gradient(self, index: int) -> None:
        """``.grad`` of a parameter is complete: into its bucket with it, and off with every bucket whose turn has come."""
        if not self.sync:
            return
        self.begin()
        if self._arrivals is not None:
            self._arrivals.append(index)
        if self._static is not None and not self._static.arrived(index):
            return
        slot = self._slots[index]
        if slot.arrived:
            raise UserError(
                f"{slot.name} got a second gradient in one backward: use checkpoint(..., use_reentrant=False), or static_graph=True"
            )
        self._put(slot)
        # Strictly in the order of the buckets, which is the same on every rank; the order of arrival need not be.
        while self._launched < len(self._buckets) and not self._buckets[self._launched].missing:
            self._launch()

    def begin(self) -> None:
        """Once in each backward, at the latest with its first gradient."""
        if not self._pass.running:
            self.recover()
            self._pass.begin(self.finish)
            self.announce()

    def announce(self) -> None:
        """Tell ranks that have run out of batches that gradients follow."""
        self._divisor = self._world_size if self.joining is None else self.joining.divisor(self.joining.announce(Phase.GRADIENTS))

    def _put(self, slot: Slot) -> None:
        grad = slot.param.grad
        assert grad is not None
        if grad.layout is not torch.strided:
            raise UserError(f"{slot.name} has a sparse gradient, which DDP does not average: use sparse=False in its embedding")
        bucket = self._buckets[slot.bucket]
        view = bucket.view(slot)
        torch.div(grad, self._divisor, out=view)
        if self._views:
            slot.param.grad = view  # what autograd had made is freed here
        slot.arrived = True
        bucket.missing -= 1

    def _launch(self) -> None:
        bucket = self._buckets[self._launched]
        self._launched += 1
        # Meets the same bucket of the other ranks; backward goes on meanwhile, and _finish waits.
        bucket.work = self._comm_hook(GradBucket(bucket, self._launched - 1, self._launched == len(self._buckets), self._group))

    def recover(self) -> None:
        """After an exception inside backward.

        The other ranks may have come further or not so far. So this one issues what it still owes them, and since its gradients
        are missing there, it sends NaN: nobody steps on a sum that is not one without seeing it.
        """
        if self._pass.interrupted:
            self.finish(End.INTERRUPTED)

    def finish(self, end: End = End.COMPLETE) -> None:
        """Launch the buckets that lack gradients, wait for all, and leave the averages in ``.grad``."""
        self._pass.end()
        self.unsynced = False
        absent: list[Slot] = []
        try:
            while self._launched < len(self._buckets):
                bucket = self._buckets[self._launched]
                for slot in bucket.slots:
                    if not slot.arrived and slot.param.grad is not None:  # from an earlier micro-batch, or not known to be complete
                        self._put(slot)
                    elif not slot.arrived:
                        bucket.view(slot).zero_()
                        absent.append(slot)
                if end is End.INTERRUPTED:
                    bucket.allocate().fill_(torch.nan)
                self._launch()
            learning = self._static is not None and self._arrivals is not None
            used: set[int] | None = None  # None: all
            if self._find_unused or learning:
                used = self._used_anywhere([] if end is End.INTERRUPTED else absent)
            for bucket in self._buckets:
                assert bucket.work is not None
                bucket.work.wait()
            if end is not End.INTERRUPTED:
                expected = used is None and self._static is None and end is End.COMPLETE  # then an absent gradient is an error
                self._hand_over([] if expected else [slot for slot in absent if used is None or slot.index in used])
        finally:
            self._launched = 0
            for bucket in self._buckets:
                bucket.reset(self._keep_buckets or not self._views)
        if self._arrivals is not None:
            self._follow_arrivals(self._arrivals, used if learning else None)
        self._check_pass(absent, end)

    def _follow_arrivals(self, arrivals: list[int], used: set[int] | None) -> None:
        """Cut the buckets anew, in the order in which the first rank's gradients were complete, without those nobody uses."""
        last_first = list(dict.fromkeys(reversed(arrivals)))
        never = set(range(len(self._named_params))).difference(last_first)
        order = from_first(last_first[::-1] + sorted(never, reverse=True), self._group, self._device)
        self._make_buckets([index for index in order if used is None or index in used])
        self._arrivals = None

    def _check_pass(self, absent: list[Slot], end: End) -> None:
        if self._static is not None:
            self._static.end_of_pass() if end is End.COMPLETE else self._static.forget_pass()
        elif end is End.COMPLETE and not self._find_unused:
            unexpected = [slot.name for slot in sorted(absent, key=lambda slot: slot.index) if slot.param.requires_grad]
            if unexpected:
                raise UserError(
                    f"no gradient on this rank for {', '.join(unexpected)}: freeze what is not trained before wrapping, "
                    "or pass find_unused_parameters=True"
                )

    def _used_anywhere(self, absent: list[Slot]) -> set[int] | None:
        """Indices of parameters that got a gradient on some rank; None where this rank need not know."""
        missing = {slot.index for slot in absent}
        flags = [index in self._slots and index not in missing for index in range(len(self._named_params))]
        used = used_on_any_rank(flags, [self._group], self._device)
        if not absent and self._static is None:
            return None  # spares an accelerator the wait for the host to read
        return {index for index, flag in enumerate(used.tolist()) if flag}

    def _hand_over(self, used: list[Slot]) -> None:
        """Give the averages to parameters whose ``.grad`` is not their bucket's view already."""
        for slot in self._slots.values() if not self._views else used:
            view = self._buckets[slot.bucket].view(slot)
            if slot.param.grad is not None:
                slot.param.grad.copy_(view)
            elif slot in used:
                slot.param.grad = view if self._views else view.clone()


def from_first(values: list[int], group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """The first rank's ``values``; the fake backend delivers nothing, so there everyone keeps its own."""
    tensor = torch.tensor(values, dtype=torch.int64, device=device)
    dist.broadcast(tensor, dist.get_global_rank(group, 0), group=group)
    return values if dist.get_backend(group) == "fake" else tensor.tolist()
