"""The values of a kernel: numbers, tiles and pointers, and how Triton combines them.

A number of Python is weak: it takes the dtype of the tile that it meets. A tile is not, also if it has no
dimensions: float16 and float32 give float32. Comparisons give tiles of bools.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dlo_lib.tiles.faults import TileError
from dlo_lib.tiles.memory import Pointer
from dlo_lib.tiles.state import TileMachine

MOST_ELEMENTS = 1 << 20
"""Of a tile, as in Triton."""
LARGEST_INT = 1 << 63
DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "int1": torch.bool,
    "int32": torch.int32,
    "int64": torch.int64,
}
Number = int | float | bool
Binary = Callable[[Any, Any], Any]


class Runtime(int):
    """An int that is not known when the kernel is compiled, such as a size or the number of a program."""


BINARY: dict[str, Binary] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mult": operator.mul,
    "Div": operator.truediv,
    "FloorDiv": operator.floordiv,
    "Mod": operator.mod,
    "BitAnd": operator.and_,
    "BitOr": operator.or_,
    "BitXor": operator.xor,
    "Lt": operator.lt,
    "LtE": operator.le,
    "Gt": operator.gt,
    "GtE": operator.ge,
    "Eq": operator.eq,
    "NotEq": operator.ne,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
}
BITS = ("BitAnd", "BitOr", "BitXor")


def binary(machine: TileMachine, name: str, a: Any, b: Any) -> Any:
    """Return the result of a binary operation of two values."""
    if isinstance(a, Pointer) or isinstance(b, Pointer):
        return _moved(machine, name, a, b)
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        return _number(name, require_number(a), require_number(b))
    if name in BITS and not (_whole(a) and _whole(b)):
        raise TileError("&, | and ^ combine masks: put each comparison in parentheses, (a < n) & (b < m)")
    a, b = matched(a, b)
    if name in ("maximum", "minimum"):
        a, b = as_tile(a, b), as_tile(b, a)
    return machine.count(BINARY[name](a, b))


def matched(a: Any, b: Any) -> tuple[Any, Any]:
    """Return two values with one dtype, if both are tiles, after a test of their shapes."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        require_fit(a.shape, b.shape)
        if a.dtype != b.dtype:
            dtype = torch.promote_types(a.dtype, b.dtype)
            return a.to(dtype), b.to(dtype)
        return a, b
    return (a, require_number(b)) if isinstance(a, Tensor) else (require_number(a), b)


def as_tile(value: Any, like: Any) -> Tensor:
    """Return a number as a tile with the dtype of the tile ``like``."""
    if isinstance(value, Tensor):
        return value
    dtype = like.dtype if isinstance(like, Tensor) else None
    if isinstance(value, float) and (dtype is None or not dtype.is_floating_point):
        dtype = torch.float32
    return torch.tensor(value, dtype=dtype)


def require_fit(*shapes: torch.Size) -> None:
    """Check that the shapes can be broadcast to one that is not too large.

    Raises:
        TileError: they cannot.
    """
    if all(shape == shapes[0] for shape in shapes):
        return
    try:
        size = math.prod(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        shown = " and ".join(str(tuple(shape)) for shape in shapes)
        raise TileError(
            "tiles of shape {shapes} do not fit: x[:, None] makes a column, x[None, :] a row", shapes=shown
        ) from None
    require_size(size)


def require_size(size: int) -> None:
    """Check the number of elements of a tile.

    Raises:
        TileError: it is too large.
    """
    if size > MOST_ELEMENTS:
        raise TileError("a tile of {size} elements is too large: the limit is 2 ** 20", size=size)


def require_number(value: Any) -> Number:
    """Return a number of Python.

    Raises:
        TileError: the value is something else.
    """
    if isinstance(value, bool | int | float):
        return value
    raise TileError("{kind} is no number and no tile", kind=describe(value))


def describe(value: Any) -> str:
    """Return the type of a value in words."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} {tuple(value.shape)}" if value.ndim else f"{dtype}"
    if isinstance(value, Pointer):
        return f"a pointer {tuple(value.offsets.shape)}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return (
        f"a number ({type(value).__mro__[-2].__name__})" if isinstance(value, int | float) else "this value"
    )


def truth(value: Any) -> bool:
    """Return a condition of ``if``, ``and``, ``or`` or ``not``.

    Raises:
        TileError: it is a tile, whose elements differ.
    """
    if isinstance(value, Tensor):
        if value.ndim:
            raise TileError("a tile has no single truth: use tl.where, and & between masks")
        return bool(value)
    return bool(require_number(value))


def _whole(value: Any) -> bool:
    return not (value.is_floating_point() if isinstance(value, Tensor) else isinstance(value, float))


def _number(name: str, a: Number, b: Number) -> Number:
    if name in ("maximum", "minimum"):
        result: Number = max(a, b) if name == "maximum" else min(a, b)
    else:
        try:
            result = BINARY[name](a, b)
        except ZeroDivisionError:
            raise TileError("a division by zero") from None
    if isinstance(result, int) and not isinstance(result, bool):
        if abs(result) >= LARGEST_INT:
            raise TileError("a whole number of more than 63 bits")
        return Runtime(result) if isinstance(a, Runtime) or isinstance(b, Runtime) else result
    return result


def _moved(machine: TileMachine, name: str, a: Any, b: Any) -> Pointer:
    if isinstance(b, Pointer):
        a, b = b, a
        name = "Add" if name == "Add" else ""
    if name not in ("Add", "Sub") or isinstance(b, Pointer) or not _whole(b):
        raise TileError(
            "a pointer can be moved by whole numbers only: x_ptr + offsets; tl.load reads its elements"
        )
    if isinstance(b, Tensor):
        require_fit(a.offsets.shape, b.shape)
    else:
        require_number(b)
    moved = a.offsets + b if name == "Add" else a.offsets - b
    machine.add_elements(moved.numel())
    return Pointer(a.buffer, moved)
