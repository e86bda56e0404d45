"""Binomial trees: whoever has the data passes it on, so that the number of ranks that have it doubles in each round.

Counted from the root, rank v receives in the round of its lowest set bit, from the rank with this bit cleared, and then serves
v + 1, v + 2, v + 4, ... below that bit, the farthest first. A *reduce* is the same tree walked from the leaves; an *all-reduce* is a
reduce to rank 0 and a broadcast. With 6 ranks, broadcast from 0:

    round 1    0 → 4        round 2    0 → 2            round 3    0 → 1, 2 → 3, 4 → 5

Rounds: ⌈log₂ N⌉, twice that for an all-reduce: far fewer than the 2 (N-1) of a ring, so small tensors like trees. Each round carries all B
bytes, so large ones do not. Bytes sent: all ranks together (N-1) B, the root of a broadcast alone ⌈log₂ N⌉ B. Memory: a reduce holds
at most two tensors of B bytes beside the one it was given.

R. Thakur, R. Rabenseifner, W. Gropp, *Optimization of Collective Communication Operations in MPICH* (2005), doi:10.1177/1094342005051521
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from dlo_lib.comm.collectives.messages import Place, Reduction


def broadcast(tensor: Tensor, root: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Give every rank the ``tensor`` of ``root``.

    Args:
        tensor: of one shape and dtype on all ranks.
        root: a rank of the group, counted within it.
        group: the ranks that take part, None for all.

    Raises:
        UserError: no such root; this rank is not in ``group``.
    """
    place = Place.of(group)
    place.check_root(root)
    data = tensor.detach().contiguous()
    parent, children = _family(place, root)
    if parent is not None:
        place.receive(data, parent)
        if data.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(data)
    for child in children:
        place.send(data, child)


def reduce(tensor: Tensor, root: int = 0, reduction: Reduction = Reduction.SUM, group: dist.ProcessGroup | None = None) -> Tensor | None:
    """The reduction of everyone's ``tensor``, as a new tensor on ``root`` and None elsewhere; ``tensor`` stays as it is.

    Args:
        tensor: of one shape and dtype on all ranks.
        root: a rank of the group, counted within it.
        reduction: an average is a sum divided by the root.
        group: the ranks that take part, None for all.

    Raises:
        UserError: no such root; an average of whole numbers; this rank is not in ``group``.
    """
    place = Place.of(group)
    place.check_root(root)
    reduction.check(tensor)
    parent, children = _family(place, root)
    total = tensor.detach().contiguous()
    arriving = total.new_empty(total.shape) if children else total
    for child in reversed(children):  # the smallest subtree is done first
        place.receive(arriving, child)
        if total.data_ptr() == tensor.data_ptr():
            total = total.clone()
        reduction.combine(total, arriving)
    if parent is not None:
        place.send(total, parent)
        return None
    total = total.clone() if total.data_ptr() == tensor.data_ptr() else total
    reduction.finish(total, place.ranks)
    return total


def all_reduce(tensor: Tensor, reduction: Reduction = Reduction.SUM, group: dist.ProcessGroup | None = None) -> None:
    """Replace ``tensor`` on every rank by the reduction of all: a reduce to rank 0, and a broadcast.

    Arguments and errors as for ``ring.all_reduce``. All ranks hold the same bits, summed along the tree.
    """
    total = reduce(tensor, 0, reduction, group)
    if total is not None:
        tensor.detach().copy_(total)
    broadcast(tensor, 0, group)


def _family(place: Place, root: int) -> tuple[int | None, list[int]]:
    """The rank that this one receives from in a broadcast (None for the root), and those that it sends to, in order."""
    virtual = (place.rank - root) % place.ranks  # counted from the root
    lowest = virtual & -virtual  # 0 for the root
    parent = None if virtual == 0 else (virtual - lowest + root) % place.ranks
    limit = lowest or place.ranks
    bits = [1 << power for power in reversed(range((limit - 1).bit_length())) if virtual + (1 << power) < place.ranks]
    return parent, [(virtual + bit + root) % place.ranks for bit in bits]
