"""What fake tensors lack in older releases of PyTorch, for ``measure_memory``.

Before 2.9, attention on the CPU has no flash kernel for grouped keys and values. On fake tensors it is
replaced by an operation that allocates what the flash kernel of CUDA allocates: in forward the output and one
fp32 number per query and head, in backward the gradients, and the temporary memory of the kernel while they
are computed.

2.8 and 2.9 have no kernels of the collectives for fake tensors, unless PyTorch's own memory tools are
imported, which takes 6 s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.nn.attention import SDPBackend, sdpa_kernel

from dlo_lib.base.torch_compat import RELEASE
from dlo_lib.models.llama import Attention

_IN_PLACE = (
    "broadcast_", "allreduce_", "allgather_", "_allgather_base_", "reduce_scatter_", "_reduce_scatter_base_",
    "scatter_", "alltoall_",
)  # fmt: skip
_ALONE = ("reduce_", "gather_", "alltoall_base_", "barrier", "send", "recv_", "recv_any_source_")
"""The operators of c10d that return their outputs and their work, and those that return only their work."""


@contextlib.contextmanager
def fake_collectives() -> Iterator[None]:
    """Within this context, c10d's operators accept fake tensors, and allocate nothing, in every release."""
    if torch._C._dispatch_has_kernel_for_dispatch_key("c10d::broadcast_", "Meta"):
        yield
        return
    library = torch.library.Library("c10d", "IMPL")
    try:
        for name in _IN_PLACE:
            library.impl(name, lambda outputs, *_: (outputs, FakeWork().boxed()), "Meta")
        for name in _ALONE:
            library.impl(name, lambda *_: FakeWork().boxed(), "Meta")
        yield
    finally:
        library._destroy()


class _Allocates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scratch: Callable[..., int]) -> Tensor:
        out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scratch = scratch
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, *_ = ctx.saved_tensors
        found = tuple(torch.empty_like(tensor) for tensor in (q, k, v))
        q.new_empty(ctx.scratch(grads[0], q, k), dtype=torch.uint8)
        return *found, None


def _nothing(*_: Any) -> int:
    return 0


@contextlib.contextmanager
def flash_attention(scratch: Callable[..., int] = _nothing) -> Iterator[None]:
    """Within this context, the attention of a Llama has the memory of the flash kernel.

    Args:
        scratch: returns the temporary bytes of the backward kernel, from the gradient of the output, the
            queries and the keys. It is called before 2.9, where attention only allocates.
    """
    if RELEASE >= (2, 9):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            yield
        return

    def attend(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        device = q.device.type
        if torch.is_autocast_enabled(device):
            q, k, v = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (q, k, v))
        return _Allocates.apply(q, k, v, scratch)

    # A TorchFunctionMode would not see the attention that a checkpoint repeats in backward.
    with (
        patch.object(Attention, "attend", staticmethod(attend)),
        patch.object(F, "scaled_dot_product_attention", attend),
    ):
        yield
