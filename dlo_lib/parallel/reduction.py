"""A backward pass whose gradients are sharded: packed as they arrive, sent to their owners when a pack is complete, settled at the end.

Packs are sent one behind the other: before one leaves, the one before must have arrived, so that two exist at most, one on its way and
one in the making. They leave strictly in the reverse of the order in which forward announced them, which is the same on every rank; the
order in which they are complete need not be. What is not complete at the end of backward (a parameter that this rank did not use) is sent
then, with zeros for what is missing. FSDP packs the gradients of a unit, stage 2 of ZeRO those of a bucket; all else they have in common.

    backward   gradients 3 | gradients 2, reduce 3 | gradients 1, reduce 2 | reduce 1 | means into .grad of the shards

Cost: B_g (N-1)/N bytes per rank and pass. Memory: two packs, and 1/N of all gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_lib.errors import UserError
from dlo_lib.parallel.backward_pass import BackwardPass, used_on_any_rank


class Slot(Protocol):
    """A parameter's place in a pack. ``arrived``: its gradient has come in this pass; ``filled``: or before, and was not sent yet."""

    name: str
    arrived: bool
    filled: bool


S = TypeVar("S", bound=Slot)


class Pack(Protocol[S]):
    """Gradients that are sent together."""

    trained: list[S]
    missing: int
    """Gradients of this pass that have not arrived."""

    def pack(self, slot: S, gradient: Tensor) -> None:
        """Copy, or add, a whole gradient to those that will be sent."""

    def start_reduce(self) -> list[S]:
        """Send what is packed, zeros where there is nothing; those slots are returned."""

    def settle_reduce(self) -> None:
        """Wait until this rank's part of the mean is there."""

    def hand_over(self, unused: set[S]) -> None:
        """Leave the means in ``.grad`` of the shards, or add them; nothing for parameters in ``unused``."""

    def drop_gradients(self) -> None:
        """Forget what is packed."""

    def end_pass(self) -> None:
        """As before the first gradient of a pass; what is packed and not sent stays."""


class Reduction(Generic[S]):
    """The gradients of ``packs``, from one backward pass to the next.

    Args:
        packs: all there are.
        groups: the ranks over which gradients are averaged.
        device: where they are.
        find_unused: whether parameters may be without gradient. One that no rank used keeps None.
        on_end: called at the end of a pass, when all gradients are on their way.
    """

    def __init__(
        self,
        packs: Sequence[Pack[S]],
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
        self._unreduced: dict[Pack[S], None] = {}  # in the order of forward: their gradients are not on their way yet
        self._complete: set[Pack[S]] = set()  # of these
        self._sent_before: dict[Pack[S], None] = {}  # those of the last pass that synchronised
        self._reducing: list[Pack[S]] = []  # on their way; all but the last have been waited for
        self._absent: list[S] = []

    def expect(self, pack: Pack[S]) -> None:
        """A forward pass is about to use its parameters; called in the same order on every rank."""
        self._unreduced.setdefault(pack)

    def on_gradient(self, pack: Pack[S], slot: S, param: Tensor) -> None:
        """The whole gradient of a parameter is complete: pack it, and send the pack when it is."""
        self.begin()
        gradient, param.grad = param.grad, None
        assert gradient is not None
        if gradient.is_sparse:
            raise UserError(f"{slot.name} has a sparse gradient: use sparse=False")
        if slot.arrived:
            raise UserError(f"{slot.name} got a second gradient in one backward: use checkpoint(..., use_reentrant=False)")
        if pack not in self._unreduced:  # the pass has no forward of its own
            if pack in self._reducing:
                raise UserError(f"{slot.name} got its gradient after the others of its unit had left: run backward in one thread")
            self._unreduced[pack] = None
        pack.pack(slot, gradient)
        if pack.missing == 0:
            self.complete(pack)

    def complete(self, pack: Pack[S]) -> None:
        """This pass has no more gradients for it: send it, and those that waited for it, when its turn has come."""
        self._complete.add(pack)
        while self.sync and self._unreduced and (last := next(reversed(self._unreduced))) in self._complete:
            self._send(last)

    def _send(self, pack: Pack[S]) -> None:
        del self._unreduced[pack]
        if self._reducing:
            self._reducing[-1].settle_reduce()  # so that two packs exist at most: one on its way, one in the making
        self._absent += pack.start_reduce()
        self._reducing.append(pack)

    def begin(self) -> None:
        """Once in each backward, at the latest with its first gradient."""
        if not self._pass.running:
            self.recover()
            self._pass.begin(self._finish)
            if self._find_unused and not self._unreduced:
                # No forward of its own: the second of two losses, or a retained graph. The others may use what this rank does not.
                self._unreduced = dict(self._sent_before)

    def recover(self) -> None:
        """After an exception inside backward: its gradients are dropped."""
        if self._pass.interrupted:
            for pack in self._reducing[-1:]:
                pack.settle_reduce()
            for pack in self._packs:
                pack.drop_gradients()
            self._unreduced, self._reducing, self._absent = {}, [], []
            self._end_pass()

    def finish(self) -> None:
        """Average what is not averaged yet; nothing is left to do after a backward pass that synchronises."""
        self.recover()
        if self._unreduced:
            self._finish()

    def _finish(self) -> None:
        """Send what lacks gradients, wait for all, and leave the means in ``.grad``."""
        absent: list[S] = []
        if self.sync:
            for pack in list(reversed(self._unreduced)):
                self._send(pack)
            for pack in self._reducing[-1:]:
                pack.settle_reduce()
            unused = self._unused_everywhere() if self._find_unused else set()
            for pack in self._reducing:
                pack.hand_over(unused)
            absent, self._absent = self._absent, []
            self._sent_before, self._reducing = dict.fromkeys(reversed(self._reducing)), []
        self._end_pass()
        if absent and not self._find_unused:
            names = ", ".join(slot.name for slot in absent)
            raise UserError(
                f"no gradient on this rank for {names}: freeze what is not trained before wrapping, or pass find_unused_parameters=True"
            )

    def _end_pass(self) -> None:
        self._pass.end()
        self._complete.clear()
        for pack in self._packs:
            pack.end_pass()
        self._on_end()

    def _unused_everywhere(self) -> set[S]:
        """Parameters without gradient on all ranks."""
        slots: Iterable[S] = [slot for pack in self._packs for slot in pack.trained]
        missing = set(self._absent)
        used = used_on_any_rank([slot not in missing for slot in slots], self._groups, self._device)
        if not missing:
            return set()  # spares an accelerator the wait for the host to read
        return {slot for slot, flag in zip(slots, used.tolist()) if not flag}
