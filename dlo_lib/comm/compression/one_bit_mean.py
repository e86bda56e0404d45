"""The mean of a tensor over ranks, with one bit for each element in each direction.

1. Every rank compresses its tensor, and sends the i-th of N parts of the bits to rank i (all-to-all).
2. Rank i averages what it received, compresses the average, and sends it to all ranks (all-gather).

Both compressions have error feedback: of the whole tensor, and of this rank's part of the mean. All ranks
decompress the same bits, so their results are equal bit for bit.

    bytes that a rank sends: Ψ/8 · f in each of the two exchanges, f = (N - 1)/N, and two scales

Paper: H. Tang et al., 1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed,
section 3.2 (arXiv:2102.02888).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_lib.comm.compression.error_feedback import ErrorFeedback
from dlo_lib.comm.compression.signs import BITS, packed, unpacked


class OneBitMean:
    """Computes the mean of tensors of one size again and again, with the errors of both compressions.

    Args:
        group: the ranks; None is all of them.
        error_feedback: False to lose what the signs leave out, to compare.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, error_feedback: bool = True) -> None:
        self.group = group
        self.of_rank, self.of_part = ErrorFeedback(error_feedback), ErrorFeedback(error_feedback)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the approximate mean of ``x`` (elements,) over the ranks, equal on all of them.

        Every rank of the group calls it, with equal sizes.
        """
        world, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        part = -(-x.numel() // (world * BITS)) * BITS  # whole bytes; the last parts are shorter, or empty
        mine = min(max(x.numel() - rank * part, 0), part)

        corrected = self.of_rank.corrected("tensor", x)
        bits, scale = packed(corrected)
        self.of_rank.keep("tensor", corrected, unpacked(bits, scale, x.numel()))
        sent = torch.nn.functional.pad(bits, (0, world * part // BITS - bits.numel()))
        arrived = torch.empty_like(sent)
        dist.all_to_all_single(arrived, sent, group=self.group)
        parts = zip(arrived.view(world, -1), self._gathered(scale.view(1)), strict=True)
        mean = torch.stack([unpacked(some, its, mine) for some, its in parts]).mean(0)

        corrected = self.of_part.corrected("mean", mean)
        bits, scale = packed(corrected)
        self.of_part.keep("mean", corrected, unpacked(bits, scale, mine))
        bits = torch.nn.functional.pad(bits, (0, part // BITS - bits.numel()))
        scales = self._gathered(scale.view(1)).repeat_interleave(part)[: x.numel()]
        return unpacked(self._gathered(bits), scales, x.numel())

    def state_dict(self) -> dict[str, Tensor]:
        """Return the two errors of this rank, as ``tensor`` and ``mean``."""
        return {**self.of_rank.state_dict(), **self.of_part.state_dict()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Replace the errors by those of ``state``."""
        for feedback, key in ((self.of_rank, "tensor"), (self.of_part, "mean")):
            feedback.load_state_dict({key: state[key]} if key in state else {})

    def _gathered(self, part: Tensor) -> Tensor:
        """Return the parts of all ranks, one after the other."""
        world = dist.get_world_size(self.group)
        whole = part.new_empty(world * part.numel())
        dist.all_gather_into_tensor(whole, part, group=self.group)
        return whole
