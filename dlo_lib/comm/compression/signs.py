"""One bit for each element: its sign, and one scale for all of them.

    C(x) = |x|₁ / Ψ · sign(x)        and sign(0) = 1

The scale is the mean magnitude: among all multiples of sign(x), this one is the nearest to x.

Paper: J. Bernstein et al., signSGD: Compressed Optimisation for Non-Convex Problems (arXiv:1802.04434).
"""

from __future__ import annotations

import torch
from torch import Tensor

BITS = 8


def packed(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the signs of ``x`` (elements,) as bits, (⌈elements / 8⌉,) uint8, and the scale, () in its dtype.

    A bit is 1 where the element is at least 0. Bits after the last element are 0. The scale of no elements
    is 0.
    """
    positive = torch.nn.functional.pad((x >= 0).to(torch.uint8), (0, -x.numel() % BITS))
    bits = (positive.view(-1, BITS) << _places(x)).sum(dim=1, dtype=torch.uint8)
    return bits, x.abs().sum() / max(1, x.numel())


def unpacked(bits: Tensor, scale: Tensor, size: int) -> Tensor:
    """Return the tensor (size,) of ``scale`` and -``scale`` that :func:`packed` has made bits of.

    Args:
        scale: (), or (size,) for a scale of each element.
    """
    positive = (bits.unsqueeze(1) >> _places(bits) & 1).flatten()[:size].bool()
    return torch.where(positive, scale, -scale)


def _places(like: Tensor) -> Tensor:
    return torch.arange(BITS, dtype=torch.uint8, device=like.device)
