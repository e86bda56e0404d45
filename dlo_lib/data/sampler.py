"""The sampler of a rank: a permutation of the data set for every epoch, divided into micro-batches over the
ranks.

With W ranks and micro-batches of B sequences, the k-th micro-batch of rank r is
    order[k W B + r B : k W B + (r + 1) B],        order = the permutation of (seed, epoch).
Together, the ranks read the permutation from start to end, each sequence once. The state is the epoch and the
number of sequences read. A resumed run therefore reads exactly the micro-batches of an uninterrupted run.

The size of the data set need not be a multiple of W B; ``Uneven`` selects the treatment of the last
sequences. All ranks have the same number of micro-batches, because every rank takes part in every step."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

import numpy as np

from dlo_lib.base.errors import UserError
from dlo_lib.data.reproducible import permutation

PADDING = -1
"""The index of an empty sequence. ``collate`` turns it into a sequence whose targets are all ignored."""


class Uneven(enum.Enum):
    """The treatment of the last sequences of an epoch, if they do not fill a micro-batch on every rank."""

    DROP = "drop"
    """Skip them, for training. A shuffled order skips other sequences in the next epoch."""
    PAD = "pad"
    """Read them and fill up with ``PADDING``, for evaluation.

    Every sequence then counts exactly once in the loss.
    """


class RankSampler:
    """Iterate over the micro-batches of one rank, lists of ``batch`` indices.

    An iteration yields the rest of the epoch; the next iteration starts the next epoch.

    Args:
        size: the number of sequences in the data set.
        batch: the number of sequences in a micro-batch of one rank.
        rank, world_size: the rank and the number of ranks.
        seed: the seed of the permutations; the same on all ranks.
        shuffle: False reads the data set in its stored order.
        uneven: the treatment of the end of an epoch.

    Attributes:
        epoch: the epoch of the next micro-batch, from 0.
        position: the number of sequences of this epoch that all ranks together have read.

    Raises:
        UserError: the sizes are invalid, or they leave no micro-batch.
    """

    def __init__(
        self,
        size: int,
        batch: int,
        rank: int = 0,
        world_size: int = 1,
        *,
        seed: int = 0,
        shuffle: bool = True,
        uneven: Uneven = Uneven.DROP,
    ) -> None:
        if batch < 1 or world_size < 1 or not 0 <= rank < world_size:
            raise UserError(
                f"rank {rank} of {world_size} with batch {batch}: "
                "use a batch >= 1 and a rank below the number of ranks"
            )
        if size < 1 or (uneven is Uneven.DROP and size < batch * world_size):
            raise UserError(
                f"the data set has {size} sequences, one micro-batch on every rank takes "
                f"{batch * world_size} ({world_size} x {batch}): "
                "use a smaller batch, shorter sequences or more data"
            )
        self.size, self.batch, self.rank, self.world_size = size, batch, rank, world_size
        self.seed, self.shuffle, self.uneven = seed, shuffle, uneven
        self.epoch = 0
        self.position = 0

    @property
    def batches_per_epoch(self) -> int:
        """The number of micro-batches of each rank in an epoch."""
        together = self.batch * self.world_size
        return self.size // together if self.uneven is Uneven.DROP else -(-self.size // together)

    def __iter__(self) -> Iterator[list[int]]:
        order = permutation(self.size, self.seed, self.epoch) if self.shuffle else np.arange(self.size)
        together = self.batch * self.world_size
        stop = self.size - together if self.uneven is Uneven.DROP else self.size - 1
        while self.position <= stop:
            start = self.position + self.rank * self.batch
            indices = order[start : start + self.batch].tolist()
            # Before the yield: a state saved while the micro-batch is in use resumes with the next one.
            self.position += together
            yield indices + [PADDING] * (self.batch - len(indices))
        self.epoch += 1
        self.position = 0

    def endless(self) -> Iterator[list[int]]:
        """Iterate over an infinite number of epochs."""
        while True:
            yield from self

    def state_dict(self) -> dict[str, Any]:
        """Return the state as numbers, which JSON can store; it is the same on all ranks."""
        return {"epoch": self.epoch, "position": self.position, "size": self.size, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state; call this before iterating.

        With another world size or batch, the run reads the remaining sequences in other micro-batches.

        Raises:
            UserError: the state belongs to another data set or seed.
        """
        for name, own in (("size", self.size), ("seed", self.seed)):
            if state[name] != own:
                raise UserError(
                    f"the saved position has {name} {state[name]}, this run {own}: "
                    "resume with the same data and seed"
                )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
