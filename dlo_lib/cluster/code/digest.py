"""A hash of a call: equal for the same content in another process, different after any change that matters.

A pickle does not serve as a hash, because a notebook's cells have another file name in each kernel, sets
another order, and classes another identity. Instead, this module traverses the value: plain data by value,
containers part by part (sets and mappings without order), functions by their code, their defaults and all
that they use, modules by name, and other objects by what rebuilds them (``__reduce_ex__``). Of code, the
instructions, constants and names count, but not the position: a comment or a moved cell changes nothing. A
function of an importable module counts with its code only.

Cost: linear in the size of the values; a tensor is read once.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_LEFT_OUT = {"__dict__", "__weakref__", "__module__", "__firstlineno__", "__static_attributes__"}
# Annotations. Since Python 3.14 a function computes them, when they are read first.
_LEFT_OUT |= {
    "__annotations__",
    "__annotate__",
    "__annotate_func__",
    "__annotations_cache__",
    "__conditional_annotations__",
}


def digest(value: Any) -> str:
    """Return the hash of ``value``, 64 hexadecimal digits."""
    return _Walk().of(value).hex()


class _Walk:
    """One traversal of a value.

    An object that occurs again is replaced by the number of its first occurrence.
    """

    def __init__(self) -> None:
        self._met: dict[int, int] = {}
        self._kept: list[Any] = []  # keeps objects alive, so that identities stay unique

    def of(self, value: Any) -> bytes:
        if type(value) in _PLAIN:
            return _hash(type(value).__name__, repr(value).encode())
        if isinstance(value, PurePath):
            return _hash("path", str(value).encode())
        if isinstance(value, types.ModuleType):
            return _hash("module", value.__name__.encode())
        if isinstance(value, types.BuiltinFunctionType):
            return _hash("builtin", f"{value.__module__}.{value.__qualname__}".encode())
        if id(value) in self._met:
            return _hash("met", str(self._met[id(value)]).encode())
        self._met[id(value)] = len(self._met)
        self._kept.append(value)
        return self._parts(value)

    def _parts(self, value: Any) -> bytes:
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return _hash("method", self.of(value.__func__), self.of(value.__self__))
        if isinstance(value, types.CodeType):
            return self._code(value)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, enum.Enum):
            return _hash("enum", self.of(type(value)), value.name.encode())
        if type(value) in (list, tuple):
            return _hash(type(value).__name__, *map(self.of, value))
        if type(value) in (set, frozenset):
            return _hash(type(value).__name__, *sorted(_Walk().of(item) for item in value))
        if type(value) is dict:
            return self._mapping("dict", value)
        if dataclasses.is_dataclass(value):
            return _hash(
                "dataclass",
                self.of(type(value)),
                *(self.of(getattr(value, one.name)) for one in dataclasses.fields(value)),
            )
        if isinstance(value, (staticmethod, classmethod)):
            return _hash(type(value).__name__, self.of(value.__func__))
        if isinstance(value, property):
            return _hash("property", *map(self.of, (value.fget, value.fset, value.fdel)))
        return self._rebuilt(value)

    def _mapping(self, kind: str, values: Mapping[Any, Any]) -> bytes:
        return _hash(
            kind,
            *sorted(
                _hash("item", _Walk().of(key), self.of(value))
                for key, value in sorted(values.items(), key=_by_text)
            ),
        )

    def _function(self, function: types.FunctionType) -> bytes:
        parts = [self.of(function.__code__), self.of(function.__defaults__), self.of(function.__kwdefaults__)]
        parts += [self.of(_content(cell)) for cell in function.__closure__ or ()]
        if _is_sent_as_code(function):
            used = sorted(set(_names(function.__code__)) & function.__globals__.keys())
            parts += [_hash(name, self.of(function.__globals__[name])) for name in used]
        return _hash("function", f"{function.__module__}.{function.__qualname__}".encode(), *parts)

    def _code(self, code: types.CodeType) -> bytes:
        names = " ".join(
            (*code.co_names, "|", *code.co_varnames, "|", *code.co_freevars, "|", *code.co_cellvars)
        )
        return _hash(
            "code", code.co_code, names.encode(), str(code.co_flags).encode(), *map(self.of, code.co_consts)
        )

    def _class(self, kind: type) -> bytes:
        name = f"{kind.__module__}.{kind.__qualname__}".encode()
        if not _is_sent_as_code(kind):
            return _hash("class", name)
        own = {
            key: value for key, value in vars(kind).items() if key not in _LEFT_OUT and not _is_slot(value)
        }
        return _hash("own class", name, *map(self.of, kind.__bases__), self._mapping("attributes", own))

    def _rebuilt(self, value: Any) -> bytes:
        if hasattr(value, "untyped_storage"):  # a tensor: its __reduce_ex__ contains a memory address
            alone = value.detach().cpu().contiguous().clone()
            return _hash(
                "tensor",
                str((alone.dtype, tuple(alone.shape), value.requires_grad)).encode(),
                bytes(alone.untyped_storage()),
            )
        parts = value.__reduce_ex__(4)
        if isinstance(parts, str):  # the object's name in its module
            return _hash("global", f"{type(value).__module__}.{parts}".encode())
        return _hash(
            "rebuilt", *(self.of(list(part) if isinstance(part, Iterator) else part) for part in parts)
        )


def _hash(kind: str, *parts: bytes) -> bytes:
    whole = hashlib.sha256(kind.encode())
    for part in parts:
        whole.update(len(part).to_bytes(8, "big") + part)
    return whole.digest()


def _by_text(item: tuple[Any, Any]) -> str:
    return repr(item[0]) if isinstance(item[0], (str, int, float, bool, bytes, type(None))) else ""


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return None


def _is_sent_as_code(thing: Any) -> bool:
    """Whether an object belongs to the script or the notebook, and is therefore sent as code."""
    return thing.__module__ in (None, "__main__")


def _is_slot(value: Any) -> bool:
    return isinstance(value, (types.GetSetDescriptorType, types.MemberDescriptorType))


def _names(code: types.CodeType) -> Iterable[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
