"""A bucket of gradients: a flat tensor that DDP fills during backward and sums over the ranks when it is
full."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

_ALIGNMENT = 16
"""The alignment of gradients in a bucket in bytes, so that the kernels of the optimiser can use vector
loads."""


class PendingWork(Protocol):
    """Communication that has started, as ``torch.distributed.Work``."""

    def wait(self) -> object:
        """Wait for the result. On an accelerator, only the current stream waits."""
        ...


@dataclass(eq=False)
class GradSlot:
    """The position of the gradient of one parameter in its bucket. ``offset`` counts elements.

    ``bucket`` is the index of the bucket instead of a reference, because a reference cycle would delay the
    release of the memory.
    """

    index: int
    name: str
    param: nn.Parameter
    bucket: int
    offset: int
    strides: tuple[int, ...]
    arrived: bool = False


@dataclass(eq=False)
class GradBucket:
    """Gradients of one dtype that are summed together; the argument of a communication hook.

    Attributes:
        index: the position in the order of sending. It is the same on every rank, and may change after the
            first pass, when the buckets are rebuilt.
        group: the ranks to sum over.
        is_last: whether it is the last bucket of a pass.
        numel: the number of elements, padding included.
    """

    index: int
    group: dist.ProcessGroup
    is_last: bool = False
    slots: list[GradSlot] = field(default_factory=list)
    numel: int = 0
    missing: int = 0
    """The number of gradients that this pass has not computed yet."""
    work: PendingWork | None = None
    """The communication, once it has started."""
    _flat: Tensor | None = None

    def add(self, index: int, name: str, param: nn.Parameter) -> GradSlot:
        """Append a slot for the gradient of ``param``, with the strides that autograd gives to it."""
        strides = torch.empty_like(param, device="meta").stride()
        self.slots.append(GradSlot(index, name, param, self.index, self.numel, strides))
        self.missing += 1
        step = _ALIGNMENT // param.element_size()
        self.numel += -(-param.numel() // step) * step
        return self.slots[-1]

    @property
    def flat(self) -> Tensor:
        """All gradients of the bucket with their padding, (numel,). A hook replaces it by the sum over the
        ranks."""
        if self._flat is None:
            padded = self.numel > sum(slot.param.numel() for slot in self.slots)
            make = torch.zeros if padded else torch.empty
            like = self.slots[0].param
            self._flat = make(self.numel, dtype=like.dtype, device=like.device)
        return self._flat

    @property
    def gradients(self) -> tuple[Tensor, ...]:
        """Views of ``flat``, one for each parameter, with the shape of the parameter."""
        return tuple(self.view(slot) for slot in self.slots)

    @staticmethod
    def part(flat: Tensor, slot: GradSlot) -> Tensor:
        """Return the elements of ``slot`` in a tensor like ``flat``, in their order in memory, a view."""
        return flat[slot.offset : slot.offset + slot.param.numel()]

    @property
    def key(self) -> str:
        """The parameters of the bucket, which are others after the buckets are rebuilt."""
        return ",".join(str(slot.index) for slot in self.slots)

    def view(self, slot: GradSlot) -> Tensor:
        """Return the view of ``flat`` that is the gradient of ``slot``."""
        return self.flat.as_strided(slot.param.shape, slot.strides, slot.offset)

    def reset(self, keep_flat: bool) -> None:
        """Reset the bucket for the next pass. A flat tensor that is not kept stays in memory as long as a
        gradient is a view of it."""
        self.work, self.missing = None, len(self.slots)
        if not keep_flat:
            self._flat = None
        for slot in self.slots:
            slot.arrived = False
