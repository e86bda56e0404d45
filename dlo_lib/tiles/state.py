"""The state that the programs of one launch share, and the count of what they do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dlo_lib.tiles.faults import TileError


def numbers_in(value: Any) -> int:
    """Return the elements of the tile, or of the tiles of the tuple, without those of masks."""
    if isinstance(value, tuple):
        return sum(numbers_in(each) for each in value)
    return value.numel() if isinstance(value, Tensor) and value.dtype != torch.bool else 0


@dataclass
class TileMachine:
    """One launch: its grid, the program that runs now with its variables, and the counters."""

    grid: tuple[int, ...]
    most_work: int
    program: tuple[int, ...] = ()
    number: int = 0
    line: int = 0
    largest_tile: int = 0
    flops: int = 0
    work: int = 0
    names: dict[str, Any] = field(default_factory=dict)
    held: int = 0
    most_held: int = 0

    def begin(self, number: int, program: tuple[int, ...], names: dict[str, Any]) -> None:
        """Begin a program, which has these variables."""
        self.number, self.program, self.names, self.held = number, program, names, 0

    def assign(self, name: str, value: Any) -> None:
        """Give a variable its value, and count what the variables hold together."""
        self.held += numbers_in(value) - numbers_in(self.names.get(name))
        self.most_held = max(self.most_held, self.held)
        self.names[name] = value

    def count(self, result: Tensor, flops: int | None = None) -> Tensor:
        """Count an operation with this result; return the result."""
        size = result.numel()
        self.add_elements(size)
        if result.is_floating_point():
            self.flops += size if flops is None else flops
            self.largest_tile = max(self.largest_tile, size)
        return result

    def add_elements(self, number: int) -> None:
        """Count the work of an operation that reads or makes this number of elements."""
        self.add_work(8 + number // 64)

    def add_work(self, amount: int) -> None:
        """Count work, in units of about a microsecond.

        Raises:
            TileError: the launch exceeds its limit.
        """
        self.work += amount
        if self.work > self.most_work:
            raise TileError("the kernel computes too long: it does much more than this launch needs")
