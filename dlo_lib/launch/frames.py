"""Stacks of a rank that refer to the notebook: a frame in a cell reads ``Cell In[3], line 4``.

Cells have no file. Their source is in the caller's ``linecache``, which is sent to the ranks
(``cell_sources``). IPython maps the generated file name to the cell (``name_cells``). Frames in cells show
their source line.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

_OURS = str(Path(__file__).parent)
_FUNCTION_OF_A_JOB = str(Path(__file__).parents[1] / "cluster" / "code" / "function_rank.py")
_LIVE_RANKS = str(Path(__file__).parents[1] / "live_ranks")
_SHELL = os.path.join(sysconfig.get_path("purelib"), "IPython", "core")
_AROUND_THE_CALLER = (_OURS, _FUNCTION_OF_A_JOB, _LIVE_RANKS, _SHELL)
_EXPLAINER = str(Path(__file__).parents[1] / "comm")
_RANK = str(Path(__file__).with_name("rank.py"))
# Since 3.14 Python adds the stack of the interpreter's C functions.
_STACK_BEGIN = re.compile(r"(?<!C stack trace) \(most recent call first\):\n")
_STACK_LINE = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')


def cell_sources() -> dict[str, tuple[str, ...]]:
    """Return the lines of all code of this process that has no file: notebook cells and interactive input."""
    entries = linecache.cache.items()
    # no mtime: no file
    return {name: tuple(entry[2]) for name, entry in entries if len(entry) == 4 and entry[1] is None}


def register_sources(sources: dict[str, tuple[str, ...]]) -> None:
    """Add the sources from :func:`cell_sources` to this process, so that its tracebacks show those lines."""
    for name, lines in sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, list(lines), name)


def strip_library_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that starts in the caller's code."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_AROUND_THE_CALLER):
        trace = trace.tb_next
    return trace


def stack_as_traceback(stack: str) -> str:
    """Return the last stack that ``faulthandler`` wrote as a traceback, starting at the caller's function."""
    last = _STACK_BEGIN.split(stack)[-1]
    frames: list[str] = []
    for line in last.splitlines():
        match = _STACK_LINE.match(line)
        if match is None or match["file"] == _RANK:
            break
        if match["file"].startswith(_EXPLAINER):
            continue  # a frame of the tap, between frames of torch
        source = linecache.getline(match["file"], int(match["line"])).strip()
        frames.append(
            f'  File "{match["file"]}", line {match["line"]}, in {match["name"]}'
            + (f"\n    {source}" if source else "")
        )
    return "\n".join(reversed(frames))


def stack_now(thread: int) -> str:
    """Return the stack of a thread of this process, most recent call last."""
    frame = sys._current_frames().get(thread)
    return "".join(
        traceback.StackSummary(
            part for part in traceback.extract_stack(frame) if not part.filename.startswith(_EXPLAINER)
        ).format()
    )


def name_cells(text: str) -> str:
    """Return ``text`` with the file names of notebook cells replaced by IPython's: ``Cell In[3]``."""

    def name(match: re.Match[str]) -> str:
        cell = _cell(match["file"])
        return f"{cell}, " if cell else match[0]

    return re.sub(r'File "(?P<file>[^"\n]+)", ', name, text)


def display_name(file: str) -> str:
    """Return a short name of a file: ``Cell In[3]``, or the last part of its path."""
    return _cell(file) or Path(file).name


def _cell(file: str) -> str:
    """Return IPython's name of the cell with file name ``file``; "" for any other file."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    known = (
        shell.compile.format_code_name(file)
        if shell is not None and hasattr(shell.compile, "format_code_name")
        else None
    )
    return " ".join(known) if known else ""
