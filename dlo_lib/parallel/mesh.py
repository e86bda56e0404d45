"""A mesh of ranks with named dimensions, one for each form of parallelism.

    pp            stages of a pipeline                        outermost: few messages per micro-batch
    dp_replicate  copies of the model, with different data
    dp_shard      shards of one copy (ZeRO, FSDP), with different data
    cp            parts of a sequence
    tp            parts of each matrix                        innermost: several messages per layer

The innermost dimension varies fastest with the rank. Neighbouring ranks, which share the fast links of a
node, therefore belong to the dimension that communicates most. ``ep`` (experts) is not an additional factor,
but a part of the data-parallel ranks dp_shard x cp. The parameters of experts are sharded over the remaining
part, ``dp_shard_mod_ep``. The names and their order are those of ``ParallelDims`` of torchtitan.

    8 ranks: pp 2, dp_replicate 2, dp_shard 2
        dp_shard                 {0 1} {2 3} {4 5} {6 7}
        dp_replicate             {0 2} {1 3} {4 6} {5 7}
        dp_replicate x dp_shard  {0 1 2 3} {4 5 6 7}
        pp                       {0 4} {1 5} {2 6} {3 7}

Only the ranks of a group take part in its creation. The mesh may therefore cover any group, and the other
ranks of the job need not take part. Communication: the creation of a group, at its first use, is a small
exchange among its ranks.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dlo_lib.base.errors import UserError
from dlo_lib.parallel.protocol import process_group

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The dimensions from the outermost to the innermost. The product of their sizes is the number of ranks."""
_EXPERT_DIMENSIONS = ("pp", "dp_replicate", "dp_shard_mod_ep", "ep", "tp")
"""The dimensions of the same ranks for layers with experts."""
SEQUENCES = ("dp_replicate", "dp_shard")
"""The dimensions along which ranks train on different sequences."""
TOKENS = (*SEQUENCES, "cp")
"""The dimensions along which ranks train on different tokens, and over which gradients are averaged."""


@dataclass(frozen=True)
class Degrees:
    """The size of each dimension. One of them may be 0, which means all remaining ranks."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def over(self, ranks: int) -> Degrees:
        """Return the degrees for this number of ranks, with the 0 replaced.

        Raises:
            UserError: the product of the degrees does not divide the number of ranks, or is smaller; ``ep``
                does not divide dp_shard x cp. The message names values that work.
        """
        sizes = asdict(self)
        if wrong := [name for name, size in sizes.items() if size < 0]:
            raise UserError(
                f"{wrong[0]} is {sizes[wrong[0]]}: "
                "use at least 1, or 0 for as many ranks as the others leave",
            )
        open_ones = [name for name in sizes if sizes[name] == 0]
        if len(open_ones) > 1 or "ep" in open_ones:
            raise UserError(f"{' and '.join(open_ones)} are 0: leave one degree open at most, and not ep")
        given = {name: sizes[name] for name in DIMENSIONS if sizes[name] > 1}
        product = math.prod(given.values())
        if ranks % product:
            name = list(given)[-1]
            rest = ranks // math.gcd(ranks, product // given[name])
            fits = ranks % (product // given[name]) == 0
            cure = (
                f"use {name} {_either(_factors(rest))}"
                if fits
                else f"use factors of {_either(_factors(ranks))}"
            )
            raise UserError(f"{_product(given)} does not divide {ranks} ranks: {cure}")
        if open_ones:
            return replace(self, **{open_ones[0]: ranks // product}).over(ranks)
        if product != ranks:
            left = ranks // product
            raise UserError(
                f"{_product(given) or 'every degree is 1, which'} makes {product} of {ranks} ranks: "
                f"use dp_replicate {self.dp_replicate * left} "
                f"or dp_shard {self.dp_shard * left} for all of them"
            )
        inside = self.dp_shard * self.cp
        if inside % self.ep:
            raise UserError(
                f"ep {self.ep} does not divide dp_shard x cp = {inside}: use ep {_either(_factors(inside))}"
            )
        return self


class ParallelMesh:
    """The ranks of ``group`` as a mesh. All ranks create it, and request the same groups in the same order.

    It supports gloo, NCCL, the switch of the judge, and fake groups inside a fake tensor mode
    (``measure_memory``). In a fake tensor mode, PyTorch's ``DeviceMesh`` cannot compute its layout, because
    tensors have no values. Therefore ``device_mesh`` creates it on demand from the same groups.

    Args:
        degrees: the size of each dimension.
        group: the ranks; None for all ranks.

    Raises:
        UserError: there is no process group, or the degrees do not fit the number of ranks.
    """

    def __init__(self, degrees: Degrees, group: dist.ProcessGroup | None = None) -> None:
        self.group = process_group(group, "a mesh")
        self.ranks = dist.get_process_group_ranks(self.group)
        self.degrees = degrees.over(len(self.ranks))
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {tuple(self.ranks): self.group}

    @classmethod
    def of(cls, device_mesh: DeviceMesh) -> ParallelMesh:
        """Return the mesh of a ``DeviceMesh``, with its groups. The names of its dimensions must be members
        of ``DIMENSIONS``, in that order.

        Raises:
            UserError: the dimensions have other names, or another order.
        """
        names = device_mesh.mesh_dim_names or ()
        if not names or [name for name in DIMENSIONS if name in names] != list(names):
            raise UserError(
                f"a device mesh of {', '.join(names) or 'unnamed dimensions'}: "
                f"name them, in order, {', '.join(DIMENSIONS)}",
            )
        ranks = device_mesh.mesh.flatten().tolist()
        whole = dist.group.WORLD if ranks == list(range(dist.get_world_size())) else _group_of(ranks)
        mesh = cls(Degrees(**dict(zip(names, device_mesh.mesh.shape))), whole)
        for name in names:
            made = device_mesh.get_group(name)
            mesh._groups.setdefault(tuple(dist.get_process_group_ranks(made)), made)
        return mesh

    def reshaped(self, degrees: Degrees) -> ParallelMesh:
        """Return a mesh of the same ranks with other degrees. Both meshes share their groups, so that none is
        created twice: over gloo, a group costs threads and connections between all its ranks.

        Raises:
            UserError: the degrees do not fit the number of ranks.
        """
        mesh = ParallelMesh(degrees, self.group)
        mesh._groups = self._groups
        return mesh

    def size(self, *names: str) -> int:
        """Return the number of ranks along these dimensions."""
        return math.prod(self._sizes(names)[name] for name in names)

    def coordinate(self, *names: str) -> int:
        """Return the index of this rank along these dimensions, from 0."""
        return self.ranks_along(*names).index(dist.get_rank())

    def ranks_along(self, *names: str) -> list[int]:
        """Return the global ranks, in order, whose other coordinates are those of this rank; it is one of
        them."""
        sizes = self._sizes(names)
        mine, strides, stride = {}, {}, 1
        index = self.ranks.index(dist.get_rank())
        for name in reversed(sizes):
            mine[name], strides[name] = index // stride % sizes[name], stride
            stride *= sizes[name]
        fixed = sum(mine[name] * strides[name] for name in sizes if name not in names)
        found = [fixed]
        for name in sizes:
            if name in names:
                found = [place + step * strides[name] for place in found for step in range(sizes[name])]
        return [self.ranks[place] for place in found]

    def group_along(self, *names: str) -> dist.ProcessGroup:
        """Return the group of ``ranks_along(*names)``, which is created at the first call."""
        ranks = tuple(self.ranks_along(*names))
        if ranks not in self._groups:
            self._groups[ranks] = _group_of(ranks)
        return self._groups[ranks]

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """Return a ``DeviceMesh`` of the dimensions with a size above 1, or of dp_shard if there are none,
        for ``fully_shard`` or ``DTensor``."""
        names = tuple(name for name in DIMENSIONS if self.size(name) > 1) or ("dp_shard",)
        layout = torch.tensor(self.ranks).view([self.size(name) for name in names])
        groups = [self.group_along(name) for name in names]
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=names)
        return DeviceMesh.from_group(groups, device_type, mesh=layout, mesh_dim_names=names)

    def _sizes(self, names: tuple[str, ...]) -> dict[str, int]:
        """Return the sizes of all dimensions from the outermost, with those of experts if ``names`` contains
        one."""
        degrees = self.degrees
        sizes = {name: getattr(degrees, name) for name in DIMENSIONS}
        if {"ep", "dp_shard_mod_ep"} & set(names):
            inside = degrees.dp_shard * degrees.cp
            sizes |= {"dp_shard_mod_ep": inside // degrees.ep, "ep": degrees.ep}
            return {name: sizes[name] for name in _EXPERT_DIMENSIONS}
        return sizes


def inner_group(group: dist.ProcessGroup, size: int) -> dist.ProcessGroup:
    """Return the group of ``size`` consecutive ranks of ``group`` that contains this rank; called by every
    rank.

    Raises:
        UserError: ``size`` does not divide the number of ranks.
    """
    ranks = dist.get_process_group_ranks(group)
    if size < 1 or len(ranks) % size:
        raise UserError(
            f"groups of {size} do not divide {len(ranks)} ranks: use {_either(_factors(len(ranks)))}"
        )
    return ParallelMesh(Degrees(dp_replicate=0, dp_shard=size), group).group_along("dp_shard")


def _group_of(ranks: list[int] | tuple[int, ...]) -> dist.ProcessGroup:
    made = dist.new_group(list(ranks), use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)  # this rank is one of them
    return made


def factors_in_words(number: int) -> str:
    """Return the factors of ``number`` as text, such as "1, 2 or 4"."""
    return _either(_factors(number))


def _product(given: dict[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in given.items())


def _factors(number: int) -> list[int]:
    return [factor for factor in range(1, number + 1) if number % factor == 0]


def _either(numbers: list[int]) -> str:
    *first, last = [str(number) for number in numbers]
    return f"{', '.join(first)} or {last}" if first else last
