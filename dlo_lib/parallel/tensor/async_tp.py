"""Asynchronous tensor parallelism: the all-gather before a product and the reduce-scatter after a product are
cut into pieces of the sequence. While one piece travels round a ring of ranks, another one is computed.

    gather, then use      step s = 0 ... t-1: send piece r-s to rank r+1, receive piece r-s-1 from rank r-1,
                          and use piece r-s meanwhile
    compute, then reduce  compute this rank's term of piece r-1. Step s = 1 ... t-1: send the sum of piece r-s
                          to rank r+1, receive that of piece r-s-1 from rank r-1, compute this rank's term of
                          piece r-s-1 meanwhile, and add it

All numbers are modulo t. Each form sends t-1 messages of B/t bytes per rank, where B are the bytes of the
whole tensor: (t-1)/t B, as the collective that it replaces. During each message, a rank computes 1/t of the
product. The pieces are parts of the sequence, so the ranks hold the same rows as without this option.

Memory: the pieces that travel beside the tensors of the collective, two to four
(``comm.collectives.travelling``).

Papers: S. Wang et al., Overlap Communication with Dependent Computation via Decomposition (ASPLOS 2023);
PyTorch has it as async tensor parallelism (``torch.distributed._symmetric_memory``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from dlo_lib.comm.collectives.messages import Communicator
from dlo_lib.comm.collectives.travelling import Ring, Travelling
from dlo_lib.parallel.tensor.exchange import TensorGroup
from dlo_lib.parallel.tensor.functions import SEQUENCE


def gather_and_use(x: Tensor, group: TensorGroup, use: Callable[[int, Tensor], None]) -> Tensor:
    """Gather the parts ``x`` of all ranks along the sequence, and call ``use`` for each part while the next
    one travels.

    Args:
        x: (..., seq / t, hidden), the part of this rank.
        group: the ranks.
        use: receives the number of a part and the part, (..., seq / t, hidden), which it must not change.

    Returns all parts, (..., seq, hidden).
    """
    x = x.contiguous()
    size = x.shape[SEQUENCE]
    whole = x.new_empty(*x.shape[:SEQUENCE], group.ranks * size, x.shape[-1])
    whole.narrow(SEQUENCE, group.rank * size, size).copy_(x)
    numbers = [(group.rank - step) % group.ranks for step in range(group.ranks)]
    places = [whole.narrow(SEQUENCE, number * size, size) for number in numbers]
    into = places[1:] if all(place.is_contiguous() for place in places) else []
    travelling = _travelling(group, x, into)
    part = x
    for number, place in zip(numbers, places[1:]):
        travelling.exchange(part)
        use(number, part)
        part = travelling.wait()
        if not into:
            place.copy_(part)
    use(numbers[-1], part)
    return whole


def compute_and_scatter(compute: Callable[[int], Tensor], group: TensorGroup) -> Tensor:
    """Return this rank's part of a sum over the ranks. Each term is computed in parts, while the sums of
    other parts travel.

    Args:
        compute: returns this rank's term of a part, of which it receives the number. The term is new memory,
            which is overwritten.
        group: the ranks.
    """
    total = compute((group.rank - 1) % group.ranks).contiguous()
    travelling = _travelling(group, total)
    for step in range(1, group.ranks):
        travelling.exchange(total)
        term = compute((group.rank - 1 - step) % group.ranks)
        total = travelling.wait().add_(term)
    return total


def _travelling(group: TensorGroup, piece: Tensor, into: Sequence[Tensor] = ()) -> Travelling:
    """Return the exchanges of pieces like ``piece`` with the next rank of the ring."""
    ring = Ring(Communicator(group.group, group.rank, group.ranks), direction=1)
    return Travelling(ring, 0, [piece.shape] * (group.ranks - 1), piece, into=into)
