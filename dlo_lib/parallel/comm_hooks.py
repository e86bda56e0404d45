"""What becomes of a bucket between the ranks: plain summing, or something cheaper that comes close to it.

DDP divides gradients by the number of ranks while it copies them into a bucket; a hook then has to leave the *sum* over the ranks there.
It is called in the middle of backward, when the bucket is full, so it starts its communication and returns; what is left to do once
that is over goes into ``wait``. Every rank calls the hook for the same buckets in the same order.

    bytes sent per rank and step: plain 2 * B_g * (N-1)/N; rounded to 16 bits half of that for fp32 gradients

Rounding to fp16 loses what is smaller than 6e-8 and overflows past 65504; bf16 keeps the range and has 8 bits of mantissa.

Paper: S. Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training (arXiv:2006.15704), section 3.2.3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_lib.errors import UserError
from dlo_lib.parallel.buckets import Bucket, Pending


@dataclass(frozen=True)
class GradBucket:
    """A full bucket, as a hook gets it."""

    bucket: Bucket
    index: int
    """Its place in the order of sending, the same on every rank until the buckets are cut anew after the first pass."""
    is_last: bool
    group: dist.ProcessGroup

    @property
    def flat(self) -> Tensor:
        """All gradients of the bucket with their padding, (numel,): what the ranks must find summed in the end."""
        return self.bucket.allocate()

    @property
    def gradients(self) -> tuple[Tensor, ...]:
        """The same memory as one view per parameter, each of its parameter's shape."""
        return tuple(self.bucket.view(slot) for slot in self.bucket.slots)


CommHook = Callable[[GradBucket], Pending]


def sum_hook(bucket: GradBucket) -> Pending:
    """All-reduce as it is; what DDP does unless told otherwise."""
    return dist.all_reduce(bucket.flat, group=bucket.group, async_op=True)


def rounding_hook(dtype: torch.dtype) -> CommHook:
    """A hook that sends gradients rounded to ``dtype`` and sums them in it.

    Args:
        dtype: ``torch.float16`` or ``torch.bfloat16``.

    Raises:
        UserError: another type.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        raise UserError(f"gradients are rounded to 16 bits, not to {dtype}: use torch.bfloat16 or torch.float16")

    def hook(bucket: GradBucket) -> Pending:
        return _Rounded(bucket, dtype)

    return hook


class _Rounded:
    def __init__(self, bucket: GradBucket, dtype: torch.dtype) -> None:
        self._flat = bucket.flat
        self._sent = bucket.flat.to(dtype)
        self._work = dist.all_reduce(self._sent, group=bucket.group, async_op=True)

    def wait(self) -> None:
        self._work.wait()
        if self._sent is not self._flat:  # gradients of that type already are summed in place
            self._flat.copy_(self._sent)
