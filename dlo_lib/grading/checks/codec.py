"""Encode plain data as bytes, to pass values between a check and the student's process.

The tree of a value is JSON, its tensors are safetensors; nothing is pickled. Plain data are None, bool, int,
float, str, list, tuple, dict, tensors, dtypes and a few frozen dataclasses of the library. The sender refuses
every other type by name, so an object whose ``==`` always returns True never arrives. The receiver trusts
nothing: it builds only these types, within limits of size and depth. A value that passes is a copy; it keeps
its strides, but not ``requires_grad``.

Two more types pass in one direction each. A check sends ``Asked``, which becomes a stand-in on the student's
side; a scenario that uses ``claimed`` sends ``Claimed``. Both are refused where they are not expected.

    frame = [u64 length of JSON] [u64 length of safetensors] JSON safetensors
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import safetensors.torch
import torch
from torch import Tensor

from dlo_lib.grading.checks.asked import Asked
from dlo_lib.grading.checks.claimed import Claimed

HEAD = struct.Struct(">QQ")
MAX_JSON, MAX_TENSORS = 1 << 20, 256 << 20  # bytes the judge accepts from a student's process
MAX_DEPTH, MAX_ITEMS = 24, 100_000
MAX_COLLISIONS = 8  # keys of a dict with the same hash: thousands of them would make the dict quadratic
MAX_SPREAD = 4  # a strided tensor may span this multiple of its elements; otherwise it is made contiguous

_DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64", "bool")
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPES}

DATACLASSES = {
    "LlamaConfig": "dlo_lib.models.llama",
    "RopeScaling": "dlo_lib.models.llama",
    "Gpu": "dlo_lib.hardware.gpus",
}
"""Frozen dataclasses that are plain data: name → module."""


StandIn = Callable[[int, str], Any]
"""Returns the stand-in for the function of a check with this number and name."""


class NotPlain(Exception):
    """A value that is not plain data, or bytes that do not encode plain data."""


def pack(value: Any, asked: list[Asked] | None = None) -> bytes:
    """Encode ``value`` as one frame. The functions of the check in it are added to ``asked``; None: there
    may be none.

    Raises:
        NotPlain: ``value`` is not plain data.
    """
    parts = _Parts({}, asked)
    tree = json.dumps(_encode(value, parts, 0)).encode()
    blob = safetensors.torch.save(parts.tensors) if parts.tensors else b""
    return HEAD.pack(len(tree), len(blob)) + tree + blob


def unpack(
    frame: bytes | bytearray | memoryview, stand_in: StandIn | None = None, claims: bool = False
) -> Any:
    """Decode one complete frame.

    Args:
        stand_in: makes what a function of a check becomes; None: there may be none.
        claims: whether the sender may mark values as ``Claimed``.

    Raises:
        NotPlain: :func:`pack` could not have written it, or it exceeds the limits of depth and number.
    """
    try:
        length, _ = HEAD.unpack_from(frame)
        tree = json.loads(str(frame[HEAD.size : HEAD.size + length], "utf-8"))
        return _Decoder(_tensors(bytes(frame[HEAD.size + length :])), stand_in, claims).decode(tree, 0)
    except NotPlain:
        raise
    except (RecursionError, MemoryError) as error:
        raise NotPlain("nested too deep or too large") from error
    except Exception as error:
        raise NotPlain(f"undecodable ({type(error).__name__})") from error


def enclosed(frame: bytes, numbers: Mapping[str, int], name: str) -> bytes:
    """Return the frame of a dict: ``numbers``, then the value of ``frame`` under ``name``. It is not packed
    again."""
    length, blob = HEAD.unpack_from(frame)
    before = "".join(f'["{key}", {number}], ' for key, number in numbers.items())
    value = frame[HEAD.size : HEAD.size + length]
    tree = b"".join([f'{{"$dict": [{before}["{name}", '.encode(), value, b"]]}"])
    return HEAD.pack(len(tree), blob) + tree + frame[HEAD.size + length :]


def _tensors(blob: bytes) -> dict[str, Tensor]:
    if not blob:
        return {}
    # The header of safetensors names the tensors; a million of them take a minute to read.
    if int.from_bytes(blob[:8], "little") > MAX_JSON:
        raise NotPlain("too many tensors")
    return safetensors.torch.load(blob)


def round_trip(value: Any, claims: bool = False) -> Any:
    """Encode and decode ``value``, which may hold a ``Claimed`` only with ``claims``.

    Raises:
        NotPlain: as :func:`pack` and :func:`unpack`.
    """
    return unpack(pack(value), claims=claims)


def frame_length(buffer: bytes | bytearray, limited: bool = True) -> int | None:
    """Return the length in bytes of the frame at the start of ``buffer``; None while its head is incomplete.

    Raises:
        NotPlain: ``limited`` is True and the frame exceeds the limits.
    """
    if len(buffer) < HEAD.size:
        return None
    tree, blob = HEAD.unpack_from(buffer)
    if limited and (tree > MAX_JSON or blob > MAX_TENSORS):
        raise NotPlain(f"too large: {tree + blob} bytes")
    return HEAD.size + tree + blob


@dataclasses.dataclass(frozen=True)
class _Parts:
    """What a frame holds besides its tree."""

    tensors: dict[str, Tensor]
    asked: list[Asked] | None


def _encode(value: Any, parts: _Parts, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise NotPlain("nested too deep")
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, numpy.generic):
        return _encode(value.item(), parts, depth + 1)
    if isinstance(value, Tensor):
        return _encode_tensor(value, parts.tensors)
    if isinstance(value, torch.dtype) and str(value).removeprefix("torch.") in DTYPES:
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, list):
        return [_encode(item, parts, depth + 1) for item in value]
    if isinstance(value, tuple):
        return {"$tuple": [_encode(item, parts, depth + 1) for item in value]}
    if isinstance(value, dict):
        return {"$dict": [[_encode_key(key), _encode(item, parts, depth + 1)] for key, item in value.items()]}
    kind = type(value)
    if DATACLASSES.get(kind.__name__) == kind.__module__:
        fields = [field.name for field in dataclasses.fields(value)]
        return {
            "$data": kind.__name__,
            "fields": {name: _encode(getattr(value, name), parts, depth + 1) for name in fields},
        }
    if isinstance(value, Asked) and parts.asked is not None:
        parts.asked.append(value)
        return {"$asked": len(parts.asked) - 1, "name": value.name}
    if kind is Claimed:
        return {"$claimed": _encode(value.said, parts, depth + 1)}
    raise NotPlain(
        f"an object of type {kind.__name__[:60]} (plain are numbers, "
        "strings, tensors, lists, tuples, dicts and None)"
    )


def _encode_key(key: Any) -> Any:
    if key is None or type(key) in (bool, int, float, str):
        return key
    raise NotPlain(f"a dict with a key of type {type(key).__name__[:60]}")


def _encode_tensor(value: Tensor, tensors: dict[str, Tensor]) -> dict[str, Any]:
    with torch._C.DisableTorchFunctionSubclass():
        if (
            value.layout is not torch.strided
            or value.device.type == "meta"
            or value.dtype not in DTYPES.values()
        ):
            raise NotPlain(f"a tensor of layout {value.layout}, dtype {value.dtype} on {value.device.type}")
        plain = value.detach().as_subclass(Tensor)  # type: ignore[arg-type]
        name = f"t{len(tensors)}"
        tensors[name] = plain.cpu().contiguous().clone()  # safetensors refuses shared storage
        return {"$tensor": name, "stride": list(plain.stride())}


class _Decoder:
    """Builds values from a parsed tree; checks every tag and every type."""

    def __init__(self, tensors: dict[str, Tensor], stand_in: StandIn | None, claims: bool) -> None:
        self.tensors = tensors
        self.items = 0
        self.tags: dict[str, Callable[[dict[str, Any], int], Any]] = {
            "$tuple": self._tuple,
            "$dict": self._dict,
            "$dtype": lambda node, depth: DTYPES[node["$dtype"]],
            "$tensor": self._tensor,
            "$data": self._dataclass,
        }
        if stand_in is not None:
            self.tags["$asked"] = lambda node, depth: stand_in(int(node["$asked"]), str(node["name"]))
        if claims:
            self.tags["$claimed"] = lambda node, depth: Claimed(self.decode(node["$claimed"], depth))

    def decode(self, node: Any, depth: int) -> Any:
        self.items += 1
        if depth > 2 * MAX_DEPTH or self.items > MAX_ITEMS:
            raise NotPlain("nested too deep or too many items")
        if node is None or type(node) in (bool, int, float):
            return node
        if type(node) is str:
            node.encode()  # raises for a lone surrogate, which no file could contain
            return node
        if type(node) is list:
            return [self.decode(item, depth + 1) for item in node]
        return self.tags[next(iter(node))](node, depth + 1)

    def _tuple(self, node: dict[str, Any], depth: int) -> tuple[Any, ...]:
        return tuple(self.decode(list(node["$tuple"]), depth))

    def _dict(self, node: dict[str, Any], depth: int) -> dict[Any, Any]:
        pairs = [
            (_encode_key(self.decode(key, depth)), self.decode(item, depth)) for key, item in node["$dict"]
        ]
        if len({hash(key) for key, _ in pairs}) < len(pairs) - MAX_COLLISIONS:
            raise NotPlain("a dict whose keys collide")
        return dict(pairs)

    def _tensor(self, node: dict[str, Any], depth: int) -> Tensor:
        # Each tensor once, because a thousand copies of one would fill the memory.
        tensor, stride = self.tensors.pop(node["$tensor"]), node["stride"]
        if (
            tensor.dtype not in DTYPES.values()
            or len(stride) != tensor.dim()
            or not all(type(step) is int and step >= 0 for step in stride)
        ):
            raise NotPlain("a tensor of unknown dtype or stride")
        if list(tensor.stride()) == stride or not tensor.numel():
            return tensor
        span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, stride))
        expanded = any(step == 0 and size > 1 for size, step in zip(tensor.shape, stride))
        if expanded or span > MAX_SPREAD * tensor.numel():
            return tensor
        return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)

    def _dataclass(self, node: dict[str, Any], depth: int) -> Any:
        kind = getattr(importlib.import_module(DATACLASSES[node["$data"]]), node["$data"])
        return kind(**{str(name): self.decode(item, depth) for name, item in node["fields"].items()})
