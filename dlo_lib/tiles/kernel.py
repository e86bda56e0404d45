"""``@triton.jit`` of the interpreter: a kernel that is launched as in Triton."""

from __future__ import annotations

import inspect
import linecache
import types
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from dlo_lib.base.errors import UserError
from dlo_lib.tiles import language
from dlo_lib.tiles.faults import TileError
from dlo_lib.tiles.launch import Traffic, run
from dlo_lib.tiles.program import read_program

Grid = Sequence[int] | Callable[[dict[str, Any]], Sequence[int]]
LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas")


class TileKernel:
    """A kernel: ``kernel[grid](*arguments, BLOCK=64)`` runs it.

    CPU tensors are processed by the interpreter, which returns the traffic of the launch, also where
    ``TRITON_INTERPRET`` asks Triton to interpret. CUDA tensors are processed by Triton, which returns None
    here.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__
        self.__wrapped__ = function
        self._text = _text_of(function)
        self._triton: Any = None

    @property
    def source(self) -> str:
        """The text of the kernel.

        Raises:
            UserError: Python does not know it, as for a function that ``exec`` has made.
        """
        if not self._text:
            raise UserError(f"the text of {self.__name__} is not known: define it in a cell or in a file")
        return self._text

    def __getitem__(self, grid: Grid) -> Callable[..., Traffic | None]:
        def launch(*args: Any, **kwargs: Any) -> Traffic | None:
            if any(isinstance(value, Tensor) and value.is_cuda for value in args):
                self._real()[grid](*args, **kwargs)
                return None
            for option in LAUNCH_OPTIONS:
                kwargs.pop(option, None)
            program = read_program(self.source)
            names = [name for name, _ in program.parameters]
            given = dict(zip(names, args)) | kwargs
            if len(args) > len(names):
                given["..."] = args[len(names)]
            return run(program, tuple(grid(given) if callable(grid) else grid), given)

        return launch

    def __call__(self, *_: object, **__: object) -> None:
        raise TileError("{name} is a kernel: launch it as {name}[grid](...)", name=self.__name__)

    def _real(self) -> Any:
        """Return this kernel as a kernel of Triton."""
        if self._triton is None:
            if not has_triton():
                raise UserError(
                    "Triton is not installed: pip install 'dlo-lib[kernels]', or use tensors on the CPU"
                )
            import triton

            changed = {
                name: triton.language if value is language else value
                for name, value in self.function.__globals__.items()
            }
            names = types.FunctionType(self.function.__code__, changed, self.__name__)
            names.__annotations__ = {
                name: triton.language.constexpr if "constexpr" in str(kind) else kind
                for name, kind in self.function.__annotations__.items()
            }
            names.__module__ = self.function.__module__
            names.__qualname__ = self.function.__qualname__
            self._triton = triton.jit(names)
        return self._triton


def jit(function: Callable[..., Any]) -> TileKernel:
    """Make ``function`` a kernel. Its text is read now, its syntax at the first launch."""
    return TileKernel(function)


def has_triton() -> bool:
    """Return whether the real Triton is installed. This does not import it."""
    return find_spec("triton") is not None


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def _text_of(function: Callable[..., Any]) -> str:
    """Return the text of a function, "" if it is not known.

    ``inspect.getsource`` would search all modules.
    """
    code = function.__code__
    # Python 3.13 keeps the program of `python -c` as the text of "<string>", the file of what `exec` defines.
    lines = linecache.getlines(code.co_filename) if code.co_filename != "<string>" else []
    if not lines:
        return ""
    return "".join(inspect.getblock(lines[code.co_firstlineno - 1 :]))
