"""An interpreter of Triton's language for machines without Triton: it runs kernels, and says what is wrong.

    import dlo_lib.tiles as triton
    import dlo_lib.tiles.language as tl

    @triton.jit
    def double_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
        offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < n
        tl.store(y_ptr + offsets, 2 * tl.load(x_ptr + offsets, mask=mask), mask=mask)

    traffic = double_kernel[(triton.cdiv(n, 64),)](x, y, n, BLOCK=64)

A kernel is text and can call nothing else of Python, so a judge can run the kernel of a student. The judge
runs it in a process with limits, because it may compute without end. The launch counts the bytes that are
read and written. It reports what a GPU computes wrongly without a message: an access outside of a tensor, two
programs that use one element, an undefined value, a loop variable whose type changes. Kernels on CUDA tensors
run with the real Triton, without a change.

- ``kernel``: ``@triton.jit``, and what a call of a kernel does
- ``program``: reads the syntax tree of a kernel
- ``launch``: runs the programs one after another on the CPU
- ``values``: numbers, tiles and pointers
- ``memory``: tensors with the checks that a GPU does not make
- ``kinds``: what a variable of a loop keeps
- ``state``: what the programs of a launch share
- ``functions``: the functions of ``tl``
- ``language``: the names of ``triton.language`` that are supported
- ``faults``: the error of a kernel
- ``cures``: what to write in place of what is not supported

The room imports no other room. Paper: Triton (P. Tillet et al., MAPL 2019).
"""

from dlo_lib.tiles.faults import TileError
from dlo_lib.tiles.kernel import TileKernel, cdiv, has_triton, jit, next_power_of_2
from dlo_lib.tiles.launch import Traffic, run
from dlo_lib.tiles.program import NotWrittenError, Program, read_program

__all__ = [
    "NotWrittenError",
    "Program",
    "TileError",
    "TileKernel",
    "Traffic",
    "cdiv",
    "has_triton",
    "jit",
    "next_power_of_2",
    "read_program",
    "run",
]
