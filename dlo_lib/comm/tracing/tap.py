"""The tap: one kernel in torch's dispatcher that sees every communication call of this process.

The functions of ``torch.distributed``, the C++ reducer of DistributedDataParallel, FSDP2, DTensor and
functional collectives all reach the operators ``c10d::*`` of the dispatcher, on any thread and in any grad
mode. The tap is a Python kernel on the key BackendSelect, just above the kernel of the backend: it receives
each call and forwards it, also that of an operator that it does not know (``comm.tracing.unknown``). It
cannot see calls that bypass the dispatcher: calls on a backend object
(``group._get_backend(device).allreduce(...)``), the key-value store, symmetric memory, which ranks read and
write without a call on the other side, and other processes.

Wrappers of Python functions would miss the C++ callers. A TorchDispatchMode costs 15 - 50 % of a step and
misses other threads.

Before PyTorch 2.10, a garbage collection between two backward passes may clear a gradient of ``fully_shard``
that only C++ holds: with a tap, a second backward pass without ``zero_grad`` ended with "'DTensor' object has
no attribute '_local_tensor'" in 2 of 6 random programs on 2.9; without a tap, both ran.

The tap reports to a ``Listener`` what is issued and what is waited for. Cost: about 30 microseconds per call,
of which 10 are the dispatcher's call into Python.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from dlo_lib.comm.calls import Call, Kind, channel, require_peer
from dlo_lib.comm.tracing.call_sites import call_site
from dlo_lib.comm.tracing.identity_map import IdentityMap
from dlo_lib.comm.tracing.operators import Reader, known_operators, unknown_operators
from dlo_lib.comm.tracing.unknown import passing_kernel

_NOT_WAITED_IN = ("isend", "irecv", "batch_isend_irecv")
_NO_PASS: tuple[int, list[Work]] = (-1, [])


class TapUnavailable(RuntimeError):
    """The tap does not know the internals of this version of torch."""


class Listener(Protocol):
    """Receives the calls of this process and the waits for them."""

    def issued(self, call: Call) -> None:
        """The program is about to make ``call``."""

    def waits(self, call: Call) -> None:
        """This process begins to wait for ``call``."""

    def waited(self, call: Call, failed: bool) -> None:
        """The wait for ``call`` has ended; ``failed`` if its backend raised an error."""


@runtime_checkable
class CompletionListener(Protocol):
    """A listener that also receives the works of calls, to measure when they end."""

    def running(self, call: Call, work: Work, on_device: bool) -> None:
        """The backend has accepted ``call``.

        ``on_device``: it runs in a GPU stream, which waits for ``work``.
        """


class Tap:
    """Enabled by ``install``, disabled by ``remove``; a process has at most one (``comm.tracing.listeners``).

    Args:
        rank: the global rank of this process; it may be set later, before the first call.

    Raises:
        TapUnavailable: by ``install``, if torch's internals are unknown; nothing is changed then.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.pending = IdentityMap[Work, Call](Work.is_completed)
        """Calls that the program has not waited for, by their work."""
        self.by_storage: dict[int, Call] = {}
        """The same calls by the address of their output, because functional collectives wait for a tensor."""
        self.futures = IdentityMap[torch.futures.Future, Work](torch._C.Future.done)
        """Works by the futures made from them."""
        self.here = threading.local()
        """State of a thread: ``inside``, the calls of C++ code that waits for them itself; ``in_ddp_hook``;
        ``reducing``, a backward pass and the works that DDP's reducer has issued in it."""
        self._listeners: tuple[Listener, ...] = ()
        self._completion_listeners: tuple[CompletionListener, ...] = ()
        self._generation = ""
        self._numbers = itertools.count(1)
        self._sequences: dict[Hashable, int] = {}
        self._members: dict[str, tuple[int, ...]] = {}
        self._order = threading.Lock()
        self._library: torch.library.Library | None = None

    def add(self, listener: Listener) -> None:
        """Report calls to ``listener`` from now on."""
        self._listen((*self._listeners, listener))

    def leave(self, listener: Listener) -> None:
        """Stop reporting to ``listener``."""
        self._listen(tuple(other for other in self._listeners if other is not listener))

    def _listen(self, listeners: tuple[Listener, ...]) -> None:
        self._listeners = listeners
        self._completion_listeners = tuple(
            listener for listener in listeners if isinstance(listener, CompletionListener)
        )

    def install(self) -> None:
        """Put the kernels into the dispatcher."""
        library = torch.library.Library("c10d", "IMPL")
        try:
            with warnings.catch_warnings():
                # Torch warns that a kernel is overridden, which is intended here.
                warnings.simplefilter("ignore")
                kernels = {name: self._kernel(_overload(name), at) for name, at in known_operators().items()}
                kernels |= {
                    name: passing_kernel(self._unknown, _overload(name)) for name in unknown_operators()
                }
                for name, kernel in kernels.items():
                    library.impl(name, kernel, "BackendSelect", with_keyset=True)
        except (AttributeError, RuntimeError, TypeError) as error:
            library._destroy()
            raise TapUnavailable(
                f"the dispatcher of torch {torch.__version__} is another than this tap knows: {error}"
            ) from error
        self._library = library

    def remove(self) -> None:
        """Remove the kernels from the dispatcher."""
        if self._library is not None:
            self._library._destroy()
            self._library = None

    def begin_generation(self, number: int) -> None:
        """Rename all groups: this process joined another process group, and torch counts from 0 again."""
        self._generation = f"/{number}"

    def _kernel(self, overload: torch._ops.OpOverload, reader: Reader) -> Callable:
        # Not call_boxed: it holds the GIL, which the backend's threads may need, and would cause a deadlock.
        redispatch = overload._handle.redispatch_boxed
        below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
        unbox_group, unbox_work, group_at, here = ProcessGroup.unbox, Work.unbox, reader.group, self.here
        now_in_backward, queue_callback = (
            torch._C._current_graph_task_id,
            torch.autograd.Variable._execution_engine.queue_callback,
        )

        def kernel(keyset, *arguments):
            group = unbox_group(arguments[group_at])
            name = group.group_name + self._generation
            members = self._members_of(group, name)
            site, in_torch = call_site()
            backward = now_in_backward()
            in_backward = backward != -1
            # An all-reduce from C++ in backward comes from DDP's reducer.
            from_reducer = (
                in_backward and in_torch == "_engine_run_backward" and reader.kind is Kind.ALL_REDUCE
            )
            by_reducer = from_reducer or (in_backward and getattr(here, "in_ddp_hook", False))
            read = reader.read(arguments, len(members), summed=from_reducer)
            require_peer(reader.kind, group.rank(), read.root, len(members))
            peer = members[read.root] if read.root >= 0 else -1
            is_async: bool = read.is_async
            counter_key: Hashable = name
            if reader.point_to_point:
                is_async = site.api in _NOT_WAITED_IN
                counter_key = (reader.kind, *channel(reader.kind, name, peer, read.tag, self.rank))
            with self._order:
                sequence = self._sequences[counter_key] = self._sequences.get(counter_key, 0) + 1
                call = Call(
                    next(self._numbers), reader.kind, name, members, sequence, peer, read.tag, read.dtype,
                    read.shape, read.numel, read.payload_bytes, read.reduction, is_async, in_backward,
                    by_reducer, read.send_splits, read.receive_splits, site, time.monotonic_ns(),
                )  # fmt: skip
            self.issued(call)
            if not reader.returns_work:
                return self.blocking(call, lambda: redispatch(keyset & below, *arguments))
            if (inside := getattr(here, "inside", None)) is not None:
                inside.append(call)
                self.waits(call)
            result = redispatch(keyset & below, *arguments)
            work = unbox_work(result[1] if isinstance(result, tuple) else result)
            self.pending.keep(work, call)
            if is_async and not by_reducer:
                self._keep_by_storage(call, reader.outputs(arguments))
            for listener in self._completion_listeners:
                listener.running(call, work, _on_device(group, read.tensors))
            if by_reducer:
                # The reducer waits in C++ at the end of backward. A callback queued here runs just before
                # that, in this thread, where the tap sees the wait.
                if getattr(here, "reducing", _NO_PASS)[0] != backward:
                    here.reducing = (backward, [])
                    queue_callback(functools.partial(_wait_for_all, here.reducing[1]))
                here.reducing[1].append(work)
            return result

        return kernel

    def _members_of(self, group: ProcessGroup, name: str) -> tuple[int, ...]:
        """Return the global ranks of ``group``, which this tap calls ``name``."""
        if (members := self._members.get(name)) is None:
            members = self._members[name] = tuple(dist.get_process_group_ranks(group))
        return members

    def _unknown(self, group: ProcessGroup, operator: str) -> None:
        """Report a call of an operator whose meaning is not known."""
        site, _ = call_site()
        name = group.group_name + self._generation
        with self._order:
            key = (name, operator)
            sequence = self._sequences[key] = self._sequences.get(key, 0) + 1
            number, now = next(self._numbers), time.monotonic_ns()
        members = self._members_of(group, name)
        self.issued(
            Call(number, Kind.UNKNOWN, name, members, sequence, operator=operator, site=site, issued=now)
        )

    def new_group(self, callers: tuple[int, ...], members: tuple[int, ...], name: str) -> Call:
        """Return the call with which ``callers`` create a group of ``members``.

        It is counted under ``name``.
        """
        site, _ = call_site()
        with self._order:
            sequence = self._sequences[name] = self._sequences.get(name, 0) + 1
            number, now = next(self._numbers), time.monotonic_ns()
        return Call(number, Kind.NEW_GROUP, name, callers, sequence, shape=members, site=site, issued=now)

    def blocking(self, call: Call, action: Callable[[], Any]) -> Any:
        """Run ``action``, which waits for ``call``, and report to the listeners before and after it."""
        self.waits(call)
        failed = True
        try:
            result = action()
            failed = False
        finally:
            self.waited(call, failed)
        return result

    def issued(self, call: Call) -> None:
        """Report to all listeners that ``call`` is issued."""
        for listener in self._listeners:
            listener.issued(call)

    def waits(self, call: Call) -> None:
        """Report to all listeners that this process waits for ``call``."""
        for listener in self._listeners:
            listener.waits(call)

    def waited(self, call: Call, failed: bool) -> None:
        """Report to all listeners that the wait for ``call`` has ended."""
        for listener in self._listeners:
            listener.waited(call, failed)

    def _keep_by_storage(self, call: Call, outputs: Sequence[Tensor]) -> None:
        """Remember ``call`` until the program waits for one of its outputs."""
        if len(self.by_storage) > 4096:
            self.by_storage.clear()
        for tensor in outputs:
            self.by_storage[tensor.untyped_storage().data_ptr()] = call


def _overload(name: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.c10d, name).default


def _on_device(group: ProcessGroup, tensors: Sequence[Tensor]) -> bool:
    """Whether the backend only queues its work in a stream. gloo copies data of a GPU itself."""
    return bool(tensors) and tensors[0].is_cuda and group._get_backend(tensors[0].device).name() != "gloo"


def _wait_for_all(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()
