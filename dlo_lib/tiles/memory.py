"""The memory of a kernel: tensors as flat addresses, with the checks that a GPU does not make."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dlo_lib.tiles.faults import TileError

NOT_USED, SEVERAL = -1, -2
SECTOR = 32  # bytes
UNDEFINED_INT = -(2**31)
NO_MASK = "a mask must exclude the lanes after the end"
INCOMPLETE_MASK = (
    "the mask lets this lane pass. Its condition is incomplete, or the offset has a wrong row, head or stride"
)
AFTER_THE_END = (
    "all lanes of this access are after the end, so the row, the head or the block is wrong, "
    "or a loop ends too late"
)


@dataclass
class Buffer:
    """The memory that an argument of a kernel points to.

    ``flat`` are the addresses from the first to the last element of the tensor; ``gaps`` is True at addresses
    between them that belong to no element. ``writers`` and ``readers`` hold the program of each address.
    """

    name: str
    tensor: Tensor
    flat: Tensor = field(init=False)
    gaps: Tensor | None = field(init=False, default=None)
    writers: Tensor | None = field(init=False, default=None)
    readers: Tensor | None = field(init=False, default=None)
    read: int = 0
    written: int = 0
    most_written: int = 0
    sectors: int = 0
    undefined: bool = False
    _writer: tuple[int, int] = (NOT_USED, 0)

    def __post_init__(self) -> None:
        sizes, strides = self.tensor.shape, self.tensor.stride()
        span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides))
        span = span if self.tensor.numel() else 0
        self.flat = self.tensor.detach().as_strided((span,), (1,))
        if span != self.tensor.numel():
            self.gaps = torch.ones(span, dtype=torch.bool)
            self.gaps.as_strided(sizes, strides).fill_(False)

    def load(
        self, offsets: Tensor, mask: Tensor | None, other: Tensor | float | None, program: int
    ) -> Tensor:
        """Return the elements at ``offsets``; where ``mask`` is False ``other``, or an undefined value."""
        active = offsets.reshape(-1) if mask is None else offsets[mask]
        self._require_elements(active, "reads", mask is not None)
        self.read += active.numel()
        self._count_sectors(active)
        self._note_reading(active, program)
        if mask is None:
            return torch.take(self.flat, offsets)
        if not len(self.flat):
            value = self.flat.new_zeros(offsets.shape)
        else:
            value = torch.take(self.flat, offsets.where(mask, 0))
        if other is None:
            self.undefined |= not bool(mask.all())
            other = float("nan") if value.is_floating_point() else UNDEFINED_INT
        if isinstance(other, Tensor):
            return value.where(mask, other.to(value.dtype))
        return value.masked_fill(~mask, bool(other) if value.dtype == torch.bool else other)

    def store(self, offsets: Tensor, value: Tensor, mask: Tensor | None, program: int, atomic: bool) -> None:
        """Write ``value`` at ``offsets`` where ``mask`` is True; ``atomic`` adds it."""
        active = offsets.reshape(-1) if mask is None else offsets[mask]
        chosen = (value.reshape(-1) if mask is None else value[mask]).to(self.flat.dtype)
        self._require_elements(active, "writes", mask is not None)
        self.written += active.numel()
        self._count_sectors(active)
        last, stored = self._writer  # programs run one after another
        self._writer = program, active.numel() + (stored if last == program else 0)
        self.most_written = max(self.most_written, self._writer[1])
        if atomic:
            self.flat.index_put_((active,), chosen, accumulate=True)
            return
        self._note_writing(active, program)
        self.flat[active] = chosen

    def _count_sectors(self, active: Tensor) -> None:
        """Count the sectors that one access to these addresses touches."""
        if not active.numel():
            return
        each = SECTOR // self.flat.element_size()
        low, high = (int(address) for address in active.aminmax())
        if high - low < active.numel():
            self.sectors += high // each - low // each + 1
        else:
            self.sectors += torch.unique(active // each).numel()

    def _require_elements(self, active: Tensor, does: str, masked: bool) -> None:
        if not active.numel():
            return
        low, high = (int(each) for each in active.aminmax())
        values: dict[str, Any] = {"name": self.name, "does": does, "shape": tuple(self.tensor.shape)}
        if low < 0:
            message = "{does} {name} at offset {at}, before its first element"
            raise TileError(message, at=low, **values)
        if high >= len(self.flat):
            message = "{does} {name} at offset {at}, and the last element of its shape {shape} is at {last}: "
            if low >= len(self.flat):
                message += AFTER_THE_END
            else:
                message += INCOMPLETE_MASK if masked else NO_MASK
            raise TileError(message, at=high, last=len(self.flat) - 1, **values)
        if self.gaps is not None and bool(self.gaps[active].any()):
            at = int(active[self.gaps[active]][0])
            message = (
                "{does} {name} at offset {at}, which is none of its elements: its shape is {shape} and its "
                "strides are {strides}, so use the strides"
            )
            raise TileError(message, at=at, strides=self.tensor.stride(), **values)

    def _note_reading(self, active: Tensor, program: int) -> None:
        if self.writers is not None:
            self._require_owner(self.writers[active], program, "reads {name}, which {other} writes")
        if self.readers is None:
            self.readers = torch.full((len(self.flat),), NOT_USED)
        known = self.readers[active]
        self.readers[active] = known.where((known != NOT_USED) & (known != program), program).where(
            (known == NOT_USED) | (known == program), SEVERAL
        )

    def _note_writing(self, active: Tensor, program: int) -> None:
        if self.writers is None:
            self.writers = torch.full((len(self.flat),), NOT_USED)
        self._require_owner(self.writers[active], program, "writes an element of {name} that {other} writes")
        if self.readers is not None:
            self._require_owner(
                self.readers[active], program, "writes an element of {name} that {other} reads"
            )
        self.writers[active] = program

    def _require_owner(self, users: Tensor, program: int, message: str) -> None:
        others = users[(users != NOT_USED) & (users != program)]
        if others.numel():
            message += ": the programs of a grid run at the same time, in no order"
            first = int(others[0])
            other = f"program {first}" if first != SEVERAL else "another program"
            raise TileError(message, name=self.name, other=other)


@dataclass(frozen=True)
class Pointer:
    """Addresses of one buffer: a number, or a tile of numbers."""

    buffer: Buffer
    offsets: Tensor
