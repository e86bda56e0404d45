"""The shards of FSDP as ``DTensor``s, in the ``state_dict`` of the model and of its optimiser.

Training uses plain tensors, because every operator of a ``DTensor`` costs more. A ``state_dict`` contains
``DTensor``s with the shapes of the whole parameters, as after PyTorch's ``fully_shard``. Therefore
``torch.distributed.checkpoint`` and its ``get_state_dict`` work on them with all options. ``load_state_dict``
takes such a state, or the plain tensors of an unsharded model or optimiser. Each rank keeps its part.

Hooks of the modules convert the parameters. The user creates the optimiser, so a hook on all optimisers
recognises it at its first step. ``get_state_dict`` makes a step with learning rate 0 if there was none.

A 0-d parameter cannot be sharded. One rank holds its value and sends it to all ranks for the ``state_dict``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dlo_lib.base.errors import UserError
from dlo_lib.base.torch_compat import is_dtensor_class
from dlo_lib.parallel.sharding.elementwise import updates_elements
from dlo_lib.parallel.sharding.sharded_grad import ShardedGrad, plain

# torch.distributed.tensor takes 1 s of CPU time to import: only a process that needs a DTensor imports it.
if TYPE_CHECKING:
    from torch.distributed.tensor import DeviceMesh


@dataclass(frozen=True, eq=False)
class ShardSpec:
    """What a shard is a part of.

    Attributes:
        name: the name of the parameter in the model.
        shape, strides: those of the whole parameter.
        group: the ranks that hold the parts, in rows of ceil(d0 / ranks).
    """

    name: str
    shape: torch.Size
    strides: tuple[int, ...]
    group: dist.ProcessGroup

    def dtensor(self, part: Tensor) -> Tensor:
        """Return the whole tensor of which this rank holds ``part``; a 0-d one as a plain tensor.

        A 0-d tensor is sent by the rank that holds it, so every rank must call this.
        """
        if not self.shape:
            value = part.detach().reshape(()) if part.numel() else part.new_empty(())
            value = value.clone()
            dist.broadcast(value, group=self.group, group_src=0)
            return value
        from torch.distributed.tensor import DTensor, Shard

        mesh = _mesh(self.group, part.device.type)
        return DTensor.from_local(
            part, mesh, [Shard(0)], run_check=False, shape=self.shape, stride=self.strides
        )

    def part(self, value: Tensor) -> Tensor:
        """Return the part of this rank of ``value``, which is a ``DTensor`` or whole.

        Raises:
            UserError: ``value`` has another shape, or is sharded in another way.
        """
        if value.shape != self.shape:
            raise UserError(
                f"{self.name} is {tuple(value.shape)} instead of {tuple(self.shape)}: "
                "load the state of the same model",
            )
        ranks, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        if is_dtensor_class(type(value)):
            from torch.distributed.tensor import DTensor, Shard

            assert isinstance(value, DTensor)
            if value.placements == (Shard(0),) and value.device_mesh.size() == ranks:
                return value.to_local()
            value = value.full_tensor()
        return rows_of(value, ranks, rank)


def rows_of(value: Tensor, ranks: int, rank: int) -> Tensor:
    """Return the rows of ``value`` that ``rank`` of ``ranks`` stores; a 0-d tensor is one row."""
    count = value.shape[:1].numel()
    rows = -(-count // ranks)
    return value.reshape(count, *value.shape[1:])[rank * rows : (rank + 1) * rows]


@functools.lru_cache(maxsize=64)
def _mesh(group: dist.ProcessGroup, device_type: str) -> DeviceMesh:
    from torch.distributed.tensor import DeviceMesh

    return DeviceMesh.from_group(group, device_type)


def spec_of(param: Tensor) -> ShardSpec | None:
    """Return the spec of ``param`` if it is a shard of FSDP."""
    return getattr(param, "shard_of", None)


# -- the model


def show_dtensors(module: nn.Module, shards: Mapping[str, nn.Parameter]) -> None:
    """Make ``state_dict`` of ``module`` return ``DTensor``s, and ``load_state_dict`` take them.

    Args:
        shards: the shards of its parameters, by attribute.
    """
    owned = OwnedShards(shards)
    module.register_state_dict_post_hook(functools.partial(_save_params, owned))
    module.register_load_state_dict_pre_hook(functools.partial(_load_params, owned))


def refuse_copy(self: Any, protocol: Any) -> Any:
    """Serves as ``__reduce_ex__`` of what the hooks of FSDP hold, so that a module with them is not copied.
    The parameters of a copy would be plain tensors with the rows of this rank."""
    raise UserError(
        "a module inside FSDP cannot be copied or pickled, because it holds the rows of one rank: copy it "
        "before wrapping, or load full_state_dict() into a module that is not wrapped"
    )


class OwnedShards(dict[str, nn.Parameter]):
    """The shards of a module, by attribute."""

    __reduce_ex__ = refuse_copy


def _save_params(
    shards: Mapping[str, nn.Parameter], module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    for attribute, shard in shards.items():
        spec = spec_of(shard)
        assert spec is not None
        state[prefix + attribute] = spec.dtensor(shard.detach())


def _load_params(
    shards: Mapping[str, nn.Parameter],
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: Mapping[str, Any],
    *rest: Any,
) -> None:
    if metadata.get("assign_to_params_buffers"):
        raise UserError("load_state_dict(assign=True) would replace the shards: leave assign out")
    for attribute, shard in shards.items():
        spec, value = spec_of(shard), state.get(prefix + attribute)
        assert spec is not None
        if isinstance(value, Tensor):
            # A module whose unit is whole at this moment holds other parameters: write to the shard itself.
            part = spec.part(value.detach())
            with torch.no_grad():
                shard.copy_(part)
            state[prefix + attribute] = module._parameters[attribute]


# -- the optimiser

_seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_states: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
"""For how many shards an optimiser had a state after its last step."""


@functools.cache
def show_optimizer_dtensors() -> None:
    """Do the same for the optimisers of shards, from their first step on."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _seen:
        return
    groups = {spec.group for spec in map(spec_of, _params(optimizer)) if spec is not None}
    if any(dist.get_world_size(group) > 1 for group in groups) and not updates_elements(optimizer):
        name = type(optimizer).__name__
        raise UserError(
            f"{name} does not update each element by itself, and FSDP gives it the rows of this rank: "
            f"use AdamW, SGD or another elementwise optimiser, or DDP with {name} (ShardedOptimizer "
            "shards its state if it updates each parameter by itself)"
        )
    _seen.add(optimizer)
    if groups:
        _states[optimizer] = 0
        optimizer.register_state_dict_post_hook(_save_optimizer)
        optimizer.register_load_state_dict_pre_hook(_load_optimizer)
        for param, values in optimizer.state.items():  # loaded before the hooks were there
            values.update(_parts(param, values))


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Make the state plain tensors. The momentum of SGD begins as a clone of the gradient."""
    if optimizer in _states and _states[optimizer] != len(optimizer.state):
        _states[optimizer] = len(optimizer.state)
        for values in optimizer.state.values():
            values |= {key: plain(value) for key, value in values.items() if isinstance(value, ShardedGrad)}


def _params(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _save_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    params = _params(optimizer)
    values = {index: _wholes(params[index], held) for index, held in state["state"].items()}
    return {**state, "state": values}


def _wholes(param: nn.Parameter, held: Mapping[str, Any]) -> dict[str, Any]:
    spec = spec_of(param)
    if spec is None:
        return dict(held)
    whole = {}
    for key, value in held.items():
        if isinstance(value, Tensor) and value.dim():
            if value.shape != param.shape:
                raise UserError(
                    f"the optimiser keeps {key} of shape {tuple(value.shape)} for a shard of {spec.name} of "
                    f"shape {tuple(param.shape)}, which has no place in a state of the whole model: "
                    "use an optimiser whose state has the shape of the parameters",
                )
            value = spec.dtensor(value)
        whole[key] = value
    return whole


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    params = _params(optimizer)
    indices = [index for group in state["param_groups"] for index in group["params"]]
    by_index = dict(zip(indices, params))
    values = {
        index: _parts(by_index[index], held) if index in by_index else held
        for index, held in state["state"].items()
    }
    return {**state, "state": values}


def _parts(param: Tensor, held: Mapping[str, Any]) -> dict[str, Any]:
    spec = spec_of(param)
    if spec is None:
        return dict(held)
    spec = replace(spec, name=f"the optimiser's state of {spec.name}")

    def part(key: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not spec.shape:  # the number of steps is 0-d as well
            return spec.part(value) if value.dim() == 0 and key != "step" else value
        whole = is_dtensor_class(type(value)) or (value.dim() and value.shape != param.shape)
        return spec.part(value) if whole else value

    return {key: part(key, value) for key, value in held.items()}
