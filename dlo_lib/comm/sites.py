"""Where a call comes from: the person's own line, found by walking up the Python stack past torch's frames and this library's.

Where the library runs itself (``python -m dlo_lib.train``, whatever package has parsed its arguments), it is the library's own line.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from functools import lru_cache
from types import FrameType

import torch

from dlo_lib.comm.calls import Site

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(os.path.abspath(__file__))
_LIBRARY = os.path.dirname(_HERE) + os.sep
_OURS = tuple(_LIBRARY + room + os.sep for room in ("comm", "launch", "grading/switch"))
_PLUMBING = {"wrapper", "_call_impl", "_wrapped_call_impl", "__call__", "inner", "decorate_context", "_fn", "fsdp_hook_wrapper"}
_INSTALLED = (sysconfig.get_path("stdlib") + os.sep, os.path.dirname(sys.executable) + os.sep)
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_OURS_, _TORCHS, _DISPATCHERS, _LIBRARYS, _OTHERS, _PERSONS = range(6)


def call_site() -> tuple[Site, str]:
    """The person's line, and torch's innermost function above the dispatcher (which tells DDP's reducer from a person's call)."""
    frame: FrameType | None = sys._getframe(1)
    api = in_torch = ""
    library: FrameType | None = None
    while frame is not None:
        code = frame.f_code
        owner = _owner(code.co_filename)
        if owner == _PERSONS or (owner == _OTHERS and library is None):
            return _site(code.co_filename, frame.f_lineno, code.co_qualname, api), in_torch
        if owner == _LIBRARYS:
            library = library or frame
        elif owner in (_TORCHS, _DISPATCHERS):
            if not in_torch and owner == _TORCHS:
                in_torch = code.co_name
            if library is None and code.co_name not in _PLUMBING:  # what the library calls, not through what torch called the library
                api = code.co_name
        frame = frame.f_back
    if library is None:
        return Site("?", 0, "", api), in_torch
    return _site(library.f_code.co_filename, library.f_lineno, library.f_code.co_qualname, api), in_torch


@lru_cache(maxsize=4096)
def _owner(file: str) -> int:
    if file.startswith((*_OURS, "<frozen")):
        return _OURS_
    if file.startswith(_TORCH) or file == "<string>" or file.endswith(("/contextlib.py", "/typing_extensions.py")):
        return _DISPATCHERS if file.endswith(("_ops.py", "c10d_logger.py")) else _TORCHS
    if file.startswith(_LIBRARY):
        return _LIBRARYS
    return _OTHERS if file.startswith(_INSTALLED) or any(folder in file for folder in _PACKAGES) else _PERSONS


_site = lru_cache(maxsize=4096)(Site)
