"""A backend for ``torch.compile`` that records each graph as plain data, and the inputs of each run.

Dynamo passes straight-line code to a backend: placeholders, operations, outputs. ``GraphRecorder`` converts
them to lists, names and numbers, which can be stored, drawn, counted or run in another process
(``dlo_lib.grading.checks.graphs``), and runs the graph unchanged. A symbolic size is recorded as "dimension d
of input i", so that the graph can be run with other sizes.

    graph = {"inputs": [{"name": n} | {"name": n, "size": [input, dim]}], "nodes": [{"name", "kind", "module",
    "op", "args", "kwargs"}],
             "outputs": [...]}, where {"ref": n} is the value of another node

Cost: that of eager execution, and a copy of each constant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

PlainGraph = dict[str, Any]


class GraphRecorder:
    """Records graphs and calls: ``torch.compile(f, backend=GraphRecorder(inputs))``.

    Args:
        inputs: named tensors. In ``calls`` they appear as ``{"input": name}``; other tensors appear by value.

    Attributes:
        graphs: the graphs in the order of compilation.
        calls: the calls of graphs in order, with the number of the graph and its arguments.
    """

    def __init__(self, inputs: Mapping[str, Tensor] | None = None) -> None:
        self.graphs: list[PlainGraph] = []
        self.calls: list[dict[str, Any]] = []
        self._inputs = dict(inputs or {})

    def __call__(self, module: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """Record a graph and return the function that runs it. ``torch.compile`` calls it for each graph."""
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
            if (
                arg.data_ptr() == tensor.data_ptr()
                and arg.shape == tensor.shape
                and arg.dtype == tensor.dtype
            ):
                return {"input": name}
        return {"value": arg.detach().clone()}


def plain_graph(module: fx.GraphModule) -> PlainGraph:
    """Return a graph of Dynamo as plain data, in the form of the docstring of this module.

    Raises:
        TypeError: the graph contains an object that is not plain data, such as a custom autograd function.
    """
    graph: PlainGraph = {"inputs": [], "nodes": [], "outputs": []}
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node in module.graph.nodes:
        if node.op == "placeholder":
            graph["inputs"].append({"name": node.name, **_open_size(node, placeholders)})
        elif node.op == "output":
            graph["outputs"] = [_plain(value) for value in node.args[0]]
        elif node.op == "get_attr":
            value = _constant(module, str(node.target))
            graph["nodes"].append({"name": node.name, "kind": "constant", "value": value})
        elif node.op in ("call_function", "call_method"):
            graph["nodes"].append({"name": node.name, **_operation(node)})
        else:
            raise TypeError(f"a graph with a node of kind {node.op}")
    return graph


def _open_size(node: fx.Node, placeholders: list[fx.Node]) -> dict[str, Any]:
    """Return the input and the dimension of a symbolic size; {} for a placeholder that is not a size."""
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
    args = [_plain(arg) for arg in node.args]
    kwargs = {name: _plain(value) for name, value in node.kwargs.items()}
    if node.op == "call_method":
        return {
            "kind": "method",
            "module": "torch.Tensor",
            "op": str(node.target),
            "args": args,
            "kwargs": kwargs,
        }
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
