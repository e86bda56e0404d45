"""The interface of every parallel wrapper. Training, checkpoints, clipping and measurements use only this
interface.

A wrapper is a module that is called as the wrapped module. It also defines the communication of its
gradients, and which part of each parameter this rank holds. DDP, ZeRO, FSDP and pipelines implement the
protocol, including a pipeline whose stages are wrapped by one of the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.base.errors import UserError

Range = tuple[int, int]
"""The first index and the number of indices."""


@dataclass(frozen=True)
class SplitDim:
    """The tensor is cut along dimension ``dim`` into parts of ceil(size / ranks), one for each rank of
    ``group`` in order, as ``Shard(dim)`` of DTensor.

    With ``copies``, there are ranks / copies parts, and ``copies`` consecutive ranks hold the same one. If
    this is the number of ranks, each rank holds the whole tensor.

    With ``sections``, the dimension consists of equal sections, such as the queries, keys and values of a
    fused projection. Each section is cut, and a rank holds its part of every section, one after another.
    """

    dim: int
    group: dist.ProcessGroup
    copies: int = 1
    sections: int = 1

    def rows(self, size: int, rank: int | None = None) -> tuple[int, int]:
        """Return the first index of this rank's part of a section of ``size``, and the number of indices.

        Args:
            rank: another rank of the group, whose part is meant.
        """
        rank = dist.get_rank(self.group) if rank is None else rank
        rows = -(-size * self.copies // dist.get_world_size(self.group))
        first = min(size, rank // self.copies * rows)
        return first, min(rows, size - first)

    def ranges(self, size: int, rank: int | None = None) -> list[Range]:
        """Return the indices of this rank in a dimension of ``size``: a range for each section. ``rank`` is
        that of ``rows``."""
        section = size // self.sections
        first, rows = self.rows(section, rank)
        return [(number * section + first, rows) for number in range(self.sections)]

    def part_of(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of ``tensor``, as a view if there is one section."""
        parts = [tensor.narrow(self.dim, *found) for found in self.ranges(tensor.shape[self.dim])]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


@dataclass(frozen=True)
class FlatRange:
    """The rank holds consecutive elements in the order of memory, beginning at element ``start``: a piece of
    the flat parameters of ZeRO."""

    start: int


@dataclass(frozen=True)
class ShardBox:
    """A box of elements that is in the whole tensor at ``whole``, and in the part of a rank at ``part``."""

    whole: tuple[int, ...]
    part: tuple[int, ...]
    sizes: tuple[int, ...]


Placement = tuple[SplitDim | FlatRange, ...]
"""The position of a rank's part in the whole tensor: each member is a part of the part before it. () if the
rank holds the whole tensor."""


@dataclass(frozen=True, eq=False)
class ParamShard:
    """One parameter as this rank holds it.

    Attributes:
        name: the name in the whole model.
        shape, strides: those of the whole parameter.
        placement: the position of this rank's part.
        param: the parameter that the optimiser updates: the part of this rank, or the whole.
    """

    name: str
    shape: torch.Size
    strides: tuple[int, ...]
    placement: Placement
    param: nn.Parameter

    @property
    def counted(self) -> bool:
        """Whether this rank is the first of those that hold the same part in a group of ``placement``, and
        counts the part in a norm over all ranks."""
        splits = [split for split in self.placement if isinstance(split, SplitDim)]
        return all(dist.get_rank(split.group) % split.copies == 0 for split in splits)

    def boxes(self, ranks: Mapping[dist.ProcessGroup, int] | None = None) -> list[ShardBox]:
        """Return the boxes of which this rank's part consists, if each placement is a ``SplitDim``: one,
        unless a dimension has sections. A 0-d parameter counts as one row.

        Args:
            ranks: for the part of another rank, its rank in each group of ``placement``.

        Raises:
            UserError: a placement is a ``FlatRange``.
        """
        held: list[list[Range]] = [[(0, size)] for size in self.shape or (1,)]  # by dimension
        for split in self.placement:
            if not isinstance(split, SplitDim):
                raise UserError(f"{self.name} is cut into flat ranges of parts: use stage 3 (fsdp) or 0")
            held[split.dim] = _ranges_in(
                held[split.dim], split, None if ranks is None else ranks[split.group]
            )
        by_dim = []
        for ranges in held:
            starts = itertools.accumulate((count for _, count in ranges), initial=0)
            by_dim.append([(first, start, count) for (first, count), start in zip(ranges, starts)])
        return [ShardBox(*(tuple(numbers) for numbers in zip(*dims))) for dims in itertools.product(*by_dim)]

    def of(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor with the shape of the whole parameter, such as a moment. It is
        a view where the part is a box."""
        if not self.shape:
            return whole.reshape(-1)[: self.param.numel()].view(self.param.shape)
        part = whole
        for place in self.placement:
            if isinstance(place, SplitDim):
                part = place.part_of(part)
            else:
                outer_first = sorted(range(part.dim()), key=lambda dim: -self.strides[dim])
                elements = part.permute(outer_first).reshape(-1)  # in the order of memory
                part = elements[place.start : place.start + self.param.numel()]
        return part.reshape(self.param.shape)


def _ranges_in(held: list[Range], split: SplitDim, rank: int | None) -> list[Range]:
    """Return the indices that are left of ``held`` after ``split``, on ``rank`` of its group."""
    left = []
    for first, count in split.ranges(sum(count for _, count in held), rank):
        start = 0  # of the held range among the held indices
        for held_first, held_count in held:
            begin, end = max(first, start), min(first + count, start + held_count)
            if begin < end:
                left.append((held_first + begin - start, end - begin))
            start += held_count
    return left


@runtime_checkable
class ParallelModel(Protocol):
    """A model that is distributed over ranks."""

    holds_every_param: bool
    """Whether each rank holds a part of every parameter. It does in every wrapper except a pipeline."""
    takes_added_grads: bool
    """Whether ``finish_grad_sync`` also averages gradients that were added to ``.grad`` outside autograd, as
    split backward passes do."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside the context do not communicate gradients. The next backward pass outside
        averages their sum."""

    def finish_grad_sync(self) -> None:
        """Average the gradients that are not averaged yet, and wait for the result."""

    def shards(self) -> list[ParamShard]:
        """Return every parameter of which this rank holds a part, each once."""

    def unwrapped(self) -> Sequence[nn.Module]:
        """Return the wrapped modules. Their parameters and buffers have the names of the whole model."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their ``norm_type``-norm over all ranks is at most ``max_norm``.

        Returns the norm before scaling, ().
        """

    def observe_memory(self, observer: MemoryObserver) -> None:
        """Report the tensors of the wrapper to ``observer``, now and each time new ones are allocated."""


class ModelParts(Protocol):
    """What a checkpoint needs of a model: a part of ``ParallelModel``."""

    @property
    def holds_every_param(self) -> bool:
        """As in ``ParallelModel``."""

    def shards(self) -> list[ParamShard]:
        """As in ``ParallelModel``."""

    def unwrapped(self) -> Sequence[nn.Module]:
        """As in ``ParallelModel``."""


@dataclass(frozen=True)
class WholeModel:
    """The parts of a model in one process, without a process group: all of it."""

    module: nn.Module
    holds_every_param = True

    def shards(self) -> list[ParamShard]:
        return whole_params(self.module)

    def unwrapped(self) -> Sequence[nn.Module]:
        return [self.module]


class MemoryObserver(Protocol):
    """A measurement of memory, to which wrappers report their tensors."""

    def weights(self, tensors: Iterable[Tensor]) -> None:
        """``tensors`` hold parameters for the whole training."""

    def buffers(self, tensors: Iterable[Tensor]) -> None:
        """``tensors`` hold gathered parameters or messages."""

    def gradients(self, tensors: Iterable[Tensor]) -> None:
        """``tensors`` hold gradients."""


class ModuleWrapper(nn.Module):
    """A wrapper whose parameters, buffers and ``state_dict`` have the names of its ``module``, so that a
    checkpoint does not depend on the wrapper."""

    module: nn.Module

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the ``state_dict`` of the module, without a prefix, so that it loads into an unwrapped
        module."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters with their names in the module."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers with their names in the module."""
        return self.module.named_buffers(*args, **kwargs)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Map the first part of each name to the part before it, which the name leaves out.

        ``torch.distributed.checkpoint.state_dict`` calls this method.
        """
        module = self.module
        return dict.fromkeys([*module._modules, *module._parameters, *module._buffers], "module")

    def __getstate__(self) -> Any:
        raise UserError(
            f"a {type(self).__name__} module cannot be copied or pickled, because it belongs to a process "
            "group: copy its .module and wrap the copy",
        )


def whole_params(module: nn.Module) -> list[ParamShard]:
    """Return the parameters of a module that is whole on every rank."""
    named = module.named_parameters()
    return [ParamShard(name, param.shape, param.stride(), (), param) for name, param in named]


def groups_by_param(shards: Iterable[ParamShard]) -> dict[nn.Parameter, list[dist.ProcessGroup]]:
    """Return for each parameter the groups whose ranks hold different parts of it, the outermost first."""
    return {shard.param: shard_groups([shard]) for shard in shards}


def shard_groups(shards: Iterable[ParamShard]) -> list[dist.ProcessGroup]:
    """Return the groups whose ranks hold different parts of ``shards``, the outermost first."""
    splits = [split for shard in shards for split in shard.placement]
    return list(dict.fromkeys(split.group for split in splits if isinstance(split, SplitDim)))


def stepped_shards(model: ModelParts, optimizer: torch.optim.Optimizer) -> list[ParamShard]:
    """Return the shards that ``optimizer`` updates: its pieces if it shards the parameters itself, otherwise
    the shards of the model."""
    cut: Callable[[list[ParamShard]], list[ParamShard]] | None = getattr(optimizer, "shards", None)
    return model.shards() if cut is None else cut(model.shards())


def averaged_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimiser whose groups and state an average of the weights uses, because its parameters are
    those that this rank holds after each step."""
    return optimizer if holds_parts(optimizer) else local_optimizer(optimizer)


def holds_parts(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the groups of the optimiser have parts of parameters, and its inner one whole ones."""
    return getattr(optimizer, "holds_parts", False)


def local_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimiser that holds the state of this rank: the inner one of a sharded optimiser, otherwise
    ``optimizer``."""
    local = getattr(optimizer, "local", None)
    return local if isinstance(local, torch.optim.Optimizer) else optimizer


def process_group(group: dist.ProcessGroup | None, what: str) -> dist.ProcessGroup:
    """Return ``group``, or the group of all ranks if it is None.

    Args:
        what: the object that needs the group, for the message.

    Raises:
        UserError: there is no process group.
    """
    chosen = group if group is not None else dist.group.WORLD
    if chosen is None:
        raise UserError(
            f"{what} needs a process group: start with torchrun or srun, or call launch.run_ranks"
        )
    return chosen
