"""Calls of a module inside FSDP that do not pass through the wrapper, as ``fsdp.module.generate(tokens)``.

Outside of a forward, the modules hold the shards: the optimiser is made of them, and methods may freeze,
count, list or initialise them. A method that computes with a shard would take the rows of this rank for the
whole parameter, without an error if no gradient is needed. While such a method runs, a function that mixes a
shard with another tensor, or its elements with each other, is refused. Modules that the method calls are
right, because their hooks make their parameters whole.

Cost: a few microseconds for each function that such a method calls; none inside the forward of the wrapper.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dlo_lib.base.errors import UserError
from dlo_lib.parallel.fsdp.absent_param import used_outside
from dlo_lib.parallel.fsdp.dtensors import refuse_copy
from dlo_lib.parallel.nested import tensors_in
from dlo_lib.parallel.sharding.operations import Effect, operation
from dlo_lib.parallel.sharding.sharded_grad import ShardedGrad

_READS = frozenset(["__bool__", "__float__", "__int__", "allclose", "equal", "item", "numpy", "tolist"])
"""Functions that return values of a tensor as another type."""


class _RefuseShards(TorchFunctionMode):
    """Refuses functions that compute with shards.

    Args:
        names: the names of the shards, by id.

    Raises:
        UserError: a function does so.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = dict(names)
        self._kept: list[Tensor] = []  # because a new tensor may get the id of a freed one

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        name = next((self._names[id(tensor)] for tensor in given if id(tensor) in self._names), None)
        if name is None:
            return func(*args, **kwargs)
        does = operation(func)
        if does.writes:
            if not all(map(self._is_of_rank, tensors_in(args[:1]))):
                raise UserError(used_outside(name))
            return func(*args, **kwargs)
        if does.effect is Effect.PLAIN:
            return func(*args, **kwargs)
        mixes = does.effect is Effect.MIXED or not all(
            self._is_of_rank(tensor) or not tensor.dim() for tensor in given
        )
        if does.name in _READS:
            raise UserError(used_outside(name))
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            if mixes:  # the shapes do not fit, because a shard has fewer rows
                raise UserError(used_outside(name)) from error
            raise
        for tensor in tensors_in(result):
            if mixes:
                raise UserError(used_outside(name))
            self._names[id(tensor)] = name
            self._kept.append(tensor)
        return result

    def _is_of_rank(self, tensor: Tensor) -> bool:
        return id(tensor) in self._names or isinstance(tensor, ShardedGrad)


class DirectCalls:
    """Watches the methods of the modules of ``root``.

    Args:
        names: the names of the shards, by id.
        is_running: returns whether the forward of the wrapper is running.
    """

    def __init__(self, root: nn.Module, names: Mapping[int, str], is_running: Callable[[], bool]) -> None:
        self._names, self._is_running = names, is_running
        for module in root.modules():
            for name in _own_methods(module):
                method = getattr(module, name)
                # In the dictionary itself, because __setattr__ of a module may be that of a user.
                module.__dict__[name] = functools.wraps(method)(functools.partial(self._call, method))

    __reduce_ex__ = refuse_copy

    def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or self._is_running() or in_backward():
            return method(*args, **kwargs)
        with _RefuseShards(self._names):
            return method(*args, **kwargs)


def in_backward() -> bool:
    """Return whether autograd computes gradients, for which checkpointing calls forward again."""
    return torch._C._current_graph_task_id() != -1


def _own_methods(module: nn.Module) -> list[str]:
    """Return the public methods that the class of ``module`` adds to those of PyTorch."""
    names = dict.fromkeys(
        name
        for cls in type(module).__mro__
        if cls.__module__.partition(".")[0] not in ("torch", "builtins")
        for name, found in vars(cls).items()
        if inspect.isfunction(found) and not inspect.isgeneratorfunction(found)
    )
    held = module.__dict__
    return [name for name in names if name[0] != "_" and not hasattr(nn.Module, name) and name not in held]
