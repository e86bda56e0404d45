"""The waits of a process for communication: wrapped functions of torch that block and name their call.

The tap in the dispatcher (``comm.tracing.tap``) sees when calls are issued. Waits occur elsewhere: in
``Work.wait``, in the futures made from it, in the ``wait_tensor`` of functional collectives, in ``new_group``
(which meets on the store), and in C++ code of DistributedDataParallel, whose calls wait before they return.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.distributed.utils as dist_utils
import torch.nn.parallel.distributed as torch_ddp
from torch.distributed import Work

from dlo_lib.comm.tracing.tap import Tap


@contextmanager
def watched_waits(tap: Tap) -> Iterator[None]:
    """Within this context, every wait of this process runs in ``tap.blocking``."""
    with ExitStack() as stack:
        stack.enter_context(_work(tap))
        stack.enter_context(_wait_tensor(tap))
        stack.enter_context(
            patch.object(c10d, "_new_group_with_tag", _new_group(tap, c10d._new_group_with_tag))
        )
        for module in (dist, dist_utils, torch_ddp, torch._C._distributed_c10d):
            for name in ("_broadcast_coalesced", "_verify_params_across_processes"):
                if hasattr(module, name):
                    stack.enter_context(patch.object(module, name, _waits_inside(tap, getattr(module, name))))
        rebuild = dist.Reducer._rebuild_buckets
        stack.enter_context(
            patch.object(
                dist.Reducer, "_rebuild_buckets", _waits_inside(tap, lambda reducer: rebuild(reducer))
            )
        )
        register = torch_ddp.DistributedDataParallel.register_comm_hook
        stack.enter_context(
            patch.object(torch_ddp.DistributedDataParallel, "register_comm_hook", _ddp_hook(tap, register))
        )
        yield


@contextmanager
def _work(tap: Tap) -> Iterator[None]:
    """Watch ``Work.wait``, and the wait of a future made from a work."""
    wait, get_future, future_wait = Work.wait, Work.get_future, torch._C.Future.wait

    @functools.wraps(wait)
    def watched_wait(work: Work, *arguments, **keywords):
        call = tap.pending.get(work)
        if call is None:
            return wait(work, *arguments, **keywords)
        try:
            return tap.blocking(call, lambda: wait(work, *arguments, **keywords))
        finally:
            tap.pending.drop(work)

    @functools.wraps(get_future)
    def watched_get_future(work: Work):
        future = get_future(work)
        if tap.pending.get(work) is not None:
            tap.futures.keep(future, work)
        return future

    @functools.wraps(future_wait)
    def watched_future_wait(future):
        work = tap.futures.get(future)
        if work is None or (call := tap.pending.get(work)) is None:
            return future_wait(future)
        try:
            return tap.blocking(call, lambda: future_wait(future))
        finally:
            tap.futures.drop(future)
            tap.pending.drop(work)

    # patch.object does not work here: it deletes the attribute at the end, which C++ types do not allow.
    changes: list[tuple[type, str, Any, Any]] = [
        (Work, "wait", wait, watched_wait),
        (Work, "get_future", get_future, watched_get_future),
        (torch._C.Future, "wait", future_wait, watched_future_wait),
    ]
    for owner, name, _, watched in changes:
        setattr(owner, name, watched)
    try:
        yield
    finally:
        for owner, name, original, _ in changes:
            setattr(owner, name, original)


@contextmanager
def _wait_tensor(tap: Tap) -> Iterator[None]:
    """Watch ``wait_tensor`` of functional collectives; the storage of the output identifies the call."""
    redispatch = torch.ops._c10d_functional.wait_tensor.default._handle.redispatch_boxed
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def wait_tensor(keyset, tensor):
        call = (
            tap.by_storage.pop(tensor.untyped_storage().data_ptr(), None)
            if type(tensor) is torch.Tensor
            else None
        )
        if call is None:
            return redispatch(keyset & below, tensor)
        return tap.blocking(call, lambda: redispatch(keyset & below, tensor))

    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("wait_tensor", wait_tensor, "BackendSelect", with_keyset=True)
    try:
        yield
    finally:
        library._destroy()


def _new_group(tap: Tap, original: Callable) -> Callable:
    """Wrap ``new_group``.

    Every rank of the world must call it; it returns when the members met on the store.
    """

    @functools.wraps(original)
    def new_group(ranks=None, *arguments, **keywords):
        world = tuple(range(dist.get_world_size()))
        members = tuple(sorted(ranks)) if ranks is not None else world
        callers = members if keywords.get("use_local_synchronization") else world
        if tap.rank not in callers:
            return original(ranks, *arguments, **keywords)
        name = "new_group" if callers == world else f"new_group of {members}"
        call = tap.new_group(callers, members, name)
        tap.issued(call)
        return tap.blocking(call, lambda: original(ranks, *arguments, **keywords))

    return new_group


def _waits_inside(tap: Tap, original: Callable) -> Callable:
    """Wrap C++ code that issues calls and waits for them itself: the wait lasts from issue to return."""

    @functools.wraps(original)
    def watched(*arguments, **keywords):
        tap.here.inside = []
        failed = True
        try:
            result = original(*arguments, **keywords)
            failed = False
        finally:
            calls, tap.here.inside = tap.here.inside, None
            for call in calls:
                tap.waited(call, failed)
        return result

    return watched


def _ddp_hook(tap: Tap, register: Callable) -> Callable:
    """Mark calls of a DistributedDataParallel communication hook: the reducer waits for them in C++."""

    @functools.wraps(register)
    def register_comm_hook(module, state, hook):
        def marked(state, bucket):
            tap.here.in_ddp_hook = True
            try:
                return hook(state, bucket)
            finally:
                tap.here.in_ddp_hook = False

        for name in ("__name__", "__qualname__"):  # torch reads them
            setattr(marked, name, getattr(hook, name, "hook"))
        setattr(marked, "__signature__", inspect.signature(hook))  # noqa: B010  setattr, because mypy rejects the attribute
        return register(module, state, marked)

    return register_comm_hook
