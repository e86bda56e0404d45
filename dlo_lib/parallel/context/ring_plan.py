"""The steps of a ring for one rank: what it computes, and how much of each block it sends and receives.

Blocks of keys travel in the order of the ring, and only the part that a later rank uses is sent. With s keys
on each rank, KV = the keys and values of the whole sequence in bytes, and N ranks, all ranks together send

                 keys and values         their gradients
    contiguous   (N-1)/2 KV              (N-1)^2/N KV
    zig-zag      3/4 (N-1) KV            (1 - 1/(2N)) (N-1) KV
    striped      (1 - 1/(N s)) (N-1) KV  (1 - 1/(2s)) (N-1) KV
    not causal   (N-1) KV                (N-1) KV

Contiguous keys are used by the ranks after their own only. The second half of a zig-zag block is used by the
ranks before its own only, which it visits first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dlo_lib.parallel.context.documents import document_rectangles
from dlo_lib.parallel.context.placement import Rectangle, SequenceLayout


@dataclass(frozen=True)
class RingStep:
    """One step of one rank. The numbers are first keys of a block.

    Attributes:
        rectangles: what the rank computes with the block of this step.
        keys_sent: how many keys and values of this block the rank sends on.
        keys_received: how many of the next block it receives.
        grads_sent: of how many keys it sends the gradients on, after it has added its own.
        grads_received: of how many keys of the next block it receives the gradients.
    """

    rectangles: Sequence[Rectangle]
    keys_sent: int
    keys_received: int
    grads_sent: int
    grads_received: int


@dataclass(frozen=True)
class RingPlan:
    """The steps of one rank; blocks are sent to the rank ``direction`` places further."""

    steps: Sequence[RingStep]
    direction: int


def ring_plan(
    layout: SequenceLayout, place: int, seq: int, causal: bool = True, documents: Tensor | None = None
) -> RingPlan:
    """Return the steps of the rank at ``place`` of the ring.

    Args:
        seq: the number of tokens of the whole sequence.
        causal: whether a token sees the tokens before it only.
        documents: the number of the document of each token of the whole sequences, (batch, seq); None if the
            sequences are not packed. Documents reduce the rectangles, but not the messages.
    """

    def rectangles(key: int) -> list[Rectangle]:
        if documents is not None:
            return document_rectangles(layout, place, key, documents, causal)
        found = layout.rectangle(place, key, seq, causal)
        return [] if found is None else [found]

    def lengths(key: int, step: int) -> tuple[int, int]:
        """The keys of a block that are used after ``step``, and those with a gradient after ``step``."""
        return (
            layout.keys_used(key, range(step + 1, layout.ring), seq, causal),
            layout.keys_used(key, range(1, step + 1), seq, causal),
        )

    steps = []
    for step in range(layout.ring):
        key, next_key = layout.key_of(place, step), layout.key_of(place, step + 1)
        (keys_sent, grads_sent), (keys_received, grads_received) = lengths(key, step), lengths(next_key, step)
        steps.append(RingStep(rectangles(key), keys_sent, keys_received, grads_sent, grads_received))
    return RingPlan(steps, layout.direction)
