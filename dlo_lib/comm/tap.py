"""The tap: one kernel in torch's dispatcher that sees every communication call of this process.

``torch.distributed``'s functions, the C++ reducer of DistributedDataParallel, FSDP2, DTensor and functional collectives all reach the
operators ``c10d::*`` of the dispatcher, on any thread and in any grad mode. A Python kernel on the key BackendSelect, which every call
passes just above the backend's own kernel, is told of each and then passes it on. What it cannot see is a call on a backend object itself
(``group._get_backend(device).allreduce(...)``), which goes round the dispatcher.

Wrapping Python functions instead would miss the C++ callers; a TorchDispatchMode costs 15 - 50 % of a step and misses other threads.

The tap tells a ``Listener`` what is issued and what is waited for. Cost: some 20 microseconds a call.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from dlo_lib.comm.calls import Call, Kind, Site


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


@dataclass(frozen=True)
class _Operator:
    """An operator of the dispatcher: what kind of call it is, and which arguments hold this rank's tensors and the full one's."""

    kind: Kind
    local: str = "tensors"
    full: str = "tensors"


_OPERATORS = {
    "allreduce_": _Operator(Kind.ALL_REDUCE),
    "allreduce_coalesced_": _Operator(Kind.ALL_REDUCE),
    "broadcast_": _Operator(Kind.BROADCAST),
    "reduce_": _Operator(Kind.REDUCE),
    "allgather_": _Operator(Kind.ALL_GATHER, "input_tensors", "output_tensors"),
    "_allgather_base_": _Operator(Kind.ALL_GATHER, "input_tensor", "output_tensor"),
    "allgather_coalesced_": _Operator(Kind.ALL_GATHER, "input_list", "output_lists"),
    "allgather_into_tensor_coalesced_": _Operator(Kind.ALL_GATHER, "inputs", "outputs"),
    "gather_": _Operator(Kind.GATHER, "input_tensors", "input_tensors"),
    "scatter_": _Operator(Kind.SCATTER, "output_tensors", "output_tensors"),
    "reduce_scatter_": _Operator(Kind.REDUCE_SCATTER, "output_tensors", "input_tensors"),
    "_reduce_scatter_base_": _Operator(Kind.REDUCE_SCATTER, "output_tensor", "input_tensor"),
    "reduce_scatter_tensor_coalesced_": _Operator(Kind.REDUCE_SCATTER, "outputs", "inputs"),
    "alltoall_": _Operator(Kind.ALL_TO_ALL, "input_tensors", "input_tensors"),
    "alltoall_base_": _Operator(Kind.ALL_TO_ALL, "input", "input"),
    "barrier": _Operator(Kind.BARRIER, "", ""),
    "monitored_barrier_": _Operator(Kind.MONITORED_BARRIER, "", ""),
    "send": _Operator(Kind.SEND),
    "recv_": _Operator(Kind.RECV),
    "recv_any_source_": _Operator(Kind.RECV_ANY),
}
_REDUCTIONS = {kind.value: name for name, kind in dist.ReduceOp.RedOpType.__members__.items()}
_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(os.path.abspath(__file__))
_OURS = tuple(os.path.join(os.path.dirname(_HERE), room) + os.sep for room in ("comm", "launch", "grading/switch"))
_PLUMBING = {"wrapper", "_call_impl", "_wrapped_call_impl", "__call__", "inner", "decorate_context"}


class Tap:
    """Put in place with ``install``, taken away with ``remove``; there is at most one in a process (``comm.listening``).

    Raises:
        TapUnavailable: on ``install``, when torch's internals have changed; nothing is changed then.
    """

    def __init__(self, rank: int, listener: Listener) -> None:
        self.rank, self.listeners = rank, [listener]
        self.pending: dict[int, tuple[Work, Call]] = {}
        """Calls not yet waited for, by the id of their work, which is kept alive for as long."""
        self.by_storage: dict[int, Call] = {}
        """The same by the address of the output, for functional collectives, which are waited for by tensor."""
        self.here = threading.local()
        """Of this thread: ``inside``, the calls of C++ code that waits for them itself; ``in_ddp_hook``."""
        self._era = ""
        self._numbers = itertools.count(1)
        self._sequences: dict[tuple, int] = {}
        self._members: dict[str, tuple[int, ...]] = {}
        self._order = threading.Lock()
        self._library: torch.library.Library | None = None

    def install(self) -> None:
        library = torch.library.Library("c10d", "IMPL")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that a kernel is overridden is what we are here for
                for name, operator in _OPERATORS.items():
                    library.impl(name, self._kernel(name, operator), "BackendSelect", with_keyset=True)
        except (AttributeError, RuntimeError, TypeError) as error:
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

    def _kernel(self, name: str, operator: _Operator) -> Callable:
        overload = getattr(torch.ops.c10d, name).default
        places = {argument.name: index for index, argument in enumerate(overload._schema.arguments)}
        # Not call_boxed: that keeps the GIL, which the backend's own threads may need, and would dead-lock for real.
        passes_on = overload._handle.redispatch_boxed
        below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

        def kernel(keyset, *arguments):
            def given(argument: str, default: Any = None) -> Any:
                index = places.get(argument, len(arguments))
                return arguments[index] if index < len(arguments) else default

            call = self._read(operator, given)
            self.issued(call)
            if name == "monitored_barrier_":  # the one that has no work to wait for
                return self.blocking(call, lambda: passes_on(keyset & below, *arguments))
            if (inside := getattr(self.here, "inside", None)) is not None:
                inside.append(call)
                self.waits(call)
            result = passes_on(keyset & below, *arguments)
            work = Work.unbox(result[1] if isinstance(result, tuple) else result)
            self.pending[id(work)] = (work, call)
            for listener in self.listeners:
                if isinstance(listener, Timed):
                    listener.running(call, work, _on_device(given("process_group"), given(operator.full)))
            for tensor in _tensors(given(operator.full)):
                self.by_storage[tensor.untyped_storage().data_ptr()] = call
            self._forget_old()
            if call.by_reducer:
                # The reducer waits in C++ at the end of backward; what is queued now runs just before, in this thread, where it is seen.
                torch.autograd.Variable._execution_engine.queue_callback(lambda: _wait(work))
            return result

        return kernel

    def _read(self, operator: _Operator, given: Callable[..., Any]) -> Call:
        group = ProcessGroup.unbox(given("process_group"))
        name = group.group_name + self._era
        members = self._members.get(name)
        if members is None:
            members = self._members[name] = tuple(dist.get_process_group_ranks(group))
        root = given("root_rank", given("dst", given("src", -1)))
        reduce_op = given("reduce_op")
        local, full = _tensors(given(operator.local)), _tensors(given(operator.full))
        sends, receives = _splits(given, len(members)) if operator.kind is Kind.ALL_TO_ALL else ((), ())
        site, in_torch = call_site()
        in_backward = torch._C._current_graph_task_id() != -1
        return self.number(
            operator.kind,
            name,
            members,
            peer=members[root] if root >= 0 else -1,
            tag=given("tag", 0),
            dtype=str(local[0].dtype).removeprefix("torch.") if local else "",
            shape=tuple(local[0].shape) if local else (),
            numel=_same_everywhere(local, full),
            payload_bytes=sum(tensor.numel() * tensor.element_size() for tensor in full),
            reduction=_reduction(reduce_op) if reduce_op is not None else "",
            is_async=site.api in ("isend", "irecv", "batch_isend_irecv") if operator.kind.point_to_point else bool(given("async_op", True)),
            in_backward=in_backward,
            by_reducer=in_backward and (getattr(self.here, "in_ddp_hook", False) or in_torch == "_engine_run_backward"),
            send_splits=sends,
            receive_splits=receives,
            site=site,
        )

    def number(self, kind: Kind, group: str, members: tuple[int, ...], **fields: Any) -> Call:
        """Make a call and give it its number and its place in the group's order, one thread at a time."""
        with self._order:
            draft = Call(0, kind, group, members, 0, **fields, issued=time.monotonic_ns())
            channel = (kind.point_to_point and kind, *draft.channel(self.rank))
            sequence = self._sequences[channel] = self._sequences.get(channel, 0) + 1
            return Call(next(self._numbers), kind, group, members, sequence, **fields, issued=draft.issued)

    def blocking(self, call: Call, action: Callable[[], Any]) -> Any:
        """Run what waits for ``call``, and tell the listener before and after."""
        self.waits(call)
        failed = True
        try:
            result = action()
            failed = False
        finally:
            self.waited(call, failed)
        return result

    def issued(self, call: Call) -> None:
        for listener in self.listeners:
            listener.issued(call)

    def waits(self, call: Call) -> None:
        for listener in self.listeners:
            listener.waits(call)

    def waited(self, call: Call, failed: bool) -> None:
        for listener in self.listeners:
            listener.waited(call, failed)

    def call_of(self, work: Work) -> Call | None:
        found = self.pending.get(id(work))
        return found[1] if found else None

    def done(self, work: Work) -> None:
        self.pending.pop(id(work), None)

    def _forget_old(self) -> None:
        if len(self.pending) > 256:
            self.pending = {key: (work, call) for key, (work, call) in self.pending.items() if not work.is_completed()}
        if len(self.by_storage) > 4096:
            self.by_storage.clear()


def _on_device(group: Any, value: Any) -> bool:
    """Whether the backend only queues its work in a stream: gloo copies from a GPU and back itself."""
    tensor = next(iter(_tensors(value)), None)
    return tensor is not None and tensor.is_cuda and ProcessGroup.unbox(group)._get_backend(tensor.device).name() != "gloo"


def _wait(work: Work) -> None:
    work.wait()


def _tensors(value: Any) -> list[Tensor]:
    if value is None:
        return []
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)]


def _same_everywhere(local: list[Tensor], full: list[Tensor]) -> int:
    uneven = len({tensor.numel() for tensor in full}) > 1 and len(full) > len(local)
    return -1 if uneven else sum(tensor.numel() for tensor in local)


def _splits(given: Callable[..., Any], ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Elements to and from each member of an all-to-all."""
    if (tensor := given("input")) is not None:
        return _elements(tensor, given("input_split_sizes"), ranks), _elements(given("output"), given("output_split_sizes"), ranks)
    return tuple(t.numel() for t in given("input_tensors")), tuple(t.numel() for t in given("output_tensors"))


def _elements(tensor: Tensor, splits: Sequence[int], ranks: int) -> tuple[int, ...]:
    if not splits:
        return (tensor.numel() // ranks,) * ranks
    row = tensor[:1].numel()
    return tuple(size * row for size in splits)


def _reduction(reduce_op: Any) -> str:
    """SUM, MAX, ...: the operator has it as a script object whose ``op`` gives the number."""
    return _REDUCTIONS.get(int(reduce_op.op()), "?")


def call_site() -> tuple[Site, str]:
    """The person's line, and torch's innermost function above the dispatcher (which tells DDP's reducer from a person's call)."""
    frame: FrameType | None = sys._getframe(1)
    api = in_torch = ""
    while frame is not None:
        code = frame.f_code
        owner = _owner(code.co_filename)
        if owner == "person":
            return _site(code, frame.f_lineno, api), in_torch
        if owner == "torch":
            if not in_torch and not code.co_filename.endswith(("_ops.py", "c10d_logger.py")):
                in_torch = code.co_name
            if code.co_name not in _PLUMBING:
                api = code.co_name
        frame = frame.f_back
    return Site("?", 0, "", api), in_torch


@lru_cache(maxsize=4096)
def _owner(file: str) -> str:
    if file.startswith((*_OURS, "<frozen")):
        return "ours"
    if file.startswith(_TORCH) or file == "<string>" or file.endswith(("/contextlib.py", "/typing_extensions.py")):
        return "torch"
    return "person"


@lru_cache(maxsize=4096)
def _site(code: CodeType, line: int, api: str) -> Site:
    return Site(code.co_filename, line, code.co_qualname, api)
