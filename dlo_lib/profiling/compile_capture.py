"""A backend for ``torch.compile`` that keeps each graph as plain data, and notes what every run of it was given.

Dynamo hands a backend straight-line code: placeholders, operations, outputs. ``GraphRecorder`` writes these down as lists, names and
numbers, which can be stored, drawn, counted or run again elsewhere (``dlo_lib.grading.graphs``), and then runs the graph as it is. Sizes
that the graph leaves open are written as "dimension d of that input", so that it can be run again on other sizes.

    graph = {"inputs": [{"name": n} | {"name": n, "size": [input, dim]}], "nodes": [{"name", "kind", "module", "op", "args", "kwargs"}],
             "outputs": [...]}, where {"ref": n} is the value of another node

Cost: that of running without a compiler, and a copy of each constant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

PlainGraph = dict[str, Any]


class GraphRecorder:
    """``torch.compile(f, backend=GraphRecorder(inputs))``; ``graphs`` and ``calls`` hold what was made and what was run, in order.

    Args:
        inputs: tensors that are to be recognised when a graph gets them: in ``calls`` they appear as ``{"input": name}``, others by value.
    """

    def __init__(self, inputs: Mapping[str, Tensor] | None = None) -> None:
        self.graphs: list[PlainGraph] = []
        self.calls: list[dict[str, Any]] = []
        self._inputs = dict(inputs or {})

    def __call__(self, module: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """What ``torch.compile`` calls for each graph."""
        number = len(self.graphs)
        self.graphs.append(plain_graph(module))

        def run(*args: Any) -> Any:
            self.calls.append({"graph": number, "args": [self._known(arg) for arg in args]})
            return module.forward(*args)

        return run

    def _known(self, arg: Any) -> Any:
        if not isinstance(arg, Tensor):
            return {"value": arg}
        for name, tensor in self._inputs.items():
            if arg.data_ptr() == tensor.data_ptr() and arg.shape == tensor.shape and arg.dtype == tensor.dtype:
                return {"input": name}
        return {"value": arg.detach().clone()}


def plain_graph(module: fx.GraphModule) -> PlainGraph:
    """A graph of Dynamo's as plain data, in the form that the module's docstring shows.

    Raises:
        TypeError: it holds something that is none, such as an autograd function of one's own.
    """
    graph: PlainGraph = {"inputs": [], "nodes": [], "outputs": []}
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node in module.graph.nodes:
        if node.op == "placeholder":
            graph["inputs"].append({"name": node.name, **_open_size(node, placeholders)})
        elif node.op == "output":
            graph["outputs"] = [_plain(value) for value in node.args[0]]
        elif node.op == "get_attr":
            graph["nodes"].append({"name": node.name, "kind": "constant", "value": _constant(module, str(node.target))})
        elif node.op in ("call_function", "call_method"):
            graph["nodes"].append({"name": node.name, **_operation(node)})
        else:
            raise TypeError(f"a graph with a node of kind {node.op}")
    return graph


def _open_size(node: fx.Node, placeholders: list[fx.Node]) -> dict[str, Any]:
    """Of which tensor's dimension a symbolic size is, where the placeholder is one."""
    symbol = node.meta.get("example_value")
    if not isinstance(symbol, torch.SymInt):
        return {}
    for other in placeholders:
        example = other.meta.get("example_value")
        if isinstance(example, Tensor):
            for dim, size in enumerate(example.shape):
                if isinstance(size, torch.SymInt) and str(size) == str(symbol):
                    return {"size": [other.name, dim]}
    return {}


def _operation(node: fx.Node) -> dict[str, Any]:
    args, kwargs = [_plain(arg) for arg in node.args], {name: _plain(value) for name, value in node.kwargs.items()}
    if node.op == "call_method":
        return {"kind": "method", "module": "torch.Tensor", "op": str(node.target), "args": args, "kwargs": kwargs}
    target: Any = node.target
    name = target.__name__
    module = "torch" if getattr(torch, name, None) is target else str(target.__module__)
    return {"kind": "function", "module": module, "op": name, "args": args, "kwargs": kwargs}


def _constant(module: fx.GraphModule, name: str) -> Tensor:
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part)
    if not isinstance(value, Tensor):
        raise TypeError(f"a graph that holds a {type(value).__name__}")
    return value.detach().clone()


def _plain(value: Any) -> Any:
    match value:
        case fx.Node():
            return {"ref": value.name}
        case None | bool() | int() | float() | str() | torch.dtype():
            return value
        case list() | tuple():
            return [_plain(item) for item in value]
        case slice():
            return {"slice": [_plain(value.start), _plain(value.stop), _plain(value.step)]}
        case torch.device():
            return {"device": value.type}
        case _ if value is Ellipsis:
            return {"ellipsis": True}
    raise TypeError(f"a graph that holds a {type(value).__name__}")
