"""The reduction of a call. Since PyTorch 2.10, the argument of the dispatcher's operator contains it.

In earlier versions that argument has no methods. There, the reduction is recorded in the methods of
``ProcessGroup``, which ``torch.distributed`` calls, and in the functional collectives. Calls from C++ code
use neither: those of DistributedDataParallel are sums, as ``comm.tracing.tap`` knows, and the reduction of
any other call is "?".
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from dlo_lib.base.torch_compat import RELEASE

UNKNOWN = "?"
_READABLE = RELEASE >= (2, 10)
_NAMES = {kind.value: name for name, kind in dist.ReduceOp.RedOpType.__members__.items()}
_METHODS = (
    "allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
)  # fmt: skip
_FUNCTIONAL = (
    "all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_", "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
)  # fmt: skip


class _Noted(threading.local):
    name = UNKNOWN


_noted = _Noted()


def reduction_of(argument: Any) -> str:
    """Return the name of the reduction in an operator's argument ``reduce_op``, such as ``"SUM"``."""
    return _NAMES.get(int(argument.op()), UNKNOWN) if _READABLE else _noted.name


@contextmanager
def noted_reductions() -> Iterator[None]:
    """Within this context, ``reduction_of`` knows the reductions of this process's calls on every release.

    Raises:
        AttributeError, RuntimeError: this module does not know the internals of this version of torch.
    """
    if _READABLE:
        yield
        return
    library = torch.library.Library("_c10d_functional", "IMPL")
    originals = {name: getattr(dist.ProcessGroup, name) for name in _METHODS}
    try:
        for name in _FUNCTIONAL:
            library.impl(
                name,
                _noting_kernel(getattr(torch.ops._c10d_functional, name).default),
                "BackendSelect",
                with_keyset=True,
            )
        for name, original in originals.items():
            setattr(dist.ProcessGroup, name, _noting_method(original))
        yield
    finally:
        for name, original in originals.items():  # patch.object does not work: C++ types allow no deletion
            setattr(dist.ProcessGroup, name, original)
        library._destroy()


@contextmanager
def _noting(name: str) -> Iterator[None]:
    before, _noted.name = _noted.name, name
    try:
        yield
    finally:
        _noted.name = before


def _noting_method(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(group: dist.ProcessGroup, *arguments: Any, **keywords: Any) -> Any:
        with _noting(_named(*arguments, *keywords.values())):
            return original(group, *arguments, **keywords)

    return method


def _named(*arguments: Any) -> str:
    """Return the reduction, which is an argument or a field of the options; without either it is a sum."""
    for argument in arguments:
        value: Any = getattr(argument, "reduceOp", argument)
        if isinstance(value, dist.ReduceOp):
            kind: Any = getattr(value, "op", value)
            return _NAMES[int(kind)]
    return "SUM"


def _noting_kernel(overload: torch._ops.OpOverload) -> Callable[..., Any]:
    redispatch = overload._handle.redispatch_boxed
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    place = [argument.name for argument in overload._schema.arguments].index("reduce_op")

    def kernel(keyset: Any, *arguments: Any) -> Any:
        with _noting(str(arguments[place]).upper()):
            return redispatch(keyset & below, *arguments)

    return kernel
