"""Checkpoints of sharded training in the format of ``torch.distributed.checkpoint``. Every rank writes only
its shards.

A checkpoint can be loaded on any number of ranks: each rank reads the rows that belong to it from the files
that contain them. A shard is stored as a ``DTensor`` that is sharded on its first dimension, as by
``fully_shard``, so that the tools of PyTorch can read and convert the checkpoint
(``torch.distributed.checkpoint.format_utils.dcp_to_torch_save``). A stage of a pipeline stores its parameters
under their names in the whole model, so that training can continue with other stages and another schedule.
The pieces of a ``ShardedOptimizer`` (ZeRO stages 1 and 2) are stored with the shapes of the parameters
(``parallel.flat_part``), so that training can change between stage 3 and these stages.

    model.<parameter>        optimizer.state.<parameter>.<key>        optimizer.groups (hyper-parameters)

A 0-d parameter cannot be sharded. The rank that holds it writes it and its moments as 0-d tensors.

The format contains a pickled file, ``.metadata``: load only checkpoints from trusted sources.
Cost: 12 bytes per parameter (fp32 and AdamW), written by all ranks together, without an all-gather.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DeviceMesh, DTensor, Shard

from dlo_lib.base.errors import UserError, no_space
from dlo_lib.optim.averaging import AVERAGE_KEYS
from dlo_lib.parallel.flat_part import FlatPart
from dlo_lib.parallel.protocol import (
    FlatRange,
    ModelParts,
    ParamShard,
    SplitDim,
    averaged_optimizer,
    holds_parts,
    local_optimizer,
    stepped_shards,
)
from dlo_lib.parallel.zero.state_dict import MASTER

Meshes = dict[dist.ProcessGroup, DeviceMesh]
"""A ``DeviceMesh`` for each group over which parameters are sharded, created at the first use."""


def save_sharded(
    folder: str | Path, model: ModelParts, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Write the parameters and buffers of ``model``, and the state of ``optimizer``, to ``folder``; called by
    every rank.

    Raises:
        UserError: there is no space left, or the folder is not writable. Every rank raises it.
    """
    meshes: Meshes = {}
    state = _model_state(model, meshes)
    if optimizer is not None:
        dtypes = {shard.name: shard.param.dtype for shard in model.shards()}
        for stated in _stated_shards(model, optimizer):
            shard = stated.shard
            for key, value in stated.state(dtypes[shard.name]).items():
                described = _described(value, shard, meshes) if _is_part(value, shard) else value
                if described is not None:
                    state[f"optimizer.state.{shard.name}.{key}"] = described
        groups = [
            {**group, "params": names}
            for group, names in zip(optimizer.param_groups, _names(model, optimizer))
        ]
        state["optimizer.groups"] = json.dumps(groups, default=float)  # a learning rate may be a tensor
    try:
        dcp.save(state, checkpoint_id=folder)
    except dcp.CheckpointException as failure:
        for error in failure.failures.values():
            if isinstance(error[0], OSError):
                other = UserError(f"cannot write {folder} ({error[0]}): choose another folder")
                raise no_space(folder, error[0]) or other from failure
        raise


def load_sharded(
    folder: str | Path, model: ModelParts, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Load a checkpoint of ``save_sharded``, which another number of ranks may have written; called by every
    rank.

    Raises:
        UserError: there is no checkpoint, or it is of another model or optimiser.
    """
    if not (Path(folder) / ".metadata").is_file():
        raise UserError(
            f"{folder} holds no sharded checkpoint (no .metadata): "
            "give the folder that save_sharded wrote to",
        )
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    meshes: Meshes = {}
    state = _model_state(model, meshes)
    local: dict[str, Any] = {}  # the memory of this rank for the optimiser state, by key
    if optimizer is not None:
        of_elements = {key for shard in model.shards() for key in _keys_of_elements(shard, stored)}
        for stated in _stated_shards(model, optimizer):
            shard = stated.shard
            for key in stated.keys(stored):
                value: Any = _memory_for(stored[key], shard, key.rpartition(".")[2] in of_elements)
                local[key] = value
                described = _described(value, shard, meshes) if _is_part(value, shard) else value
                if described is not None or value is None:
                    state[key] = described
        state["optimizer.groups"] = ""
    if missing := sorted(key for key in state if key not in stored):
        raise UserError(f"{folder} is of another model or optimiser: it lacks {', '.join(missing[:5])}")
    _check_shapes(folder, state, stored)
    dcp.load(state, checkpoint_id=folder)
    if optimizer is not None:
        values = {key: state[key] if value is None else value for key, value in local.items()}
        _load_optimizer(optimizer, model, values, state)


def load_whole_optimizer(
    model: ModelParts,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
) -> None:
    """Load this rank's part of the state of an optimiser that one process has saved.

    Args:
        state: the values of each parameter, by its name and the key; values for each element have the shape
            of the whole parameter.
        groups: the hyper-parameters of each group, with the names of its parameters in ``params``.

    Raises:
        UserError: the optimiser has other groups of parameters.
    """
    values = {}
    for stated in _stated_shards(model, optimizer):
        shard = stated.shard
        held = {f"{_prefix(shard)}{key}": value for key, value in state.get(shard.name, {}).items()}
        for name in stated.keys(held):
            value = held[name]
            whole = isinstance(value, Tensor) and value.shape == shard.shape and bool(shard.shape)
            values[name] = shard.of(value).clone() if whole else value
    _load_optimizer(optimizer, model, values, {"optimizer.groups": json.dumps(groups)})


def _model_state(model: ModelParts, meshes: Meshes) -> dict[str, Any]:
    """Return the parameters of this rank, which a load overwrites in place, and the buffers."""
    state: dict[str, Any] = {}
    for shard in model.shards():
        described = _described(shard.param.detach(), shard, meshes)
        if described is not None:
            state[f"model.{shard.name}"] = described
    for module in model.unwrapped():
        saved = module.state_dict(keep_vars=True)
        state |= {f"model.{name}": saved[name] for name, _ in module.named_buffers() if name in saved}
    return state


def _described(part: Tensor, shard: ParamShard, meshes: Meshes) -> Tensor | None:
    """Return the part of this rank in the form of the checkpoint format; None for a 0-d parameter of another
    rank."""
    match shard.placement:
        case ():
            return part
        case _ if not shard.shape:
            return part.view(()) if part.numel() else None
        case (SplitDim(dim, group, 1, 1),):
            if group not in meshes:
                meshes[group] = DeviceMesh.from_group(group, part.device.type)
            return DTensor.from_local(
                part,
                meshes[group],
                [Shard(dim)],
                run_check=False,
                shape=shard.shape,
                stride=shard.strides,
            )
        case (FlatRange(start),):
            return FlatPart(part, shard.shape, shard.strides, start)
    return FlatPart.of_boxes(part, shard.shape, shard.boxes())


@dataclass(frozen=True)
class _Stated:
    """A shard with a state in ``holder``.

    Attributes:
        of_average: whether the state is the average of the weights; None if it is that with all the rest.
    """

    shard: ParamShard
    holder: torch.optim.Optimizer
    of_average: bool | None = None

    def keys(self, stored: Iterable[str]) -> list[str]:
        """Return the keys of the checkpoint that belong to this state."""
        prefix = _prefix(self.shard)
        own = [key for key in stored if key.startswith(prefix)]
        return [key for key in own if self.of_average in (None, key.removeprefix(prefix) in AVERAGE_KEYS)]

    def state(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return the state, by key. If the shard has another dtype than the model, ``dtype``, it is included
        as the master copy."""
        state = dict(self.holder.state.get(self.shard.param, {}))
        if state and self.shard.param.dtype is not dtype:
            state[MASTER] = self.shard.param.detach()
        return state


def _stated_shards(model: ModelParts, optimizer: torch.optim.Optimizer) -> list[_Stated]:
    """Return the shards of which ``optimizer`` keeps a state, or would."""
    local, stepped = local_optimizer(optimizer), stepped_shards(model, optimizer)
    if not holds_parts(optimizer):
        return [_Stated(shard, local) for shard in stepped]
    parts = [_Stated(shard, averaged_optimizer(optimizer), True) for shard in model.shards()]
    return [*(_Stated(shard, local, False) for shard in stepped), *parts]


def _is_part(value: object, shard: ParamShard) -> bool:
    """Return whether a state value has the shape of the shard, such as a moment. Other values, such as the
    number of steps, are equal on every rank."""
    return isinstance(value, Tensor) and value.shape == shard.param.shape


def _names(model: ModelParts, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the names of the parameters of each group; empty lists for a pipeline, whose ranks hold
    different ones."""
    if not model.holds_every_param:
        return [[] for _ in optimizer.param_groups]
    names = {shard.param: shard.name for shard in model.shards()}
    return [[names[param] for param in group["params"]] for group in optimizer.param_groups]


def _prefix(shard: ParamShard) -> str:
    """Return how the keys of the optimiser state of a parameter begin."""
    return f"optimizer.state.{shard.name}."


def _keys_of_elements(shard: ParamShard, stored: dict[str, Any]) -> list[str]:
    """Return the state keys with a value for each element, such as ``exp_avg``. The result is empty for a 0-d
    parameter, where the shapes do not distinguish them from values such as the number of steps."""
    if not shard.shape:
        return []
    keys = [key for key in stored if key.startswith(_prefix(shard))]
    return [key.rpartition(".")[2] for key in keys if getattr(stored[key], "size", None) == shard.shape]


def _memory_for(metadata: Any, shard: ParamShard, of_elements: bool) -> Tensor | None:
    """Allocate the memory into which a stored value is read; None if it is not a tensor."""
    if not isinstance(metadata, TensorStorageMetadata):
        return None
    if metadata.size == shard.shape and (shard.shape or of_elements):
        return torch.empty_like(shard.param.detach(), dtype=metadata.properties.dtype)
    return torch.empty(metadata.size, dtype=metadata.properties.dtype)


def _check_shapes(folder: str | Path, state: dict[str, Any], stored: dict[str, Any]) -> None:
    for key, value in state.items():
        if isinstance(value, Tensor) and (held := getattr(stored[key], "size", None)) != value.shape:
            sizes = f"{key} is {tuple(held or ())} instead of {tuple(value.shape)}"
            raise UserError(f"{folder} is of another model: {sizes}")


def _load_optimizer(
    optimizer: torch.optim.Optimizer,
    model: ModelParts,
    values: dict[str, Any],
    state: dict[str, Any],
) -> None:
    """Load the hyper-parameters and the ``values`` of this rank, by key, into the optimiser."""
    groups = json.loads(state["optimizer.groups"])
    saved, own = [group["params"] for group in groups], _names(model, optimizer)
    # The names of a group are empty if a pipeline has written the checkpoint, or reads it.
    if len(saved) != len(own) or any(one and other and one != other for one, other in zip(saved, own)):
        raise UserError(
            "the checkpoint's optimiser has other groups of parameters: create it as when it was saved",
        )
    by_shard: dict[nn.Parameter, dict[str, Any]] = {}
    for stated in _stated_shards(model, optimizer):
        prefix = _prefix(stated.shard)
        by_shard[stated.shard.param] = {key.removeprefix(prefix): values[key] for key in stated.keys(values)}
    load = getattr(optimizer, "load_local_state", None)
    if load is not None:
        load(by_shard, [{key: value for key, value in group.items() if key != "params"} for group in groups])
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = {param: number for number, param in enumerate(params)}
    optimizer.load_state_dict(
        {
            "state": {number: by_shard[param] for param, number in numbers.items() if by_shard[param]},
            "param_groups": [
                {**group, "params": [numbers[param] for param in held["params"]]}
                for group, held in zip(groups, optimizer.param_groups)
            ],
        }
    )
