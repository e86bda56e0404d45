"""Compiles every kernel ahead of time, without a GPU, and reports what the compiler allocates.

The operations run forward and backward on the meta device, where tensors have no data. Their launches are
recorded instead of started, so that the kernels, types and tile sizes are those that ``launch`` receives on
a GPU of the architecture that is compiled for (``tuning.compiled_for``). The assembler that Triton chooses
for each architecture then assembles the PTX of each kernel, and reports:

- *registers* of a thread. 65,536 registers of a multiprocessor, divided by registers * threads, are the
  programs that it can hold at once.
- *spills*: bytes of registers that did not fit and are written to and read from memory. 0 is right. Norms of
  fp32 rows above ``dispatch.LONGEST_FP32_ROW`` have no kernel, because no tile of theirs reaches 0.
- *shared memory* of a program, at most ``SHARED_KIB``. A kernel that needs more does not start.

The instructions of the PTX show whether a kernel uses what its architecture has: bulk copies into shared
memory (``cp.async.bulk``), asynchronous products of a warp group (``wgmma``), and accesses of 128 bits.

A kernel takes at least the *floor*: the larger of its bytes / the bandwidth and its floating-point operations
/ the peak, from the data sheet. Its bytes are those of the tensors that it receives, each once.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlo_lib.base.errors import UserError, unknown_name
from dlo_lib.hardware import gpu
from dlo_lib.kernels.cases import CASES, SIZES, Size, products, run_forward_and_backward
from dlo_lib.kernels.dispatch import KernelBackend, using

SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""The shared memory that a program may have, by compute capability: A100, the GeForce 30 and 40, H100, B200
and the GeForce 50. CUDA C++ Programming Guide, table of technical specifications per compute capability."""
CAPABILITIES = tuple(SHARED_KIB)
_GPUS = {80: "a100-80", 90: "h100-80", 100: "b200"}
"""Those whose data sheet gives the floor."""
_INSTRUCTIONS = {
    "bulk copies": r"cp\.async\.bulk",
    "async copies": r"cp\.async\.c[ag]\.",
    "wgmma": r"wgmma\.mma_async",
    "tcgen05": r"tcgen05\.mma",
    "mma": r"(?<!wgmma\.)\bmma\.sync",
    "128-bit": r"\b(ld|st)\.global[.\w:]*\.(v4\.b32|v2\.b64)",
}
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
        capability: a compute capability, such as 90.
        warps: of a program, of 32 threads each.
        registers: of a thread.
        spilled_bytes: stores and loads of spilled registers, of a thread.
        shared_bytes: shared memory of a program.
        moved_bytes: of the tensors that it receives, each once.
        operations: floating-point operations of its matrix products.
        dtype: of the operation, as ``hardware`` names it.
        ptx: the code.
        bulk: whether its tiles are those that the copy engine reads.
    """

    operation: str
    kernel: str
    capability: int
    warps: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    moved_bytes: int
    operations: int
    dtype: str
    ptx: str = field(repr=False)
    bulk: bool = False

    @property
    def instructions(self) -> tuple[str, ...]:
        """The names of the kinds of instructions in the code, of ``_INSTRUCTIONS``."""
        return tuple(name for name, pattern in _INSTRUCTIONS.items() if re.search(pattern, self.ptx))

    @property
    def problem(self) -> str | None:
        """One line if the kernel spills registers, cannot start on this architecture, or makes no use of the
        copy engine although its tiles are made for it."""
        where = f"{self.operation}: {self.kernel} on sm_{self.capability}"
        if self.shared_bytes > SHARED_KIB[self.capability] * 1024:
            return (
                f"{where} needs {self.shared_bytes / 1024:.0f} KiB of shared memory of "
                f"{SHARED_KIB[self.capability]}: choose smaller tiles or fewer stages in tuning.toml"
            )
        if self.spilled_bytes:
            return (
                f"{where} spills {self.spilled_bytes} bytes: "
                "choose smaller tiles or more warps in tuning.toml"
            )
        if self.bulk and "bulk copies" not in self.instructions:
            return f"{where} has no bulk copy, although its tiles have BULK: leave BULK out of tuning.toml"
        return None

    def floor_us(self) -> float | None:
        """Return the least microseconds of the kernel by the data sheet, or None where it is not known."""
        if self.capability not in _GPUS:
            return None
        of = gpu(_GPUS[self.capability])
        return 1e6 * max(self.moved_bytes / of.bandwidth, self.operations / of.peak(self.dtype))


def compile_kernels(
    operations: Sequence[str] = tuple(CASES),
    capabilities: Sequence[int] = CAPABILITIES,
    dtype: torch.dtype = torch.bfloat16,
    size: str = "3b",
) -> Iterator[CompiledKernel]:
    """Compile the kernels of ``operations`` for each compute capability, and yield their resources.

    Args:
        operations: names of ``CASES``.
        capabilities: of ``CAPABILITIES``.
        dtype: of the tensors.
        size: a name of ``SIZES``.

    Raises:
        UserError: a name or a capability is unknown, or Triton is not installed or interprets kernels.
    """
    for name in operations:
        if name not in CASES:
            raise unknown_name("operation", name, CASES)
    for capability in capabilities:
        if capability not in SHARED_KIB:
            raise unknown_name("compute capability", str(capability), map(str, SHARED_KIB))
    if size not in SIZES:
        raise unknown_name("size", size, SIZES)
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise UserError("TRITON_INTERPRET=1 interprets kernels: unset it to compile them")
    for name in operations:
        for capability in capabilities:
            with using(KernelBackend.TRITON):
                launches = launches_of(name, dtype, capability, SIZES[size])
            for launch in launches:
                yield compiled(name, launch, capability, dtype, SIZES[size])


def compile_part(operation: str, capability: int, dtype: torch.dtype, size: str) -> list[CompiledKernel]:
    """Compile the kernels of one operation for one compute capability, in a process of several."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return list(compile_kernels([operation], [capability], dtype, size))


def launches_of(name: str, dtype: torch.dtype, capability: int, size: Size) -> list[Any]:
    """Return the different launches of one operation; those of a loop differ only in their grid."""
    from dlo_lib.kernels.triton_code.launch import recorded
    from dlo_lib.kernels.triton_code.tuning import compiled_for

    with compiled_for(capability), recorded() as launches:
        run_forward_and_backward(name, dtype, "meta", size)
    different = {(launch.kernel.__name__, str(source_of(launch))): launch for launch in launches}
    return list(different.values())


def source_of(launch: Any) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], list[Any]]]:
    """Return the types, the constants and the attributes of the arguments, as a launch specialises them."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[Any]] = {}
    for index, param in enumerate(launch.kernel.params):
        value = launch.arguments[param.name]
        specialised = not param.do_not_specialize
        if param.is_constexpr or (isinstance(value, int) and value == 1 and specialised):
            signature[param.name], constants[param.name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[param.name] = _TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[param.name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and specialised:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[param.name] = "fp32"
    return signature, constants, attributes


def _ast_source(launch: Any) -> Any:
    from triton.compiler import ASTSource

    signature, constants, attributes = source_of(launch)
    return ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)


def code_of(launch: Any, capability: int) -> str:
    """Return Triton's IR of a launch, which its compiler receives, without the numbers of lines. What a
    comment changes is not in it."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    source, target = _ast_source(launch), GPUTarget("cuda", capability, 32)
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options({**launch.options, **source.parse_options()})
    functions = backend.get_codegen_implementation(options)
    code: str = source.make_ir(target, options, functions, backend.get_module_map(), context).str_nodebug()
    return code


def compiled(operation: str, launch: Any, capability: int, dtype: torch.dtype, size: Size) -> CompiledKernel:
    """Compile a launch of an operation of ``CASES`` or ``EDGES``, and return its resources."""
    import triton
    from triton.backends.compiler import GPUTarget

    source = _ast_source(launch)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    ptx = made.asm["ptx"]
    registers, spilled = _assembled(ptx, capability)
    kernel = launch.kernel.__name__.strip("_")
    tensors = [value for value in launch.arguments.values() if isinstance(value, Tensor)]
    moved = sum(tensor.nbytes for tensor in tensors)
    if operation == "adamw":  # it receives addresses: parameter and moments are read and written
        moved = 7 * dtype.itemsize * size.wide * size.hidden
    return CompiledKernel(
        operation=operation,
        kernel=kernel,
        capability=capability,
        warps=made.metadata.num_warps,
        registers=registers,
        spilled_bytes=spilled,
        shared_bytes=made.metadata.shared,
        moved_bytes=moved,
        operations=products(kernel, operation, size),
        dtype=_TYPES[dtype].removeprefix("*"),
        ptx=ptx,
        bulk=bool(launch.arguments.get("BULK")),
    )


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
