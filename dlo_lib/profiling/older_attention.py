"""The memory of attention with PyTorch before 2.9, whose CPU kernel knows no grouped keys and values.

On fake tensors, attention is replaced by an operation that allocates what the flash kernel of CUDA allocates:
in forward the output and one fp32 number per query and head, in backward the gradients, and the temporary
memory of the kernel while they are computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dlo_lib.models.llama import Attention


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


@contextlib.contextmanager
def attention_before_2_9(scratch: Callable[..., int]) -> Iterator[None]:
    """Within this context, the attention of a Llama only allocates.

    Args:
        scratch: returns the temporary bytes of the backward kernel, from the gradient of the output, the
            queries and the keys.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, enable_gqa: bool = False) -> Tensor:
        device = q.device.type
        if torch.is_autocast_enabled(device):
            q, k, v = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (q, k, v))
        return _Allocates.apply(q, k, v, scratch)

    with patch.object(Attention, "attend", staticmethod(attend)):
        yield
