"""Where a call comes from: the person's own line, found by walking up the Python stack past torch's frames and ours."""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from types import FrameType

import torch

from dlo_lib.comm.calls import Site

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(os.path.abspath(__file__))
_OURS = tuple(os.path.join(os.path.dirname(_HERE), room) + os.sep for room in ("comm", "launch", "grading/switch"))
_PLUMBING = {"wrapper", "_call_impl", "_wrapped_call_impl", "__call__", "inner", "decorate_context"}
_OURS_, _TORCHS, _DISPATCHERS, _PERSONS = range(4)


def call_site() -> tuple[Site, str]:
    """The person's line, and torch's innermost function above the dispatcher (which tells DDP's reducer from a person's call)."""
    frame: FrameType | None = sys._getframe(1)
    api = in_torch = ""
    while frame is not None:
        code = frame.f_code
        owner = _owner(code.co_filename)
        if owner == _PERSONS:
            return _site(code.co_filename, frame.f_lineno, code.co_qualname, api), in_torch
        if owner != _OURS_:
            if not in_torch and owner == _TORCHS:
                in_torch = code.co_name
            if code.co_name not in _PLUMBING:
                api = code.co_name
        frame = frame.f_back
    return Site("?", 0, "", api), in_torch


@lru_cache(maxsize=4096)
def _owner(file: str) -> int:
    if file.startswith((*_OURS, "<frozen")):
        return _OURS_
    if file.startswith(_TORCH) or file == "<string>" or file.endswith(("/contextlib.py", "/typing_extensions.py")):
        return _DISPATCHERS if file.endswith(("_ops.py", "c10d_logger.py")) else _TORCHS
    return _PERSONS


_site = lru_cache(maxsize=4096)(Site)
