"""Runs the programs of a kernel one after another, and counts what they move."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dlo_lib.tiles.faults import TileError
from dlo_lib.tiles.memory import SECTOR, Buffer, Pointer
from dlo_lib.tiles.program import Program, read_program
from dlo_lib.tiles.state import TileMachine
from dlo_lib.tiles.values import Runtime

MOST_PROGRAMS = 1 << 20
MOST_WORK = 1 << 62
RunText = Callable[[str, Sequence[int], Mapping[str, Any], int], "Traffic"]
_elsewhere: ContextVar[RunText | None] = ContextVar("elsewhere", default=None)


@dataclass(frozen=True)
class Traffic:
    """What a launch moved.

    Attributes:
        read: bytes loaded from each argument.
        written: bytes stored to each argument.
        largest_tile: elements of the largest floating-point tile.
        flops: floating-point operations: 2 m n k for a product, one for each element of another operation.
        programs: the number of programs.
        undefined: a load had lanes outside of its mask and no ``other``, so their values are undefined.
        most_held: the most elements that the variables of one program hold at one time, in tiles that are no
            masks: a tile that another name still has counts again.
        most_written: the most bytes that one program stores to each argument.
        sectors: bytes of the sectors of 32 bytes that pass between each argument and the programs, which is
            what a GPU moves: each load and each store passes each sector that it touches once.
    """

    read: Mapping[str, int]
    written: Mapping[str, int]
    largest_tile: int
    flops: int
    programs: int
    undefined: bool = False
    most_held: int = 0
    most_written: Mapping[str, int] = field(default_factory=dict)
    sectors: Mapping[str, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """All bytes that were read and written."""
        return sum(self.read.values()) + sum(self.written.values())

    @property
    def intensity(self) -> float:
        """Floating-point operations for each byte."""
        return self.flops / self.bytes if self.bytes else math.inf

    def __repr__(self) -> str:
        read, written = (sum(kind.values()) for kind in (self.read, self.written))
        moved = f"{read:,} bytes read, {written:,} written, {self.flops:,} operations"
        return f"{self.programs} programs: {moved}, largest tile {self.largest_tile} elements"


@contextlib.contextmanager
def running_elsewhere(run_text: RunText) -> Iterator[None]:
    """Let ``run_text`` run the kernels that are given as text in the context, as in another process."""
    token = _elsewhere.set(run_text)
    try:
        yield
    finally:
        _elsewhere.reset(token)


def run(
    kernel: str | Program,
    grid: Sequence[int],
    args: Mapping[str, Any],
    most_work: int = MOST_WORK,
) -> Traffic:
    """Run a kernel on CPU tensors, which it changes in place.

    Args:
        kernel: its text, or the program read from it.
        grid: the number of programs along each of up to three axes.
        args: a value for each parameter: a tensor, an int, a float or a bool.
        most_work: limits the computing time, in units of about a microsecond.

    Raises:
        TileError: the kernel or an argument is wrong.
        NotWrittenError: the kernel raises NotImplementedError.
    """
    elsewhere = _elsewhere.get()
    if elsewhere is not None and isinstance(kernel, str):
        return elsewhere(kernel, grid, args, most_work)
    # Tiles are made without a device, and the caller may have made a GPU the default one.
    is_cpu = torch.get_default_device().type == "cpu"
    with contextlib.nullcontext() if is_cpu else torch.device("cpu"):
        return _run(kernel, grid, args, most_work)


def _run(kernel: str | Program, grid: Sequence[int], args: Mapping[str, Any], most_work: int) -> Traffic:
    program = read_program(kernel) if isinstance(kernel, str) else kernel
    sizes = _grid(grid)
    machine = TileMachine(sizes, most_work)
    names, buffers = _arguments(program, args)
    for number, place in enumerate(itertools.product(*map(range, sizes))):
        machine.begin(number, place, dict(names))
        try:
            program.body(machine)
        except TileError as error:
            _locate(error, machine, program)
            raise
        except (
            ArithmeticError,
            IndexError,
            MemoryError,
            RecursionError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            first = (str(error) or type(error).__name__).splitlines()[0]
            raised = TileError("{error}", error=first[:200])
            _locate(raised, machine, program)
            raise raised from None
    read = {
        name: buffer.read * buffer.tensor.element_size() for name, buffer in buffers.items() if buffer.read
    }
    written = {
        name: buffer.written * buffer.tensor.element_size()
        for name, buffer in buffers.items()
        if buffer.written
    }
    undefined = any(buffer.undefined for buffer in buffers.values())
    return Traffic(
        read,
        written,
        machine.largest_tile,
        machine.flops,
        math.prod(sizes),
        undefined,
        machine.most_held,
        {name: buffers[name].most_written * buffers[name].tensor.element_size() for name in written},
        {name: buffer.sectors * SECTOR for name, buffer in buffers.items() if buffer.sectors},
    )


def _locate(error: TileError, machine: TileMachine, program: Program) -> None:
    error.line = error.line or machine.line
    error.code = program.line(error.line)
    error.program = machine.program


def _grid(grid: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(grid, Sequence) or not 1 <= len(grid) <= 3:
        raise TileError("the grid is {grid}: it should be a tuple of one to three sizes", grid=grid)
    sizes = tuple(grid)
    if any(type(size) is not int or size < 0 for size in sizes) or math.prod(sizes) > MOST_PROGRAMS:
        raise TileError("the grid is {grid}: use whole numbers, with a product of at most 2 ** 20", grid=grid)
    return sizes


def _arguments(program: Program, args: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Buffer]]:
    """Return the values of the parameters, and the buffers by name; equal tensors share one buffer."""
    expected = [name for name, _ in program.parameters]
    if set(expected) != set(args):
        values: dict[str, Any] = {
            "name": program.name,
            "expected": ", ".join(expected),
            "got": ", ".join(args),
        }
        raise TileError("{name} has the parameters {expected}, and is launched with {got}", **values)
    names: dict[str, Any] = {}
    buffers: dict[str, Buffer] = {}
    known: dict[tuple[Any, ...], Buffer] = {}
    for name, is_constexpr in program.parameters:
        value = args[name]
        if isinstance(value, Tensor):
            if value.device.type != "cpu" or is_constexpr:
                raise TileError(
                    "{name} should be a tensor on the CPU, and its parameter no constexpr", name=name
                )
            key = value.data_ptr(), value.dtype, value.shape, value.stride()
            buffer = known.setdefault(key if value.numel() else (name,), Buffer(name, value))
            names[name], buffers[name] = Pointer(buffer, torch.zeros((), dtype=torch.int64)), buffer
        elif isinstance(value, bool | int):
            names[name] = value if is_constexpr or isinstance(value, bool) else Runtime(value)
        elif isinstance(value, float):
            names[name] = value if is_constexpr else torch.tensor(value, dtype=torch.float32)
        else:
            kind = type(value).__name__
            raise TileError("{name} is a {kind}: give a tensor or a number", name=name, kind=kind)
    return names, {name: buffer for name, buffer in buffers.items() if buffer.name == name}
