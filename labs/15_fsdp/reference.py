"""The course's own answers under the names of this lab: what ``lab.use_reference("question")`` gives a stuck student.

The library's FSDP keeps other things of a unit than this lab does, so what has no interface of its own there is written out, in other words
than in the solution: by torch's ``chunk`` and ``split``, which cut as this lab does.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

Shape = tuple[int, ...]


def flat_shard(tensors: list[Tensor], rank: int, world: int) -> Tensor:
    """A row of the flat buffer."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return F.pad(flat, (0, -flat.numel() % world)).view(world, -1)[rank].clone()


def flat_whole(shard: Tensor, shapes: list[Shape]) -> list[Tensor]:
    """Cut one after the other."""
    flat = shard.new_empty(dist.get_world_size() * shard.numel())
    dist.all_gather_into_tensor(flat, shard)
    sizes = [math.prod(shape) for shape in shapes]
    *parts, _ = flat.split([*sizes, flat.numel() - sum(sizes)])
    return [part.view(shape) for part, shape in zip(parts, shapes)]


def padding(shapes: list[Shape], world: int) -> tuple[int, int]:
    """What all ranks hold, less what is real."""
    real = sum(math.prod(shape) for shape in shapes)
    return -real % world, world * sum(_size(shape, world) for shape in shapes) - real


def own_rows(length: int, rank: int, world: int) -> tuple[int, int]:
    """By cutting the numbers of rows."""
    pieces = torch.arange(length).chunk(world)
    if rank >= len(pieces):
        return length, length
    return int(pieces[rank][0]), int(pieces[rank][-1]) + 1


def shard_views(row: Tensor, shapes: list[Shape], rank: int, world: int) -> list[Tensor]:
    """The parts of the row, each without its padding."""
    views = []
    for part, shape in zip(row.split([_size(shape, world) for shape in shapes]), shapes):
        start, stop = own_rows(math.prod(shape[:1]), rank, world)
        views.append(part[: (stop - start) * math.prod(shape[1:])].view(stop - start, *shape[1:]))
    return views


def pack(tensors: list[Tensor], world: int) -> Tensor:
    """Each tensor copied into its columns."""
    sizes = [_size(tensor.shape, world) for tensor in tensors]
    packed = tensors[0].new_empty(world, sum(sizes))
    for columns, tensor in zip(packed.split(sizes, dim=1), tensors):
        flat = columns.new_zeros(columns.numel())
        flat[: tensor.numel()] = tensor.reshape(-1)
        columns.copy_(flat.view(columns.shape))
    return packed


def unpack(packed: Tensor, shapes: list[Shape]) -> list[Tensor]:
    """The columns of each tensor."""
    columns = packed.split([_size(shape, packed.shape[0]) for shape in shapes], dim=1)
    return [part.flatten()[: math.prod(shape)].view(shape) for part, shape in zip(columns, shapes)]


def unshard(unit: Any) -> None:
    """Gather, unpack, fill, put."""
    if not unit.is_whole:
        for whole, value in zip(unit.wholes, _gathered(unit, unit.compute_dtype)):
            whole.untyped_storage().resize_(value.nbytes)
            whole.data.copy_(value)
        _put(unit, True)


def reshard(unit: Any) -> None:
    """Free all."""
    for whole in unit.wholes:
        whole.untyped_storage().resize_(0)
    _put(unit, False)


def reduce_gradients(unit: Any) -> None:
    """One reduce-scatter of the packed gradients."""
    pairs = [(shard, whole) for shard, whole in zip(unit.shards, unit.wholes) if whole.requires_grad]
    if pairs:
        world = dist.get_world_size()
        found = [torch.zeros_like(whole) if whole.grad is None else whole.grad for _, whole in pairs]
        packed = pack([gradient.to(unit.reduce_dtype) for gradient in found], world)
        own = torch.empty_like(packed[0])
        dist.reduce_scatter_tensor(own, packed.flatten())
        parts = shard_views((own / world).to(unit.row.dtype), [whole.shape for _, whole in pairs], dist.get_rank(), world)
        for (shard, whole), part in zip(pairs, parts):
            shard.grad = part + (0 if shard.grad is None else shard.grad)
            whole.grad = None


def cut_into_units(model: nn.Module, kind: type[nn.Module]) -> list[tuple[nn.Module, list[list[str]]]]:
    """By the blocks that hold each parameter."""
    blocks = {name: module for name, module in model.named_modules() if isinstance(module, kind)}
    units: dict[str, list[list[str]]] = {"": [], **{name: [] for name in blocks}}
    names: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for same in names.values():
        owners = {next((block for block in blocks if name.startswith(f"{block}.")), "") for name in same}
        units[owners.pop() if len(owners) == 1 else ""].append(same)
    return [(blocks.get(name, model), held) for name, held in units.items() if held or not name]


class _Hooks:
    """The hooks of one model."""

    def __init__(self, units: list[Any]) -> None:
        self.root, self.open = units[0], []
        for unit in units:
            unit.module.register_forward_pre_hook(lambda module, args, unit=unit: self.before_forward(unit, args))
            unit.module.register_forward_hook(lambda module, args, output, unit=unit: self.after_forward(unit, output))

    def before_forward(self, unit: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        unshard(unit)
        return tuple(self.prepared(unit, arg) if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args)

    def prepared(self, unit: Any, arg: Tensor) -> Tensor:
        arg = arg.to(unit.compute_dtype)
        if arg.requires_grad and unit is not self.root:
            arg = arg.view_as(arg)
            arg.register_hook(lambda grad: self.after_backward(unit))
        return arg

    def after_forward(self, unit: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda grad: self.before_backward(unit))
        if not (unit is self.root and output.requires_grad):
            reshard(unit)

    def before_backward(self, unit: Any) -> None:
        if unit is self.root:
            torch.autograd.Variable._execution_engine.queue_callback(self.end)
        unshard(unit)
        self.open.append(unit)

    def after_backward(self, unit: Any) -> None:
        self.open.remove(unit)
        reduce_gradients(unit)
        reshard(unit)

    def end(self) -> None:
        while self.open:
            self.after_backward(self.open[-1])


def add_hooks(units: list[Any]) -> None:
    """Gather, free and reduce by hooks."""
    _Hooks(units)


def full_state(model: nn.Module, units: list[Any]) -> dict[str, Tensor]:
    """Unit by unit, from the rows."""
    state = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for unit in units:
        for names, value in zip(unit.names, _gathered(unit, unit.row.dtype)):
            state |= {name: value.clone() for name in names}
    return state


def _size(shape: Shape, world: int) -> int:
    """Numbers of a rank's part of a parameter, padding included."""
    return -(-math.prod(shape[:1]) // world) * math.prod(shape[1:])


def _gathered(unit: Any, dtype: torch.dtype) -> list[Tensor]:
    row = unit.row.detach().to(dtype)
    packed = row.new_empty(dist.get_world_size(), row.numel())
    dist.all_gather_into_tensor(packed.view(-1), row)
    return unpack(packed, unit.shapes)


def _put(unit: Any, whole: bool) -> None:
    """As the lab's ``put`` does."""
    for places, parameter in zip(unit.places, unit.wholes if whole else unit.shards):
        for module, attribute in places:
            module._parameters[attribute] = parameter
    unit.is_whole = whole
    unit.history.append((time.monotonic_ns(), whole))


REFERENCE = {
    "flat": {"flat_shard": flat_shard, "flat_whole": flat_whole},
    "padding": {"padding": padding},
    "rows": {"own_rows": own_rows, "shard_views": shard_views},
    "pack": {"pack": pack, "unpack": unpack},
    "unshard": {"unshard": unshard},
    "reshard": {"reshard": reshard},
    "reduce": {"reduce_gradients": reduce_gradients},
    "units": {"cut_into_units": cut_into_units},
    "hooks": {"add_hooks": add_hooks},
    "state": {"full_state": full_state},
}
