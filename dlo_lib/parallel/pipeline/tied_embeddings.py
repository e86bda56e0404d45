"""Tied embeddings in a pipeline: the first and the last stage hold a copy of one parameter on different
ranks.

Each rank computes the gradient of its use of the parameter. The gradient of the parameter is the sum, and
both ranks need it, so that the copies remain equal. Cost: in each step, one all-reduce of the table, or of
this rank's shard of it, between the two ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import nn

from dlo_lib.base.errors import UserError


class TiedEmbeddings:
    """Keeps the two copies of a tied parameter equal. Every rank of ``group`` creates it.

    Args:
        parameter: the copy of this rank; None on ranks that are not ``ends``.
        ends: the ranks of ``group`` that hold a copy. The copies take the value of the first one.
        group: the ranks of the pipeline; None for all ranks.
        name: the name of the parameter in the first stage.

    Raises:
        UserError: a rank of ``ends`` has no copy.
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
            raise UserError(
                f"rank {mine} is an end of the pipeline and has no copy of the tied parameter: pass it"
            )
        whole = group if group is not None else dist.group.WORLD
        assert whole is not None  # get_rank has raised otherwise
        self._pair = whole
        if dist.get_world_size(whole) > 2:
            # PyTorch derives the name of a group from the number of groups on a rank. Therefore the other
            # ranks create a group too; otherwise a later group of an end and another rank would hang.
            members = [dist.get_global_rank(whole, end) for end in (ends if mine in ends else (mine,))]
            self._pair = dist.new_group(members, use_local_synchronization=True)
        self._parameter, self.name = parameter if mine in ends else None, name
        self.duplicate = parameter if mine == ends[1] else None
        """The second copy, on the rank that holds it. A norm over all ranks must not count it."""
        if self._parameter is not None:
            dist.broadcast(self._parameter.data, dist.get_global_rank(whole, ends[0]), group=self._pair)

    def check(self, params: Iterable[nn.Parameter]) -> None:
        """Check that the copy of this rank is among ``params``, those of its stages.

        Raises:
            UserError: it is not, because it was replaced.
        """
        if self._parameter is not None and all(param is not self._parameter for param in params):
            raise UserError(
                f"the copy of {self.name} was replaced after the two copies were tied: "
                "change the stages first, then make TiedEmbeddings and the pipeline"
            )

    def add_gradients(self) -> None:
        """Replace the gradients of both copies by their sum; called by both ranks after the backward
        passes."""
        if self._parameter is None or not self._parameter.requires_grad or not self._parameter.numel():
            return  # on both ranks alike, because both hold the same rows of a sharded table
        if self._parameter.grad is None:
            self._parameter.grad = self._parameter.new_zeros(self._parameter.shape)
        dist.all_reduce(self._parameter.grad, group=self._pair)
