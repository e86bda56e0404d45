"""In the student's process: runs the cells and answers requests with plain data. Nothing here is trusted by the judge.

Each cell is read by transformers of its own, so that no cell can change how a later one is read. A cell that fails does not stop those
after it, as in a notebook. What cells print is counted and thrown away; nothing that is printed is ever read as an answer.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import linecache
import random
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy
import torch
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import dlo_lib.grading
from dlo_lib.grading.channel import Channel
from dlo_lib.grading.codec import DATACLASSES, NotPlain, pack
from dlo_lib.grading.contract import Scenario
from dlo_lib.grading.faults import Fault, fault_of
from dlo_lib.grading.student import Direct, run_scenario
from dlo_lib.grading.switch.link import Link

MAX_OUTPUT = 1 << 20  # characters of one cell beyond which its output counts as cut


class Shell(InteractiveShell):
    """The shell behind magics and ``get_ipython()``; cells do not run through it."""

    def ask_exit(self) -> None:
        """``exit`` in a cell ends the cell."""
        raise SystemExit

    def enable_gui(self, gui: str | None = None) -> None:
        """There is no screen."""

    def enable_matplotlib(self, gui: str | None = None) -> tuple[str, str]:
        """Figures are drawn for nobody."""
        return "inline", "agg"


class SilentLab:
    """``Lab`` as cells find it here: checks and hints are the notebook's, the judge has its own."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class Counter(io.TextIOBase):
    """Counts what is written."""

    size = 0

    def write(self, text: str) -> int:
        """Throw it away."""
        self.size += len(text)
        return len(text)


def prepare() -> Shell:
    """What every worker needs, made once before the fork."""
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    shell = Shell.instance(config=config)
    shell.display_pub = CapturingDisplayPublisher()
    for module in set(DATACLASSES.values()):
        __import__(module)
    return shell


def seed() -> None:
    """Where every worker's random numbers begin, said once before the fork: to ask each accelerator, as torch does, would touch 500 pages
    of memory that a worker shares until then."""
    numpy.random.seed(0)
    torch.manual_seed(0)


def serve(line: socket.socket) -> None:
    """Answer requests until the judge hangs up."""
    channel = Channel(line, limited=False)
    dlo_lib.grading.Lab = SilentLab  # type: ignore[misc,assignment]
    sys.argv = ["notebook"]
    random.seed(0)  # a fork has changed it
    shell = Shell.instance()
    while True:
        try:
            request = channel.receive()
        except (EOFError, OSError):
            return
        try:
            reply = {"id": request["id"], "value": _answer(request, shell.user_ns, channel)}
            pack(reply)
        except NotPlain as error:
            reply = {"id": request["id"], "fault": asdict(Fault("NotPlain", str(error)))}
        except BaseException as error:  # noqa: BLE001  whatever the student's code raises is told, and the worker lives on
            reply = {"id": request["id"], "fault": asdict(fault_of(error))}
        channel.send(reply)


def _answer(request: Mapping[str, Any], names: dict[str, Any], channel: Channel) -> Any:
    match request["do"]:
        case "load":
            return [_run_cell(cell, names, channel) for cell in request["cells"]]
        case "get":
            return _lookup(names, request["name"])
        case "call":
            with _silence():
                return _lookup(names, request["name"])(*request["args"], **request["kwargs"])
        case "rank":
            with _silence():
                return _run_rank(request, names, channel)
    raise ValueError(request["do"])


class Missing(NameError):
    """No cell defined that name."""


def _lookup(names: Mapping[str, Any], name: str) -> Any:
    if name not in names:
        raise Missing(name)
    return names[name]


def _run_cell(cell: Mapping[str, str], names: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """Run one cell: its fault, if any, and whether it wrote too much."""
    channel.send({"cell": cell["id"]})
    fault = None
    with _silence() as output:
        try:
            source = TransformerManager().transform_cell(cell["source"])
            file = f"<cell {cell['id']}>"
            if cell["own"]:
                linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
            code = compile(source, file, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            result = eval(code, names)
            if code.co_flags & inspect.CO_COROUTINE:  # a cell may await, as in a notebook
                asyncio.run(result)
        except BaseException as error:  # noqa: BLE001  also SystemExit: a notebook goes on with the next cell
            fault = asdict(fault_of(error))
    return {"cell": cell["id"], "fault": fault, "cut": output.size > MAX_OUTPUT}


def _run_rank(request: Mapping[str, Any], names: Mapping[str, Any], channel: Channel) -> Any:
    """Run the scenario with the switch, at the other end of the channel, as its process group."""
    scenario = Scenario(request["name"], request["source"])
    return run_scenario(scenario, Direct(names), request["rank"], request["world"], request["inputs"], Link(channel.line))


@contextlib.contextmanager
def _silence() -> Iterator[Counter]:
    counter = Counter()
    with contextlib.redirect_stdout(counter), contextlib.redirect_stderr(counter):
        yield counter
