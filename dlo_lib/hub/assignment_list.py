"""nbgrader's Assignment List as a server extension that holds no memory of a student who does not use it.

nbgrader's own extension imports nbgrader, nbconvert and SQLAlchemy into the server of each student: 35 MB.
This one answers the same requests by a process that runs nbgrader's functions, starts with the first request,
and ends when it has had none for a while.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import sys
from typing import Any

from jupyter_server.base.handlers import JupyterHandler
from jupyter_server.utils import url_path_join
from tornado import web

from dlo_lib.base.interpreter import trusted_python
from dlo_lib.base.text import tr

IDLE_S = 60.0
"""The process ends after this time; to start it takes a second."""
LINE_BYTES = 1 << 24
_MANAGER = "dlo_assignment_list"
_SERVE = "from dlo_lib.hub.assignment_list import serve; serve()"
_CHANGES = {"fetch": "fetch_assignment", "submit": "submit_assignment", "fetch_feedback": "fetch_feedback"}
"""Action of a page → method of nbgrader's ``AssignmentList``."""
_IDS = ("course_id", "assignment_id")
_CALLS = {"list_assignments", "list_courses", *_CHANGES.values()}


class AssignmentProcess:
    """Calls methods of nbgrader's ``AssignmentList`` in another process.

    Args:
        folder: of the labs, whose settings of nbgrader have the last word.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._end: asyncio.TimerHandle | None = None

    @property
    def runs(self) -> bool:
        """Whether there is a process."""
        return self._process is not None and self._process.returncode is None

    async def call(self, method: str, **arguments: str) -> dict[str, Any]:
        """Return what the method returns, or that the process was killed, in nbgrader's form."""
        async with self._lock:
            if self._end is not None:
                self._end.cancel()
            process = await self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            line = b""
            try:
                process.stdin.write(json.dumps([method, arguments]).encode() + b"\n")
                await process.stdin.drain()
                line = await process.stdout.readline()
            except ConnectionError:  # it has ended
                pass
            if not line.endswith(b"\n"):
                await process.wait()
                text = tr("the process of nbgrader ended (out of memory?): try again")
                return {"success": False, "value": text}
            self._end = asyncio.get_running_loop().call_later(IDLE_S, self._close)
            answer: dict[str, Any] = json.loads(line)
            return answer

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None or not self.runs:
            self._process = await asyncio.create_subprocess_exec(
                *trusted_python(_SERVE),
                cwd=self._folder,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=LINE_BYTES,
            )
        return self._process

    def _close(self) -> None:
        """Let the process end, which has no request: the next one cancels this call."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process = None


class _Handler(JupyterHandler):
    @property
    def nbgrader(self) -> AssignmentProcess:
        return self.settings[_MANAGER]  # type: ignore[no-any-return]

    async def finish_with(self, method: str, **arguments: str) -> None:
        """Answer with what a method of nbgrader returns."""
        self.finish(json.dumps(await self.nbgrader.call(method, **arguments)))


class ListHandler(_Handler):
    """The labs of a course."""

    @web.authenticated
    async def get(self) -> None:
        """Answer ``/assignments?course_id=COURSE``."""
        await self.finish_with("list_assignments", course_id=self.get_argument("course_id"))


class ActionHandler(_Handler):
    """Fetch or submit a lab, or fetch its feedback; then the list again."""

    @web.authenticated
    async def post(self, action: str) -> None:
        """Answer ``/assignments/ACTION`` with the ids of a course and a lab, in the form or as JSON."""
        lab = self._lab()
        done = await self.nbgrader.call(_CHANGES[action], **lab)
        if action == "submit" and not done["success"]:
            self.finish(json.dumps(done))
        else:
            await self.finish_with("list_assignments", course_id=lab["course_id"])

    def _lab(self) -> dict[str, str]:
        """Return the ids of the request; one without them is a mistake of the client, status 400."""
        try:
            return {name: self.get_argument(name) for name in _IDS}
        except web.MissingArgumentError:
            body = self.get_json_body()
        if not isinstance(body, dict) or not all(isinstance(body.get(name), str) for name in _IDS):
            raise web.HTTPError(400, tr("the request needs the texts {names}", names=" and ".join(_IDS)))
        return {name: body[name] for name in _IDS}


class CoursesHandler(_Handler):
    """The courses of the user."""

    @web.authenticated
    async def get(self) -> None:
        """Answer ``/courses``."""
        await self.finish_with("list_courses")


class VersionHandler(_Handler):
    """Whether the page has the version of the installed nbgrader."""

    @web.authenticated
    def get(self) -> None:
        """Answer ``/nbgrader_version?version=VERSION``."""
        page, installed = self.get_argument("version"), importlib.metadata.version("nbgrader")
        text = "the page has nbgrader {page} and the server {installed}: reload the page; reinstall nbgrader"
        same = {"success": True} if page == installed else {}
        self.finish(
            json.dumps(same or {"success": False, "message": tr(text, page=page, installed=installed)})
        )


def serve() -> None:
    """Serve requests of :class:`AssignmentProcess` on the standard streams until the first one ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what nbgrader prints goes to the server's log
    from nbgrader.server_extensions.assignment_list.handlers import AssignmentList

    manager = AssignmentList()
    manager.root_dir = os.getcwd()
    for line in sys.stdin:
        method, arguments = json.loads(line)
        if method not in _CALLS:
            raise ValueError(f"no method {method}")
        print(json.dumps(getattr(manager, method)(**arguments)), file=answers, flush=True)


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": __name__}]


def _load_jupyter_server_extension(server: Any) -> None:
    server.web_app.settings[_MANAGER] = AssignmentProcess(server.root_dir)
    base = server.web_app.settings["base_url"]
    handlers: list[tuple[str, type[_Handler]]] = [
        (r"/assignments", ListHandler),
        (rf"/assignments/(?P<action>{'|'.join(_CHANGES)})", ActionHandler),
        (r"/courses", CoursesHandler),
        (r"/nbgrader_version", VersionHandler),
    ]
    server.web_app.add_handlers(".*$", [(url_path_join(base, path), handler) for path, handler in handlers])
