"""Read the messages of a rank strictly: exact types, known names, consistent sizes. The exchange gets nothing
else.

Two things are taken from the rank without a check: the parameters of its call, which it may choose, and the
call site, which is shown but never counted. The sizes of sent tensors must match the received bytes; the
sizes of expected tensors are compared with the results.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from dlo_lib.comm.calls import Call, CallSite, Kind
from dlo_lib.grading.checks.asked import MOST_BYTES
from dlo_lib.grading.checks.codec import DTYPES, NotPlain
from dlo_lib.grading.switch.arithmetic import REDUCTIONS
from dlo_lib.grading.switch.wire import Frame

MAX_DIMS, MAX_TENSORS, MAX_NAME, MAX_TAG = 16, 10_000, 200, 1 << 31
MAX_LINE = 1 << 31
MAX_UNWAITED = 100  # calls without a wait that a rank reports
COLLECTIVES = {kind.value: kind for kind in Kind if kind not in (Kind.NEW_GROUP, Kind.JOIN)}
RECEIVED_IS_FULL = (Kind.ALL_GATHER, Kind.SCATTER, Kind.RECV, Kind.RECV_ANY)
RECEIVED_IS_LOCAL = (Kind.SCATTER, Kind.REDUCE_SCATTER, Kind.RECV, Kind.RECV_ANY)


@dataclass(frozen=True)
class TensorSpec:
    """The dtype and the sizes of one tensor."""

    dtype: str
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    @property
    def bytes(self) -> int:
        return self.numel * DTYPES[self.dtype].itemsize

    def fits(self, tensor: Tensor) -> bool:
        """Return True if ``tensor`` can be received into it: the same dtype and number of elements."""
        return DTYPES[self.dtype] == tensor.dtype and self.numel == tensor.numel()


@dataclass(frozen=True)
class CallRequest:
    """A call of a rank: the tensors it sends, and the shapes it expects to receive."""

    rank: int
    seq: int
    kind: Kind
    group: str
    members: tuple[int, ...]
    peer: int
    tag: int
    reduction: str
    is_async: bool
    in_backward: bool
    by_reducer: bool
    site: CallSite
    sent: tuple[Tensor, ...]
    sizes: tuple[TensorSpec, ...]
    """Of the sent tensors."""
    expected: tuple[TensorSpec, ...]

    @property
    def held(self) -> int:
        """The bytes that the switch holds for the call."""
        return sum(shape.bytes for shape in self.sizes)

    def call(self, number: int, sequence: int) -> Call:
        """Return the call as the tracer records it."""
        full = self.expected if self.kind in RECEIVED_IS_FULL else self.sizes or self.expected
        local = self.expected if self.kind in RECEIVED_IS_LOCAL else self.sizes or self.expected
        uneven = len({shape.numel for shape in full}) > 1 and len(full) > len(local)
        exchanged = self.kind is Kind.ALL_TO_ALL
        return Call(
            number=number,
            kind=self.kind,
            group=self.group,
            members=self.members,
            sequence=sequence,
            peer=self.peer,
            tag=self.tag,
            dtype=local[0].dtype if local else "",
            shape=local[0].sizes if local else (),
            numel=-1 if uneven else sum(shape.numel for shape in local),
            payload_bytes=sum(shape.bytes for shape in full),
            reduction=self.reduction,
            is_async=self.is_async,
            in_backward=self.in_backward,
            by_reducer=self.by_reducer,
            send_splits=tuple(shape.numel for shape in self.sizes) if exchanged else (),
            receive_splits=tuple(shape.numel for shape in self.expected) if exchanged else (),
            site=self.site,
            issued=time.monotonic_ns(),
        )


@dataclass(frozen=True)
class Wait:
    """The rank waits for its call ``seq``.

    ``helpers``: another thread of the rank may make calls in the meantime.
    """

    seq: int
    helpers: bool


@dataclass(frozen=True)
class Mark:
    """The rank has reached the mark ``name`` and waits until its memory has been read."""

    seq: int
    name: str


@dataclass(frozen=True)
class AskedCall:
    """The rank calls function number ``function`` of the check, and waits for the answer.

    ``call``: its packed arguments, not read yet.
    """

    seq: int
    function: int
    call: bytes


@dataclass(frozen=True)
class Unwaited:
    """The rank has not waited for these asynchronous calls."""

    calls: tuple[int, ...]


@dataclass(frozen=True)
class ScenarioEnd:
    """The scenario has ended on this rank."""

    raised: bool


Message = CallRequest | Wait | Mark | AskedCall | Unwaited | ScenarioEnd


def read(frame: Frame, rank: int, world: int) -> Message | None:
    """Return the message in ``frame``; None if it is not one of the switch.

    Raises:
        NotPlain: it is a message of the switch, but an invalid one.
    """
    if not frame.tree.startswith(b'{"switch":'):
        return None
    try:
        head = json.loads(frame.tree.decode())
        return _message(head, frame.blob, rank, world)
    except NotPlain:
        raise
    except (ValueError, KeyError, TypeError, RecursionError, MemoryError) as error:
        raise NotPlain(f"no message of a process group ({type(error).__name__})") from error


def _message(head: dict[str, Any], blob: Tensor, rank: int, world: int) -> Message:
    match head["switch"]:
        case "wait":
            return Wait(_number(head["seq"], 1, 1 << 53), _flag(head["helpers"]))
        case "mark":
            return Mark(_number(head["seq"], 1, 1 << 53), _text(head["name"]))
        case "asks":
            if blob.numel() > MOST_BYTES:
                raise ValueError("bytes")
            number = _number(head["function"], 0, MAX_TENSORS)
            return AskedCall(_number(head["seq"], 1, 1 << 53), number, blob.numpy().tobytes())
        case "unwaited":
            return Unwaited(tuple(_number(seq, 1, 1 << 53) for seq in _items(head["calls"], MAX_UNWAITED)))
        case "end":
            return ScenarioEnd(_flag(head["raised"]))
        case "call":
            return _request(head, blob, rank, world)
    raise ValueError("switch")


def _request(head: dict[str, Any], blob: Tensor, rank: int, world: int) -> CallRequest:
    kind = COLLECTIVES[head["kind"]]
    members = tuple(_number(member, 0, world - 1) for member in _items(head["members"], world))
    if len(set(members)) != len(members) or rank not in members:
        raise ValueError("members")
    peer = _number(head["peer"], -1, world - 1)
    if peer not in members if kind.rooted or kind in (Kind.SEND, Kind.RECV) else peer != -1:
        raise ValueError("peer")
    reduction = head["reduction"]
    if (
        reduction not in REDUCTIONS
        if kind in (Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER)
        else reduction != ""
    ):
        raise ValueError("reduction")
    sizes, expected = _shapes(head["sent"]), _shapes(head["expected"])
    file, line, function, api = _items(head["site"], 4)
    request = CallRequest(
        rank=rank,
        seq=_number(head["seq"], 1, 1 << 53),
        kind=kind,
        group=_text(head["group"]),
        members=members,
        peer=peer,
        tag=_number(head["tag"], -MAX_TAG, MAX_TAG),
        reduction=reduction,
        is_async=_flag(head["async"]),
        in_backward=_flag(head["backward"]),
        by_reducer=_flag(head["reducer"]),
        site=CallSite(
            _text(file), _number(line, 0, MAX_LINE), _text(function), _text(api), _caller(head["caller"])
        ),
        sent=_cut(blob, sizes),
        sizes=sizes,
        expected=expected,
    )
    _count(request)
    return request


def _count(request: CallRequest) -> None:
    """Check the number of tensors of an operation."""
    ranks, root = len(request.members), request.peer == request.rank
    sent, expected = len(request.sent), len(request.expected)
    good = {
        Kind.ALL_REDUCE: sent == expected,
        Kind.BROADCAST: (sent, expected) == ((1, 0) if root else (0, 1)),
        Kind.REDUCE: (sent, expected) == (1, int(root)),
        Kind.ALL_GATHER: expected == sent * ranks,
        Kind.GATHER: (sent, expected) == (1, ranks if root else 0),
        Kind.SCATTER: (sent, expected) == (ranks if root else 0, 1),
        Kind.REDUCE_SCATTER: sent == expected * ranks,
        Kind.ALL_TO_ALL: (sent, expected) == (ranks, ranks),
        Kind.BARRIER: (sent, expected) == (0, 0),
        Kind.SEND: (sent, expected) == (1, 0),
        Kind.RECV: (sent, expected) == (0, 1),
        Kind.RECV_ANY: (sent, expected) == (0, 1),
    }
    if not good[request.kind]:
        raise ValueError("number of tensors")


def _cut(blob: Tensor, shapes: Sequence[TensorSpec]) -> tuple[Tensor, ...]:
    if sum(shape.bytes for shape in shapes) != blob.numel():
        raise ValueError("bytes")
    parts = blob.split([shape.bytes for shape in shapes])
    return tuple(_typed(part, shape).view(shape.sizes) for part, shape in zip(parts, shapes))


def _typed(part: Tensor, shape: TensorSpec) -> Tensor:
    dtype = DTYPES[shape.dtype]
    aligned = part if part.storage_offset() % dtype.itemsize == 0 else part.clone()
    return aligned.view(dtype) if shape.dtype != "bool" else aligned != 0  # every other byte than 0 is True


def _shapes(value: Any) -> tuple[TensorSpec, ...]:
    shapes = []
    for dtype, sizes in _items(value, MAX_TENSORS):
        if dtype not in DTYPES:
            raise ValueError("dtype")
        shapes.append(TensorSpec(dtype, tuple(_number(size, 0, 1 << 40) for size in _items(sizes, MAX_DIMS))))
    return tuple(shapes)


def _items(value: Any, most: int) -> list[Any]:
    if type(value) is not list or len(value) > most:
        raise ValueError("list")
    return value


def _number(value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError("number")
    return value


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > MAX_NAME or not value.isprintable():
        raise ValueError("text")
    return value


def _caller(value: Any) -> tuple[str, int] | None:
    if value is None:
        return None
    file, line = _items(value, 2)
    return _text(file), _number(line, 0, MAX_LINE)


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("flag")
    return value
