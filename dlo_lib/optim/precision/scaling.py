"""The scale of an 8-bit tensor: a factor that brings its values into the range of the format.

E4M3 ends at 448 and E5M2 at 57344, and below their smallest numbers everything is 0. Gradients and
activations have other magnitudes, so each tensor is multiplied by a scale before the rounding, and divided
by it after the matrix product. A scale that brings the largest absolute value (amax) to the largest number
uses the whole range.

``CurrentScaling`` reads the tensor twice: once for amax, once for the rounding. ``DelayedScaling`` takes amax
from the steps before, and reads it once; a sudden growth then saturates. ``BlockScaling`` has a scale for
each block, so that one outlier costs the resolution of its block only.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.optim.precision.formats import FloatFormat


class Scaling(Protocol):
    """Chooses the scale of a tensor."""

    def __call__(self, x: Tensor, to: FloatFormat) -> Tensor:
        """Return the scale of ``x``, fp32: 0-d, or of a shape that can be multiplied with ``x``."""


def scale_of(amax: Tensor, to: FloatFormat, margin: int = 0) -> Tensor:
    """Return the scale that brings ``amax`` to ``to.max / 2**margin``, of the shape of ``amax``, fp32.

    The scale is 1 where amax is 0 or not finite: the values of such a tensor stay what they are.
    """
    amax = amax.float()
    scale = to.max / 2**margin / amax
    return torch.where(
        (amax > 0) & torch.isfinite(amax) & torch.isfinite(scale), scale, torch.ones_like(scale)
    )


class CurrentScaling(nn.Module):
    """One scale for the tensor, from its own largest absolute value."""

    def forward(self, x: Tensor, to: FloatFormat) -> Tensor:
        return scale_of(x.detach().abs().amax(), to)


class DelayedScaling(nn.Module):
    """One scale for the tensor, from the largest absolute values of the calls before.

    The first call has no history and uses the present amax. An instance serves one tensor of the model, for
    instance the input of one layer. Its history is a buffer and belongs to the ``state_dict``.

    Args:
        history: the number of calls whose maximum counts.
        margin: the scale leaves a factor of ``2**margin`` for growth.

    Raises:
        UserError: a history below 1.
    """

    amax_history: Tensor
    calls: Tensor

    def __init__(self, history: int = 16, margin: int = 0) -> None:
        super().__init__()
        if history < 1:
            raise UserError(f"history={history}: use at least 1")
        self.margin = margin
        self.register_buffer("amax_history", torch.zeros(history))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, to: FloatFormat) -> Tensor:
        amax = x.detach().abs().amax().float()
        known = torch.where(self.calls > 0, self.amax_history.max(), amax)
        self.amax_history[self.calls % len(self.amax_history)] = amax
        self.calls += 1
        return scale_of(known, to, self.margin)


class BlockScaling(nn.Module):
    """A scale for each block of ``rows`` x ``columns`` of the last two dimensions.

    DeepSeek-V3 uses 1 x 128 for activations and 128 x 128 for weights. The blocks at the end may be smaller.

    Raises:
        UserError: a block without elements; from a call, if the tensor has fewer than two dimensions.
    """

    def __init__(self, rows: int = 1, columns: int = 128) -> None:
        super().__init__()
        if rows < 1 or columns < 1:
            raise UserError(f"a block of {rows} x {columns}: use at least 1 x 1")
        self.rows, self.columns = rows, columns

    def forward(self, x: Tensor, to: FloatFormat) -> Tensor:
        if x.dim() < 2:
            raise UserError(f"blocks need two dimensions, the tensor has {x.dim()}: use CurrentScaling")
        height, width = x.shape[-2:]
        rows, columns = min(self.rows, height), min(self.columns, width)
        padded = nn.functional.pad(x.detach().abs(), (0, -width % columns, 0, -height % rows))
        blocks = padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
        scale = scale_of(blocks.amax((-3, -1)), to)  # (..., block rows, block columns)
        whole = scale.repeat_interleave(rows, -2).repeat_interleave(columns, -1)
        return whole[..., :height, :width]
