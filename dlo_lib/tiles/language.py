"""The names of ``triton.language`` that the interpreter supports. They have a meaning inside of kernels only.

programs     program_id(axis), num_programs(axis)
tiles        arange(start, end), zeros(shape, dtype), full(shape, value, dtype), x[:, None], trans(x)
memory       load(pointer, mask, other), store(pointer, value, mask), atomic_add(pointer, value, mask)
elements     exp, exp2, log, log2, sqrt, rsqrt, sigmoid, abs, maximum(a, b), minimum(a, b),
             where(condition, a, b), a & b and a | b of conditions, float("-inf")
reductions   sum(x, axis), max(x, axis), min(x, axis)
products     dot(a, b, acc): tiles of at least 16 x 16, the result in float32
types        x.to(dtype), pointer.dtype.element_ty, float16, bfloat16, float32, int32, int64
loops        for i in range(start, end, step), tl.range, tl.static_range; cdiv(a, b) is a / b, rounded up
"""

from __future__ import annotations

from typing import Any, NoReturn

from dlo_lib.base.errors import UserError


class constexpr:
    """The annotation of a parameter that is known when the kernel is compiled, such as a block size."""


class DType(str):
    """The name of a dtype."""


float16, bfloat16, float32 = DType("float16"), DType("bfloat16"), DType("float32")
int1, int32, int64 = DType("int1"), DType("int32"), DType("int64")


def _only_in_kernels(name: str) -> Any:
    def call(*_: object, **__: object) -> NoReturn:
        raise UserError(f"tl.{name} works inside of a kernel only: decorate the function with @triton.jit")

    call.__name__ = name
    return call


FUNCTIONS = [
    "program_id",
    "num_programs",
    "arange",
    "zeros",
    "full",
    "trans",
    "load",
    "store",
    "atomic_add",
    "exp",
    "exp2",
    "log",
    "log2",
    "sqrt",
    "rsqrt",
    "sigmoid",
    "abs",
    "maximum",
    "minimum",
    "where",
    "sum",
    "max",
    "min",
    "dot",
    "range",
    "static_range",
    "cdiv",
]
globals().update({name: _only_in_kernels(name) for name in FUNCTIONS})


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"tl.{name} is not supported by the course's interpreter: see dlo_lib.tiles.language"
    )
