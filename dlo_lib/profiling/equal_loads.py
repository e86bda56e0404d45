"""Experts on fake tensors: a router decides nothing there, so that every expert gets equally many rows.

The sizes of messages and of the products of an expert follow from the choices of the router, which a fake
tensor does not have. In ``equal_loads`` each expert has the rows of an equal load, and the experts are
computed as on a GPU: in bf16 by one grouped product for all of them, where this PyTorch has it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from dlo_lib.models.experts import Experts, Segments, on_gpu

_on_cpu = Experts.forward


def _experts(self: Experts, rows: Tensor, segments: Segments) -> Tensor:
    if rows.dtype is not torch.bfloat16 or not hasattr(torch, "_grouped_mm"):
        return _on_cpu(self, rows, segments)
    return on_gpu(rows, self.gate_up.to(rows.dtype), self.down.to(rows.dtype), segments)


@contextlib.contextmanager
def equal_loads() -> Iterator[None]:
    """Within this context, fake tensors pass through mixtures of experts whose loads are equal."""
    choices, experts = 0, 1

    def bincount(chosen: Tensor, minlength: int) -> Tensor:
        nonlocal choices, experts
        choices, experts = chosen.numel(), minlength
        return chosen.new_empty(minlength)

    def tolist(counts: Tensor) -> Any:
        loads: list[Any] = [choices // experts + (expert < choices % experts) for expert in range(experts)]
        for size in reversed(counts.shape[1:]):
            loads = [loads[start : start + size] for start in range(0, len(loads), size)]
        return (loads * len(counts))[: len(counts)]

    def repeat_interleave(self: Tensor, repeats: Any, *rest: Any, **options: Any) -> Tensor:
        if isinstance(repeats, Tensor):  # the expert of every row
            return self.new_empty(choices)
        return Tensor.repeat_interleave(self, repeats, *rest, **options)

    # A TorchFunctionMode would not see the forward that a checkpoint repeats in backward.
    with (
        patch.object(torch, "bincount", bincount),
        patch.object(FakeTensor, "tolist", tolist),
        patch.object(FakeTensor, "repeat_interleave", repeat_interleave, create=True),
        patch.object(Experts, "forward", _experts),
    ):
        yield
