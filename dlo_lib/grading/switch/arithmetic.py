"""The reductions and the data movement of every collective, on the tensors that the ranks sent.

``outputs`` defines each operation for the members 0 ... N-1 of a group, which sent ``sent[0]`` ...
``sent[N-1]``:

    all_reduce      out[r][i] = Σ_s sent[s][i]             broadcast   out[r] = sent[root]
    reduce_scatter  out[r][i] = Σ_s sent[s][i N + r]       all_gather  out[r][i N + s] = sent[s][i]
    all_to_all      out[r][s] = sent[s][r]                 gather, scatter: to and from the root only

Sums are computed in the order of ranks and in the dtype of the tensors. Ring algorithms add in another order,
so results agree within rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dlo_lib.comm.calls import Kind

Sent = Sequence[Sequence[Tensor]]

REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": Tensor.add_,
    "AVG": Tensor.add_,  # the result is divided at the end
    "PREMUL_SUM": Tensor.add_,  # the sender has multiplied
    "PRODUCT": Tensor.mul_,
    "MIN": lambda out, other: torch.minimum(out, other, out=out),
    "MAX": lambda out, other: torch.maximum(out, other, out=out),
    "BAND": Tensor.bitwise_and_,
    "BOR": Tensor.bitwise_or_,
    "BXOR": Tensor.bitwise_xor_,
}
NO_FLOATS = ("BAND", "BOR", "BXOR")
ONLY_FLOATS = ("AVG", "PREMUL_SUM")


def allowed(reduction: str, dtype: torch.dtype) -> bool:
    """Return True if ``reduction`` is defined for ``dtype``."""
    floats = dtype.is_floating_point
    return not (floats and reduction in NO_FLOATS) and not (not floats and reduction in ONLY_FLOATS)


def fold(tensors: Sequence[Tensor], reduction: str) -> Tensor:
    """Return the reduction of one tensor per rank."""
    out = tensors[0].clone()
    for tensor in tensors[1:]:
        REDUCTIONS[reduction](out, tensor)
    return out.div_(len(tensors)) if reduction == "AVG" else out


def outputs(kind: Kind, sent: Sent, root: int, reduction: str) -> list[list[Tensor]]:
    """Return the tensors that each member receives; ``root`` is an index into the members."""
    ranks = range(len(sent))
    match kind:
        case Kind.ALL_REDUCE:
            reduced = [fold(parts, reduction) for parts in zip(*sent)]
            return [reduced for _ in ranks]
        case Kind.BROADCAST:
            return [[] if rank == root else list(sent[root]) for rank in ranks]
        case Kind.REDUCE:
            total = fold([parts[0] for parts in sent], reduction)
            return [[total] if rank == root else [] for rank in ranks]
        case Kind.ALL_GATHER:
            gathered = [part for parts in zip(*sent) for part in parts]
            return [gathered for _ in ranks]
        case Kind.GATHER:
            return [[parts[0] for parts in sent] if rank == root else [] for rank in ranks]
        case Kind.SCATTER:
            return [[sent[root][rank]] for rank in ranks]
        case Kind.REDUCE_SCATTER:
            shares = range(len(sent[0]) // len(sent))
            return [
                [fold([parts[share * len(sent) + rank] for parts in sent], reduction) for share in shares]
                for rank in ranks
            ]
        case Kind.ALL_TO_ALL:
            return [[parts[rank] for parts in sent] for rank in ranks]
        case Kind.BARRIER:
            return [[] for _ in ranks]
    raise ValueError(kind)
