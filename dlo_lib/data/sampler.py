"""Which sequences a rank reads, and in which order: a permutation of the data set for every epoch, dealt out in micro-batches.

With W ranks and micro-batches of B sequences, the k-th micro-batch of rank r is
    order[k W B + r B : k W B + (r + 1) B],        order = the permutation of (seed, epoch),
so all ranks together read the permutation from its start to its end, each sequence once, and the number of sequences read says where they
are. That number and the epoch are the whole state: a run that is put back goes on with exactly the micro-batches that it would have had.

The last W B sequences may not all be there. ``Uneven`` says what happens then; all ranks have as many micro-batches, for every rank must
take part in every step.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

import numpy as np

from dlo_lib.data.reproducible import permutation
from dlo_lib.errors import UserError

PADDING = -1
"""In place of an index: a sequence that is not there. It is collated to targets that are all ignored, so it counts nowhere."""


class Uneven(enum.Enum):
    """What becomes of the sequences at the end of an epoch that do not fill a micro-batch on every rank."""

    DROP = "drop"
    """They are left out; with a shuffled order they are others in the next epoch. For training."""
    PAD = "pad"
    """They are read, and the places left empty are ``PADDING``: every sequence counts exactly once in the loss. For evaluation."""


class RankSampler:
    """The micro-batches of one rank, lists of ``batch`` indices; iterating yields what is left of the epoch and moves on to the next.

    Args:
        size: sequences in the data set.
        batch: sequences in a micro-batch of one rank.
        rank, world_size: which share.
        seed: of the permutations; the same on all ranks.
        shuffle: False reads the data set in its own order.
        uneven: what to do with the end of an epoch.

    Attributes:
        epoch: the one that the next micro-batch belongs to, from 0.
        position: sequences of that epoch already dealt out, on all ranks together.

    Raises:
        UserError: sizes that leave nothing to read.
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
                f"rank {rank} of {world_size} with batch {batch}: use a batch of at least 1 and a rank below the number of ranks"
            )
        if size < 1 or (uneven is Uneven.DROP and size < batch * world_size):
            raise UserError(
                f"the data set has {size} sequences, one micro-batch on every rank takes {batch * world_size} ({world_size} x {batch}): "
                "use a smaller batch, shorter sequences or more data"
            )
        self.size, self.batch, self.rank, self.world_size = size, batch, rank, world_size
        self.seed, self.shuffle, self.uneven = seed, shuffle, uneven
        self.epoch = 0
        self.position = 0

    @property
    def batches_per_epoch(self) -> int:
        """Micro-batches of this rank, and of every other, in a whole epoch."""
        together = self.batch * self.world_size
        return self.size // together if self.uneven is Uneven.DROP else -(-self.size // together)

    def __iter__(self) -> Iterator[list[int]]:
        order = permutation(self.size, self.seed, self.epoch) if self.shuffle else np.arange(self.size)
        together = self.batch * self.world_size
        stop = self.size - together if self.uneven is Uneven.DROP else self.size - 1
        while self.position <= stop:
            start = self.position + self.rank * self.batch
            indices = order[start : start + self.batch].tolist()
            # Before the yield: a state taken while the micro-batch is in use goes on with the next one.
            self.position += together
            yield indices + [PADDING] * (self.batch - len(indices))
        self.epoch += 1
        self.position = 0

    def endless(self) -> Iterator[list[int]]:
        """Epoch after epoch, without end."""
        while True:
            yield from self

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON; the same on all ranks."""
        return {"epoch": self.epoch, "position": self.position, "size": self.size, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where ``state`` was taken; to be called before iterating.

        On another world size or batch it is the sequences not read yet, in other micro-batches.

        Raises:
            UserError: the state is of another data set or seed.
        """
        for name, own in (("size", self.size), ("seed", self.seed)):
            if state[name] != own:
                raise UserError(f"the saved place in the data has {name} {state[name]}, this run {own}: resume with the same data and seed")
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
