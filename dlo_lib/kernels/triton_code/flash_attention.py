"""FlashAttention: the launches of its kernels.

The kernels are in ``flash_attention_forward.py`` and ``flash_attention_backward.py``. Tiles that need a mask,
on the diagonal and at the end of the keys, have a loop of their size; the other loop computes and loads
without one. The programs with the most tiles start first.

Everything about a launch except the addresses of its tensors is computed once for the shapes, strides and
dtypes of a call, and kept in ``_PREPARED``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dlo_lib.kernels.triton_code.flash_attention_backward import _dkv_kernel, _dq_kernel
from dlo_lib.kernels.triton_code.flash_attention_forward import _forward_kernel
from dlo_lib.kernels.triton_code.flash_attention_tiles import LOG2_E
from dlo_lib.kernels.triton_code.launch import cdiv, power_of_2
from dlo_lib.kernels.triton_code.prepared import PreparedLaunch
from dlo_lib.kernels.triton_code.tuning import changes, tuned

L2_BYTES = 24 * 2**20
"""Of keys and values whose heads are processed together: half of an H100's L2 cache."""

MOST_PREPARED = 4096
"""The most launches that are kept. They are forgotten together."""

_PREPARED: dict[tuple[Any, ...], PreparedLaunch] = {}


def _prepared(
    prepare: Callable[..., PreparedLaunch],
    given: tuple[Tensor, ...],
    made: tuple[Tensor, ...],
    is_causal: bool,
) -> PreparedLaunch:
    """Return ``prepare(*given, *made, is_causal)``, or what it returned for tensors like these.

    ``given`` begins with q and k; the others have the shape of one of them. ``made`` have the strides of
    ``torch.empty_like`` of one of ``given``.
    """
    q, k = given[0], given[1]
    key: list[Any] = [prepare, changes(), q.device, q.dtype, is_causal, q.shape, k.shape]
    bits = 0
    for tensor in given:
        key.append(tensor.stride())
        bits |= tensor.data_ptr()
    if bits & 15:
        key += [tensor.data_ptr() & 15 for tensor in given]
    kept = tuple(key)
    found = _PREPARED.get(kept)
    if found is None:
        if len(_PREPARED) >= MOST_PREPARED:
            _PREPARED.clear()
        found = _PREPARED[kept] = prepare(*given, *made, is_causal)
    return found


def _constants(
    kernel: str, q: Tensor, keys: int, is_causal: bool, read: tuple[Tensor, Tensor]
) -> dict[str, int]:
    """Return the constants and the options of a kernel whose loop reads tiles of the tensors ``read``."""
    dim = q.shape[3]
    dims = max(16, power_of_2(dim))
    shape = {"head_dim": dims, "dtype": q.dtype, "is_causal": is_causal, "keys": keys}
    found = tuned(f"flash_attention.{kernel}", q.device, **shape)
    found["BULK"] = bool(found.get("BULK")) and all(map(_in_bulk, read))
    ahead = found.pop("AHEAD", 0)
    if kernel != "dkv":
        found["AHEAD"] = bool(ahead) and q.element_size() == 2
    return found | {"CAUSAL": is_causal, "DIM": dim, "DIMS": dims}


def _in_bulk(x: Tensor) -> bool:
    """Return whether the copy engine can read x: contiguous rows, everything else in units of 16 bytes."""
    unit = 16 // x.element_size()
    aligned = x.data_ptr() % 16 == 0 and all(stride and stride % unit == 0 for stride in x.stride()[:3])
    return aligned and x.stride(3) == 1


def _workspace(size: int, alignment: int, stream: int | None) -> Tensor:
    """Allocate the memory in which programs store their descriptors."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _section(x: Tensor, heads: int) -> int:
    """Return the number of heads, in multiples of a group, that are processed together."""
    return heads * max(1, L2_BYTES // (2 * x.shape[2] * x.shape[3] * x.element_size()))


def _launch_of(kernel: Any, grid: int, numbers: tuple[Any, ...], tiles: dict[str, int]) -> PreparedLaunch:
    return PreparedLaunch(kernel, grid, numbers, tiles, _workspace if tiles["BULK"] else None)


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for tensor in tensors for stride in tensor.stride())


def attention_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output and lse (batch, num_heads, seq) fp32."""
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if k.shape[2] == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    _prepared(_prepare_forward, (q, k, v), (out,), is_causal)(q, k, v, out, lse)
    return out, lse


def _prepare_forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, is_causal: bool) -> PreparedLaunch:
    batch, heads, seq_q, dim = q.shape
    seq_k, group = k.shape[2], heads // k.shape[1]
    tiles = _constants("forward", q, seq_k, is_causal, (k, v))
    tiles["EVEN"] = seq_k % tiles["COLS"] == 0
    numbers = (*_strides(q, k, v, out), batch * heads, heads, group, seq_q, seq_k, _section(k, group))
    grid = cdiv(seq_q, tiles["ROWS"]) * batch * heads
    return _launch_of(_forward_kernel, grid, (*numbers, dim**-0.5 * LOG2_E.value), tiles)


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    if not q.numel() or not k.numel():
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    dq, rows = query_gradient(grad, q, k, v, out, lse, is_causal)
    return dq, *key_gradients(grad, q, k, v, rows, is_causal)


def query_gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradient of q, and the values of each query for ``key_gradients``."""
    batch, heads, seq_q, _ = q.shape
    dq = torch.empty_like(q)
    padded = cdiv(seq_q, 4) * 4  # lines of 16 bytes, which the copy engine requires
    rows = torch.empty(batch * heads, 2, padded, dtype=torch.float32, device=q.device)
    start = _prepared(_prepare_dq, (q, k, v, out, grad), (dq,), is_causal)
    start(q, k, v, out, grad, lse.contiguous(), rows, dq)
    return dq, rows


def _prepare_dq(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, dq: Tensor, is_causal: bool
) -> PreparedLaunch:
    batch, heads, seq_q, dim = q.shape
    seq_k, group = k.shape[2], heads // k.shape[1]
    tiles = _constants("dq", q, seq_k, is_causal, (k, v))
    tiles["EVEN"] = seq_k % tiles["COLS"] == 0
    numbers = (
        *_strides(q, k, v, out, grad, dq), batch * heads, heads, group, seq_q, seq_k, cdiv(seq_q, 4) * 4,
        _section(k, group), dim**-0.5 * LOG2_E.value,
    )  # fmt: skip
    return _launch_of(_dq_kernel, cdiv(seq_q, tiles["ROWS"]) * batch * heads, numbers, tiles)


def key_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of k and v; ``rows`` are from ``query_gradient``."""
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    start = _prepared(_prepare_dkv, (q, k, v, grad), (dk, dv), is_causal)
    start(q, k, v, grad, rows, dk, dv)
    return dk, dv


def _prepare_dkv(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, dk: Tensor, dv: Tensor, is_causal: bool
) -> PreparedLaunch:
    batch, heads, seq_q, dim = q.shape
    kv_heads, seq_k = k.shape[1], k.shape[2]
    group = heads // kv_heads
    tiles = _constants("dkv", q, seq_k, is_causal, (q, grad))
    tiles |= {"EVEN": seq_q % tiles["ROWS"] == 0, "STAGES": tiles.get("num_stages", 1)}
    numbers = (
        *_strides(q, k, v, grad, dk, dv), batch * kv_heads, kv_heads, group, seq_q, seq_k,
        cdiv(seq_q, 4) * 4, max(1, _section(q, 1) // group), dim**-0.5 * LOG2_E.value,
    )  # fmt: skip
    return _launch_of(_dkv_kernel, cdiv(seq_k, tiles["COLS"]) * batch * kv_heads, numbers, tiles)
