"""Where a rank was, in words that lead back to the notebook: a frame in a cell reads ``Cell In[3], line 4``, with the cell's source.

Cells live in no file. Their source is in the caller's ``linecache``, which the ranks are given (``cell_sources``), and IPython knows which
file name stands for which cell (``name_cells``).
"""

from __future__ import annotations

import linecache
import re
import sys
import traceback
from pathlib import Path
from types import TracebackType

_OURS = str(Path(__file__).parent)
_EXPLAINER = str(Path(__file__).parents[1] / "comm")
_RANK = str(Path(__file__).with_name("rank.py"))
_STACK_LINE = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')


def cell_sources() -> dict[str, tuple[str, ...]]:
    """The lines of all code that this process knows and no file holds: notebook cells, what was typed."""
    entries = linecache.cache.items()
    return {name: tuple(entry[2]) for name, entry in entries if len(entry) == 4 and entry[1] is None}  # no mtime: no file


def remember_sources(sources: dict[str, tuple[str, ...]]) -> None:
    """Make what :func:`cell_sources` gave known to this process, so that its tracebacks show those lines."""
    for name, lines in sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, list(lines), name)


def below_this_package(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that begins in the caller's code."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OURS):
        trace = trace.tb_next
    return trace


def stack_as_traceback(stack: str) -> str:
    """The last stack that ``faulthandler`` wrote, most recent call last, with the source lines, from the caller's function on."""
    _, _, last = stack.rpartition("(most recent call first):\n")
    frames: list[str] = []
    for line in last.splitlines():
        match = _STACK_LINE.match(line)
        if match is None or match["file"] == _RANK:
            break
        if match["file"].startswith(_EXPLAINER):
            continue  # which stands between torch and torch
        source = linecache.getline(match["file"], int(match["line"])).strip()
        frames.append(f'  File "{match["file"]}", line {match["line"]}, in {match["name"]}' + (f"\n    {source}" if source else ""))
    return "\n".join(reversed(frames))


def stack_now(thread: int) -> str:
    """The stack of a thread of this process, most recent call last."""
    frame = sys._current_frames().get(thread)
    return "".join(
        traceback.StackSummary(part for part in traceback.extract_stack(frame) if not part.filename.startswith(_EXPLAINER)).format()
    )


def name_cells(text: str) -> str:
    """``text`` (tracebacks) with the files that stand for notebook cells called as IPython calls them: ``Cell In[3]``."""

    def name(match: re.Match[str]) -> str:
        cell = _cell(match["file"])
        return f"{cell}, " if cell else match[0]

    return re.sub(r'File "(?P<file>[^"\n]+)", ', name, text)


def shown_file(file: str) -> str:
    """How a file is named where there is little room: ``Cell In[3]``, or its last part."""
    return _cell(file) or Path(file).name


def _cell(file: str) -> str:
    """What IPython calls the cell that ``file`` stands for; empty for any other file."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    known = shell.compile.format_code_name(file) if shell is not None and hasattr(shell.compile, "format_code_name") else None
    return " ".join(known) if known else ""
