"""The functions of ``tl`` on the values of a kernel. Their first argument is the machine of the launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dlo_lib.tiles.faults import TileError
from dlo_lib.tiles.language import DType
from dlo_lib.tiles.memory import Pointer
from dlo_lib.tiles.state import TileMachine
from dlo_lib.tiles.values import (
    DTYPES,
    Runtime,
    as_tile,
    binary,
    describe,
    matched,
    require_fit,
    require_number,
    require_size,
)

LEAST_DOT = 16


def program_id(machine: TileMachine, axis: int) -> int:
    """Return the number of this program along an axis of the grid."""
    return Runtime(machine.program[_axis(axis, len(machine.program))])


def num_programs(machine: TileMachine, axis: int) -> int:
    """Return the number of programs along an axis of the grid."""
    return Runtime(machine.grid[_axis(axis, len(machine.grid))])


def arange(machine: TileMachine, start: int, end: int) -> Tensor:
    """Return the numbers from ``start`` to ``end - 1``; their count is a power of two."""
    for value in (start, end):
        _require_constant("tl.arange", value)
    size = end - start
    if size < 1 or size & (size - 1):
        raise TileError("tl.arange of {size} numbers: the count should be a power of two", size=size)
    require_size(size)
    machine.add_elements(size)
    return torch.arange(start, end)


def full(machine: TileMachine, shape: Any, value: Any, dtype: Any) -> Tensor:
    """Return a tile of one value."""
    sizes = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    total = 1
    for size in sizes:
        _require_constant("the shape of a tile", size)
        if size < 1 or size & (size - 1):
            raise TileError("a tile of shape {shape}: each size should be a power of two", shape=sizes)
        total *= size
    require_size(total)
    made = torch.empty(sizes, dtype=dtype_of(dtype))
    made.fill_(value if isinstance(value, Tensor) and not value.ndim else require_number(value))
    return machine.count(made, 0)


def zeros(machine: TileMachine, shape: Any, dtype: Any) -> Tensor:
    """Return a tile of zeros."""
    return full(machine, shape, 0, dtype)


def load(machine: TileMachine, pointer: Any, mask: Any = None, other: Any = None) -> Tensor:
    """Return the elements that the pointer addresses. Where ``mask`` is False nothing is read, and the value
    is ``other``; without it the value is undefined (NaN here)."""
    offsets, chosen = _addressed("tl.load", pointer, mask)
    if mask is None and other is not None:
        raise TileError("tl.load has `other` and no mask: it reads every element")
    if other is not None and not isinstance(other, Tensor):
        require_number(other)
    elif isinstance(other, Tensor):
        require_fit(offsets.shape, other.shape)
        other = other.expand(offsets.shape)
    return machine.count(pointer.buffer.load(offsets, chosen, other, machine.number), 0)


def store(machine: TileMachine, pointer: Any, value: Any, mask: Any = None) -> None:
    """Write ``value`` where ``mask`` is True, in the dtype of the tensor."""
    _write(machine, "tl.store", pointer, value, mask, atomic=False)


def atomic_add(machine: TileMachine, pointer: Any, value: Any, mask: Any = None) -> None:
    """Add ``value`` to the elements in memory; several programs may add to one element."""
    _write(machine, "tl.atomic_add", pointer, value, mask, atomic=True)


def where(machine: TileMachine, condition: Any, a: Any, b: Any) -> Any:
    """Return ``a`` where the condition is True, else ``b``."""
    if not isinstance(condition, Tensor):
        return a if require_number(condition) else b
    a, b = matched(a, b) if isinstance(a, Tensor) or isinstance(b, Tensor) else (a, b)
    a, b = as_tile(a, b), as_tile(b, a)
    dtype = torch.promote_types(a.dtype, b.dtype)
    require_fit(condition.shape, a.shape, b.shape)
    return machine.count(torch.where(condition.bool(), a.to(dtype), b.to(dtype)))


def maximum(machine: TileMachine, a: Any, b: Any) -> Any:
    """Return the larger of two values, element by element."""
    return binary(machine, "maximum", a, b)


def minimum(machine: TileMachine, a: Any, b: Any) -> Any:
    """Return the smaller of two values, element by element."""
    return binary(machine, "minimum", a, b)


def trans(machine: TileMachine, x: Any) -> Tensor:
    """Return the transpose of a tile of two dimensions."""
    tile = _tile("tl.trans", x)
    if tile.ndim != 2:
        raise TileError("tl.trans takes a tile of two dimensions, not {kind}", kind=describe(x))
    return tile.T


def dot(
    machine: TileMachine, a: Any, b: Any, acc: Any = None, input_precision: Any = None, allow_tf32: Any = None
) -> Tensor:
    """Return a b (+ acc) of tiles (m, k) and (k, n), in float32."""
    a, b = _tile("tl.dot", a), _tile("tl.dot", b)
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        message = "tl.dot multiplies (m, k) by (k, n), not {a} by {b}: tl.trans transposes a tile"
        raise TileError(message, a=tuple(a.shape), b=tuple(b.shape))
    if a.dtype != b.dtype:
        message = "tl.dot takes two tiles of one dtype, not {a} and {b}: convert one with .to(...)"
        raise TileError(message, a=describe(a), b=describe(b))
    if min(*a.shape, *b.shape) < LEAST_DOT:
        raise TileError(
            "tl.dot of {a} and {b}: each size should be at least 16", a=tuple(a.shape), b=tuple(b.shape)
        )
    m, k, n = a.shape[0], a.shape[1], b.shape[1]
    require_size(m * n)
    machine.add_work(m * n * k // 4096)
    product = a.float() @ b.float()
    if acc is not None:
        accumulated = _tile("acc of tl.dot", acc)
        require_fit(product.shape, accumulated.shape)
        product = product + accumulated
    return machine.count(product, 2 * m * n * k)


def cdiv(machine: TileMachine, a: Any, b: Any) -> Any:
    """Return a / b, rounded up."""
    return binary(machine, "FloorDiv", binary(machine, "Sub", binary(machine, "Add", a, b), 1), b)


def to(machine: TileMachine, x: Any, dtype: Any) -> Any:
    """Return ``x`` in another dtype; a number of Python stays one."""
    if not isinstance(x, Tensor):
        return require_number(x)
    return machine.count(x.to(dtype_of(dtype)), 0)


def subscript(machine: TileMachine, x: Any, places: Sequence[bool]) -> Any:
    """Return a tile or a pointer with new dimensions of size 1; ``places`` are True where one is."""
    values = x.offsets if isinstance(x, Pointer) else _tile("[...]", x)
    if values.ndim != sum(not place for place in places):
        raise TileError("{kind} has not the dimensions of this index", kind=describe(x))
    for index, place in enumerate(places):
        values = values.unsqueeze(index) if place else values
    machine.add_work(4)
    return Pointer(x.buffer, values) if isinstance(x, Pointer) else values


def dtype_of(name: Any) -> torch.dtype:
    """Return the dtype of tl.float32 and its like.

    Raises:
        TileError: it is no dtype.
    """
    if not isinstance(name, DType):
        raise TileError("this is no dtype: use one such as tl.float32")
    return DTYPES[name]


def _elementwise(name: str, function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def call(machine: TileMachine, x: Any) -> Tensor:
        tile = as_tile(x, None) if not isinstance(x, Tensor) else x
        if name != "abs" and tile.dtype != torch.float32:
            message = "tl.{name} computes in float32, not in {kind}: convert its argument, x.to(tl.float32)"
            raise TileError(message, name=name, kind=describe(x))
        return machine.count(function(tile))

    return call


def _reduction(name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(machine: TileMachine, x: Any, axis: Any = None, keep_dims: Any = False) -> Tensor:
        tile = _tile("tl." + name, x)
        machine.add_elements(tile.numel())
        if axis is None:
            return machine.count(function(tile.reshape(-1), 0), tile.numel())
        _axis(axis, tile.ndim)
        return machine.count(function(tile, axis, keepdim=bool(keep_dims)), tile.numel())

    return call


def _sum(x: Tensor, axis: int, keepdim: bool = False) -> Tensor:
    return x.sum(axis, keepdim=keepdim, dtype=x.dtype if x.is_floating_point() else None)


def _write(machine: TileMachine, name: str, pointer: Any, value: Any, mask: Any, atomic: bool) -> None:
    offsets, chosen = _addressed(name, pointer, mask)
    tile = value if isinstance(value, Tensor) else torch.tensor(require_number(value))
    require_fit(offsets.shape, tile.shape)
    if torch.broadcast_shapes(offsets.shape, tile.shape) != offsets.shape:
        message = "{name} writes {kind} to a pointer of shape {shape}: one address gets one value"
        raise TileError(message, name=name, kind=describe(tile), shape=tuple(offsets.shape))
    machine.add_elements(offsets.numel())
    pointer.buffer.store(offsets, tile.expand(offsets.shape), chosen, machine.number, atomic)


def _addressed(name: str, pointer: Any, mask: Any) -> tuple[Tensor, Tensor | None]:
    """Return the offsets and the mask of an access, in one shape."""
    if not isinstance(pointer, Pointer):
        kind = describe(pointer)
        raise TileError("{name} takes a pointer such as x_ptr + offsets, not {kind}", name=name, kind=kind)
    offsets = pointer.offsets
    if mask is None:
        return offsets, None
    chosen = mask if isinstance(mask, Tensor) else torch.tensor(bool(require_number(mask)))
    if chosen.dtype != torch.bool:
        raise TileError("the mask of {name} is {kind}: use a comparison", name=name, kind=describe(chosen))
    require_fit(offsets.shape, chosen.shape)
    offsets, chosen = torch.broadcast_tensors(offsets, chosen)
    return offsets, chosen


def _tile(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Pointer):
        raise TileError("{name} takes values, not a pointer: tl.load reads them", name=name)
    raise TileError("{name} takes a tile, not {kind}", name=name, kind=describe(value))


def _axis(axis: Any, dimensions: int) -> int:
    if isinstance(axis, int) and 0 <= axis < dimensions:
        return axis
    raise TileError("there is no axis {axis} of {dimensions}", axis=axis, dimensions=dimensions)


def _require_constant(what: str, value: Any) -> None:
    if isinstance(value, Runtime | bool) or not isinstance(value, int):
        message = "{what} should be a constant or a tl.constexpr parameter: the compiler must know it"
        raise TileError(message, what=what)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{
        function.__name__: function
        for function in (program_id, num_programs, arange, full, zeros, load, store, atomic_add)
    },
    **{function.__name__: function for function in (where, maximum, minimum, trans, dot, cdiv)},
    **{
        name: _elementwise(name, getattr(torch, name))
        for name in ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sigmoid", "abs")
    },
    **{
        name: _reduction(name, function)
        for name, function in (("sum", _sum), ("max", torch.amax), ("min", torch.amin))
    },
}
