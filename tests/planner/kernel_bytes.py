"""Counts the bytes that the operations of a block read and write, beside matrix products and attention."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dlo_lib.models import LlamaConfig
from dlo_lib.models.llama import Block, rotation

PRODUCTS = ("mm", "bmm", "addmm")


class _Count(TorchDispatchMode):
    """Adds the bytes of the tensors that each operation reads and writes; a view moves nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not (func.is_view or name in PRODUCTS or name.startswith(("empty", "detach", "_unsafe_view"))):
            moved = [one for one in tree_leaves((args, kwargs, result)) if isinstance(one, Tensor)]
            self.bytes += sum(_stored(one) for one in moved)
        return result


def _stored(tensor: Tensor) -> int:
    """The bytes of the different elements: an expanded dimension is read once."""
    shape = [size for size, stride in zip(tensor.shape, tensor.stride()) if stride]
    return torch.Size(shape).numel() * tensor.element_size()


class _Attention(torch.autograd.Function):
    """An attention that writes its result and its gradients, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.keys = k.shape
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return torch.empty_like(grad), grad.new_empty(ctx.keys), grad.new_empty(ctx.keys)


def kernel_bytes(config: LlamaConfig, autocast: bool) -> list[float]:
    """Return the bytes a token of a block in forward and in backward, with parameters in bf16 or with
    autocast: the difference of 32 and 64 tokens, so that what the parameters cost does not count."""
    few, many = (_of_tokens(config, autocast, tokens) for tokens in (32, 64))
    return [(two - one) / 32 for one, two in zip(few, many)]


def _of_tokens(config: LlamaConfig, autocast: bool, tokens: int) -> list[int]:
    dtype = torch.float32 if autocast else torch.bfloat16
    block = Block(config, dtype=dtype)
    block.self_attn.attend = lambda q, k, v, **_: _Attention.apply(q, k, v)
    x = torch.zeros(1, tokens, config.hidden, dtype=dtype, requires_grad=True)
    cos, sin = rotation(config, tokens, x)
    context = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    with _Count() as forward, context:
        y = block(x, cos, sin)
    grad = torch.zeros_like(y)
    with _Count() as backward:
        y.backward(grad)
    return [forward.bytes, backward.bytes]
