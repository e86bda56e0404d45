"""The step of every optimiser of the registry, in each of its implementations, compared with the step of
PyTorch's AdamW in a loop over the parameters.

The parameters are the matrices and norms of eight blocks of a small Llama. The temporary memory of a step is
counted in ``tests/profiling``; the column of this table shows only what the allocator requests anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.paired import Row, compare, take_turns
from dlo_lib.optim.entry import OptimizerStep
from dlo_lib.optim.registry import OPTIMIZERS

HIDDEN, WIDE, BLOCKS = 512, 1408, 8
SHAPES = [(HIDDEN, HIDDEN)] * 4 + [(WIDE, HIDDEN)] * 2 + [(HIDDEN, WIDE), (HIDDEN,), (HIDDEN,)]
IMPLEMENTATIONS = [
    (name, step) for name, entry in OPTIMIZERS.items() if not entry.in_backward for step in entry.steps
]
ROWS = len(IMPLEMENTATIONS)


def stepping(name: str, step: OptimizerStep) -> Callable[[], object]:
    """Return a function that takes one step of fp32 parameters, 25 million of them."""
    entry = OPTIMIZERS[name]
    params = [torch.randn(shape).requires_grad_() for shape in SHAPES * BLOCKS]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = entry.cls(params, **entry.arguments(step, lr=1e-4))
    return lambda: optimizer.step()


def rows(pairs: int = 15) -> Iterator[Row]:
    peer = stepping("adamw", OptimizerStep.FOR_LOOP)
    for name, step in IMPLEMENTATIONS:
        turns = take_turns(stepping(name, step), peer, pairs)
        yield compare(f"{name}, {step.value}", "AdamW, for-loop", 1, turns)
