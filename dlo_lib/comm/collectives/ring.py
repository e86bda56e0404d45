"""Ring algorithms: ranks communicate with their two neighbours only; every link carries a chunk per step.

A tensor of B bytes is cut into N chunks. In a *reduce-scatter* the partial sum of chunk c starts at rank
c + 1; each rank adds its chunk, and the sum is complete on rank c. In an *all-gather* complete chunks are
forwarded until every rank has all of them. An *all-reduce* is a reduce-scatter followed by an all-gather:

    step s of the reduce-scatter     rank r sends partial sum r - s - 1 and receives partial sum r - s - 2
    step s of the all-gather         rank r sends chunk r - s and receives chunk r - s - 1   (indices mod N)

Bytes sent per rank, with f = (N-1)/N: reduce-scatter and all-gather B f, all-reduce 2 B f, for any N; no
algorithm sends less. If N does not divide the number of elements, the first chunks have one more and nothing
is padded; all ranks together still send (N-1) B and 2 (N-1) B. Messages per rank: N-1 and 2 (N-1), which
dominate the time of small tensors. Memory: two chunks while reducing, nothing while gathering.

Each element is summed once, in one order, from rank c + 1 round to rank c. Therefore all ranks hold the same
bits, and every run gives the same bits.

P. Patarasuk, X. Yuan, *Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations* (2009),
doi:10.1016/j.jpdc.2008.09.002
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from dlo_lib.base.errors import UserError
from dlo_lib.comm.collectives.messages import Communicator, Reduction


def all_reduce(
    tensor: Tensor, reduction: Reduction = Reduction.SUM, group: dist.ProcessGroup | None = None
) -> None:
    """Replace ``tensor`` on every rank by the reduction over all ranks.

    Args:
        tensor: any shape, dtype and strides; shape and dtype are the same on all ranks.
        reduction: an average is a sum that the rank which holds the chunk divides once, at the end.
        group: the ranks that take part; None for all.

    Raises:
        UserError: the reduction is an average of integers, or this rank is not in ``group``.
    """
    comm = Communicator.of(group)
    reduction.check(tensor)
    flat = tensor.detach().contiguous().view(-1)  # shares memory with the tensor if that is contiguous
    chunks = flat.tensor_split(comm.ranks)
    chunks[comm.rank].copy_(_reduce_scatter_chunks(chunks, reduction, comm))
    _all_gather_chunks(chunks, comm)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view_as(tensor))


def reduce_scatter(
    output: Tensor,
    tensor: Tensor,
    reduction: Reduction = Reduction.SUM,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Fill ``output`` with this rank's part of the reduction of ``tensor``, which is not changed.

    Args:
        output: n elements.
        tensor: N n elements, the part of rank 0 first; of the dtype of ``output``.
        reduction: see :func:`all_reduce`.
        group: the ranks that take part; None for all.

    Raises:
        UserError: the sizes or dtypes do not agree, the reduction is an average of integers, or this rank is
            not in ``group``.
    """
    comm = Communicator.of(group)
    reduction.check(tensor)
    _check_parts(tensor, output, comm, "reduce_scatter")
    chunks = tensor.detach().contiguous().view(comm.ranks, -1).unbind()
    output.detach().copy_(_reduce_scatter_chunks(chunks, reduction, comm).view_as(output))


def all_gather(output: Tensor, tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Fill ``output`` with the ``tensor`` of every rank, that of rank 0 first.

    Args:
        output: N n elements, contiguous.
        tensor: n elements, the same number and dtype on all ranks.
        group: the ranks that take part; None for all.

    Raises:
        UserError: the sizes or dtypes do not agree, ``output`` is not contiguous, or this rank is not in
            ``group``.
    """
    comm = Communicator.of(group)
    _check_parts(output, tensor, comm, "all_gather")
    if not output.is_contiguous():
        raise UserError("the output of all_gather is not contiguous: give a contiguous output")
    parts = output.detach().view(comm.ranks, -1)
    parts[comm.rank].copy_(tensor.detach().reshape(-1))
    _all_gather_chunks(parts.unbind(), comm)


def _reduce_scatter_chunks(chunks: Sequence[Tensor], reduction: Reduction, comm: Communicator) -> Tensor:
    """Return this rank's chunk, reduced over all ranks, in a new tensor; ``chunks`` are not changed."""
    rank, ranks = comm.rank, comm.ranks
    partial = chunks[rank - 1]  # the partial sum of chunk r - 1 starts here
    # chunk 0 is the largest
    buffers = [chunks[0].new_empty(chunks[0].shape) for _ in range(min(ranks - 1, 2))]
    for step in range(ranks - 1):
        own = chunks[(rank - step - 2) % ranks]
        arriving = buffers[step % 2][: own.numel()]  # the other one is being sent
        comm.exchange(partial, (rank + 1) % ranks, arriving, (rank - 1) % ranks)
        reduction.combine(arriving, own)
        partial = arriving
    if ranks == 1:
        partial = partial.clone()
    reduction.finish(partial, ranks)
    return partial


def _all_gather_chunks(chunks: Sequence[Tensor], comm: Communicator) -> None:
    """Fill all ``chunks`` in place; rank r starts with chunk r."""
    rank, ranks = comm.rank, comm.ranks
    for step in range(ranks - 1):
        comm.exchange(
            chunks[(rank - step) % ranks],
            (rank + 1) % ranks,
            chunks[(rank - step - 1) % ranks],
            (rank - 1) % ranks,
        )


def _check_parts(whole: Tensor, part: Tensor, comm: Communicator, name: str) -> None:
    if whole.numel() != comm.ranks * part.numel() or whole.dtype != part.dtype:
        raise UserError(
            f"{name} on {comm.ranks} ranks: {whole.numel()} elements of {whole.dtype} are not {comm.ranks} "
            f"parts of {part.numel()} of {part.dtype}: pad the whole tensor to a multiple of the ranks"
        )
