"""Launches whose arguments other than tensors are known: a call is one look-up and a start.

``launch`` classifies each argument at each call, 40 for the attention. A ``PreparedLaunch`` is kept by the
shapes, strides and dtypes of its tensors, and with their addresses it starts the binary that ``launch``
found in its first call. Where the binary depends on more, ``launch`` starts the kernel: in the interpreter
and while launches are recorded, for a tensor that is not aligned to 16 bytes or is of a subclass, for another
device than the current one, and while a profiler or a debugger waits for launches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from triton import set_allocator

from dlo_lib.kernels.triton_code import binaries
from dlo_lib.kernels.triton_code.launch import _RECORDER, launch


class PreparedLaunch:
    """A launch of ``kernel`` on ``grid`` with any tensors of the same device, dtypes and strides.

    Args:
        kernel: the result of ``triton.jit``, whose parameters are the tensors, the numbers, the constants.
        grid: the number of programs in one dimension.
        numbers: the arguments after the tensors.
        meta: the ``tl.constexpr`` parameters and the options, such as ``num_warps``.
        allocate: what ``triton.set_allocator`` receives before the kernel starts, or None.
    """

    __slots__ = ("_allocate", "_binary", "_rest", "grid", "kernel", "meta", "numbers")

    def __init__(
        self, kernel: Any, grid: int, numbers: tuple[Any, ...], meta: dict[str, Any], allocate: Any = None
    ) -> None:
        self.kernel, self.grid, self.numbers, self.meta = kernel, grid, numbers, meta
        self._allocate = allocate
        self._binary: binaries.Binary | None = None
        self._rest: tuple[Any, ...] = ()

    def __call__(self, *tensors: Tensor) -> None:
        """Start the kernel on the device of the tensors."""
        binary = self._binary
        if binary is None or not self.grid:
            self._start(tensors)
            return
        pointers, bits = [], 0
        for tensor in tensors:
            kind = type(tensor)
            if kind is not Tensor and kind is not Parameter:
                self._start(tensors)
                return
            pointer = tensor.data_ptr()
            pointers.append(pointer)
            bits |= pointer
        device = torch._C._cuda_getDevice()
        if bits & 15 or tensors[0].get_device() != device or _RECORDER.get() or binaries._watched():
            self._start(tensors)
            return
        if self._allocate is not None:
            set_allocator(self._allocate)
        binary.run(
            self.grid, 1, 1, binary.stream_of(device), binary.function, binary.metadata, None, None, None,
            *pointers, *self._rest,
        )  # fmt: skip

    def _start(self, tensors: tuple[Tensor, ...]) -> None:
        """Start the kernel by ``launch``, and keep the binary if all tensors are aligned."""
        if self._allocate is not None:
            set_allocator(self._allocate)
        args = (*tensors, *self.numbers)
        launch(self.kernel, (self.grid,), *args, **self.meta)
        device = tensors[0].get_device()
        if device < 0 or self._binary is not None or any(tensor.data_ptr() & 15 for tensor in tensors):
            return
        key: list[Any] = [id(self.kernel), device, tuple(self.meta), *self.meta.values()]
        if binaries.classify(args, key) is None:
            return
        self._binary = binaries._BINARIES.get(tuple(key))
        if self._binary is not None:
            self._rest = (*self.numbers, *self._binary.constants)
