"""The step of every optimiser of the registry, in each of its implementations, compared with the step of
PyTorch's AdamW in a loop over the parameters.

Before these rows, an optimiser that both this library and PyTorch write is compared with PyTorch's, on many
small matrices and on few large ones.

The parameters of the other rows are the matrices and norms of eight blocks of a small Llama. The temporary
memory of a step is counted in ``tests/profiling``; the column of this table shows only what the allocator
requests anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from benchmarks.paired import Row, compare, take_turns
from dlo_lib.optim.entry import OptimizerStep
from dlo_lib.optim.registry import OPTIMIZERS

HIDDEN, WIDE, BLOCKS = 512, 1408, 8
SHAPES = [(HIDDEN, HIDDEN)] * 4 + [(WIDE, HIDDEN)] * 2 + [(HIDDEN, WIDE), (HIDDEN,), (HIDDEN,)]
IMPLEMENTATIONS = [
    (name, step) for name, entry in OPTIMIZERS.items() if not entry.in_backward for step in entry.steps
]
TWICE = {"adafactor": "Adafactor", "muon": "Muon"}
"""Optimisers that this library writes, and PyTorch's names of them. Its Muon begins with PyTorch 2.9."""
MATRICES = {"1,000 of 16 x 16": [(16, 16)] * 1000, "10 of 512 x 512": [(512, 512)] * 10}
ROWS = len(IMPLEMENTATIONS) + len(TWICE) * len(MATRICES)


def parameters(shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return fp32 parameters with gradients."""
    params = [torch.randn(shape).requires_grad_() for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def stepping(name: str, step: OptimizerStep) -> Callable[[], object]:
    """Return a function that takes one step of fp32 parameters, 25 million of them."""
    entry = OPTIMIZERS[name]
    optimizer = entry.cls(parameters(SHAPES * BLOCKS), **entry.arguments(step, lr=1e-4))
    return lambda: optimizer.step()


def twice(name: str, shapes: Sequence[tuple[int, ...]]) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return functions that take one step of this library's optimiser and of PyTorch's."""
    entry = OPTIMIZERS[name]
    ours = entry.cls(parameters(shapes), **entry.arguments(OptimizerStep.FOREACH, lr=1e-4))
    options = {"foreach": True} if name == "adafactor" else {}  # PyTorch's Muon has a loop only
    theirs = getattr(torch.optim, TWICE[name])(parameters(shapes), lr=1e-4, **options)
    return lambda: ours.step(), lambda: theirs.step()


def rows(pairs: int = 15) -> Iterator[Row]:
    for name, of_torch in TWICE.items():
        for text, shapes in MATRICES.items():
            title = f"torch.optim.{of_torch}"
            if not hasattr(torch.optim, of_torch):
                print(f"{name}, {text}: not compared, because this PyTorch has no {title}")
                continue
            yield compare(f"{name}, {text}", title, 1, take_turns(*twice(name, shapes), pairs))
    peer = stepping("adamw", OptimizerStep.FOR_LOOP)
    for name, step in IMPLEMENTATIONS:
        turns = take_turns(stepping(name, step), peer, pairs)
        yield compare(f"{name}, {step.value}", "AdamW, for-loop", 1, turns)
