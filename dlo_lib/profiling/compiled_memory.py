"""What a graph of ``torch.compile`` allocates, found by running it on tensors without data.

``recording_backend`` is a backend of ``torch.compile``. It receives the forward and the backward graph that
Inductor would compile, after the same decompositions and the same choice of what the forward saves for the
backward. Inductor generates code for them, which a fake tensor cannot run. The graphs are therefore run
operator by operator, and only what Inductor writes to memory is counted:

- the result of each operator that is a kernel by itself: a matrix product, attention, a sum
- an element-wise result that such a kernel reads, or that the graph returns

All other element-wise results exist in registers only, and views are no memory. A result takes the memory of
an input of its size that is not needed any more, as the generated code does. A tensor is released after the
last kernel that reads it.

Inductor can also write an element-wise result to memory because many kernels read it. This is not known here:
a block has few such tensors, and they live in one block at a time.

Cost: that of the compilation without code, a few seconds for a model of any size, and one Python call per
operator and block.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from dlo_lib.base.errors import UserError
from dlo_lib.base.torch_compat import RELEASE
from dlo_lib.profiling.tracker import MemoryTracker

OLDEST = (2, 11)
"""The oldest release that was tested and works: 2.8 compiles nothing inside a dispatch mode, and 2.9 refuses
fake tensors."""
_aten, _prims = torch.ops.aten, torch.ops.prims
_INLINED = {
    _aten.cat, _aten.full, _aten.full_like, _aten.scalar_tensor, _aten.gather, _aten.constant_pad_nd,
    _aten.arange, _aten.slice_scatter, _aten.select_scatter, _prims.iota,
    _aten.scatter,  # of one value, as in the gradient of a loss: Inductor compares the index with a range
}  # fmt: skip
"""Operators that Inductor computes inside the kernel that reads them, beside views and element-wise ones."""
_REDUCTIONS = {
    _aten.sum, _aten.mean, _aten.amax, _aten.amin, _aten.prod, _aten.any, _aten.var_mean, _aten.logsumexp,
}  # fmt: skip
"""Operators whose kernel Inductor generates, with their inputs computed inside."""
_CAST = _prims.convert_element_type.default


@contextlib.contextmanager
def recording_backend(tracker: MemoryTracker) -> Iterator[Callable[..., Any]]:
    """Give a backend of ``torch.compile`` that records what Inductor would allocate with ``tracker``.

    What is compiled inside the context, and was before, is forgotten afterwards, because PyTorch compiles a
    function for eight backends at most.

    Raises:
        UserError: this release of PyTorch is older than ``OLDEST``.
    """
    if RELEASE < OLDEST:
        raise UserError(
            f"PyTorch {torch.__version__} cannot compile while memory is recorded: use "
            f"{'.'.join(map(str, OLDEST))} or later, or compile=False"
        )
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    def compiled(module: GraphModule, inputs: Sequence[Any]) -> _RecordedGraph:
        return _RecordedGraph(module, tracker)

    torch.compiler.reset()
    try:
        yield aot_autograd(
            fw_compiler=compiled,
            bw_compiler=compiled,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )
    finally:
        torch.compiler.reset()


class _RecordedGraph:
    """Runs a graph, and records the memory of its kernels. The arguments are a list, which is emptied."""

    def __init__(self, module: GraphModule, tracker: MemoryTracker) -> None:
        self._boxed_call = True  # of the object, because PyTorch wraps it and copies its attributes
        self._module, self._tracker = module, tracker
        self._nodes = list(module.graph.nodes)
        self._kernels = {node for node in self._nodes if _is_kernel(node)}
        self._dying = self._last_reads()

    def _last_reads(self) -> dict[Node, list[Node]]:
        """Return the nodes that are not needed after each node. What is computed inside a kernel is needed
        until the last such kernel."""
        order = {node: position for position, node in enumerate(self._nodes)}
        last: dict[Node, Node] = {}
        dying: dict[Node, list[Node]] = {node: [] for node in self._nodes}
        for node in reversed(self._nodes):
            readers = (user if _runs(user, self._kernels) else last[user] for user in node.users)
            last[node] = max(readers, key=order.__getitem__, default=node)
            dying[last[node]].append(node)
        return dying

    def __call__(self, arguments: list[Any]) -> Any:
        inputs = iter(list(arguments))
        arguments.clear()
        values: dict[Node, Any] = {}
        for node in self._nodes:
            if node.op == "output":
                return map_arg(node.args[0], values.__getitem__)
            if node.op == "placeholder":
                values[node] = next(inputs)
            elif node.op == "get_attr":
                values[node] = getattr(self._module, str(node.target))
            else:
                self._compute(node, values)
            for dead in self._dying[node]:
                values.pop(dead, None)
        raise AssertionError("a graph has an output")

    def _compute(self, node: Node, values: dict[Node, Any]) -> None:
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        with self._tracker.paused():
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        if node not in self._kernels:
            return
        if _is_pointwise(node):
            self._release_one_of_the_size(node, values)
        cast = [arg for arg in args[:1] if isinstance(arg, Tensor) and node.target is _CAST]
        self._tracker.allocated(node.target, args, tree_leaves(values[node]), cast)

    def _release_one_of_the_size(self, node: Node, values: dict[Node, Any]) -> None:
        """Release the first tensor that only this kernel still needs and whose memory its result can take."""
        size = values[node].untyped_storage().nbytes()
        others = (dead for dead in self._dying[node] if dead is not node)
        dying = [dead for dead in others if isinstance(values.get(dead), Tensor)]
        for base in dying:
            storage = values[base].untyped_storage()
            if (base in self._kernels or _is_saved(base)) and storage.nbytes() == size:
                key = storage._cdata
                del storage
                for dead in dying:
                    if values[dead].untyped_storage()._cdata == key:
                        del values[dead]
                return


def _is_saved(node: Node) -> bool:
    """Return whether the node is an input of a backward that its forward has computed."""
    return node.op == "placeholder" and not node.name.startswith(("primals", "tangents"))


def _runs(node: Node, kernels: set[Node]) -> bool:
    """Return whether ``node`` reads its inputs when it is reached, and not inside a later kernel."""
    return node.op == "output" or node in kernels


def _is_kernel(node: Node) -> bool:
    """Return whether the result of ``node`` is written to memory."""
    if node.op != "call_function":
        return False
    if not _is_inlined(node):
        return True
    return not _is_view(node) and any(_needs_memory(user) for user in node.users)


def _needs_memory(reader: Node) -> bool:
    """Return whether ``reader``, directly or through views, is the end of the graph or a kernel that
    Inductor does not generate."""
    if reader.op == "output":
        return True
    if _is_view(reader):
        return any(_needs_memory(user) for user in reader.users)
    return not _is_inlined(reader) and not _is_reduction(reader)


def _is_view(node: Node) -> bool:
    target = node.target
    return target is operator.getitem or (isinstance(target, torch._ops.OpOverload) and target.is_view)


def _is_inlined(node: Node) -> bool:
    """Return whether Inductor can compute ``node`` inside the kernel that reads it."""
    return _is_view(node) or _is_pointwise(node)


def _is_pointwise(node: Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in target.tags or target.overloadpacket in _INLINED


def _is_reduction(node: Node) -> bool:
    """Return whether Inductor generates the kernel of ``node`` and computes its inputs inside."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.overloadpacket in _REDUCTIONS
