"""Which part of a parameter of the twin a rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from dlo_lib.base.errors import UserError
from dlo_lib.planner.parity.trial import HeldPart, RankRecord, Slices

Gradients = dict[str, Tensor]


@dataclass(frozen=True, eq=False)  # a slice has no hash before Python 3.12
class ParameterPart:
    """``key`` is the name of the parameter on the rank, ``name`` that of the twin."""

    rank: int
    key: str
    name: str
    slices: Slices

    def of(self, whole: Mapping[str, Tensor]) -> Tensor:
        """Return this part of the twin's tensors."""
        return whole[self.name][self.slices]


def parts_of(records: list[RankRecord], twin: Gradients, aliases: Mapping[str, str]) -> list[ParameterPart]:
    """Return the part of each rank of each parameter; empty ones are left out.

    Args:
        twin: the start of the twin's parameters.
        aliases: for each other name of a tied parameter the one in ``twin``.

    Raises:
        UserError: a parameter of a rank is no part of one of the twin.
    """
    found = []
    for rank, record in enumerate(records):
        for held in record.parts:
            if held.start.numel():
                name = _name(held, twin, aliases, rank)
                found.append(ParameterPart(rank, held.name, name, _slices(held, twin[name], rank)))
    return found


def _name(held: HeldPart, twin: Gradients, aliases: Mapping[str, str], rank: int) -> str:
    plain = held.name.split(":", 1)[-1]
    for name in (plain, plain.replace("module.", "")):
        if name in twin:
            return name
        if name in aliases:
            return aliases[name]
    same = [
        name for name, whole in twin.items() if whole.shape == held.start.shape and whole.equal(held.start)
    ]
    if len(same) == 1:
        return same[0]
    raise UserError(
        f"rank {rank} has a parameter {held.name}, which one process has not: keep the names of the model "
        "when you divide it (flat parameters cannot be compared)"
    )


def _slices(held: HeldPart, whole: Tensor, rank: int) -> Slices:
    """The place of a part: that of a DTensor is known, that of another tensor is found by its values."""
    everything = tuple(slice(0, size) for size in whole.shape)
    if held.slices is not None:
        return held.slices
    part = held.start
    if part.shape == whole.shape:
        return everything
    if part.dim() == whole.dim():
        for place in _places(part, whole):
            if torch.equal(whole[place], part):
                return place
    raise UserError(
        f"{held.name} has the shape {tuple(part.shape)} on rank {rank} and {tuple(whole.shape)} in one "
        "process, and is no part of it by its values: begin with the same weights (one seed)"
    )


def _places(part: Tensor, whole: Tensor) -> Iterator[Slices]:
    steps = [range(0, big - small + 1, max(1, small)) for small, big in zip(part.shape, whole.shape)]
    for begins in product(*steps):
        yield tuple(slice(begin, begin + size) for begin, size in zip(begins, part.shape))
