"""Compiles every kernel ahead of time, without a GPU, and reports what the compiler allocates.

The operations run forward and backward on the meta device, where tensors have no data. Their launches are
recorded instead of started, so that the kernels, types and tile sizes are those that ``launch`` receives.
The assembler that Triton chooses for each device then assembles the PTX of each kernel, and reports:

- *registers* of a thread. 65,536 registers of a multiprocessor, divided by registers * threads, are the
  programs that it can hold at once.
- *spills*: bytes of registers that did not fit and are written to and read from memory. 0 is right.
- *shared memory* of a program. A multiprocessor has 164 KiB (sm_80) or 228 KiB (sm_90).
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlo_lib.errors import UserError, unknown_name
from dlo_lib.kernels.cases import CASES, run_forward_and_backward
from dlo_lib.kernels.dispatch import KernelBackend, using

CAPABILITIES = (80, 90)
"""Compute capabilities: A100 and H100."""
_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
}


@dataclass(frozen=True)
class CompiledKernel:
    """The resources of a kernel.

    Attributes:
        operation: a name of ``CASES``.
        kernel: the name of the kernel.
        capability: 80 or 90.
        warps: of a program, of 32 threads each.
        registers: of a thread.
        spilled_bytes: stores and loads of spilled registers, of a thread.
        shared_bytes: shared memory of a program.
    """

    operation: str
    kernel: str
    capability: int
    warps: int
    registers: int
    spilled_bytes: int
    shared_bytes: int


def compile_kernels(
    operations: Sequence[str] = tuple(CASES),
    capabilities: Sequence[int] = CAPABILITIES,
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[CompiledKernel]:
    """Compile the kernels of ``operations`` for each compute capability, and yield their resources.

    Raises:
        UserError: an operation is unknown, or Triton is not installed or interprets kernels.
    """
    for name in operations:
        if name not in CASES:
            raise unknown_name("operation", name, CASES)
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise UserError("TRITON_INTERPRET=1 interprets kernels: unset it to compile them")
    for name in operations:
        with using(KernelBackend.TRITON):
            launches = _launches(name, dtype)
        for launch in launches:
            for capability in capabilities:
                yield _compiled(name, launch, capability)


def _launches(name: str, dtype: torch.dtype) -> list[Any]:
    """Return the different launches of one operation; those of a loop differ only in their grid."""
    from dlo_lib.kernels.triton_code.launch import recorded

    with recorded() as launches:
        run_forward_and_backward(name, dtype, "meta")
    different = {(launch.kernel.__name__, str(_source_of(launch))): launch for launch in launches}
    return list(different.values())


def _source_of(launch: Any) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], list[Any]]]:
    """Return the types, the constants and the attributes of the arguments, as a launch specialises them."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[Any]] = {}
    for index, param in enumerate(launch.kernel.params):
        value = launch.arguments[param.name]
        if param.is_constexpr or (isinstance(value, int) and value == 1):
            signature[param.name], constants[param.name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[param.name] = _TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[param.name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[param.name] = "fp32"
    return signature, constants, attributes


def _compiled(operation: str, launch: Any, capability: int) -> CompiledKernel:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = _source_of(launch)
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    registers, spilled = _assembled(made.asm["ptx"], capability)
    return CompiledKernel(
        operation, launch.kernel.__name__.strip("_"), capability, made.metadata.num_warps, registers, spilled,
        made.metadata.shared,
    )  # fmt: skip


def _assembled(ptx: str, capability: int) -> tuple[int, int]:
    """Return the registers of a thread and the spilled bytes that ptxas reports for ``ptx``."""
    from triton.backends.nvidia.compiler import get_ptxas

    (architecture,) = re.findall(r"^\.target (sm_\w+)", ptx, re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx, encoding="utf-8")
        # The options of Triton itself.
        command = [get_ptxas(capability).path, "-v", "-lineinfo", "--regAllocOptLevel=2"]
        command += [f"--gpu-name={architecture}", str(path), "-o", str(path.with_suffix(".cubin"))]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ptxas failed: {done.stderr[-2000:]}")
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", done.stderr)
    (registers,) = re.findall(r"Used (\d+) registers", done.stderr)
    return int(registers), sum(map(int, spills))
