"""Binomial trees: every rank that has the data sends it, so the number of such ranks doubles each round.

Count the ranks from the root. Rank v receives in the round of its lowest set bit, from the rank with this bit
cleared, and then sends to v + 1, v + 2, v + 4, ... below that bit, the farthest first. A *reduce* uses the
same tree from the leaves to the root. An *all-reduce* is a reduce to rank 0 and a broadcast. With 6 ranks, a
broadcast from rank 0 is:

    round 1    0 → 4        round 2    0 → 2            round 3    0 → 1, 2 → 3, 4 → 5

Rounds: ⌈log₂ N⌉, twice that for an all-reduce. This is far fewer than the 2 (N-1) of a ring, so trees are
faster for small tensors. Each round carries all B bytes, so trees are slower for large tensors. Bytes sent:
(N-1) B by all ranks together, ⌈log₂ N⌉ B by the root of a broadcast. Memory: a reduce holds at most two
tensors of B bytes in addition to its input.

R. Thakur, R. Rabenseifner, W. Gropp, *Optimization of Collective Communication Operations in MPICH* (2005),
doi:10.1177/1094342005051521
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from dlo_lib.comm.collectives.messages import Communicator, Reduction


def broadcast(tensor: Tensor, root: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Copy the ``tensor`` of ``root`` into the ``tensor`` of every rank.

    Args:
        tensor: shape and dtype are the same on all ranks.
        root: a rank of the group, counted within it.
        group: the ranks that take part; None for all.

    Raises:
        UserError: the group has no rank ``root``, or this rank is not in ``group``.
    """
    comm = Communicator.of(group)
    comm.check_root(root)
    data = tensor.detach().contiguous()
    parent, children = _parent_and_children(comm, root)
    if parent is not None:
        comm.receive(data, parent)
        if data.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(data)
    for child in children:
        comm.send(data, child)


def reduce(
    tensor: Tensor,
    root: int = 0,
    reduction: Reduction = Reduction.SUM,
    group: dist.ProcessGroup | None = None,
) -> Tensor | None:
    """Return the reduction of the ``tensor`` of all ranks on ``root``, as a new tensor, and None elsewhere.

    Args:
        tensor: shape and dtype are the same on all ranks; it is not changed.
        root: a rank of the group, counted within it.
        reduction: an average is a sum that the root divides.
        group: the ranks that take part; None for all.

    Raises:
        UserError: the group has no rank ``root``, the reduction is an average of integers, or this rank is
            not in ``group``.
    """
    comm = Communicator.of(group)
    comm.check_root(root)
    reduction.check(tensor)
    parent, children = _parent_and_children(comm, root)
    total = tensor.detach().contiguous()
    arriving = total.new_empty(total.shape) if children else total
    for child in reversed(children):  # the smallest subtree is complete first
        comm.receive(arriving, child)
        if total.data_ptr() == tensor.data_ptr():
            total = total.clone()
        reduction.combine(total, arriving)
    if parent is not None:
        comm.send(total, parent)
        return None
    total = total.clone() if total.data_ptr() == tensor.data_ptr() else total
    reduction.finish(total, comm.ranks)
    return total


def all_reduce(
    tensor: Tensor, reduction: Reduction = Reduction.SUM, group: dist.ProcessGroup | None = None
) -> None:
    """Replace ``tensor`` on every rank by the reduction over all ranks: a reduce to rank 0 and a broadcast.

    Arguments and errors are those of ``ring.all_reduce``. All ranks hold the same bits, summed along the
    tree.
    """
    total = reduce(tensor, 0, reduction, group)
    if total is not None:
        tensor.detach().copy_(total)
    broadcast(tensor, 0, group)


def _parent_and_children(comm: Communicator, root: int) -> tuple[int | None, list[int]]:
    """Return the rank that sends to this one in a broadcast (None for the root), and those it sends to."""
    virtual = (comm.rank - root) % comm.ranks  # counted from the root
    lowest = virtual & -virtual  # 0 for the root
    parent = None if virtual == 0 else (virtual - lowest + root) % comm.ranks
    limit = lowest or comm.ranks
    bits = [
        1 << power
        for power in reversed(range((limit - 1).bit_length()))
        if virtual + (1 << power) < comm.ranks
    ]
    return parent, [(virtual + bit + root) % comm.ranks for bit in bits]
