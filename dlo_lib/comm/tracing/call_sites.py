"""The line that makes a call: walk up the Python stack past the frames of torch and of this library.

If no frame is user code, as in ``python -m dlo_lib.train``, it is the line of this library.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from functools import lru_cache
from types import FrameType

import torch

import dlo_lib
from dlo_lib.comm.calls import CallSite

_TORCH = os.path.dirname(torch.__file__) + os.sep
_LIBRARY = os.path.dirname(dlo_lib.__file__) + os.sep
_OURS = tuple(_LIBRARY + room + os.sep for room in ("comm", "launch", "grading/switch"))
_WRAPPERS = {
    "wrapper",
    "_call_impl",
    "_wrapped_call_impl",
    "__call__",
    "inner",
    "decorate_context",
    "_fn",
    "fsdp_hook_wrapper",
}
_BETWEEN = 2
"""Frames of torch that may stand between a function and its caller."""
_MODES = {"__torch_dispatch__", "__torch_function__"}
"""Methods of a mode: they pass on a call that another frame makes."""
_INSTALLED = (sysconfig.get_path("stdlib") + os.sep, os.path.dirname(sys.executable) + os.sep)
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_INTERNAL, _TORCH_CODE, _DISPATCHER_CODE, _LIBRARY_CODE, _PACKAGE_CODE, _USER_CODE = range(6)


def call_site() -> tuple[CallSite, str]:
    """Return the user's line, and torch's innermost function above the dispatcher.

    The latter distinguishes calls of DDP's reducer from calls of the user.
    """
    frame: FrameType | None = sys._getframe(1)
    api = in_torch = ""
    library: FrameType | None = None
    while frame is not None:
        code = frame.f_code
        if code.co_name in _MODES:
            frame = frame.f_back
            continue
        owner = _owner(code.co_filename)
        if owner == _USER_CODE or (owner == _PACKAGE_CODE and library is None):
            site = _site(code.co_filename, frame.f_lineno, code.co_qualname, api, _caller(frame))
            return site, in_torch
        if owner == _LIBRARY_CODE:
            library = library or frame
        elif owner in (_TORCH_CODE, _DISPATCHER_CODE):
            if not in_torch and owner == _TORCH_CODE and code.co_name not in _WRAPPERS:
                in_torch = code.co_name
            # The outermost function of torch below the caller.
            if library is None and code.co_name not in _WRAPPERS:
                api = code.co_name
        frame = frame.f_back
    if library is None:
        return CallSite("?", 0, "", api), in_torch
    return _site(library.f_code.co_filename, library.f_lineno, library.f_code.co_qualname, api), in_torch


def _caller(frame: FrameType) -> tuple[str, int] | None:
    """Return the line of user code that called the function of ``frame``, or None if it was called otherwise.

    A decorator of torch, such as ``no_grad``, or the call of a module may stand between them.
    """
    for _ in range(_BETWEEN + 1):
        if frame.f_back is None:
            return None
        frame = frame.f_back
        owner = _owner(frame.f_code.co_filename)
        if owner == _USER_CODE:
            return frame.f_code.co_filename, frame.f_lineno
        if owner != _TORCH_CODE:
            return None
    return None


@lru_cache(maxsize=4096)
def _owner(file: str) -> int:
    if file.startswith((*_OURS, "<frozen")):
        return _INTERNAL
    if (
        file.startswith(_TORCH)
        or file == "<string>"
        or file.endswith(("/contextlib.py", "/typing_extensions.py"))
    ):
        return _DISPATCHER_CODE if file.endswith(("_ops.py", "c10d_logger.py")) else _TORCH_CODE
    if file.startswith(_LIBRARY):
        return _LIBRARY_CODE
    return (
        _PACKAGE_CODE
        if file.startswith(_INSTALLED) or any(folder in file for folder in _PACKAGES)
        else _USER_CODE
    )


_site = lru_cache(maxsize=4096)(CallSite)
