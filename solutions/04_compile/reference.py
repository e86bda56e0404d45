"""The library's own implementation under the names of this lab: what ``lab.use_reference("question")`` gives a stuck student."""

from __future__ import annotations

from torch import nn

from dlo_lib.parallel.compile_blocks import compile_blocks
from dlo_lib.profiling.compile_time import break_even_steps


def compile_each_block(model: nn.Module, **options) -> None:
    """Compile each block, in place."""
    compile_blocks(model, **options)


def break_even(compile_seconds: float, eager_seconds: float, compiled_seconds: float) -> int | None:
    """The fewest steps after which compiling has paid."""
    return break_even_steps(compile_seconds, eager_seconds, compiled_seconds)


def best_mode(modes: dict[str, tuple[float, float]], steps: int) -> str:
    """The mode that takes least for a number of steps."""
    totals = {name: compiling + steps * step for name, (compiling, step) in modes.items()}
    return min(totals, key=totals.__getitem__)


REFERENCE = {
    "blocks": {"compile_each_block": compile_each_block},
    "break_even": {"break_even": break_even, "best_mode": best_mode},
}
