"""Ring algorithms: each rank talks to its two neighbours only, and in each step every link of the ring carries one chunk.

A tensor of B bytes is cut into N chunks. In a *reduce-scatter* the partial sum of chunk c sets out from rank c + 1, takes in one rank's
share at each stop, and is complete on rank c. In an *all-gather* complete chunks travel on until everyone has them. An *all-reduce* is the
two after one another:

    step s of the reduce-scatter     rank r sends the partial sum of chunk r - s - 1 and receives that of chunk r - s - 2
    step s of the all-gather         rank r sends chunk r - s and receives chunk r - s - 1                              (indices mod N)

Bytes sent per rank, f = (N-1)/N: reduce-scatter and all-gather B f, all-reduce 2 B f, whatever N; no algorithm sends less. Where N does not
divide the elements, the first chunks have one more, nothing is padded, and the ranks together still send (N-1) B and 2 (N-1) B. Messages
per rank: N-1 and 2 (N-1), which is what small tensors pay for. Memory: two chunks while reducing, nothing while gathering.

Each element is summed in one order, from rank c + 1 round to rank c, once. So all ranks hold the same bits, the same in every run.

P. Patarasuk, X. Yuan, *Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations* (2009), doi:10.1016/j.jpdc.2008.09.002
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from dlo_lib.comm.collectives.messages import Place, Reduction
from dlo_lib.errors import UserError


def all_reduce(tensor: Tensor, reduction: Reduction = Reduction.SUM, group: dist.ProcessGroup | None = None) -> None:
    """Replace ``tensor`` on every rank by the reduction of all.

    Args:
        tensor: any shape, dtype and strides, of one shape and dtype on all ranks.
        reduction: an average is a sum divided once at the end, by the rank that holds the chunk.
        group: the ranks that take part, None for all.

    Raises:
        UserError: an average of whole numbers; this rank is not in ``group``.
    """
    place = Place.of(group)
    reduction.check(tensor)
    flat = tensor.detach().contiguous().view(-1)  # the tensor itself unless it has strides of its own
    chunks = flat.tensor_split(place.ranks)
    chunks[place.rank].copy_(_reduced(chunks, reduction, place))
    _spread(chunks, place)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view_as(tensor))


def reduce_scatter(output: Tensor, tensor: Tensor, reduction: Reduction = Reduction.SUM, group: dist.ProcessGroup | None = None) -> None:
    """Fill ``output`` with this rank's part of the reduction of everyone's ``tensor``, which stays as it is.

    Args:
        output: n elements.
        tensor: N n elements, the part of rank 0 first; of the dtype of ``output``.
        reduction: as for :func:`all_reduce`.
        group: the ranks that take part, None for all.

    Raises:
        UserError: the sizes or dtypes do not agree; an average of whole numbers; this rank is not in ``group``.
    """
    place = Place.of(group)
    reduction.check(tensor)
    _check_parts(tensor, output, place, "reduce_scatter")
    chunks = tensor.detach().contiguous().view(place.ranks, -1).unbind()
    output.detach().copy_(_reduced(chunks, reduction, place).view_as(output))


def all_gather(output: Tensor, tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Fill ``output`` with everyone's ``tensor``, that of rank 0 first.

    Args:
        output: N n elements, contiguous.
        tensor: n elements, the same number and dtype on all ranks.
        group: the ranks that take part, None for all.

    Raises:
        UserError: the sizes or dtypes do not agree, ``output`` has gaps, or this rank is not in ``group``.
    """
    place = Place.of(group)
    _check_parts(output, tensor, place, "all_gather")
    if not output.is_contiguous():
        raise UserError("all_gather receives into its output, which has gaps: give a contiguous one")
    parts = output.detach().view(place.ranks, -1)
    parts[place.rank].copy_(tensor.detach().reshape(-1))
    _spread(parts.unbind(), place)


def _reduced(chunks: Sequence[Tensor], reduction: Reduction, place: Place) -> Tensor:
    """This rank's chunk, reduced over all ranks, in a tensor of its own; ``chunks`` stay as they are."""
    rank, ranks = place.rank, place.ranks
    partial = chunks[rank - 1]  # of chunk r - 1, which begins its way here
    buffers = [chunks[0].new_empty(chunks[0].shape) for _ in range(min(ranks - 1, 2))]  # chunk 0 is the largest
    for step in range(ranks - 1):
        own = chunks[(rank - step - 2) % ranks]
        arriving = buffers[step % 2][: own.numel()]  # the other one is being sent
        place.exchange(partial, (rank + 1) % ranks, arriving, (rank - 1) % ranks)
        reduction.combine(arriving, own)
        partial = arriving
    if ranks == 1:
        partial = partial.clone()
    reduction.finish(partial, ranks)
    return partial


def _spread(chunks: Sequence[Tensor], place: Place) -> None:
    """Fill all ``chunks`` in place, of which rank r has number r."""
    rank, ranks = place.rank, place.ranks
    for step in range(ranks - 1):
        place.exchange(chunks[(rank - step) % ranks], (rank + 1) % ranks, chunks[(rank - step - 1) % ranks], (rank - 1) % ranks)


def _check_parts(whole: Tensor, part: Tensor, place: Place, name: str) -> None:
    if whole.numel() != place.ranks * part.numel() or whole.dtype != part.dtype:
        raise UserError(
            f"{name} on {place.ranks} ranks: {whole.numel()} elements of {whole.dtype} are not {place.ranks} parts of {part.numel()} of "
            f"{part.dtype}: pad the whole to a multiple of the ranks"
        )
