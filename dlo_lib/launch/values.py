"""Values sent between the caller and its ranks: functions and arguments to the ranks, results back.

cloudpickle sends functions and classes of ``__main__`` (a script, a notebook's cells) as code, and those of a
module as an import that each rank performs. A module that an ordinary import would not find (loaded from a
path, rewritten by a test runner) is sent as code too.

Two things are not left to cloudpickle. Code keeps the name of its file, which stacks and the explanation of a
deadlock show, and by which torch.compile finds its source; cloudpickle 3.1.3 replaces it. Functions of the
caller's ``__main__`` have the rank's ``__main__`` as their globals, at any depth of the call, because
torch.compile looks for the global names of a function in the module of that name.
"""

from __future__ import annotations

import dis
import importlib
import importlib.machinery
import io
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from dlo_lib.base.errors import UserError

_ADVICE = "send plain data and tensors, and open files, locks and connections inside the function"


def pack_call(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    modules: set[str] | None = None,
) -> bytes:
    """Return ``fn(*args, **kwargs)`` as bytes.

    Args:
        modules: receives the names of the modules that the call needs when it is unpacked and runs: of
            functions and classes that are sent as an import, and of imports inside of functions.

    Raises:
        UserError: the function or an argument cannot be sent to another process; the message names it.
    """
    _send_unimportable_modules_as_code()
    try:
        whole = (fn, tuple(args), dict(kwargs))
        if modules is None:
            return _pickled(whole, _CallPickler)
        return _pickled(whole, lambda buffer: _ImportsPickler(buffer, modules))
    except Exception as error:
        name = getattr(fn, "__qualname__", repr(fn))
        parts = {f"the function {name} (or something it uses)": fn}
        parts |= {f"args[{position}] of {name}": value for position, value in enumerate(args)}
        parts |= {f"argument {key} of {name}": value for key, value in kwargs.items()}
        culprit = next((part for part, value in parts.items() if not _can_be_sent(value)), "the call")
        raise UserError(f"{culprit} cannot be sent to the ranks ({_first_line(error)}): {_ADVICE}") from error


def unpack_call(
    data: bytes, main: dict[str, Any] | None = None
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return the function, the positional and the keyword arguments of :func:`pack_call`.

    Args:
        main: becomes the globals of the functions of the caller's ``__main__``, and receives the names that
            they use; None: a new dict.
    """
    token = _MAIN.set({} if main is None else main)
    try:
        return cloudpickle.loads(data)
    finally:
        _MAIN.reset(token)


def pack_variables(values: Mapping[str, Any]) -> bytes:
    """Return variables with their names as bytes, which ``unpack_result`` reads.

    Raises:
        UserError: a value cannot be sent to another process; the message names it.
    """
    _send_unimportable_modules_as_code()
    try:
        return _pickled(dict(values))
    except Exception as error:
        culprit = next((name for name, value in values.items() if not _can_be_sent(value)), "a variable")
        raise UserError(f"{culprit} cannot be sent to the ranks ({_first_line(error)}): {_ADVICE}") from error


def pack_result(value: Any) -> bytes:
    """Return a rank's result as bytes.

    Raises:
        UserError: the result cannot be sent to another process.
    """
    try:
        return _pickled(value, _ResultPickler)
    except UserError as error:  # of an object that knows why, such as a gradient that another rank holds
        raise UserError(f"returned a {type(value).__name__} that cannot be sent back: {error}") from error
    except Exception as error:
        kind = type(value).__name__
        raise UserError(
            f"returned a {kind} that cannot be sent back ({_first_line(error)}): "
            "return tensors and plain data"
        ) from error


def unpack_result(data: bytes | bytearray) -> Any:
    """Return the result of :func:`pack_result`."""
    return cloudpickle.loads(data)


_MAIN: ContextVar[dict[str, Any]] = ContextVar("_MAIN")


def _globals_of_main(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the dict that replaces the caller's ``__main__`` where a call is unpacked."""
    main = _MAIN.get({})
    main.update(attributes)
    return main


class _GlobalsOfMain:
    """Stands for the globals of the caller's ``__main__``; ``attributes`` are used by relative imports."""

    def __init__(self, main: Mapping[str, Any]) -> None:
        names = ("__name__", "__package__", "__path__", "__file__")
        self.attributes = {name: main[name] for name in names if name in main}

    def __reduce__(self) -> tuple[Callable[[dict[str, Any]], dict[str, Any]], tuple[dict[str, Any]]]:
        return _globals_of_main, (self.attributes,)


def _code_with_its_file(code: CodeType) -> tuple[type[CodeType], tuple[Any, ...]]:
    return CodeType, (
        code.co_argcount,
        code.co_posonlyargcount,
        code.co_kwonlyargcount,
        code.co_nlocals,
        code.co_stacksize,
        code.co_flags,
        code.co_code,
        code.co_consts,
        code.co_names,
        code.co_varnames,
        code.co_filename,
        code.co_name,
        code.co_qualname,
        code.co_firstlineno,
        code.co_linetable,
        code.co_exceptiontable,
        code.co_freevars,
        code.co_cellvars,
    )


class _Pickler(cloudpickle.Pickler):
    """Sends a tensor that is a view without the rest of its storage, every module as an import, and code with
    the name of its file.

    cloudpickle knows modules of the class ``ModuleType`` only, but ``torch.distributed.config`` and others
    have another class. It also sends that module with a function that uses ``dist`` and any attribute
    ``.config``.
    """

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is CodeType:
            return _code_with_its_file(obj)
        if _is_imported_with_own_class(obj):
            return importlib.import_module, (obj.__name__,)
        if type(obj) is Tensor and (copy := self._without_storage(obj)) is not obj:
            return copy.__reduce_ex__(cloudpickle.DEFAULT_PROTOCOL)
        return super().reducer_override(obj)

    def _without_storage(self, tensor: Tensor) -> Tensor:
        if (
            tensor.layout is not torch.strided
            or tensor.device.type == "meta"
            or tensor.untyped_storage().nbytes() <= tensor.nbytes
        ):
            return tensor
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _is_imported_with_own_class(obj: object) -> bool:
    return (
        isinstance(obj, ModuleType) and type(obj) is not ModuleType and sys.modules.get(obj.__name__) is obj
    )


class _CallPickler(_Pickler):
    """Sends functions of ``__main__`` without their own globals: they use those of the rank's ``__main__``.

    A notebook that is run by a program has several namespaces called ``__main__``; this applies to the first
    that the call needs.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._main: dict[str, Any] | None = None

    def reducer_override(self, obj: Any) -> Any:
        if (
            self._main is None
            and isinstance(obj, FunctionType)
            and obj.__globals__.get("__name__") == "__main__"
        ):
            self._main = obj.__globals__
            self.globals_ref[id(self._main)] = _GlobalsOfMain(self._main)
        return super().reducer_override(obj)


class _ResultPickler(_Pickler):
    """Sends tensors as CPU tensors, so that the caller can read them without a GPU."""

    def _without_storage(self, tensor: Tensor) -> Tensor:
        if tensor.device.type in ("cpu", "meta"):
            return super()._without_storage(tensor)
        return tensor.detach().cpu().requires_grad_(tensor.requires_grad)


class _ImportsPickler(_CallPickler):
    """Records the modules that the sent objects import, when it is asked for an id of each object."""

    def __init__(self, file: io.BytesIO, modules: set[str]) -> None:
        super().__init__(file)
        self._modules = modules
        self._as_code = cloudpickle.list_registry_pickle_by_value()

    def persistent_id(self, obj: Any) -> None:
        if isinstance(obj, CodeType):
            self._modules |= set(_imports_of(obj))
        elif isinstance(obj, ModuleType):
            self._modules.add(obj.__name__)
        elif isinstance(obj, (FunctionType, type)) and isinstance(name := obj.__module__, str):
            by_code = name == "__main__" or any(f"{name}.".startswith(f"{sent}.") for sent in self._as_code)
            self._modules |= set() if by_code else {name}


def _imports_of(code: CodeType) -> Iterator[str]:
    """Yield the names that the statements ``import`` of a code object import, without relative ones."""
    base = ""
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            base = str(step.argval)
            yield base
        elif step.opname == "IMPORT_FROM":
            yield f"{base}.{step.argval}"


def _pickled(value: Any, pickler: Callable[[io.BytesIO], cloudpickle.Pickler] = _Pickler) -> bytes:
    buffer = io.BytesIO()
    pickler(buffer).dump(value)
    return buffer.getvalue()


def _can_be_sent(value: Any) -> bool:
    try:
        _pickled(value)
    except Exception:  # noqa: BLE001  __reduce__ may raise any exception
        return False
    return True


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _send_unimportable_modules_as_code() -> None:
    installed = (sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"))
    tops: dict[str, importlib.machinery.ModuleSpec | None] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(module, ModuleType) or module.__name__ != name or name == "__main__":
            continue
        if (
            file is None
            or not file.endswith(".py")
            or file.startswith(installed)
            or name in cloudpickle.list_registry_pickle_by_value()
        ):
            continue
        top = name.partition(".")[0]
        if top not in tops:
            tops[top] = _find(top)
        ordinary = type(getattr(module, "__loader__", None)) is importlib.machinery.SourceFileLoader
        if not (ordinary and _loads_file(tops[top], name, file)):
            cloudpickle.register_pickle_by_value(module)


def _find(top: str) -> importlib.machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        spec = finder.find_spec(top, None) if hasattr(finder, "find_spec") else None
        if spec is not None:
            return spec
    return None


def _loads_file(top: importlib.machinery.ModuleSpec | None, name: str, file: str) -> bool:
    """Whether an import of ``name``, whose first part has the spec ``top``, loads ``file``."""
    if top is None:
        return False
    if "." not in name and top.origin is not None:
        return os.path.exists(top.origin) and os.path.samefile(top.origin, file)
    rest = name.split(".")[1:]
    for folder in top.submodule_search_locations or ():
        stem = os.path.join(folder, *rest)
        if any(
            os.path.exists(path) and os.path.samefile(path, file)
            for path in (f"{stem}.py", os.path.join(stem, "__init__.py"))
        ):
            return True
    return False
