"""The reduction of sharded gradients in a backward pass. Gradients are packed as autograd computes them, a
complete pack is reduce-scattered, and the averages are assigned to the shards at the end of the pass.

The packs are reduced one after the other. A reduce-scatter starts when the previous one has finished, so that
at most two packs are in memory: one that is being sent and one that is being filled. The packs are sent in
the reverse of the order in which forward used them, because this order is the same on every rank. The order
in which packs are complete may differ between ranks. A pack that is incomplete at the end of backward,
because this rank did not use a parameter, is sent then, with zeros for the missing gradients. FSDP packs the
gradients of a unit; stage 2 of ZeRO packs those of a bucket.

    backward   gradients 3 | gradients 2, reduce 3 | gradients 1, reduce 2 | reduce 1 | assign to .grad

Cost: B_g (N-1)/N bytes per rank and pass. Memory: two packs, and 1/N of all gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_lib.base.errors import UserError
from dlo_lib.parallel.backward_pass import BackwardPass, used_on_any_rank


class PackedParam(Protocol):
    """A parameter of a pack.

    Attributes:
        arrived: whether this pass has computed the gradient.
        filled: whether a gradient of this pass, or of an earlier one, is packed and not sent yet.
        frozen: whether the parameter has been frozen since. Zeros are sent for it, and its gradient stays
            None.
    """

    name: str
    arrived: bool
    filled: bool

    @property
    def frozen(self) -> bool: ...


S = TypeVar("S", bound=PackedParam)


class GradPack(Protocol[S]):
    """Gradients that are reduced together."""

    trained: list[S]
    missing: int
    """The number of gradients that this pass has not computed yet."""

    def pack(self, slot: S, gradient: Tensor) -> None:
        """Copy a whole gradient into the pack, or add it to a gradient that is not sent yet."""

    def start_reduce_scatter(self) -> list[S]:
        """Start the reduce-scatter of the pack, with zeros for missing gradients.

        Returns the parameters whose gradient is missing.
        """

    def wait_reduce_scatter(self) -> None:
        """Wait until this rank has received its part of the average."""

    def assign_grads(self, unused: set[S]) -> None:
        """Assign the averages to ``.grad`` of the shards, or add them to it. The parameters in ``unused``
        keep None."""

    def drop_grads(self) -> None:
        """Discard the packed gradients."""

    def finalize_backward(self) -> None:
        """Reset the state of the pass. Gradients that are packed and not sent are kept."""


class GradReduceScatter(Generic[S]):
    """Averages the gradients of ``packs`` over the ranks, in each backward pass.

    Args:
        packs: all packs of the module.
        groups: the groups over which gradients are averaged.
        device: the device of the gradients.
        find_unused: allow parameters without a gradient. A parameter that no rank used keeps the gradient
            None.
        on_end: called at the end of each pass.

    Raises:
        UserError: in backward, if a gradient is sparse, is computed twice in one pass, or is missing while
            ``find_unused`` is False.
    """

    def __init__(
        self,
        packs: Sequence[GradPack[S]],
        groups: Sequence[dist.ProcessGroup],
        device: torch.device,
        *,
        find_unused: bool,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.sync = True
        """False inside ``no_sync``."""
        self._packs, self._groups, self._device = packs, groups, device
        self._find_unused, self._on_end = find_unused, on_end
        self._pass = BackwardPass()
        self._unsent: dict[GradPack[S], None] = {}  # the packs that are not sent yet, in the order of forward
        self._complete: set[GradPack[S]] = set()  # the complete ones among them
        self._sent_before: dict[GradPack[S], None] = {}  # the packs of the last pass that synchronised
        self._reducing: list[GradPack[S]] = []  # the packs that are sent; only the last one may be in flight
        self._absent: list[S] = []

    def expect(self, pack: GradPack[S]) -> None:
        """Register that a forward pass uses the parameters of ``pack``; called in the same order on every
        rank."""
        self._unsent.setdefault(pack)

    def on_gradient(self, pack: GradPack[S], slot: S, param: Tensor) -> None:
        """Pack the gradient of ``param``, which autograd has accumulated, and send the pack if it is
        complete."""
        self.begin()
        gradient, param.grad = param.grad, None
        assert gradient is not None
        if gradient.is_sparse:
            raise UserError(f"{slot.name} has a sparse gradient: use sparse=False")
        if slot.arrived:
            raise UserError(
                f"{slot.name} got a second gradient in one backward: use checkpoint(..., use_reentrant=False)"
            )
        if pack not in self._unsent:  # no forward precedes this pass
            if pack in self._reducing:
                raise UserError(
                    f"the gradient of {slot.name} was computed after its unit was reduced: "
                    "run backward in one thread",
                )
            self._unsent[pack] = None
        pack.pack(slot, gradient)
        if pack.missing == 0:
            self.complete(pack)

    def complete(self, pack: GradPack[S]) -> None:
        """Mark ``pack`` as complete in this pass, and send every complete pack whose turn it is."""
        self._complete.add(pack)
        while self.sync and self._unsent and (last := next(reversed(self._unsent))) in self._complete:
            self._send(last)

    def _send(self, pack: GradPack[S]) -> None:
        del self._unsent[pack]
        if self._reducing:
            self._reducing[-1].wait_reduce_scatter()  # so that at most two packs are in memory
        self._absent += pack.start_reduce_scatter()
        self._reducing.append(pack)

    def begin(self) -> None:
        """Begin a backward pass, unless it has begun; called at the latest with the first gradient."""
        if not self._pass.running:
            self.recover()
            self._pass.begin(self._finish)
            if self._find_unused and not self._unsent:
                # No forward precedes this pass: it is the second of two losses, or uses a retained graph.
                # Expect all packs of the last pass, because other ranks may use parameters that this rank
                # does not use.
                self._unsent = dict(self._sent_before)

    def recover(self) -> None:
        """Discard the gradients of a backward pass that an exception has interrupted."""
        if self._pass.interrupted:
            for pack in self._reducing[-1:]:
                pack.wait_reduce_scatter()
            self._drop()
            self._finalize_backward()

    def discard(self) -> None:
        """Discard the gradients that are packed and not averaged, as those of ``no_sync``."""
        self.recover()
        if not self._pass.running:
            self._drop()

    def _drop(self) -> None:
        for pack in self._packs:
            pack.drop_grads()
        self._unsent, self._reducing, self._absent = {}, [], []

    def finish(self) -> None:
        """Average the gradients that are not averaged yet. After a pass that synchronises there are none."""
        self.recover()
        if self._unsent:
            self._finish()

    def _finish(self) -> None:
        """Send the incomplete packs, wait for all packs, and assign the averages to ``.grad``."""
        absent: list[S] = []
        if self.sync:
            for pack in list(reversed(self._unsent)):
                self._send(pack)
            for pack in self._reducing[-1:]:
                pack.wait_reduce_scatter()
            unused = self._unused_everywhere() if self._find_unused else set()
            unused.update(slot for slot in self._absent if slot.frozen)
            for pack in self._reducing:
                pack.assign_grads(unused)
            absent, self._absent = self._absent, []
            self._sent_before, self._reducing = dict.fromkeys(reversed(self._reducing)), []
        self._finalize_backward()
        missing = [slot.name for slot in absent if not slot.frozen]
        if missing and not self._find_unused:
            names = ", ".join(missing)
            raise UserError(
                f"no gradient on this rank for {names}: freeze what is not trained before wrapping, "
                "or pass find_unused_parameters=True",
            )

    def _finalize_backward(self) -> None:
        self._pass.end()
        self._complete.clear()
        for pack in self._packs:
            pack.finalize_backward()
        self._on_end()

    def _unused_everywhere(self) -> set[S]:
        """Return the parameters that have no gradient on any rank."""
        slots: Iterable[S] = [slot for pack in self._packs for slot in pack.trained]
        missing = set(self._absent)
        used = used_on_any_rank([slot not in missing for slot in slots], self._groups, self._device)
        if not missing:
            return set()  # return early, so that the CPU does not wait for an accelerator
        return {slot for slot, flag in zip(slots, used.tolist()) if not flag}


def divisors(ranks: int, dtype: torch.dtype) -> tuple[int, float]:
    """Return the numbers by which gradients are divided before and after they are summed over ``ranks``. The
    product is ``ranks``.

    A sum in fp16 overflows above 65504, and small gradients that are divided first underflow. Therefore about
    the square root of ``ranks`` comes first, as in PyTorch's ``fully_shard``. Other dtypes have more range.
    """
    before = 1
    while dtype is torch.float16 and ranks % before == 0 and ranks / before > before:
        before *= 2
    return before, ranks / before
