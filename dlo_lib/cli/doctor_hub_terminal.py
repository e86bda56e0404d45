"""The part of `dlo doctor --hub` for the terminal of a course: open it as a grader, and type a command.

JupyterLab's terminal speaks terminado's protocol on a WebSocket: messages are lists in JSON, ``["stdin",
text]`` to the shell, and ``["stdout", text]`` and ``["disconnect", 1]`` from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dlo_lib.base.text import tr
from dlo_lib.cli.diagnosis import Diagnosis, fault, passed
from dlo_lib.hub.membership import HubApi
from dlo_lib.hub.settings import HubCourse, HubSettings

_ANSWER_S = 60
_MARK = "dlo-doctor:"
_TYPED = 'echo "dlo-""doctor:$(command -v dlo)"\r'
"""The shell prints what is typed, too: only its answer has the mark in one piece."""


def examine_terminal(settings: HubSettings, course: HubCourse, token: str) -> Diagnosis:
    """Open a terminal in the service of ``course`` with the rights of ``token``, and look for `dlo` in it."""
    name = f"terminal of {course.name}"
    repeat = tr("repeat dlo course --hub {file}, and restart the Hub", file=settings.file)
    address = f"{settings.address}/services/{course.name}"
    server = HubApi(address, token)
    try:
        made = server("POST", "/api/terminals", {})["name"]
        try:
            with ThreadPoolExecutor(1) as thread:  # the caller may run in a loop of events, as in a notebook
                work = thread.submit(asyncio.run, _answer(f"{address}/terminals/websocket/{made}", token))
                said = work.result()
        finally:
            with contextlib.suppress(urllib.error.HTTPError):  # 404: its shell has ended, and so it is gone
                server("DELETE", f"/api/terminals/{made}")
    except (OSError, TimeoutError, KeyError) as error:
        cure = tr('look for "Service {name}" in the log of the Hub', name=course.name)
        return fault(name, cure, "it does not open ({error})", error=str(error) or type(error).__name__)
    program = str(settings.environment / "bin" / "dlo")
    if (found := said.rpartition(_MARK)[2].split()[:1] if _MARK in said else None) is None:
        text, last = 'the shell of {account} ends at once: "{said}"', " ".join(said.split()[-12:])
        return fault(name, repeat, text, account=course.account, said=last)
    if found != [program]:
        text, where = "dlo is {found} in it, and not {program}", (found or ["absent"])[0]
        return fault(name, repeat, text, found=where, program=program)
    return passed(name, "{account} has a shell, and dlo in it", account=course.account)


async def _answer(url: str, token: str) -> str:
    """Return what the shell prints after a command, or until it ends.

    Raises:
        OSError: the server refuses the connection.
    """
    from tornado.httpclient import HTTPClientError, HTTPRequest
    from tornado.websocket import WebSocketClosedError, websocket_connect

    request = HTTPRequest(
        url.replace("http", "ws", 1), headers={"Authorization": f"token {token}"}, request_timeout=_ANSWER_S
    )
    try:
        socket = await websocket_connect(request)
    except HTTPClientError as error:
        if error.code != 404:
            raise OSError(str(error)) from error
        return ""  # the shell has ended, and with it the terminal
    try:
        with contextlib.suppress(WebSocketClosedError):  # the shell has ended: what it said is waiting
            await socket.write_message(json.dumps(["stdin", _TYPED]))
        return await asyncio.wait_for(_until_answered(socket), _ANSWER_S)
    finally:
        socket.close()


async def _until_answered(socket: Any) -> str:
    said = ""
    while (message := await socket.read_message()) is not None:
        kind, *content = json.loads(message)
        if kind == "disconnect":
            break
        said += content[0] if kind == "stdout" else ""
        if _MARK in said and "\n" in said.rpartition(_MARK)[2]:
            break
    return said
