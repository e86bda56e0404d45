"""Averages the gradients of a data-parallel backward pass. Gradients are copied into buckets, and full
buckets are all-reduced while autograd computes the other gradients.

A bucket is sent when it is full and all buckets before it have been sent. The order of the buckets is the
same on every rank, although the order in which autograd computes the gradients may differ. The communication
that does not overlap with computation is waited for at the end of backward.

    gradient = sum over ranks of (gradient of the rank / N)

The first pass records the order in which the gradients of the first rank are complete. The buckets are then
rebuilt in this order.

Paper: S. Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training
(arXiv:2006.15704), section 3.2.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from dlo_lib.base.errors import UserError
from dlo_lib.parallel.backward_pass import BackwardPass, used_on_any_rank
from dlo_lib.parallel.ddp.comm_hooks import CommHook
from dlo_lib.parallel.ddp.grad_bucket import GradBucket, GradSlot
from dlo_lib.parallel.ddp.join import JoinContext, JoinPhase
from dlo_lib.parallel.ddp.static_graph import StaticGraph
from dlo_lib.parallel.sharding.buckets import cut_into_buckets


class PassEnd(enum.Enum):
    """How a backward pass ended on this rank: complete, by an exception, or it was a pass of the other ranks
    only."""

    COMPLETE = enum.auto()
    INTERRUPTED = enum.auto()
    SHADOW = enum.auto()


class GradAllReduce:
    """Averages the gradients of ``named_params`` over ``group``. The arguments are those of :class:`DDP`."""

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
        reduced_over: Mapping[nn.Parameter, dist.ProcessGroup],
    ) -> None:
        self.sync = True
        """False inside ``no_sync``."""
        self.unsynced = False
        """Whether a forward has run whose gradients are not averaged yet."""
        self.join_context: JoinContext | None = None
        """Set inside ``DDP.join``."""
        self._named_params, self._group, self._device = named_params, group, device
        self._bucket_bytes, self._first_bucket_bytes = bucket_bytes, first_bucket_bytes
        self._views, self._keep_buckets = gradient_as_bucket_view, keep_buckets
        self._find_unused = find_unused_parameters
        self._reduced_over = reduced_over
        self._comm_hook = comm_hook
        self._static = StaticGraph([name for name, _ in named_params]) if static_graph else None
        self._world_size = self._divisor = dist.get_world_size(group)
        self._pass = BackwardPass()
        self._launched = 0  # the all-reduces of buckets[:launched] have started
        # The order of the first pass; None after the buckets are rebuilt
        self._arrivals: list[int] | None = []
        # Autograd computes the gradient of the last layer first.
        self._make_buckets(list(reversed(range(len(named_params)))))

    def _make_buckets(self, order: list[int]) -> None:
        """Cut the parameters into buckets in the ``order`` (indices) in which their gradients are
        expected."""
        by_group: dict[dist.ProcessGroup, list[int]] = {self._group: []}
        for position, index in enumerate(order):
            ranks = self._reduced_over.get(self._named_params[index][1], self._group)
            by_group.setdefault(ranks, []).append(position)
        cut: list[tuple[list[int], dist.ProcessGroup]] = []
        for ranks, members in by_group.items():
            params = [self._named_params[order[position]][1] for position in members]
            found = cut_into_buckets(params, self._bucket_bytes, self._first_bucket_bytes)
            cut += [([members[number] for number in numbers], ranks) for numbers in found]
        self._buckets: list[GradBucket] = []
        slots: dict[int, GradSlot] = {}
        for positions, ranks in sorted(cut, key=lambda entry: entry[0][-1]):  # in the order of completion
            bucket = GradBucket(len(self._buckets), ranks)
            for index in (order[position] for position in positions):
                slots[index] = bucket.add(index, *self._named_params[index])
            self._buckets.append(bucket)
        for bucket in self._buckets[-1:]:
            bucket.is_last = True
        self._slots = slots

    def on_gradient(self, index: int) -> None:
        """Copy a complete gradient to its bucket, and launch the all-reduce of every bucket that is ready, in
        order."""
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
                f"{slot.name} got a second gradient in one backward: "
                "use checkpoint(..., use_reentrant=False), or static_graph=True",
            )
        self._copy_to_bucket(slot)
        # Launch in the order of the buckets, which is the same on every rank. The order of gradients may
        # differ.
        while self._launched < len(self._buckets) and not self._buckets[self._launched].missing:
            self._launch()

    def begin(self) -> None:
        """Begin a backward pass, unless it has begun; called at the latest with the first gradient."""
        if not self._pass.running:
            self.recover()
            self._pass.begin(self.finish)
            self.announce()

    def announce(self) -> None:
        """Inside ``DDP.join``, announce the reduction of gradients to the ranks that have no batch left."""
        self._divisor = self._world_size
        if self.join_context is not None:
            self._divisor = self.join_context.divisor(self.join_context.announce(JoinPhase.GRADIENTS))

    def _copy_to_bucket(self, slot: GradSlot) -> None:
        grad = slot.param.grad
        assert grad is not None
        if grad.layout is not torch.strided:
            raise UserError(
                f"{slot.name} has a sparse gradient, which DDP does not average: "
                "use sparse=False in its embedding",
            )
        bucket = self._buckets[slot.bucket]
        view = bucket.view(slot)
        torch.div(grad, self._divisor, out=view)
        if self._views:
            slot.param.grad = view  # frees the gradient that autograd allocated
        slot.arrived = True
        bucket.missing -= 1

    def _launch(self) -> None:
        bucket = self._buckets[self._launched]
        self._launched += 1
        bucket.work = self._comm_hook(bucket)  # overlaps with backward; ``finish`` waits for it

    def recover(self) -> None:
        """Finish a backward pass that an exception has interrupted.

        Other ranks may have started more collectives, or fewer. This rank therefore issues the remaining
        collectives, with buckets of NaN, because its gradients are missing. The incomplete sum is then
        visible on every rank.
        """
        if self._pass.interrupted:
            self.finish(PassEnd.INTERRUPTED)

    def finish(self, end: PassEnd = PassEnd.COMPLETE) -> None:
        """Launch the incomplete buckets, wait for all buckets, and assign the averages to ``.grad``."""
        self._pass.end()
        self.unsynced = False
        absent: list[GradSlot] = []
        try:
            while self._launched < len(self._buckets):
                bucket = self._buckets[self._launched]
                for slot in bucket.slots:
                    if not slot.arrived and slot.param.grad is not None:
                        # A gradient of an earlier micro-batch, or of a first pass with ``static_graph``.
                        self._copy_to_bucket(slot)
                    elif not slot.arrived:
                        bucket.view(slot).zero_()
                        absent.append(slot)
                if end is PassEnd.INTERRUPTED:
                    bucket.flat.fill_(torch.nan)
                self._launch()
            learning = self._static is not None and self._arrivals is not None
            used: set[int] | None = None  # None means all parameters
            if self._find_unused or learning:
                used = self._used_anywhere([] if end is PassEnd.INTERRUPTED else absent)
            for bucket in self._buckets:
                assert bucket.work is not None
                bucket.work.wait()
            if end is not PassEnd.INTERRUPTED:
                # Without these options, an absent gradient is an error, which ``_check_pass`` raises.
                all_expected = used is None and self._static is None and end is PassEnd.COMPLETE
                filled = [slot for slot in absent if used is None or slot.index in used]
                self._assign_grads([] if all_expected else filled)
        finally:
            self._launched = 0
            for bucket in self._buckets:
                bucket.reset(self._keep_buckets or not self._views)
        if self._arrivals is not None:
            self._rebuild_buckets(self._arrivals, used if learning else None)
        self._check_pass(absent, end)

    def _rebuild_buckets(self, arrivals: list[int], used: set[int] | None) -> None:
        """Rebuild the buckets in the order in which the gradients of the first rank were complete, without
        parameters that no rank uses."""
        last_first = list(dict.fromkeys(reversed(arrivals)))
        never = set(range(len(self._named_params))).difference(last_first)
        order = broadcast_ints(last_first[::-1] + sorted(never, reverse=True), self._group, self._device)
        self._make_buckets([index for index in order if used is None or index in used])
        self._arrivals = None

    def _check_pass(self, absent: list[GradSlot], end: PassEnd) -> None:
        if self._static is not None:
            self._static.end_of_pass() if end is PassEnd.COMPLETE else self._static.discard_pass()
        elif end is PassEnd.COMPLETE and not self._find_unused:
            absent = sorted(absent, key=lambda slot: slot.index)
            unexpected = [slot.name for slot in absent if slot.param.requires_grad]
            if unexpected:
                raise UserError(
                    f"no gradient on this rank for {', '.join(unexpected)}: "
                    "freeze what is not trained before wrapping, or pass find_unused_parameters=True",
                )

    def _used_anywhere(self, absent: list[GradSlot]) -> set[int] | None:
        """Return the indices of the parameters that have a gradient on at least one rank; None if this rank
        does not need them."""
        missing = {slot.index for slot in absent}
        flags = [index in self._slots and index not in missing for index in range(len(self._named_params))]
        used = used_on_any_rank(flags, [self._group], self._device)
        if not absent and self._static is None:
            return None  # return early, so that the CPU does not wait for an accelerator
        return {index for index, flag in enumerate(used.tolist()) if flag}

    def _assign_grads(self, used: list[GradSlot]) -> None:
        """Assign the averages to the parameters whose ``.grad`` is not a view of the bucket."""
        for slot in self._slots.values() if not self._views else used:
            view = self._buckets[slot.bucket].view(slot)
            if slot.param.grad is not None:
                slot.param.grad.copy_(view)
            elif slot in used:
                slot.param.grad = view if self._views else view.clone()


def broadcast_ints(values: list[int], group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """Return the ``values`` of the first rank of ``group``. With the fake backend, which transfers nothing,
    return the local ones."""
    tensor = torch.tensor(values, dtype=torch.int64, device=device)
    dist.broadcast(tensor, dist.get_global_rank(group, 0), group=group)
    return values if dist.get_backend(group) == "fake" else tensor.tolist()
