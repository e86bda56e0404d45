"""All-to-all by pairwise exchange: in step s every rank sends to the one s places on and receives from the one s places back.

Each rank has a message for each other one; nothing can be summed or passed on, so every byte goes straight to its owner. In each step all
ranks are busy and no two send to the same one.

Bytes sent per rank: B (N-1)/N where the parts are equal, B the bytes of all parts; N-1 messages. Memory: the outputs only.

J. Bruck et al., *Efficient Algorithms for All-to-All Communications in Multiport Message-Passing Systems* (1997), doi:10.1109/71.642949,
have fewer, longer messages instead, which suits small parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from dlo_lib.comm.collectives.messages import Place
from dlo_lib.errors import UserError


def all_to_all(outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Send ``inputs[r]`` to rank r, and fill ``outputs[r]`` with what rank r sends here.

    Args:
        outputs: one contiguous tensor for each rank of the group, of the size and dtype that this rank sends; any may be empty.
        inputs: one tensor for each rank; sizes may differ.
        group: the ranks that take part, None for all.

    Raises:
        UserError: not one tensor for each rank, an output with gaps, two sizes for what stays here, or this rank is not in ``group``.
    """
    place = Place.of(group)
    rank, ranks = place.rank, place.ranks
    if len(inputs) != ranks or len(outputs) != ranks:
        raise UserError(f"all_to_all on {ranks} ranks got {len(inputs)} inputs and {len(outputs)} outputs: give one for each rank")
    if not all(output.is_contiguous() for output in outputs):
        raise UserError("all_to_all receives into its outputs, and one has gaps: give contiguous ones")
    if inputs[rank].numel() != outputs[rank].numel():
        raise UserError(f"rank {rank} keeps {inputs[rank].numel()} elements, with room for {outputs[rank].numel()}: make the two agree")
    outputs[rank].detach().copy_(inputs[rank].detach().view_as(outputs[rank]))
    for distance in range(1, ranks):
        to, source = (rank + distance) % ranks, (rank - distance) % ranks
        place.exchange(inputs[to].detach().contiguous(), to, outputs[source].detach(), source)
