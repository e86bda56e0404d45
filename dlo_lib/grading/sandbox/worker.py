"""The loop of the student's process: it runs cells and answers the judge's questions with plain data.

The judge trusts nothing here. Each cell is read by new input transformers, so that no cell can change how a
later one is read. A cell that fails does not stop the next ones, as in a notebook. The output of cells is
counted and discarded; the judge never reads it.
"""

from __future__ import annotations

import ast
import asyncio
import base64
import contextlib
import gc
import inspect
import io
import json
import linecache
import marshal
import random
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from types import CodeType
from typing import Any, NoReturn

import numpy
import torch
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import dlo_lib.grading
import dlo_lib.launch
from dlo_lib.base.worker_start import start_workers_by_fork
from dlo_lib.grading.checks.codec import DATACLASSES, NotPlain, pack
from dlo_lib.grading.checks.contract import Scenario
from dlo_lib.grading.checks.faults import Fault, fault_of
from dlo_lib.grading.sandbox.asking import Asking
from dlo_lib.grading.sandbox.channel import Channel
from dlo_lib.grading.sandbox.without_compiler import use_operators_in_compiled_code
from dlo_lib.grading.switch.link import Link
from dlo_lib.grading.switch.own_memory import return_free_memory
from dlo_lib.grading.switch.scenario import DirectNames, call_scenario, names_used, run_scenario

MAX_OUTPUT = 1 << 20  # characters of one cell; more output is reported as cut
# Magics that define nothing, and the help of a name. IPython overwrites 3 to 4 MiB of memory for each.
WITHOUT_EFFECT = re.compile(
    r"^%%time\b.*$|^%(timeit|matplotlib|config|load_ext|autoreload)\b.*$"
    r"|^\?{1,2}[\w.]+[ \t]*$|^[\w.]+\?{1,2}[ \t]*$"
    r"|\A\s*%%ranks?\b(?s:.*)",  # a cell that runs on ranks of the notebook
    re.MULTILINE,
)


class Shell(InteractiveShell):
    """The shell of magics and ``get_ipython()``; cells do not run through it."""

    def ask_exit(self) -> None:
        """End the cell that calls ``exit``."""
        raise SystemExit

    def enable_gui(self, gui: str | None = None) -> None:
        """Do nothing, because there is no screen."""

    def enable_matplotlib(self, gui: str | None = None) -> tuple[str, str]:
        """Select the backend without a screen."""
        return "inline", "agg"


class SilentLab:
    """Replaces ``Lab`` in cells: its methods do nothing, because the judge runs the checks."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def refuse_ranks(*_: object, **__: object) -> NoReturn:
    """Replace ``run_ranks`` in cells: a worker starts no processes, and trying it takes 13 MiB."""
    raise PermissionError("run_ranks starts no ranks while a lab is graded")


class OutputCounter(io.TextIOBase):
    """A stream that counts the characters written to it and discards them."""

    size = 0

    def write(self, text: str) -> int:
        """Count ``text`` and discard it."""
        self.size += len(text)
        return len(text)


def prepare() -> Shell:
    """Create the shell that every worker uses; called once, before the fork."""
    start_workers_by_fork()
    use_operators_in_compiled_code()
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    shell = Shell.instance(config=config)
    shell.display_pub = CapturingDisplayPublisher()
    for module in set(DATACLASSES.values()):
        __import__(module)
    return shell


def seed() -> None:
    """Seed the random numbers of all workers; called once, before the fork.

    In a worker, ``torch.manual_seed`` would ask each accelerator and touch 500 shared pages of memory.
    """
    numpy.random.seed(0)
    torch.manual_seed(0)


def serve(line: socket.socket) -> None:
    """Answer requests until the judge closes the channel."""
    channel = Channel(line, limited=False)
    asking = Asking(channel)
    dlo_lib.grading.Lab = SilentLab  # type: ignore[misc,assignment]
    dlo_lib.launch.run_ranks = refuse_ranks  # type: ignore[assignment]
    sys.argv = ["notebook"]
    random.seed(0)  # a fork reseeds it
    shell = Shell.instance()
    while True:
        try:
            request = channel.receive()
        except (EOFError, OSError):
            return
        asking.begin(request["id"])
        try:
            reply = {"id": request["id"], "value": _answer(request, shell.user_ns, channel, asking)}
            pack(reply)
        except NotPlain as error:
            reply = {"id": request["id"], "fault": asdict(Fault("NotPlain", str(error)))}
        except BaseException as error:  # noqa: BLE001  each error of the student's code becomes a reply
            reply = {"id": request["id"], "fault": asdict(fault_of(error))}
        asking.end()
        channel.send(reply)


def _answer(request: Mapping[str, Any], names: dict[str, Any], channel: Channel, asking: Asking) -> Any:
    match request["do"]:
        case "load":
            announce = channel.send if request.get("announced", True) else _say_nothing
            reports = [_run_cell(cell, names, announce) for cell in json.loads(request["cells"])]
            if request.get("measured"):  # what a mark returns too must not count as what the cells hold
                gc.collect()
                return_free_memory()
            return reports
        case "get":
            return _lookup(names, request["name"])
        case "call":
            with _silence():
                return _lookup(names, request["name"])(*request["args"], **request["kwargs"])
        case "run":
            scenario = Scenario(request["name"], request["source"])
            student = DirectNames({name: _lookup(names, name) for name in names_used(scenario)})
            with _silence():
                return call_scenario(scenario, student, request["inputs"])
        case "rank":
            link = Link(channel.line)
            asking.switch = link.ask
            with _silence():
                return run_rank(request, names, link)
    raise ValueError(request["do"])


class Missing(NameError):
    """No cell has defined the name."""


def _lookup(names: Mapping[str, Any], name: str) -> Any:
    if name not in names:
        raise Missing(name)
    return names[name]


def _say_nothing(message: Mapping[str, str]) -> None:
    """Announce no cell."""


def _run_cell(
    cell: Mapping[str, Any], names: dict[str, Any], announce: Callable[[dict[str, str]], None]
) -> dict[str, Any]:
    """Run one cell; return its id, its fault or None, and whether its output was cut."""
    announce({"cell": cell["id"]})
    fault = None
    with _silence() as output:
        try:
            if compiled := cell.get("code"):
                code = marshal.loads(base64.b64decode(compiled))
            else:
                code = _compiled(cell["source"], f"<cell {cell['id']}>", cell["own"])
            result = eval(code, names)
            if code.co_flags & inspect.CO_COROUTINE:  # a cell may await, as in a notebook
                asyncio.run(result)
        except BaseException as error:  # noqa: BLE001  also SystemExit: the next cell runs, as in a notebook
            fault = asdict(fault_of(error))
            if type(error) is NameError and cell["own"]:
                _define_the_rest(cell["source"], f"<cell {cell['id']}>", error, names)
    return {"cell": cell["id"], "fault": fault, "cut": output.size > MAX_OUTPUT}


def _define_the_rest(source: str, file: str, error: NameError, names: dict[str, Any]) -> None:
    """Run the functions, classes and imports below the line at which an own cell failed.

    A measurement above them may use a name of a given cell that the judge does not run; in the notebook the
    whole cell runs.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != file:
        trace = trace.tb_next
    if trace is None:
        return
    try:
        statements = ast.parse(source, file).body
    except SyntaxError:  # a cell with magics
        return
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    for statement in statements:
        if isinstance(statement, kinds) and statement.lineno > trace.tb_lineno:
            with contextlib.suppress(Exception):  # the cell has failed already
                exec(compile(ast.Module([statement], []), file, "exec"), names)


def _compiled(source: str, file: str, own: bool) -> CodeType:
    """Compile a cell; the lines of an ``own`` cell are shown in messages.

    A cell without magics is Python as it stands. Reading it as IPython does takes two thirds of the time of
    loading a lab, in each process.
    """
    try:
        code = compile(source, file, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except SyntaxError:
        source = WITHOUT_EFFECT.sub("", source)
        try:
            code = compile(source, file, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        except SyntaxError:
            source = TransformerManager().transform_cell(source)
            code = compile(source, file, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    finally:
        if own:
            linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    return code


def run_rank(request: Mapping[str, Any], names: Mapping[str, Any], link: Link) -> Any:
    """Run the scenario of one rank; its process group is the switch at the other end of ``link``."""
    return run_scenario(
        request["name"],
        base64.b64decode(request["code"]),
        DirectNames(names),
        request["rank"],
        request["world"],
        request["inputs"],
        link,
    )


@contextlib.contextmanager
def _silence() -> Iterator[OutputCounter]:
    counter = OutputCounter()
    with contextlib.redirect_stdout(counter), contextlib.redirect_stderr(counter):
        yield counter
