"""The kernels that Inductor generates for a compiled function, and the number of tensors that each kernel
reads and writes.

A separate operation reads its operands from memory and writes its result to memory. A fused kernel reads each
tensor once, keeps intermediate results in registers, and writes only its outputs: for n pointwise operations
on B bytes, about 2B bytes instead of 2nB or more. The kernels are parsed from the generated code (C++ on a
CPU, Triton on a GPU), whose pointers have the names ``in_ptr``, ``out_ptr`` and ``in_out_ptr``.

Reference: J. Ansel et al., PyTorch 2 (ASPLOS 2024), section on fusion. Cost: one compilation.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dlo_lib.base.errors import UserError

KERNEL = re.compile(r"^(\w+) = async_compile\.\w+\(.*?r?'''(.*?)'''", re.MULTILINE | re.DOTALL)
CALLED_OUTSIDE = re.compile(r"\bextern_kernels\.(\w+)\(|torch\.ops\.aten\.(\w+)\.\w+\(")
POINTER = re.compile(r"\b(in_out_ptr\d+|in_ptr\d+|out_ptr\d+)\b")
VIEWS = frozenset(
    {
        "view",
        "t",
        "transpose",
        "expand",
        "permute",
        "reshape",
        "slice",
        "select",
        "unsqueeze",
        "squeeze",
        "detach",
        "alias",
    }
)


@dataclass(frozen=True)
class GeneratedKernel:
    """One generated kernel: the number of tensors that it reads and writes, and its source."""

    name: str
    reads: int
    writes: int
    source: str


@dataclass(frozen=True)
class GeneratedCode:
    """The result of one compilation: its kernels, and the names of the library calls (matrix products)
    between them."""

    kernels: tuple[GeneratedKernel, ...]
    library_calls: tuple[str, ...]


@dataclass(frozen=True)
class MemoryTraffic:
    """The number of kernels, and the bytes that they read and write together."""

    kernels: int
    bytes: int


def generated_code(function: Callable[..., Any], *args: Any) -> GeneratedCode:
    """Compile ``function`` with Inductor, run it on ``args``, and parse the generated code. This resets the
    caches of ``torch.compile``.

    Raises:
        UserError: this version of torch does not show the generated code.
    """
    try:
        from torch._inductor.utils import run_and_get_code
    except ImportError as error:
        raise UserError(
            "this version of torch does not show generated code: run with TORCH_LOGS=output_code"
        ) from error
    _, sources = run_and_get_code(torch.compile(function), *args)
    kernels, calls = [], []
    for source in sources:
        for name, body in KERNEL.findall(source):
            pointers = set(POINTER.findall(body))
            prefixes = (("in_",), ("out_", "in_out_"))
            reads, writes = (sum(pointer.startswith(kinds) for pointer in pointers) for kinds in prefixes)
            kernels.append(GeneratedKernel(name, reads, writes, body.strip()))
        calls += [one or other for one, other in CALLED_OUTSIDE.findall(KERNEL.sub("", source))]
    return GeneratedCode(tuple(kernels), tuple(calls))


def moved_eagerly(function: Callable[..., Any], *args: Any) -> MemoryTraffic:
    """Count the memory traffic of ``function`` in eager mode, where each operation reads its operands and
    writes its results. An operand that occurs twice is counted once.

    Views are not counted, because they do not access the memory.
    """
    with _TrafficCounter() as counter:
        function(*args)
    return MemoryTraffic(counter.kernels, counter.bytes)


class _TrafficCounter(TorchDispatchMode):
    """Sums the bytes of the operands and results of each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.bytes = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        if operation.overloadpacket.__name__.strip("_") not in VIEWS:
            operands = {
                id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
            }
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            self.kernels += 1
            self.bytes += sum(tensor.nbytes for tensor in (*operands.values(), *made))
        return result
