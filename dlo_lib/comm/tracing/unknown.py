"""Operators ``c10d::*`` that the tap does not know, because a later release of torch added or changed them.

A call of one is passed on unchanged. The listeners receive it as a call of the kind ``Kind.UNKNOWN``, with
the name of the operator and without tensors, bytes and waits. All other operators are traced as before.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed import ProcessGroup

from dlo_lib.comm.tracing.operators import group_place


def passing_kernel(report: Callable[[ProcessGroup, str], None], overload: torch._ops.OpOverload) -> Callable:
    """Return the kernel that passes calls of ``overload`` on, each after ``report(group, name)``."""
    redispatch = overload._handle.redispatch_boxed
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    group_at, name = group_place(overload._schema), overload._schema.name.removeprefix("c10d::")

    def kernel(keyset, *arguments):
        report(ProcessGroup.unbox(arguments[group_at]), name)
        return redispatch(keyset & below, *arguments)

    return kernel


def describe_unknown(operator: str) -> str:
    """Return why calls of ``operator`` have no kind."""
    return f"torch {torch.__version__} has an operator that this library does not know, {operator}"
