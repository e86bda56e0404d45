"""Differences between the supported releases of PyTorch, each with the release that changed it.

The library is written for the newest release, and imports from here what differs in older ones. When
``torch_version.OLDEST`` rises, the entries for earlier releases are removed. One difference has a separate
module, because it needs more than a line: ``comm.tracing.reductions``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map

from dlo_lib.base.torch_version import release

RELEASE = release(torch.__version__)

# 2.13 renamed the collectives of one flat tensor, and deprecated the old names.
all_gather_single = dist.all_gather_single if RELEASE >= (2, 13) else dist.all_gather_into_tensor
reduce_scatter_single = dist.reduce_scatter_single if RELEASE >= (2, 13) else dist.reduce_scatter_tensor


def refusing_backend(rank: int, world_size: int) -> FakeProcessGroup:
    """Return a backend that moves no data and raises an error in every collective.

    Before 2.10 it cannot raise: collectives return at once and do not change their outputs.
    """
    if RELEASE < (2, 10):
        return FakeProcessGroup(rank, world_size)
    fake: Any = FakeProcessGroup  # torch's stub describes an older class
    options = fake.Options()
    options.error_on_collective = True
    return fake._create_internal(rank, world_size, options)


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend that moves tensors on ``device`` in ``group``, such as ``"gloo"``."""
    backend = group._get_backend(device)
    if RELEASE < (2, 9) and isinstance(backend, FakeProcessGroup):
        return "fake"  # its C++ class has no name there
    return backend.name()


def divide_averages_of_gloo() -> None:
    """Let each reduce-scatter of gloo divide an average by the number of ranks, in this process.

    In 2.8 it returns the sum, so that the gradients of PyTorch's FSDP are too large by this number. Calling
    it again changes nothing.
    """
    if RELEASE >= (2, 9) or _DIVIDING:
        return
    for name in ("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"):
        setattr(dist.ProcessGroup, name, _averaging(getattr(dist.ProcessGroup, name)))
    library = torch.library.Library("_c10d_functional", "IMPL")
    for name in ("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"):
        functional = getattr(torch.ops._c10d_functional, name).default
        library.impl(name, _averaging_functional(functional), "CPU")
    _DIVIDING.append(library)


_DIVIDING: list[torch.library.Library] = []


def _averaging(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reduce_scatter(group: dist.ProcessGroup, outputs: Any, inputs: Any, options: Any) -> Any:
        if options.reduceOp == dist.ReduceOp.AVG and _is_gloo(group, tree_leaves(outputs)[0].device):
            options.reduceOp = dist.ReduceOp.SUM
            inputs = tree_map(lambda tensor: tensor / group.size(), inputs)
        return original(group, outputs, inputs, options)

    return reduce_scatter


def _averaging_functional(operator: Any) -> Callable[..., Any]:
    def reduce_scatter(inputs: Any, reduce_op: str, group_size: int, group_name: Any) -> Any:
        group = dist.distributed_c10d._resolve_process_group(group_name)
        if reduce_op == "avg" and _is_gloo(group, torch.device("cpu")):
            reduce_op, inputs = "sum", tree_map(lambda tensor: tensor / group_size, inputs)
        key = torch._C.DispatchKey.CompositeExplicitAutograd  # the kernel that this one replaces
        return operator._op_dk(key, inputs, reduce_op, group_size, group_name)

    return reduce_scatter


def _is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    return backend_name(group, device) == "gloo"


def repair_pipelining() -> None:
    """Let a stage of ``torch.distributed.pipelining`` send what its neighbour receives, in this process.

    In 2.9 and 2.10 the first message between stages is sent as int64[] and received as float32[1], which
    ends the process with gloo. Calling it again changes nothing.
    """
    if not (2, 9) <= RELEASE < (2, 11):
        return
    if (loaded := sys.modules.get(STAGE)) is not None:
        _repair_stage(loaded)
    elif not any(isinstance(finder, _StageFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _StageFinder())


STAGE = "torch.distributed.pipelining.stage"


class _StageFinder(importlib.abc.MetaPathFinder):
    """Repairs the module when it is imported: it imports much that few ranks need."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != STAGE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _repair_stage(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _repair_stage(module: Any) -> None:
    stage = module._PipelineStageBase
    original = stage._get_init_p2p_neighbors_ops
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def operations(self: Any) -> list[dist.P2POp]:
        found = original(self)
        for operation in found:
            operation.tensor = operation.tensor.reshape(1).float()
        return found

    stage._get_init_p2p_neighbors_ops = operations


def owned_edge(output: Tensor) -> tuple[GradientEdge, object]:
    """Return the gradient edge of ``output``, and an object that keeps the graph behind it.

    Before 2.9, the edge alone does not keep the node of a Python ``autograd.Function``: a backward from it
    raises an error.
    """
    edge = get_gradient_edge(output)
    if RELEASE >= (2, 9) or not isinstance(edge.node, torch._C._FunctionBase):
        return edge, None
    with torch.enable_grad():
        return edge, output.view_as(output).grad_fn  # a node of C++ owns the nodes before it


def pytorch_ring() -> ModuleType:
    """Return PyTorch's module of ring attention, whose functions are private.

    It is imported by the call, because it imports DTensor.
    """
    package = "torch.distributed.tensor.experimental"
    moved = importlib.util.find_spec(f"{package}._context_parallel") is not None  # after 2.9
    return importlib.import_module(f"{package}{'._context_parallel' if moved else ''}._attention")


def pytorch_ring_backward(group: dist.ProcessGroup, *arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    """Call the backward of PyTorch's ring attention."""
    ranks: Any = group if RELEASE >= (2, 9) else SimpleNamespace(get_group=lambda: group)
    return pytorch_ring()._templated_ring_attention_backward(ranks, *arguments, **options)


def _one_product_each(rows: Tensor, weights: Tensor, *, offs: Tensor) -> Tensor:
    ends = offs.tolist()
    return torch.cat([rows[begin:end] @ weight for begin, end, weight in zip([0, *ends], ends, weights)])


grouped_mm = getattr(F, "grouped_mm", _one_product_each)  # 2.8 and 2.9 have none


def is_dtensor_class(kind: type) -> bool:
    """Return whether ``kind`` is ``DTensor`` or a subclass of it.

    ``torch.distributed.tensor`` takes 1 s of CPU time to import, in every rank. A process that did not import
    it has no ``DTensor``.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and issubclass(kind, module.DTensor)
