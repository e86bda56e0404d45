"""The visible checks of dropout on ranks (exercise 12): masks that are equal, and masks that differ."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import Run, check
from dlo_lib.labkit.traffic import passes_only

from .scenarios import dropped

LEAST, MOST = 36, 44  # of each size of x: two masks are never equal by chance
DIFFERS = [False, False, True, True, False]
SHARED = [True, False, False, True, True]  # the inputs of these calls are the same on all ranks
"""Equal inputs with ``differs`` and other ones without: a mask comes from the generator, not from x."""


@dataclass(frozen=True)
class Dropped:
    """Dropouts of each rank, the ``DIFFERS`` ones with masks that differ."""

    run: Run
    inputs: list[list[Tensor]]  # by rank and call
    outputs: list[list[Tensor]]
    again: list[list[Tensor]]  # the same calls, with the generator in its first state again
    p: float

    def mask(self, rank: int, call: int) -> Tensor:
        """Where the elements are kept."""
        return self.outputs[rank][call] != 0


def dropouts(student, t, world: int) -> Dropped:
    """Successive dropouts on ranks, with results of the right shape."""
    p, seed = t.uniform(0.2, 0.4), t.integer(0, 9999)
    shape = t.integer(LEAST, MOST), t.integer(LEAST, MOST)
    shared = t.normal(*shape)
    inputs = [[shared if same else t.normal(*shape) for same in SHARED] for _ in range(world)]
    run = student.ranks(dropped, [{"xs": own, "p": p, "differs": DIFFERS, "seed": seed} for own in inputs])
    first, again, like = [], [], {"shape": shape, "dtype": torch.float32}
    for rank, got in enumerate(run.results):
        for found, outs in zip((first, again), t.items(got, 2, "what the scenario returns")):
            outs = t.items(outs, len(DIFFERS), "what the calls return")
            found.append([t.tensor(out, "the result on rank {rank}", rank=rank, **like) for out in outs])
    return Dropped(run, inputs, first, again, p)


@check("dropout", points=1, seconds=30)
def check_dropout_values(student, t):
    "A part p of the elements is 0, the others are divided by 1 - p, and nothing is communicated"
    found = dropouts(student, t, 2)
    for rank in range(2):
        for call, (x, out) in enumerate(zip(found.inputs[rank], found.outputs[rank])):
            values = {"rank": rank, "call": call + 1}
            part = float((out == 0).double().mean())
            message = "call {call} on rank {rank} drops {part:.2f} of the elements, with p = {p:.2f}"
            t.that(abs(part - found.p) < 0.1, message, part=part, p=found.p, **values)
            kept = found.mask(rank, call)
            alone = bool(torch.equal(out[kept], x[kept]))
            message = "call {call} on rank {rank} keeps elements unchanged: they must be divided by 1 - p"
            t.that(not alone, message, **values)
            what = "the kept elements of call {call} on rank {rank}"
            t.close(out[kept], x[kept] / (1 - found.p), what, **values)
    passes_only(
        t, found.run, [], "rank {rank} uses {kinds}: the generators agree already, so nothing is communicated"
    )


@check("dropout", points=1, seconds=30)
def check_masks_equal(student, t):
    "differs=False: one mask on all ranks, also after calls with differs=True"
    found = dropouts(student, t, 3)
    for call in (0, 1, 4):
        for rank in (1, 2):
            message = (
                "ranks 0 and {rank} drop different elements of the same tensor, whose copies then differ: "
                "draw the mask from `generator`"
                if call == 0
                else "after a call with differs=True, ranks 0 and {rank} drop different elements of the same "
                "tensor: the states of `generator` have become different. On every rank, draw the same "
                "numbers from it"
            )
            if call == 1:
                message = (
                    "ranks 0 and {rank} drop different elements of tensors with other numbers: the mask "
                    "comes from `generator`, whose state is the same, and not from x"
                )
            t.that(bool(torch.equal(found.mask(0, call), found.mask(rank, call))), message, rank=rank)
    again = bool(torch.equal(found.mask(0, 0), found.mask(0, 4)))
    t.that(not again, "two calls with differs=False drop the same elements: each call draws a new mask")
    for rank, outs in enumerate(found.again):
        message = (
            "rank {rank}: with `generator` in the same state, a call with differs=False drops other elements "
            "than before: draw the mask from `generator`"
        )
        t.that(bool(torch.equal(outs[0] != 0, found.mask(rank, 0))), message, rank=rank)


@check("dropout", points=1, seconds=30)
def check_masks_differ(student, t):
    "differs=True: another mask on each rank, and in each call"
    found = dropouts(student, t, 3)
    for call in (2, 3):
        for one, other in ((0, 1), (0, 2), (1, 2)):
            message = (
                "ranks {one} and {other} have other parts of the activations and drop the same elements of "
                "them: dropout has the same mask on every rank. Seed a generator by the rank"
            )
            if SHARED[call]:
                message = (
                    "ranks {one} and {other} drop the same elements of a tensor with the same numbers: the "
                    "mask depends on the rank, and not on x. Seed a generator by the rank"
                )
            t.that(
                not bool(torch.equal(found.mask(one, call), found.mask(other, call))),
                message,
                one=one,
                other=other,
            )
    for rank in range(3):
        message = (
            "rank {rank} drops the same elements in two calls: seed with a number from `generator` and the "
            "rank, not with the rank alone"
        )
        t.that(not bool(torch.equal(found.mask(rank, 2), found.mask(rank, 3))), message, rank=rank)
