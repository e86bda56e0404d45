"""A parameter that two stages on different ranks hold a copy of: a tied embedding, at both ends of the pipeline.

Each end computes the gradient of its own use; the parameter's gradient is their sum, which both need, so that the copies stay equal. One
all-reduce of the table between the two ranks for each step.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from dlo_lib.errors import UserError


class TiedEnds:
    """Made on every rank of the world, as any group; of use on the two.

    Args:
        parameter: this rank's copy; None on the ranks between.
        ends: the ranks of ``group`` that hold one. The copies become the first one's.
        group: the ranks of the pipeline; None for all.
        name: what the parameter is called where it is first.

    Raises:
        UserError: a rank at an end brings no copy.
    """

    def __init__(
        self,
        parameter: nn.Parameter | None,
        ends: tuple[int, int],
        group: dist.ProcessGroup | None = None,
        name: str = "embed_tokens.weight",
    ) -> None:
        mine = dist.get_rank(group)
        if mine in ends and parameter is None:
            raise UserError(f"rank {mine} is an end of the pipeline and brings no copy of the tied parameter")
        whole = group if group is not None else dist.group.WORLD
        assert whole is not None  # get_rank has raised otherwise
        self._pair = dist.new_group([dist.get_global_rank(whole, end) for end in ends], use_local_synchronization=True)
        self._parameter, self.name = parameter if mine in ends else None, name
        self.counted_elsewhere = parameter if mine == ends[1] else None
        """The copy that a norm over all ranks must leave out."""
        if self._parameter is not None:
            dist.broadcast(self._parameter.data, dist.get_global_rank(whole, ends[0]), group=self._pair)

    def add_gradients(self) -> None:
        """Leave the sum of both ends' gradients at both."""
        if self._parameter is None or not self._parameter.requires_grad:
            return
        if self._parameter.grad is None:
            self._parameter.grad = self._parameter.new_zeros(self._parameter.shape)
        dist.all_reduce(self._parameter.grad, group=self._pair)
