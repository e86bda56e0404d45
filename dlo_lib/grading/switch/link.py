"""A rank's connection to the switch: it sends calls and receives results into the tensors of the calls. The
judge trusts nothing here.

The threads that wait read the results: the first one reads for all, and the others wait for it (leader and
followers). The link starts a thread only when a future is requested, because a future must complete even if
no thread waits.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import select
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_lib.comm.calls import Kind
from dlo_lib.comm.deadlock.helper_threads import HelperThreads
from dlo_lib.comm.tracing.call_sites import call_site
from dlo_lib.grading.checks.codec import DTYPES, HEAD, unpack
from dlo_lib.grading.checks.stand_in import as_tensor
from dlo_lib.grading.switch.own_memory import return_free_memory
from dlo_lib.grading.switch.request import MAX_UNWAITED
from dlo_lib.grading.switch.wire import frame, memory_of

NAMES = {dtype: name for name, dtype in DTYPES.items()}
HUNG_UP = "connection closed by the switch: another rank failed, or this rank sent an invalid message"
MAX_SITE = 180  # longest file name, in characters, that is sent


class CommunicationError(RuntimeError):
    """The switch does not support an operation, or it has closed the connection."""


@dataclass
class PendingCall:
    """A call that is not complete.

    ``into``: the tensors for what is received; None: ``answer`` becomes all that is received.
    """

    into: Sequence[Tensor] | None
    answer: bytes = b""
    futures: list[torch.futures.Future] = field(default_factory=list)


class Link:
    """The connection of this rank, over the connected socket ``line``."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._numbers = itertools.count(1)
        self._pending: dict[int, PendingCall] = {}
        self._unwaited: set[int] = set()
        self._sources: dict[int, int] = {}
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._reading = False
        self._broken = ""
        self._completer: threading.Thread | None = None
        self._helpers = HelperThreads[int](self._report_wait_of_helper)
        self.left: dist.ProcessGroup | None = None
        """The previous default group of this process."""

    def post(
        self, kind: Kind, group: str, members: Sequence[int], sent: Sequence[Tensor], into: Sequence[Tensor],
        *, peer: int = -1, tag: int = 0, reduction: str = "", is_async: bool = False,
    ) -> int:  # fmt: skip
        """Send a call; return its number.

        Raises:
            CommunicationError: the switch cannot carry a tensor, or has closed the connection.
        """
        site, in_torch = call_site()
        in_backward = _in_backward()
        if not self._helpers.is_main(in_backward):
            self._helpers.communicates()
        head = {
            "kind": kind.value,
            "group": group,
            "members": list(members),
            "peer": peer,
            "tag": tag,
            "reduction": reduction,
            "async": is_async or site.api in ("isend", "irecv", "batch_isend_irecv"),
            "backward": in_backward,
            "reducer": in_backward and in_torch == "_engine_run_backward",
            "site": [_shown(site.file), site.line, _shown(site.function), _shown(site.api)],
            "caller": [_shown(site.caller[0]), site.caller[1]] if site.caller else None,
            "sent": [_shape(tensor) for tensor in sent],
            "expected": [_shape(tensor) for tensor in into],
        }
        seq = self._post("call", head, sent, PendingCall(into))
        if head["async"]:
            self._unwaited.add(seq)
        return seq

    def mark(self, name: str) -> None:
        """Wait until the judge has read this process's memory and recorded it under ``name``."""
        callbacks = gc.callbacks[:]
        gc.callbacks.clear()  # one of the student's could free what the code should have freed before
        gc.collect()
        gc.callbacks.extend(callbacks)
        return_free_memory()
        self.wait(self._post("mark", {"name": str(name)}, (), PendingCall(())))

    def ask(self, function: int, call: bytes) -> Any:
        """Return the judge's answer to the packed call of a function of the check.

        Raises:
            CommunicationError: the switch has closed the connection.
        """
        pending = PendingCall(None)
        self._lead(self._post("asks", {"function": function}, (as_tensor(call),), pending))
        if self._broken:
            raise CommunicationError(self._broken)
        return unpack(pending.answer)

    def report_unwaited(self) -> None:
        """Report the asynchronous calls for which this rank has not waited."""
        if self._unwaited:
            self._send({"switch": "unwaited", "calls": sorted(self._unwaited)[:MAX_UNWAITED]}, ())

    def end(self, raised: bool) -> None:
        """Report that this rank makes no more calls."""
        self._send({"switch": "end", "raised": raised}, ())

    def wait(self, seq: int) -> None:
        """Wait until call ``seq`` is complete.

        Raises:
            CommunicationError: the switch has closed the connection.
        """
        self._unwaited.discard(seq)
        if seq in self._pending:
            if self._helpers.is_main(_in_backward()):
                self._report_wait(seq, self._helpers.may_communicate())
                self._lead(seq)
            else:
                self._helpers.waits(seq)
                self._lead(seq)
                self._helpers.waited(seq)
        if self._broken:
            raise CommunicationError(self._broken)

    def is_done(self, seq: int) -> bool:
        """Return True if call ``seq`` is complete; reads results that have arrived, without waiting."""
        while seq in self._pending and not self._reading and select.select([self._line], [], [], 0)[0]:
            with self._changed:
                if self._reading:
                    break
                self._reading = True
            self._read()
        if seq not in self._pending:
            self._unwaited.discard(seq)
            return True
        return False

    def source(self, seq: int) -> int:
        """Return the global rank that sent a message, or -1 if the message has not arrived."""
        return self._sources.get(seq, -1)

    def future(self, seq: int, value: Any) -> torch.futures.Future:
        """Return a future of call ``seq`` with the result ``value``, which completes even if no
        thread waits.
        """
        self._unwaited.discard(seq)
        future: torch.futures.Future = torch.futures.Future()
        with self._changed:
            pending = self._pending.get(seq)
            if pending is None:
                future.set_result(value)
                return future
            future_of_call: torch.futures.Future = torch.futures.Future()
            pending.futures.append(future_of_call)
            if self._completer is None:
                self._completer = threading.Thread(target=self._complete, name="dlo-switch", daemon=True)
                self._completer.start()
            self._changed.notify_all()
        future_of_call.add_done_callback(lambda done: future.set_result(value))
        return future

    # -- inside

    def _post(self, what: str, head: dict[str, Any], sent: Sequence[Tensor], pending: PendingCall) -> int:
        with self._changed:
            seq = next(self._numbers)
            self._pending[seq] = pending
        self._send({"switch": what, "seq": seq, **head}, sent)
        return seq

    def _send(self, head: dict[str, Any], tensors: Sequence[Tensor]) -> None:
        if self._broken:
            raise CommunicationError(self._broken)
        try:
            with self._sending:
                for piece in frame(head, tensors):
                    self._line.sendall(piece)
        except OSError as error:
            raise CommunicationError(HUNG_UP) from error

    def _report_wait(self, seq: int, helpers: bool) -> None:
        self._send({"switch": "wait", "seq": seq, "helpers": helpers}, ())

    def _report_wait_of_helper(self, seq: int) -> None:
        with contextlib.suppress(CommunicationError):  # the thread that waits raises it
            self._report_wait(seq, helpers=False)

    def _lead(self, seq: int) -> None:
        """Read until ``seq`` is complete, or wait for the thread that reads."""
        while True:
            with self._changed:
                while self._reading and seq in self._pending and not self._broken:
                    self._changed.wait()
                if seq not in self._pending or self._broken:
                    return
                self._reading = True
            self._read()

    def _complete(self) -> None:
        """Read for futures; the target of a thread."""
        while not self._broken:
            with self._changed:
                while not (waited := [seq for seq, pending in self._pending.items() if pending.futures]):
                    self._changed.wait()
            self._lead(waited[0])

    def _read(self) -> None:
        """Receive one frame; the caller has set ``_reading``."""
        try:
            length, size = HEAD.unpack(self._exactly(HEAD.size))
            head = json.loads(self._exactly(length))
            pending = self._pending[head["done"]]
            if pending.into is None:
                pending.answer = self._exactly(size)
            else:
                self._receive_into(pending.into, head["sizes"])
            self._sources[head["done"]] = head["source"]
            with self._changed:
                del self._pending[head["done"]]
                self._reading = False
                self._changed.notify_all()
            if pending.futures:
                # A callback may wait for a call that it starts, and this thread may be the one that reads.
                threading.Thread(target=_set_results, args=(pending.futures,), daemon=True).start()
        except OSError:
            with self._changed:
                self._broken, self._reading = HUNG_UP, False
                self._changed.notify_all()

    def _receive_into(self, into: Sequence[Tensor], sizes: Sequence[int]) -> None:
        with torch.no_grad():
            for tensor, count in zip(into, sizes):
                if count == 0:
                    continue
                target = tensor.detach()
                whole = (
                    target
                    if target.is_contiguous()
                    else torch.empty_like(target, memory_format=torch.contiguous_format)
                )
                self._fill(memory_of(whole))
                if whole is not target:
                    target.copy_(whole)

    def _exactly(self, count: int) -> bytes:
        data = bytearray(count)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, target: memoryview) -> None:
        while target:
            count = self._line.recv_into(target)
            if not count:
                raise ConnectionResetError
            target = target[count:]


class SwitchWork(dist.Work):
    """The work handle of one call or of several coalesced ones. ``value``: the result of its future."""

    def __init__(self, link: Link, calls: Sequence[int], value: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._link, self._calls, self._value = link, tuple(calls), list(value)

    def wait(self, timeout: Any = None) -> bool:
        """Wait until the calls are complete. The judge's deadline applies, not ``timeout``."""
        for seq in self._calls:
            self._link.wait(seq)
        return True

    def synchronize(self) -> None:
        """As ``wait``."""
        self.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        """Return True if the calls are complete, without waiting."""
        return all(self._link.is_done(seq) for seq in self._calls)

    is_success = is_completed  # a complete call has succeeded

    def result(self) -> list[Tensor]:
        """Wait, and return the tensors."""
        self.wait()
        return self._value

    def _source_rank(self) -> int:
        return self._link.source(self._calls[-1])

    source_rank = _source_rank

    def get_future(self) -> torch.futures.Future:
        """Return a future of ``result()``."""
        if _in_backward():
            # In backward, PyTorch's DDP waits for the future in C++, at the end. The callback runs just
            # before and reports the wait to the switch.
            torch.autograd.Variable._execution_engine.queue_callback(self.synchronize)
        return self._link.future(self._calls[-1], self._value)


def _set_results(futures: Sequence[torch.futures.Future]) -> None:
    for future in futures:
        future.set_result(None)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _shape(tensor: Tensor) -> list[Any]:
    if tensor.dtype not in NAMES or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        raise CommunicationError(
            f"a tensor of {tensor.dtype} on {tensor.device.type} cannot pass the switch: "
            f"send {', '.join(DTYPES)} on the CPU"
        )
    return [NAMES[tensor.dtype], list(tensor.shape)]


def _shown(text: str) -> str:
    """Shorten a name and replace the characters that the judge refuses."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[-MAX_SITE:])
