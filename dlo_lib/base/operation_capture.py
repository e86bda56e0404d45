"""A recorder of the operations that a function runs, in order, as plain data.

PyTorch passes every operation on tensors to a dispatch mode before it runs. ``OperationRecorder`` keeps its
name and its arguments, in the form of ``compile_capture``: the graph can be counted, or run in another
process on other inputs (``dlo_lib.grading.checks.graphs``). Python code leaves no trace: a loop over the
images of a batch appears as operations for each image, and a number read from a tensor as a constant. So do
the rows that a mask selects, and random numbers: a replay uses those of the recording.

Cost: about 20 microseconds an operation, and all intermediate results are kept until the recorder is deleted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PlainGraph = dict[str, Any]  # plain data, as `profiling.compile_capture` makes of the graphs of torch.compile


class OperationRecorder(TorchDispatchMode):
    """Records the operations within a ``with`` block::

        recorder = OperationRecorder({"x": x})
        with recorder:
            y = function(x)
        graph = recorder.graph([y])

    Args:
        inputs: named tensors, the inputs of the graph in this order.

    Attributes:
        nodes: the operations so far, as the nodes of a ``PlainGraph``.
    """

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.nodes: list[dict[str, Any]] = []
        self._inputs = list(inputs)
        self._names = {id(tensor): name for name, tensor in inputs.items()}
        self._alive: list[Any] = list(inputs.values())  # an id is unique while its tensor lives

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that skips the compiler imports it, which takes two seconds

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        given, args = args, _with_places(func, args)
        if func.namespace == "profiler":  # a named region, which computes nothing
            return func(*args, **kwargs)
        if _draws(func, args, kwargs) or self._places_of_constants(func, args):
            result = func(*args, **kwargs)
            self._alive.append(result)
            self._names.pop(id(result), None)  # its values are a constant from now on
            return result
        node = {
            "name": f"n{len(self.nodes)}",
            "kind": "function",
            "module": f"torch.ops.{func.namespace}",
            "op": func.__name__,
            "args": [self._plain(arg) for arg in args],
            "kwargs": {name: self._plain(value) for name, value in kwargs.items()},
        }
        if args is not given:
            node["masked"] = True
        self.nodes.append(node)
        result = func(*args, **kwargs)
        self._alive.append(result)
        if isinstance(result, Tensor):
            # An operation in place returns its argument, which keeps its name.
            self._names.setdefault(id(result), node["name"])
        elif isinstance(result, list | tuple):
            for index, part in enumerate(result):
                if isinstance(part, Tensor):
                    self._take(node["name"], index, part)
        return result

    def graph(self, outputs: Sequence[Any]) -> PlainGraph:
        """Return what was recorded, with these tensors as the outputs."""
        found = [self._plain(value) for value in outputs]
        return {"inputs": [{"name": name} for name in self._inputs], "nodes": self.nodes, "outputs": found}

    def _places_of_constants(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether ``func`` makes places of numbers that do not come from the inputs: they are constants."""
        sized_by_values = (torch.ops.aten.repeat_interleave.Tensor, torch.ops.aten.nonzero.default)
        known = any(id(leaf) in self._names for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
        return func in sized_by_values and not known

    def _take(self, name: str, index: int, part: Tensor) -> None:
        """Record that ``part`` is one of the results of the node ``name``."""
        taken = f"{name}_{index}"
        self.nodes.append(
            {
                "name": taken,
                "kind": "function",
                "module": "_operator",
                "op": "getitem",
                "args": [{"ref": name}, index],
                "kwargs": {},
            }
        )
        self._names.setdefault(id(part), taken)

    def _plain(self, value: Any) -> Any:
        match value:
            case Tensor():
                return {"ref": self._name(value)}
            case None | bool() | int() | float() | str() | torch.dtype():
                return value
            case list() | tuple():
                return [self._plain(item) for item in value]
            case torch.device():
                return {"device": value.type}
            case torch.layout() | torch.memory_format():
                return None  # the default: a replay needs no other one
        raise TypeError(f"an operation with an argument of type {type(value).__name__}")

    def _name(self, tensor: Tensor) -> str:
        """Return the name of a tensor. One that existed before, or came from outside, is a constant."""
        if id(tensor) not in self._names:
            name = f"constant{len(self._names)}"
            with torch.utils._python_dispatch._disable_current_modes():
                value = tensor.detach().clone()
            self.nodes.append({"name": name, "kind": "constant", "value": value})
            self._names[id(tensor)] = name
            self._alive.append(tensor)
        return self._names[id(tensor)]


def _with_places(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of an operation, with places instead of a mask that selects rows.

    The size of the result depends on the values of a mask, and a replay computes all sizes before it runs.
    A node with places instead of a mask has ``"masked": True``.
    """
    if func is not torch.ops.aten.index.Tensor or not any(map(_is_mask, args[1])):
        return args
    places: list[Tensor | None] = []
    with torch.utils._python_dispatch._disable_current_modes():
        for index in args[1]:
            places += index.nonzero().unbind(1) if _is_mask(index) else [index]
    return args[0], places


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether ``func`` draws random numbers into a new tensor, or in place of all values of one."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    return not given or (func._schema.is_mutable and len(given) == 1)
