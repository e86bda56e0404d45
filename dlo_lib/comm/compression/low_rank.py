"""A matrix as the product of two thin ones, found by one step of a power iteration: PowerSGD.

    P = M Q         P <- its sum over ranks, with orthonormal columns
    Q = Mᵀ P        Q <- its mean over ranks        M ≈ P Qᵀ

P Qᵀ is the projection of the mean of all M on the columns of P. These tend to the most important directions
of M: with a *warm start*, Q is that of the previous step, so each training step continues the power
iteration. Both sums are all-reduces of (n + m) r elements in place of n m. With error feedback, what the
projection leaves out is added to the next gradient.

The functions here compute without communication, on batches of matrices of one shape.

Paper: T. Vogels, S. P. Karimireddy and M. Jaggi, PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization, algorithm 1 (arXiv:1905.13727).
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_worth(rows: int, columns: int, rank: int, factor: float) -> bool:
    """Return whether the factors of a matrix have ``factor`` times fewer elements than the matrix."""
    return (rows + columns) * min(rank, rows, columns) * factor < rows * columns


def orthonormal(matrices: Tensor, eps: float = 0.0) -> Tensor:
    """Return matrices whose columns are orthonormal and span those of ``matrices``.

    Args:
        matrices: (batch, rows, rank), rank at most rows.
        eps: is added to the norm of each column, against columns of zeros.

    One or two columns and 16-bit numbers by Gram-Schmidt, others by a QR decomposition.
    """
    rank = matrices.shape[2]
    if rank > 2 and matrices.dtype in (torch.float32, torch.float64):
        return torch.linalg.qr(matrices).Q
    columns: list[Tensor] = []
    for number in range(rank):
        column = matrices[:, :, number : number + 1]
        for earlier in columns:
            column = column - (earlier * column).sum(dim=1, keepdim=True) * earlier
        columns.append(column / (column.norm(dim=1, keepdim=True) + eps))
    return torch.cat(columns, dim=2)


def first_factors(batch: int, columns: int, rank: int, seed: int, like: Tensor) -> Tensor:
    """Draw the first Q, (batch, columns, rank), with the dtype and device of ``like``. Equal seeds give equal
    factors on all ranks, and the global generator is not used."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(batch, columns, rank, generator=generator, dtype=torch.float32)
    return drawn.to(like.device, like.dtype)
