"""The twin of each step: one process that has the tensors of all ranks; the cost of an all-reduce, summed over its rounds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def estimate(parts: Sequence[Tensor]) -> float:
    """π from the points of all ranks, computed with norms instead of squares."""
    inside = float((torch.linalg.vector_norm(torch.cat(list(parts)), dim=1) <= 1).double().sum())
    return 4 * inside / sum(map(len, parts))


def summed(values: Sequence[Tensor]) -> Tensor:
    """The sum over ranks."""
    return torch.stack(list(values)).sum(0)


def chunks_of(values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The chunks of the sum, by rank."""
    return summed(values).tensor_split(len(values))


def same(got: object, want: Tensor) -> bool:
    """Whether ``got`` is the tensor ``want``, up to rounding."""
    return isinstance(got, Tensor) and got.shape == want.shape and torch.allclose(got.double(), want.double(), rtol=1e-4, atol=1e-6)


def tree_rounds(ranks: int) -> int:
    """The rounds of a tree: each doubles the ranks that have the tensor."""
    have, rounds = 1, 0
    while have < ranks:
        have, rounds = 2 * have, rounds + 1
    return rounds


def seconds(algorithm: str, size: float, ranks: int, alpha: float, beta: float) -> float:
    """The seconds of an all-reduce of ``size`` bytes."""
    total = 0.0
    if algorithm == "ring":
        for _ in range(2):
            for _ in range(1, ranks):
                total += alpha + beta * size / ranks
        return total
    for _ in range(2 * tree_rounds(ranks)):  # a reduce and a broadcast
        total += alpha + beta * size
    return total
