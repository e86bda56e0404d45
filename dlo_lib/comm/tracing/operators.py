"""The operators ``c10d::*`` of torch's dispatcher: their kinds, and how a call is read from its arguments.

The position of an argument comes from the operator's schema. Therefore another order of arguments in another
version of torch is read correctly. An operator that lacks an argument, or that is not listed here, has no
reader: its calls are traced without a kind (``comm.tracing.unknown``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlo_lib.comm.calls import Kind
from dlo_lib.comm.tracing.reductions import reduction_of


@dataclass(frozen=True)
class Operator:
    """The kind of a call, and the names of the arguments with this rank's tensors and the full tensors."""

    kind: Kind
    local: str = "tensors"
    full: str = "tensors"


OPERATORS = {
    "allreduce_": Operator(Kind.ALL_REDUCE),
    "allreduce_coalesced_": Operator(Kind.ALL_REDUCE),
    "broadcast_": Operator(Kind.BROADCAST),
    "reduce_": Operator(Kind.REDUCE),
    "allgather_": Operator(Kind.ALL_GATHER, "input_tensors", "output_tensors"),
    "_allgather_base_": Operator(Kind.ALL_GATHER, "input_tensor", "output_tensor"),
    "allgather_coalesced_": Operator(Kind.ALL_GATHER, "input_list", "output_lists"),
    "allgather_into_tensor_coalesced_": Operator(Kind.ALL_GATHER, "inputs", "outputs"),
    "gather_": Operator(Kind.GATHER, "input_tensors", "input_tensors"),
    "gather_into_tensor_": Operator(Kind.GATHER, "input_tensor", "input_tensor"),  # 2.15
    "scatter_": Operator(Kind.SCATTER, "output_tensors", "output_tensors"),
    "reduce_scatter_": Operator(Kind.REDUCE_SCATTER, "output_tensors", "input_tensors"),
    "_reduce_scatter_base_": Operator(Kind.REDUCE_SCATTER, "output_tensor", "input_tensor"),
    "reduce_scatter_tensor_coalesced_": Operator(Kind.REDUCE_SCATTER, "outputs", "inputs"),
    "alltoall_": Operator(Kind.ALL_TO_ALL, "input_tensors", "input_tensors"),
    "alltoall_base_": Operator(Kind.ALL_TO_ALL, "input", "input"),
    "barrier": Operator(Kind.BARRIER, "", ""),
    "monitored_barrier_": Operator(Kind.MONITORED_BARRIER, "", ""),
    "send": Operator(Kind.SEND),
    "recv_": Operator(Kind.RECV),
    "recv_any_source_": Operator(Kind.RECV_ANY),
}
_GROUP = "process_group"
_DTYPES = {
    value: str(value).removeprefix("torch.")
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


class Read(NamedTuple):
    """The properties of a call, read from its arguments."""

    tensors: Sequence[Tensor]
    """The full tensors."""
    root: int
    """Rank within the group of the root, the destination or the source; -1 if there is none."""
    tag: int
    dtype: str
    shape: tuple[int, ...]
    numel: int
    payload_bytes: int
    reduction: str
    is_async: bool
    send_splits: tuple[int, ...]
    receive_splits: tuple[int, ...]


class Reader:
    """Reads the calls of one operator from their arguments, a tuple in the order of the operator's schema.

    Trailing arguments with default values may be missing.

    Raises:
        KeyError: on construction, when the schema lacks an argument.
    """

    def __init__(self, operator: Operator, schema: Any) -> None:
        self.kind, self.point_to_point = operator.kind, operator.kind.point_to_point
        self.places = {argument.name: index for index, argument in enumerate(schema.arguments)}
        types = {argument.name: str(argument.type) for argument in schema.arguments}
        self.group = self.places[_GROUP]
        self.returns_work = bool(schema.returns)
        self._local, self._locals = self._tensors(operator.local, types)
        self._full, self._fulls = self._tensors(operator.full, types)
        self._output, self._outputs = self._tensors(
            next((name for name in types if name.startswith("output")), operator.local), types
        )
        self._root = next(
            (self.places[name] for name in ("root_rank", "dst", "src") if name in self.places), None
        )
        self._tag = self.places.get("tag")
        self._reduction = self.places.get("reduce_op")
        self._is_async = next(
            (self.places[name] for name in ("async_op", "asyncOp") if name in self.places), None
        )
        self._splits = self.kind is Kind.ALL_TO_ALL

    def _tensors(self, name: str, types: dict[str, str]) -> tuple[int, Callable[[Any], Sequence[Tensor]]]:
        if not name:
            return 0, _none
        depth = types[name].count("List[")
        return self.places[name], (_one, _several, _nested)[depth]

    def read(self, arguments: tuple, ranks: int, summed: bool = False) -> Read:
        """Return the properties of a call.

        ``ranks`` is the size of the group. ``summed`` says that any reduction is a sum: reading the argument
        takes 0.07 ms in a backward pass, because it is not in the caches then.
        """
        local, full = self._locals(arguments[self._local]), self._fulls(arguments[self._full])
        sends, receives = self._read_splits(arguments, ranks) if self._splits else ((), ())
        at = self._is_async
        return Read(
            full,
            -1 if self._root is None else arguments[self._root],
            0 if self._tag is None else arguments[self._tag],
            _DTYPES[local[0].dtype] if local else "",
            tuple(local[0].shape) if local else (),
            _same_everywhere(local, full),
            _elements_of(full) * full[0].element_size() if full else 0,
            "" if self._reduction is None else "SUM" if summed else reduction_of(arguments[self._reduction]),
            at is None or at >= len(arguments) or bool(arguments[at]),
            sends,
            receives,
        )

    def outputs(self, arguments: tuple) -> Sequence[Tensor]:
        """Return the tensors that the call fills."""
        return self._outputs(arguments[self._output])

    def _read_splits(self, arguments: tuple, ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the number of elements to and from each member of an all-to-all."""

        def given(name: str) -> Any:
            return arguments[self.places[name]]

        if "input" in self.places:
            sends = _elements(given("input"), given("input_split_sizes"), ranks)
            return sends, _elements(given("output"), given("output_split_sizes"), ranks)
        return tuple(t.numel() for t in given("input_tensors")), tuple(
            t.numel() for t in given("output_tensors")
        )


@functools.cache
def reader_of(name: str, operator: Operator) -> Reader:
    """Return the reader of the calls of ``c10d::name``.

    Raises:
        AttributeError, KeyError: torch lacks the operator, or its schema lacks an argument.
    """
    return Reader(operator, getattr(torch.ops.c10d, name).default._schema)


def known_operators() -> dict[str, Reader]:
    """Return the readers of the operators of torch that are in ``OPERATORS`` and have the arguments that they
    need. An earlier release lacks some of the operators."""
    known = {}
    for name, operator in OPERATORS.items():
        with contextlib.suppress(AttributeError, KeyError):
            known[name] = reader_of(name, operator)
    return known


def unknown_operators() -> list[str]:
    """Return the operators of torch that communicate on a process group and are not in
    ``known_operators()``."""
    names = {
        name.removeprefix("c10d::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("c10d::")
    }
    return sorted(
        name for name in names - known_operators().keys() if "." not in name and _communicates(name)
    )


def group_place(schema: Any) -> int:
    """Return the position of the process group among the arguments of an operator; -1 if it has none."""
    types = [str(argument.type) for argument in schema.arguments]
    return next((place for place, name in enumerate(types) if name.endswith("c10d.ProcessGroup")), -1)


def _communicates(name: str) -> bool:
    return group_place(getattr(torch.ops.c10d, name).default._schema) >= 0


def _none(_: object) -> Sequence[Tensor]:
    return ()


def _one(tensor: Tensor) -> Sequence[Tensor]:
    return (tensor,)


def _several(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return tensors


def _nested(lists: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
    return list(chain.from_iterable(lists))


def _same_everywhere(local: Sequence[Tensor], full: Sequence[Tensor]) -> int:
    """Return the elements of this rank's tensors; -1 if ranks may have different numbers."""
    if len(full) > len(local) and len({tensor.numel() for tensor in full}) > 1:
        return -1
    return _elements_of(local)


def _elements_of(tensors: Sequence[Tensor]) -> int:
    return tensors[0].numel() if len(tensors) == 1 else sum(tensor.numel() for tensor in tensors)


def _elements(tensor: Tensor, splits: Sequence[int], ranks: int) -> tuple[int, ...]:
    if not splits:
        return (tensor.numel() // ranks,) * ranks
    row = tensor[:1].numel()
    return tuple(size * row for size in splits)
