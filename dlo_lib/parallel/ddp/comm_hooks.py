"""Communication hooks of DDP: an exact sum of a bucket over the ranks, or a cheaper approximation.

DDP divides the gradients by the number of ranks while it copies them into a bucket. A hook replaces the
bucket by its *sum* over the ranks. DDP calls the hook during backward, when the bucket is full. The hook
starts its communication and returns; the work after the communication belongs in ``wait``. Every rank calls
the hook for the same buckets in the same order.

    bytes sent per rank and step: exact 2 * B_g * (N-1)/N; rounded to 16 bits half of that for fp32 gradients

:func:`for_torch` adapts a hook to PyTorch's ``DistributedDataParallel``.

fp16 rounds values below 6e-8 to 0 and overflows above 65504. bf16 has the range of fp32 and 8 bits of
precision.

Paper: S. Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training
(arXiv:2006.15704), section 3.2.3.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.parallel.ddp.grad_bucket import GradBucket, GradSlot, PendingWork
from dlo_lib.parallel.protocol import process_group

CommHook = Callable[[GradBucket], PendingWork]
TorchHook = Callable[[object, dist.GradBucket], "torch.futures.Future[Tensor]"]


def sum_hook(bucket: GradBucket) -> PendingWork:
    """Sum the bucket with an all-reduce. This is the default of DDP."""
    return dist.all_reduce(bucket.flat, group=bucket.group, async_op=True)


def rounding_hook(dtype: torch.dtype) -> CommHook:
    """Return a hook that rounds gradients to ``dtype``, sends them and sums them in this dtype.

    Args:
        dtype: ``torch.float16`` or ``torch.bfloat16``.

    Raises:
        UserError: ``dtype`` is another dtype.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        raise UserError(
            f"gradients are rounded to 16 bits, not to {dtype}: use torch.bfloat16 or torch.float16"
        )

    def hook(bucket: GradBucket) -> PendingWork:
        return _Rounded(bucket, dtype)

    return hook


class _Rounded:
    def __init__(self, bucket: GradBucket, dtype: torch.dtype) -> None:
        self._flat = bucket.flat
        self._sent = bucket.flat.to(dtype)
        self._work = dist.all_reduce(self._sent, group=bucket.group, async_op=True)

    def wait(self) -> None:
        self._work.wait()
        if self._sent is not self._flat:  # gradients that have this dtype already are summed in place
            self._flat.copy_(self._sent)


def for_torch(hook: CommHook, module: nn.Module, group: dist.ProcessGroup | None = None) -> TorchHook:
    """Return ``hook`` in the form of PyTorch's DDP.

        model = DistributedDataParallel(module)
        model.register_comm_hook(None, for_torch(PowerSGD(rank=2, start=100), module))

    What a hook does after its first communication begins with the last bucket of a pass, for one bucket after
    the other, so all ranks have the same order of messages.

    Args:
        module: the wrapped module, whose parameters have a name.
        group: that of the DDP; None for all ranks.
    """
    ranks = process_group(group, "a hook")
    places: dict[Tensor, tuple[int, nn.Parameter, str]] = {
        param: (index, param, name) for index, (name, param) in enumerate(module.named_parameters())
    }
    pending: list[tuple[PendingWork, torch.futures.Future[Tensor], Tensor]] = []

    def torch_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        flat = bucket.buffer().div_(dist.get_world_size(ranks))
        ours = GradBucket(bucket.index(), ranks, bucket.is_last(), numel=flat.numel(), _flat=flat)
        for held, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            index, param, name = places[held]
            offset = int(gradient.storage_offset() - flat.storage_offset())
            ours.slots.append(GradSlot(index, name, param, ours.index, offset, gradient.stride()))
        devices: list[int | str | torch.device] | None = [flat.device] if flat.is_cuda else None
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        pending.append((hook(ours), future, flat))
        if ours.is_last:
            for work, waiting, result in pending:
                work.wait()
                waiting.set_result(result)
            pending.clear()
        return future

    # PyTorch's DDP reads the annotations of a hook.
    torch_hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}
    return torch_hook
