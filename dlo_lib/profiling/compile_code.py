"""What Inductor wrote: the kernels of a compiled function, and what each of them reads and writes.

An operation of its own reads its operands from memory and writes its result back. A fused kernel reads each tensor once, keeps what is
in between in registers, and writes what leaves it: for n pointwise operations on B bytes about 2B instead of 2nB and more. The kernels are
read from the generated code (C++ on a processor, Triton on a GPU), whose pointers are called ``in_ptr``, ``out_ptr`` and ``in_out_ptr``.

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

from dlo_lib.errors import UserError

KERNEL = re.compile(r"^(\w+) = async_compile\.\w+\(.*?r?'''(.*?)'''", re.MULTILINE | re.DOTALL)
CALLED_OUTSIDE = re.compile(r"\bextern_kernels\.(\w+)\(|torch\.ops\.aten\.(\w+)\.\w+\(")
POINTER = re.compile(r"\b(in_out_ptr\d+|in_ptr\d+|out_ptr\d+)\b")
VIEWS = frozenset({"view", "t", "transpose", "expand", "permute", "reshape", "slice", "select", "unsqueeze", "squeeze", "detach", "alias"})


@dataclass(frozen=True)
class Kernel:
    """One generated kernel: how many tensors it reads and writes, and its source."""

    name: str
    reads: int
    writes: int
    source: str


@dataclass(frozen=True)
class GeneratedCode:
    """What one compilation wrote: its kernels, and the calls of libraries (matrix products) between them."""

    kernels: tuple[Kernel, ...]
    library_calls: tuple[str, ...]


@dataclass(frozen=True)
class Moved:
    """What operations run one by one: ``kernels`` of them, which together read and write ``bytes``."""

    kernels: int
    bytes: int


def generated_code(function: Callable[..., Any], *args: Any) -> GeneratedCode:
    """Compile ``function`` with Inductor, run it on ``args``, and read what was generated. What was compiled before is forgotten.

    Raises:
        UserError: this version of torch does not show what it generates.
    """
    try:
        from torch._inductor.utils import run_and_get_code
    except ImportError as error:
        raise UserError("this version of torch does not show generated code: run with TORCH_LOGS=output_code") from error
    _, sources = run_and_get_code(torch.compile(function), *args)
    kernels, calls = [], []
    for source in sources:
        for name, body in KERNEL.findall(source):
            pointers = set(POINTER.findall(body))
            reads, writes = (sum(pointer.startswith(kinds) for pointer in pointers) for kinds in (("in_",), ("out_", "in_out_")))
            kernels.append(Kernel(name, reads, writes, body.strip()))
        calls += [one or other for one, other in CALLED_OUTSIDE.findall(KERNEL.sub("", source))]
    return GeneratedCode(tuple(kernels), tuple(calls))


def moved_eagerly(function: Callable[..., Any], *args: Any) -> Moved:
    """What ``function`` moves when each of its operations runs by itself: each reads its different operands and writes its results.

    Views, which move nothing, are not counted.
    """
    with _Counting() as counting:
        function(*args)
    return Moved(counting.kernels, counting.bytes)


class _Counting(TorchDispatchMode):
    """Adds up the operands and results of each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.bytes = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        if operation.overloadpacket.__name__.strip("_") not in VIEWS:
            operands = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            self.kernels += 1
            self.bytes += sum(tensor.nbytes for tensor in (*operands.values(), *made))
        return result
