"""All-to-all by pairwise exchange: in step s, rank r sends to r + s and receives from r - s (mod N).

Each rank has a message for each other rank. Nothing can be summed or forwarded, so every byte is sent
directly to its destination. In each step all ranks are busy and no two ranks send to the same one.

Bytes sent per rank: B (N-1)/N for equal parts, where B is the size of all parts, in N-1 messages. Memory: the
outputs only.

J. Bruck et al., *Efficient Algorithms for All-to-All Communications in Multiport Message-Passing Systems*
(1997), doi:10.1109/71.642949, send fewer and longer messages instead, which is faster for small parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from dlo_lib.base.errors import UserError
from dlo_lib.comm.collectives.messages import Communicator


def all_to_all(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: dist.ProcessGroup | None = None
) -> None:
    """Send ``inputs[r]`` to rank r, and fill ``outputs[r]`` with what rank r sends to this rank.

    Args:
        outputs: one contiguous tensor for each rank of the group, of the size and dtype that this rank sends.
            Tensors may be empty.
        inputs: one tensor for each rank; sizes may differ.
        group: the ranks that take part; None for all.

    Raises:
        UserError: the number of tensors is not the number of ranks, an output is not contiguous, the input
            and the output of this rank differ in size, or this rank is not in ``group``.
    """
    comm = Communicator.of(group)
    rank, ranks = comm.rank, comm.ranks
    if len(inputs) != ranks or len(outputs) != ranks:
        raise UserError(
            f"all_to_all on {ranks} ranks got {len(inputs)} inputs and {len(outputs)} outputs: "
            "give one for each rank"
        )
    if not all(output.is_contiguous() for output in outputs):
        raise UserError("an output of all_to_all is not contiguous: give contiguous outputs")
    if inputs[rank].numel() != outputs[rank].numel():
        raise UserError(
            f"rank {rank} keeps {inputs[rank].numel()} elements, but its output has {outputs[rank].numel()}: "
            "make the two sizes equal"
        )
    outputs[rank].detach().copy_(inputs[rank].detach().view_as(outputs[rank]))
    for distance in range(1, ranks):
        to, source = (rank + distance) % ranks, (rank - distance) % ranks
        comm.exchange(inputs[to].detach().contiguous(), to, outputs[source].detach(), source)
