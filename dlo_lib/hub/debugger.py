"""The debugger of a notebook, loaded by the first request that needs it.

ipykernel imports debugpy with the kernel, which holds 40 MB of each student who never opens the debugger.
:func:`defer` puts a small module in the place of ``ipykernel.debugger``; the first request of the debugger
puts back ipykernel's own, which serves this and all later requests.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from typing import Any

from ipykernel.compiler import get_tmp_directory, get_tmp_hash_seed
from tornado.locks import Event

_MODULE = "ipykernel.debugger"


class DeferredDebugger:
    """What an ipykernel needs of its debugger; the arguments are those of ``ipykernel.debugger.Debugger``.

    All methods run in the thread of the kernel's control channel.
    """

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments
        self._debugger: Any = None
        self._loaded = Event()

    @property
    def tcp_client(self) -> Any:
        """The connection to debugpy, which exists when it sends something."""
        return self._debugger.tcp_client

    async def handle_stopped_event(self) -> None:
        """Wait until a cell stops at a breakpoint, and report it."""
        await self._loaded.wait()
        await self._debugger.handle_stopped_event()

    async def process_request(self, message: dict[str, Any]) -> dict[str, Any]:
        """Answer a request of JupyterLab."""
        if self._debugger is None:
            if message["command"] == "debugInfo":
                return _not_started(message)
            self._load()
        reply: dict[str, Any] = await self._debugger.process_request(message)
        return reply

    def _load(self) -> None:
        if isinstance(sys.modules[_MODULE], _Deferred):
            del sys.modules[_MODULE]
        self._debugger = importlib.import_module(_MODULE).Debugger(*self._arguments)
        self._loaded.set()


class _Deferred(types.ModuleType):
    """Stands for ``ipykernel.debugger`` until it is needed."""

    Debugger = DeferredDebugger
    _is_debugpy_available = True


def defer() -> None:
    """Let ipykernel use :class:`DeferredDebugger`, if debugpy is installed."""
    if _MODULE not in sys.modules and importlib.util.find_spec("debugpy") is not None:
        sys.modules[_MODULE] = _Deferred(_MODULE)


def _not_started(message: dict[str, Any]) -> dict[str, Any]:
    """Return ipykernel's answer to ``debugInfo``, which JupyterLab asks for with each notebook it opens."""
    return {
        "type": "response",
        "request_seq": message["seq"],
        "success": True,
        "command": message["command"],
        "body": {
            "isStarted": False,
            "hashMethod": "Murmur2",
            "hashSeed": get_tmp_hash_seed(),
            "tmpFilePrefix": get_tmp_directory() + os.sep,
            "tmpFileSuffix": ".py",
            "breakpoints": [],
            "stoppedThreads": [],
            "richRendering": True,
            "exceptionPaths": ["Python Exceptions"],
            "copyToGlobals": True,
        },
    }
