"""Checkpoints of sharded training in the format of ``torch.distributed.checkpoint``: every rank writes its own shards and no other.

Read again, on any number of ranks: each takes the rows that are now its own from whichever files hold them. A shard is described as a
``DTensor`` sharded on its first dimension, cut as ``fully_shard`` cuts it, so PyTorch's own tools read and convert the checkpoint
(``torch.distributed.checkpoint.format_utils.dcp_to_torch_save``). A stage of a pipeline holds its parameters whole, under the names they
have in the whole model: it may be resumed with other cuts and another schedule. Of a ``ShardedOptimizer`` (stages 1 and 2 of ZeRO) the
pieces are described in the parameters' shapes (``parallel.flat_part``), so stage 3 can go on from there, and the reverse.

    model.<parameter>        optimizer.state.<parameter>.<key>        optimizer.groups (hyper-parameters)

A parameter that is a number has no dimension to cut: it, and its moments, are written as numbers by the rank that holds it.

The format describes itself by a pickled file, ``.metadata``: load only checkpoints from those you trust.
Cost: 12 bytes a parameter (fp32 and AdamW), written by all ranks together; nothing is gathered.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DeviceMesh, DTensor, Shard

from dlo_lib.errors import UserError, no_space
from dlo_lib.parallel.ddp import DDP
from dlo_lib.parallel.flat_part import FlatPart
from dlo_lib.parallel.fsdp import FSDP
from dlo_lib.parallel.partition import Piece
from dlo_lib.parallel.pipeline.runtime import Pipeline
from dlo_lib.parallel.zero import ShardedOptimizer
from dlo_lib.parallel.zero2 import ShardedDDP
from dlo_lib.parallel.zero_state import is_piece, local_state, put_back

Spread = FSDP | Pipeline | DDP | ShardedDDP


class Held(Protocol):
    """A parameter as a rank holds it: ``shard``, a part of ``whole`` or all of it."""

    @property
    def shard(self) -> nn.Parameter: ...

    @property
    def whole(self) -> Tensor: ...


@dataclass(frozen=True)
class _Whole:
    shard: nn.Parameter

    @property
    def whole(self) -> Tensor:
        return self.shard


def save_sharded(folder: str | Path, model: Spread, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Write the parameters and buffers of ``model``, and the state of ``optimizer``, to ``folder``; called by every rank.

    Raises:
        UserError: no space left, or the folder cannot be written to; on every rank alike.
    """
    state = _model_state(model)
    mesh, slots = _mesh(model), _slots(model)
    if isinstance(optimizer, ShardedOptimizer):
        for piece in optimizer.pieces():
            name, _ = slots[piece.param]
            for key, value in local_state(optimizer, piece).items():
                state[f"optimizer.state.{name}.{key}"] = _part(value, piece) if piece.param.dim() and is_piece(value, piece) else value
    elif optimizer is not None:
        for param, values in optimizer.state.items():
            assert isinstance(param, nn.Parameter)
            name, slot = slots[param]
            for key, value in values.items():
                described = _described(value, slot, mesh) if _is_sharded(value, slot) else value
                if described is not None:
                    state[f"optimizer.state.{name}.{key}"] = described
    if optimizer is not None:
        groups = [{**group, "params": names} for group, names in zip(optimizer.param_groups, _names(model, optimizer))]
        state["optimizer.groups"] = json.dumps(groups, default=float)  # a learning rate may be a tensor
    try:
        dcp.save(state, checkpoint_id=folder)
    except dcp.CheckpointException as failure:
        for error in failure.failures.values():
            if isinstance(error[0], OSError):
                raise no_space(folder, error[0]) or UserError(f"cannot write {folder} ({error[0]}): choose another folder") from failure
        raise


def load_sharded(folder: str | Path, model: Spread, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Put back what ``save_sharded`` has written, on however many ranks; called by every rank.

    Raises:
        UserError: no such checkpoint, or one of another model or optimiser.
    """
    if not (Path(folder) / ".metadata").is_file():
        raise UserError(f"{folder} holds no sharded checkpoint (no .metadata): give the folder that save_sharded wrote to")
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = _model_state(model)
    mesh, slots = _mesh(model), _slots(model)
    rooms: dict[str, Tensor] = {}  # the memory of parts, by key
    if isinstance(optimizer, ShardedOptimizer):
        for piece in optimizer.pieces():
            for key in _keys_of(slots[piece.param][0], stored):
                if (room := _room_for_part(stored[key], piece)) is not None:
                    rooms[key] = room
                    state[key] = _part(room, piece) if piece.param.dim() and is_piece(room, piece) else room
                else:
                    state[key] = None
    elif optimizer is not None:
        of_elements = {key for name, slot in slots.values() for key in _keys_of_elements(name, slot, stored)}
        for name, slot in slots.values():
            for key in _keys_of(name, stored):
                if mesh is not None and not slot.whole.dim() and key.rpartition(".")[2] in of_elements:
                    rooms[key] = torch.empty_like(slot.shard.detach())
                    if len(rooms[key]):
                        state[key] = rooms[key].view(())
                else:
                    state[key] = _room_for(stored[key], slot, mesh)
    if optimizer is not None:
        state["optimizer.groups"] = ""
    if missing := sorted(key for key in state if key not in stored):
        raise UserError(f"{folder} is of another model or optimiser: it lacks {', '.join(missing[:5])}")
    _check_shapes(folder, state, stored)
    dcp.load(state, checkpoint_id=folder)
    if optimizer is not None:
        _put_back(optimizer, model, state | rooms)


def _model_state(model: Spread) -> dict[str, Any]:
    """Of parameters the shards themselves, which are then read in place."""
    mesh, slots = _mesh(model), _slots(model)
    described = {f"model.{name}": _described(slot.shard.detach(), slot, mesh) for name, slot in slots.values()}
    state: dict[str, Any] = {key: value for key, value in described.items() if value is not None}
    for module in model.plain_stages() if isinstance(model, Pipeline) else [model.module]:
        saved = module.state_dict(keep_vars=True)
        state |= {f"model.{name}": saved[name] for name, _ in module.named_buffers() if name in saved}
    return state


def _slots(model: Spread) -> dict[nn.Parameter, tuple[str, Held]]:
    if isinstance(model, FSDP):
        return {slot.shard: (slot.name, slot) for unit in model.units for slot in unit.slots}
    if not isinstance(model, Pipeline):
        return {param: (name, _Whole(param)) for name, param in model.module.named_parameters()}
    # Backwards, so that of a parameter that two stages share the first stage's name stays.
    names = {parameter: name for stage in reversed(model.plain_stages()) for name, parameter in stage.named_parameters()}
    if model.tied is not None and model.tied.counted_elsewhere is not None:
        names[model.tied.counted_elsewhere] = model.tied.name
    return {parameter: (name, _Whole(parameter)) for parameter, name in names.items()}


def _names(model: Spread, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Of the parameters in each of the optimiser's groups; none for a pipeline, where every rank has others in a group."""
    slots = _slots(model)
    return [[] if isinstance(model, Pipeline) else [slots[param][0] for param in group["params"]] for group in optimizer.param_groups]


def _mesh(model: Spread) -> DeviceMesh | None:
    """Over which parameters are cut; None where a rank has them whole."""
    if not isinstance(model, FSDP):
        return None
    return DeviceMesh.from_group(model.group, next(model.parameters()).device.type)


def _is_sharded(value: object, slot: Held) -> bool:
    """An optimiser's state of the parameter's shape, such as a moment; others, such as a count of steps, are the same on every rank."""
    return isinstance(value, Tensor) and value.shape == slot.shard.shape


def _described(part: Tensor, slot: Held, mesh: DeviceMesh | None) -> DTensor | Tensor | None:
    """A rank's part as the format has it; None where a number is another rank's."""
    if mesh is None:
        return part
    if not slot.whole.dim():
        return part.view(()) if len(part) else None
    return DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=slot.whole.shape, stride=slot.whole.stride())


def _part(value: Tensor, piece: Piece) -> FlatPart:
    return FlatPart(value, piece.param.shape, piece.strides, piece.start)


def _keys_of(name: str, stored: dict[str, Any]) -> list[str]:
    """What is stored of a parameter's state."""
    prefix = f"optimizer.state.{name}."
    return [key for key in stored if key.startswith(prefix)]


def _keys_of_elements(name: str, slot: Held, stored: dict[str, Any]) -> list[str]:
    """Of a parameter that is no number, what is stored for each element, such as ``exp_avg``. Of a number, nothing tells it apart."""
    if not slot.whole.dim():
        return []
    return [key.rpartition(".")[2] for key in _keys_of(name, stored) if getattr(stored[key], "size", None) == slot.whole.shape]


def _room_for_part(metadata: Any, piece: Piece) -> Tensor | None:
    """The same for a piece."""
    if not isinstance(metadata, TensorStorageMetadata):
        return None
    if metadata.size == piece.param.shape:
        return torch.empty_like(piece.shard.detach(), dtype=metadata.properties.dtype)
    return torch.empty(metadata.size, dtype=metadata.properties.dtype)


def _room_for(metadata: Any, slot: Held, mesh: DeviceMesh | None) -> Any:
    """Where a stored value of the optimiser's state will be read to."""
    if not isinstance(metadata, TensorStorageMetadata):
        return None
    if metadata.size == slot.whole.shape and slot.whole.dim():
        return _described(torch.empty_like(slot.shard.detach(), dtype=metadata.properties.dtype), slot, mesh)
    return torch.empty(metadata.size, dtype=metadata.properties.dtype)


def _check_shapes(folder: str | Path, state: dict[str, Any], stored: dict[str, Any]) -> None:
    for key, value in state.items():
        if isinstance(value, Tensor) and (held := getattr(stored[key], "size", None)) != value.shape:
            raise UserError(f"{folder} is of another model: {key} is {tuple(held or ())} instead of {tuple(value.shape)}")


def _put_back(optimizer: torch.optim.Optimizer, model: Spread, state: dict[str, Any]) -> None:
    saved = json.loads(state["optimizer.groups"])
    if [group["params"] for group in saved] != _names(model, optimizer):
        raise UserError("the checkpoint's optimiser has other groups of parameters: make it as when it was saved")
    slots = _slots(model)
    if isinstance(optimizer, ShardedOptimizer):
        of_pieces = {piece.shard: _state_of(slots[piece.param][0], state) for piece in optimizer.pieces()}
        put_back(optimizer, of_pieces, [{key: value for key, value in group.items() if key != "params"} for group in saved])
        return
    order = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = {param: number for number, param in enumerate(order)}
    values = {number: held for param, number in numbers.items() if (held := _state_of(slots[param][0], state))}
    groups = [{**group, "params": [numbers[param] for param in own["params"]]} for group, own in zip(saved, optimizer.param_groups)]
    optimizer.load_state_dict({"state": values, "param_groups": groups})


def _state_of(name: str, state: dict[str, Any]) -> dict[str, Any]:
    """A parameter's state by key, as this rank holds it."""
    prefix = f"optimizer.state.{name}."
    found = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    return {key: value.to_local() if isinstance(value, DTensor) else value for key, value in found.items()}
