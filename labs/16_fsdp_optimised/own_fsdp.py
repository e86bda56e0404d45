"""The FSDP of lab 15, without its hooks, for this lab: units, their packed rows, and the average of their
gradients.

To read: ``Unit``, ``unshard`` to ``wait_reduce``, and ``Simple``. The rows and the making of units are those
of lab 15. You may replace any function by the one that you wrote: names and meaning are those of lab 15. New
here: ``Unit.message``, ``Unit.reducing``, ``start_reduce`` and ``wait_reduce``, which split the reduction
into its start and its end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(eq=False)
class Unit:
    """Parameters that are gathered, freed and reduced together."""

    module: nn.Module  # its forward and backward need them
    # of each parameter, as module and attribute: tied ones have several
    places: list[list[tuple[nn.Module, str]]]
    row: Tensor  # (S,): this rank's part, packed and padded
    shards: list[nn.Parameter]  # its parts, views of row: for the optimiser
    wholes: list[nn.Parameter]  # for the module: always the same tensors, without memory while freed
    is_whole: bool = False
    message: tuple[Tensor, Any] | None = (
        None  # an all-gather in transit: its buffer (world, S), and its handle
    )
    reducing: tuple[Tensor, Any] | None = (
        None  # a reduce-scatter in transit: this rank's row of the sum, and its handle
    )


# -- rows


def own_rows(length: int, rank: int, world: int) -> tuple[int, int]:
    """Return start and stop of this rank's rows."""
    rows = -(-length // world)
    return min(rank * rows, length), min((rank + 1) * rows, length)


def shard_views(row: Tensor, shapes: list[torch.Size], rank: int, world: int) -> list[Tensor]:
    """Return this rank's part of each parameter, as views of its packed row."""
    views, offset = [], 0
    for shape in shapes:
        length, inner = math.prod(shape[:1]), math.prod(shape[1:])
        start, stop = own_rows(length, rank, world)
        views.append(row[offset : offset + (stop - start) * inner].view(stop - start, *shape[1:]))
        offset += -(-length // world) * inner
    return views


def pack(tensors: list[Tensor], world: int) -> Tensor:
    """Return the row that each rank keeps of these whole tensors: (world, S)."""
    parts = []
    for tensor in tensors:
        size = -(-math.prod(tensor.shape[:1]) // world) * math.prod(tensor.shape[1:])
        parts.append(F.pad(tensor.reshape(-1), (0, world * size - tensor.numel())).view(world, size))
    return torch.cat(parts, dim=1)


def unpack(packed: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    """Return the whole tensors, from the rows of all ranks (world, S)."""
    tensors, offset = [], 0
    for shape in shapes:
        size = -(-math.prod(shape[:1]) // len(packed)) * math.prod(shape[1:])
        tensors.append(packed[:, offset : offset + size].reshape(-1)[: math.prod(shape)].view(shape))
        offset += size
    return tensors


# -- units


def put(unit: Unit, whole: bool) -> None:
    """Register the whole parameters, or the shards, in the modules."""
    for places, parameter in zip(unit.places, unit.wholes if whole else unit.shards):
        for module, attribute in places:
            module._parameters[attribute] = parameter
    unit.is_whole = whole


def make_unit(module: nn.Module, places: list[list[tuple[nn.Module, str]]]) -> Unit:
    """Keep this rank's row of these parameters, and register the shards in their modules."""
    rank, world = dist.get_rank(), dist.get_world_size()
    parameters = [owner._parameters[attribute] for (owner, attribute), *_ in places]
    shapes = [parameter.shape for parameter in parameters]
    row = pack([parameter.detach() for parameter in parameters], world)[rank].clone()
    shards = [nn.Parameter(view) for view in shard_views(row, shapes, rank, world)]
    wholes = [nn.Parameter(torch.empty_like(parameter)) for parameter in parameters]
    for whole in wholes:
        whole.untyped_storage().resize_(0)
    unit = Unit(module, places, row, shards, wholes)
    put(unit, False)
    return unit


def make_units(model: nn.Module, kind: type[nn.Module]) -> tuple[Unit | None, list[Unit]]:
    """Return the root (what is outside the blocks, None if there is nothing), and one unit for each block of
    this kind."""
    blocks = [module for module in model.modules() if isinstance(module, kind)]
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((module, attribute))
    inside = [set(block.modules()) for block in blocks]
    of_block: list[list[list[tuple[nn.Module, str]]]] = [[] for _ in blocks]
    root = []
    for held in places.values():
        own = [
            found for modules, found in zip(inside, of_block) if all(module in modules for module, _ in held)
        ]
        (own[0] if own else root).append(held)
    return make_unit(model, root) if root else None, [
        make_unit(block, held) for block, held in zip(blocks, of_block)
    ]


# -- the simple form: every message is waited for at once


def unshard(unit: Unit) -> None:
    """Gather the unit and wait, unless it is whole."""
    if unit.is_whole:
        return
    packed = unit.row.new_empty(dist.get_world_size(), unit.row.numel())
    dist.all_gather_into_tensor(packed.view(-1), unit.row)
    fill(unit, packed)


def fill(unit: Unit, packed: Tensor) -> None:
    """Copy the rows of all ranks (world, S) into the whole parameters, and register them in the modules."""
    for whole, value in zip(unit.wholes, unpack(packed, [whole.shape for whole in unit.wholes])):
        whole.untyped_storage().resize_(whole.numel() * whole.element_size())
        whole.data.copy_(value)
    put(unit, True)


def reshard(unit: Unit) -> None:
    """Free the whole parameters and register the shards."""
    for whole in unit.wholes:
        whole.untyped_storage().resize_(0)
    put(unit, False)


def start_reduce(unit: Unit) -> None:
    """Start the sum of the gradients of the whole parameters over the ranks, and drop the whole gradients."""
    gradients = [torch.zeros_like(whole) if whole.grad is None else whole.grad for whole in unit.wholes]
    packed = pack(gradients, dist.get_world_size())
    for whole in unit.wholes:
        whole.grad = None
    row = packed.new_empty(packed.shape[1])
    unit.reducing = row, dist.reduce_scatter_tensor(row, packed.view(-1), async_op=True)


def wait_reduce(unit: Unit) -> None:
    """Wait for the sum, if it is in transit, and add the average to the gradients of the shards."""
    if unit.reducing is None:
        return
    row, message = unit.reducing
    unit.reducing = None
    message.wait()
    row = row / dist.get_world_size()
    for shard, part in zip(
        unit.shards,
        shard_views(row, [whole.shape for whole in unit.wholes], dist.get_rank(), dist.get_world_size()),
    ):
        shard.grad = part if shard.grad is None else shard.grad + part


# -- the moments


def add_hooks(model: nn.Module, root: Unit | None, units: list[Unit], moments: Any) -> None:
    """Call ``moments.before_forward(units, k)``, ``after_forward``, ``before_backward``, ``after_backward``
    for each block k, and ``end_of_backward(units)``. The root is whole from the beginning of forward to the
    end of backward."""

    def hook_block(k: int, unit: Unit) -> None:
        def pre(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            moments.before_forward(units, k)
            x = args[0]
            if torch.is_grad_enabled() and x.requires_grad:
                # The output of a block is the input of the next. A tensor for each keeps the hooks in order.
                x = x.view_as(x)
                x.register_hook(lambda grad: moments.after_backward(units, k))
            return x, *args[1:]

        def post(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            moments.after_forward(units, k)
            if output.requires_grad:
                output.register_hook(lambda grad: moments.before_backward(units, k))

        unit.module.register_forward_pre_hook(pre)
        unit.module.register_forward_hook(post)

    def begin(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if root is not None:
            unshard(root)
        if args[0].is_floating_point() and not args[0].requires_grad:
            # so that the first block has a hook after backward
            return args[0].detach().requires_grad_(torch.is_grad_enabled()), *args[1:]
        return None

    def end(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(
                lambda grad: torch.autograd.Variable._execution_engine.queue_callback(end_of_backward)
            )

    def end_of_backward() -> None:
        if root is not None:
            start_reduce(root)
        moments.end_of_backward(units)
        if root is not None:
            wait_reduce(root)
            reshard(root)

    for k, unit in enumerate(units):
        hook_block(k, unit)
    model.register_forward_pre_hook(begin)
    model.register_forward_hook(end)


class Simple:
    """The moments of lab 15: each block is gathered before it computes, freed after it, and its gradient is
    waited for."""

    @staticmethod
    def before_forward(units: list[Unit], k: int) -> None:
        unshard(units[k])

    @staticmethod
    def after_forward(units: list[Unit], k: int) -> None:
        reshard(units[k])

    before_backward = before_forward

    @staticmethod
    def after_backward(units: list[Unit], k: int) -> None:
        start_reduce(units[k])
        wait_reduce(units[k])
        reshard(units[k])

    @staticmethod
    def end_of_backward(units: list[Unit]) -> None:
        pass
