"""One block of attention by PyTorch's fused kernel where it returns the log-sum-exp, else by ``softmax``.

On the CPU, ``F.scaled_dot_product_attention`` calls a fused kernel that computes tiles of the scores and
keeps only the LSE of each row. The function returns the output alone. The ring needs the LSE as well, so this
module calls the operators below it. They accept fp16, bf16, fp32 and fp64. Other devices, on which these
operators do not exist, use the functions of ``softmax``.

The kernel reads keys and values once for each tile of queries. Where the tokens of a head are not adjacent,
as in a message, they are copied first: the kernel then needs 3 to 16 % less CPU time.

The operators are not public. ``tests/parallel/context/test_softmax.py`` compares them with ``softmax``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dlo_lib.base.torch_compat import RELEASE
from dlo_lib.parallel.context.softmax import block_attention, block_attention_backward

_FORWARD = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_BACKWARD = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)
_SHARES_KV_HEADS = RELEASE >= (2, 13)
"""Whether the kernel accepts fewer key than query heads. Older versions receive repeated heads."""


def is_fused(device: torch.device) -> bool:
    """Return whether blocks on ``device`` use a fused kernel."""
    return device.type == "cpu" and _FORWARD is not None and _BACKWARD is not None


def attend_block(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute ``softmax.block_attention``, with its arguments and results.

    ``bias`` has 4 dimensions and the dtype of ``q``.
    """
    if not is_fused(q.device):
        return block_attention(q, k, v, scale, causal, bias)
    assert _FORWARD is not None
    k, v = _prepared(k, q.shape[1]), _prepared(v, q.shape[1])
    out, lse = _FORWARD(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    if bias is not None:
        # The kernel returns the LSE 0 for a query that sees no key of the block.
        lse = lse.masked_fill((bias == -math.inf).all(-1), -math.inf)
    return out, lse


def attend_block_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool = False,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``softmax.block_attention_backward``, with its arguments and results."""
    if not is_fused(q.device):
        return block_attention_backward(grad_out, q, k, v, out, lse, scale, causal, bias)
    assert _BACKWARD is not None
    whole_k, whole_v = _prepared(k, q.shape[1]), _prepared(v, q.shape[1])
    dq, dk, dv = _BACKWARD(grad_out, q, whole_k, whole_v, out, lse, 0.0, causal, attn_mask=bias, scale=scale)
    if whole_k.shape != k.shape:
        dk, dv = (grad.unflatten(1, (k.shape[1], -1)).sum(2) for grad in (dk, dv))
    return dq, dk, dv


def _prepared(kv: Tensor, heads: int) -> Tensor:
    """Return contiguous keys or values, with a head for each query head if the kernel needs it."""
    if _SHARES_KV_HEADS or kv.shape[1] == heads:
        return kv.contiguous()
    return kv.repeat_interleave(heads // kv.shape[1], dim=1)
