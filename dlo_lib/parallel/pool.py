"""Flat memory that is needed again and again: given back, it serves the next who asks.

On the CPU the system hands out large memory page by page: one fault for every 4 KiB that is first touched, which for a gathered unit takes
longer than to copy it. An accelerator's allocator keeps what is given back by itself, so there a pool only passes requests on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Pool:
    """Memory on ``device``. With ``keep`` it holds at most as many blocks as were ever taken at once."""

    def __init__(self, device: torch.device, keep: bool) -> None:
        self._device, self._keep = device, keep
        self.on_take: Callable[[Tensor], None] = lambda tensor: None
        """Is told of what is lent, as it is: for those who count memory."""
        self._free: list[Tensor] = []

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, (numel,)."""
        tensor = self._take(numel, dtype)
        self.on_take(tensor)
        return tensor

    def _take(self, numel: int, dtype: torch.dtype) -> Tensor:
        if not self._keep:
            return torch.empty(numel, dtype=dtype, device=self._device)
        size = numel * dtype.itemsize
        self._free.sort(key=Tensor.numel)
        for index, block in enumerate(self._free):
            if block.numel() >= size:
                return self._free.pop(index)[:size].view(dtype)
        if self._free:
            self._free.pop()  # too small: a larger one takes its place
        return torch.empty(size, dtype=torch.uint8, device=self._device).view(dtype)

    def give(self, tensor: Tensor) -> None:
        """Return what ``take`` returned; no other reference to it may be used any more."""
        if self._keep:
            whole = torch.empty(0, dtype=torch.uint8, device=self._device)
            self._free.append(whole.set_(tensor.untyped_storage()))

    def release(self) -> None:
        """Free what is not lent, when the next one asks late and others need memory before."""
        self._free.clear()
