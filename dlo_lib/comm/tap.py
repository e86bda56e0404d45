"""The tap: one kernel in torch's dispatcher that sees every communication call of this process.

``torch.distributed``'s functions, the C++ reducer of DistributedDataParallel, FSDP2, DTensor and functional collectives all reach the
operators ``c10d::*`` of the dispatcher, on any thread and in any grad mode. A Python kernel on the key BackendSelect, which every call
passes just above the backend's own kernel, is told of each and then passes it on. What goes round the dispatcher it cannot see:
calls on a backend object itself (``group._get_backend(device).allreduce(...)``), the key-value store, symmetric memory, which ranks read
and write without a call of the other side, and other processes.

Wrapping Python functions instead would miss the C++ callers; a TorchDispatchMode costs 15 - 50 % of a step and misses other threads.

The tap tells a ``Listener`` what is issued and what is waited for. Cost: some 30 microseconds a call, of which 10 are the dispatcher's
detour through Python.
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

from dlo_lib.comm.calls import Call, Kind, channel
from dlo_lib.comm.held import Held
from dlo_lib.comm.operators import OPERATORS, Reader, unknown_operators
from dlo_lib.comm.sites import call_site

_NOT_WAITED_IN = ("isend", "irecv", "batch_isend_irecv")
_NO_PASS: tuple[int, list[Work]] = (-1, [])


class TapUnavailable(RuntimeError):
    """torch's internals are not as this version of the tap knows them."""


class Listener(Protocol):
    """Who is told."""

    def issued(self, call: Call) -> None:
        """``call`` is about to be made."""

    def waits(self, call: Call) -> None:
        """This process now waits for ``call``."""

    def waited(self, call: Call, failed: bool) -> None:
        """``call`` is over, or its backend raised."""


@runtime_checkable
class Timed(Protocol):
    """A listener that also wants to know when calls are over, whoever waits for them."""

    def running(self, call: Call, work: Work, on_device: bool) -> None:
        """The backend has taken ``call``; ``on_device``: it runs in a stream of a GPU, and ``work`` is waited for there."""


class Tap:
    """Put in place with ``install``, taken away with ``remove``; there is at most one in a process (``comm.listening``).

    Raises:
        TapUnavailable: on ``install``, when torch's internals have changed; nothing is changed then.
    """

    def __init__(self, rank: int, listener: Listener) -> None:
        self.rank = rank
        self.pending = Held[Work, Call]()
        """Calls not yet waited for, by their work."""
        self.by_storage: dict[int, Call] = {}
        """The same by the address of their output: functional collectives are waited for by tensor."""
        self.futures = Held[torch.futures.Future, Work]()
        """Works by a future made of them."""
        self.here = threading.local()
        """Of this thread: ``inside``, the calls of C++ code that waits for them itself; ``in_ddp_hook``; ``reducing``, a backward pass and
        what DDP's reducer has issued in it."""
        self._listeners: tuple[Listener, ...] = ()
        self._timed: tuple[Timed, ...] = ()
        self._era = ""
        self._numbers = itertools.count(1)
        self._sequences: dict[Hashable, int] = {}
        self._members: dict[str, tuple[int, ...]] = {}
        self._order = threading.Lock()
        self._library: torch.library.Library | None = None
        self.add(listener)

    def add(self, listener: Listener) -> None:
        self._listen((*self._listeners, listener))

    def leave(self, listener: Listener) -> None:
        self._listen(tuple(other for other in self._listeners if other is not listener))

    def _listen(self, listeners: tuple[Listener, ...]) -> None:
        self._listeners = listeners
        self._timed = tuple(listener for listener in listeners if isinstance(listener, Timed))

    def install(self) -> None:
        if unknown := unknown_operators():
            raise TapUnavailable(f"torch {torch.__version__} has communication operators unknown to this tap: {', '.join(unknown)}")
        library = torch.library.Library("c10d", "IMPL")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that a kernel is overridden is what we are here for
                for name, operator in OPERATORS.items():
                    overload = getattr(torch.ops.c10d, name).default
                    library.impl(name, self._kernel(overload, Reader(operator, overload._schema)), "BackendSelect", with_keyset=True)
        except (AttributeError, KeyError, RuntimeError, TypeError) as error:
            library._destroy()
            raise TapUnavailable(f"torch {torch.__version__} has other communication operators than this tap knows: {error}") from error
        self._library = library

    def remove(self) -> None:
        if self._library is not None:
            self._library._destroy()
            self._library = None

    def begin_era(self, number: int) -> None:
        """This process has joined another process group, and torch counts its groups from 0 again: the old names are no longer theirs."""
        self._era = f"/{number}"

    def _kernel(self, overload: torch._ops.OpOverload, reader: Reader) -> Callable:
        # Not call_boxed: that keeps the GIL, which the backend's own threads may need, and would dead-lock for real.
        passes_on = overload._handle.redispatch_boxed
        below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
        unbox_group, unbox_work, group_at, here = ProcessGroup.unbox, Work.unbox, reader.group, self.here
        now_in_backward, queue_callback = torch._C._current_graph_task_id, torch.autograd.Variable._execution_engine.queue_callback

        def kernel(keyset, *arguments):
            group = unbox_group(arguments[group_at])
            name = group.group_name + self._era
            members = self._members.get(name)
            if members is None:
                members = self._members[name] = tuple(dist.get_process_group_ranks(group))
            site, in_torch = call_site()
            backward = now_in_backward()
            in_backward = backward != -1
            # C++ in backward that all-reduces is DDP's reducer; the backward of functional collectives makes other calls.
            from_reducer = in_backward and in_torch == "_engine_run_backward" and reader.kind is Kind.ALL_REDUCE
            by_reducer = from_reducer or (in_backward and getattr(here, "in_ddp_hook", False))
            said = reader.read(arguments, len(members), summed=from_reducer)
            peer = members[said.root] if said.root >= 0 else -1
            is_async: bool = said.is_async
            counted_on: Hashable = name
            if reader.point_to_point:
                is_async = site.api in _NOT_WAITED_IN
                counted_on = (reader.kind, *channel(reader.kind, name, peer, said.tag, self.rank))
            with self._order:
                sequence = self._sequences[counted_on] = self._sequences.get(counted_on, 0) + 1
                call = Call(
                    next(self._numbers), reader.kind, name, members, sequence, peer, said.tag, said.dtype, said.shape, said.numel,
                    said.payload_bytes, said.reduction, is_async, in_backward, by_reducer, said.send_splits, said.receive_splits, site,
                    time.monotonic_ns(),
                )  # fmt: skip
            self.issued(call)
            if not reader.returns_work:
                return self.blocking(call, lambda: passes_on(keyset & below, *arguments))
            if (inside := getattr(here, "inside", None)) is not None:
                inside.append(call)
                self.waits(call)
            result = passes_on(keyset & below, *arguments)
            work = unbox_work(result[1] if isinstance(result, tuple) else result)
            self.pending.keep(work, call)
            if is_async and not by_reducer:
                self._keep_by_storage(call, reader.outputs(arguments))
            for listener in self._timed:
                listener.running(call, work, _on_device(group, said.tensors))
            if by_reducer:
                # The reducer waits in C++ at the end of backward; what is queued now runs just before, in this thread, where it is seen.
                if getattr(here, "reducing", _NO_PASS)[0] != backward:
                    here.reducing = (backward, [])
                    queue_callback(functools.partial(_wait_for_all, here.reducing[1]))
                here.reducing[1].append(work)
            return result

        return kernel

    def new_group(self, callers: tuple[int, ...], members: tuple[int, ...], name: str) -> Call:
        """The call with which ``callers`` make a group of ``members``; it is counted under ``name``."""
        site, _ = call_site()
        with self._order:
            sequence = self._sequences[name] = self._sequences.get(name, 0) + 1
            number, now = next(self._numbers), time.monotonic_ns()
        return Call(number, Kind.NEW_GROUP, name, callers, sequence, shape=members, site=site, issued=now)

    def blocking(self, call: Call, action: Callable[[], Any]) -> Any:
        """Run what waits for ``call``, and tell the listeners before and after."""
        self.waits(call)
        failed = True
        try:
            result = action()
            failed = False
        finally:
            self.waited(call, failed)
        return result

    def issued(self, call: Call) -> None:
        for listener in self._listeners:
            listener.issued(call)

    def waits(self, call: Call) -> None:
        for listener in self._listeners:
            listener.waits(call)

    def waited(self, call: Call, failed: bool) -> None:
        for listener in self._listeners:
            listener.waited(call, failed)

    def _keep_by_storage(self, call: Call, outputs: Sequence[Tensor]) -> None:
        """Remember ``call`` until an output is waited for."""
        if len(self.by_storage) > 4096:
            self.by_storage.clear()
        for tensor in outputs:
            self.by_storage[tensor.untyped_storage().data_ptr()] = call


def _on_device(group: ProcessGroup, tensors: Sequence[Tensor]) -> bool:
    """Whether the backend only queues its work in a stream: gloo copies from a GPU and back itself."""
    return bool(tensors) and tensors[0].is_cuda and group._get_backend(tensors[0].device).name() != "gloo"


def _wait_for_all(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()
