"""The output of a job: of an element, of one of its ranks, its first error, and as it appears.

``srun --label`` begins each line with the number of the task, and ``torchrun --tee`` with the number of the
rank on its node. With both, the task is the launcher of a node; all launchers start as many ranks.

A log may have hundreds of MiB. Its last lines are read from its end, and errors are searched in the mapped
file, so that the memory used does not grow with it.
"""

from __future__ import annotations

import codecs
import mmap
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dlo_lib.base.errors import require_count
from dlo_lib.base.text import tr

_TASK, _LOCAL = r" *(?P<task>\d+): ", r"\[\w*?(?P<local>\d+)\]:"
_RANK = r"\[rank\d+\]: "  # PyTorch begins the lines of a traceback with it
_LABEL = re.compile(rf"(?:{_TASK})?(?:{_RANK}|(?:{_LOCAL})?(?:{_RANK})?)")
_OF_A_LAUNCHER = ("torch.distributed.elastic.", "Signal")
_TRACEBACK = "Traceback (most recent call last):"
_LONGEST = 5000  # lines of a traceback; a killed process leaves one without an end
_BLOCK = 2**18
_END_OF_STEP = re.compile(r"srun: Force Terminated")
_ENDED = re.compile(
    r"srun: error: \S+: tasks? (?P<task>\d+)[\d,-]*: (?P<how>[A-Z][\w ]*?)(?: \(core dumped\))?$",
    re.MULTILINE,
)
_OUT_OF_MEMORY = "Out Of Memory"
_SIGNALS = {
    "Killed": "SIGKILL",
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Illegal instruction": "SIGILL",
    "Floating point exception": "SIGFPE",
}


@dataclass(frozen=True)
class RankLabels:
    """How the lines of an output are labelled.

    Attributes:
        per_node: ranks that each launcher starts; 0 if srun starts the ranks.
        tasks: whether srun labels the lines.
    """

    per_node: int = 0
    tasks: bool = True

    def line_of(self, rank: int) -> Callable[[str], str | None]:
        """Return a function that gives a line of ``rank`` without its label, and None for other lines; if
        the lines have no labels, all are of rank 0.
        """
        require_count("rank", rank, 0)
        pattern = re.compile((_TASK if self.tasks else "") + (_LOCAL if self.per_node else ""))
        if not self.tasks and not self.per_node:
            return lambda line: line if rank == 0 else None

        def taken(line: str) -> str | None:
            label = pattern.match(line)
            if label is None:
                return None
            names = label.groupdict()
            task = int(names.get("task") or 0)
            of = task * self.per_node + int(names["local"]) if self.per_node else task
            return line[label.end() :] if of == rank else None

        return taken


def output(file: Path, lines: int | None = None, keep: Callable[[str], str | None] | None = None) -> str:
    """Return the lines of a log, or its last ``lines``; "" if there is no log yet.

    Args:
        keep: what remains of a line; None leaves it out.
    """
    try:
        if lines is not None:
            return "".join(reversed([line for _, line in zip(range(lines), _from_end(file, keep))]))
        with file.open(encoding="utf-8", errors="replace") as log:
            if keep is None:
                return log.read()
            return "".join(kept for line in log if (kept := keep(line)) is not None)
    except FileNotFoundError:
        return ""


def pieces(file: Path) -> Iterator[str]:
    """Yield a log in pieces, which need not end with a line; nothing if there is no log."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    if file.exists():
        with file.open("rb") as log:
            while data := log.read(_BLOCK):
                yield decoder.decode(data)


def _from_end(file: Path, keep: Callable[[str], str | None] | None) -> Iterator[str]:
    """Yield the lines of a file, or what remains of them, from the last to the first."""
    with file.open("rb") as log:
        at, left = log.seek(0, os.SEEK_END), b""
        while at > 0:
            size = min(_BLOCK, at)
            at -= size
            log.seek(at)
            data = log.read(size) + left
            left, *whole = (
                data.splitlines(keepends=True) if at > 0 else [b"", *data.splitlines(keepends=True)]
            )
            for line in reversed(whole):
                text = line.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")
                kept = text if keep is None else keep(text)
                if kept is not None:
                    yield kept


def first_error(file: Path) -> str:
    """Return the first traceback in the output of several ranks that is not a consequence of another failure,
    without labels; "" if there is none.

    Programs that do not record their failures (``dlo_lib.base.rank_failures``) leave only this.
    """
    tracebacks: dict[str, list[str]] = {}  # by label, because the lines of ranks alternate
    for line in _around_tracebacks(file, lambda: bool(tracebacks)):
        found = _LABEL.match(line)
        label = found[0] if found else ""
        rest = line[len(label) :]
        if rest.startswith(_TRACEBACK):
            tracebacks[label] = [rest]
        elif label in tracebacks:
            tracebacks[label].append(rest)
            if rest and not rest.startswith(" "):  # the line of the exception is the last one
                from dlo_lib.launch.failure import reports_broken_communication  # imports torch

                whole = "\n".join(tracebacks.pop(label))
                if not rest.startswith(_OF_A_LAUNCHER) and not reports_broken_communication(rest):
                    return whole
            elif len(tracebacks[label]) > _LONGEST:
                del tracebacks[label]
    return ""


def _around_tracebacks(file: Path, inside: Callable[[], bool]) -> Iterator[str]:
    """Yield the lines of a file from each first line of a traceback on, while ``inside`` returns True."""
    if not file.exists() or file.stat().st_size == 0:
        return
    with file.open("rb") as log, mmap.mmap(log.fileno(), 0, access=mmap.ACCESS_READ) as text:
        at = 0
        while (found := text.find(_TRACEBACK.encode(), at)) >= 0:
            text.seek(text.rfind(b"\n", 0, found) + 1)
            while line := text.readline():
                at = text.tell()
                yield line.decode(errors="replace").rstrip("\r\n")
                if not inside():
                    break


def killed_rank(file: Path, names_ranks: bool) -> str:
    """Return which rank a signal has ended, from the lines of srun at the end of the output; "" if none.

    A killed process cannot record its failure. srun ends the other tasks with SIGTERM, which does not count.

    Args:
        names_ranks: whether srun starts the ranks, and not a launcher.
    """
    last = output(file, 200)
    steps = [list(_ENDED.finditer(step)) for step in _END_OF_STEP.split(last)]
    for found in next((ends for ends in reversed(steps) if ends), []):  # of the last turn
        if found["how"] in _SIGNALS or found["how"] == _OUT_OF_MEMORY:
            who = tr("rank {rank}", rank=found["task"]) if names_ranks else tr("a launcher of ranks")
            if found["how"] == _OUT_OF_MEMORY:
                return tr("{who} was killed: out of memory", who=who)
            return killed_by(who, _SIGNALS[found["how"]])
    return ""


def killed_by(who: str, name: str) -> str:
    """Return that a signal has ended a process, with the usual cause of a SIGKILL."""
    said = tr("{who} was killed by {name}", who=who, name=name)
    return said + tr(" (out of memory?)") if name == "SIGKILL" else said


def appearing(file: Path, over: Callable[[], bool], pace: Callable[[], float]) -> Iterator[str]:
    """Yield the content of ``file`` in pieces as it appears, until ``over`` returns True.

    Args:
        pace: returns the seconds between two calls of ``over``, which may query the scheduler.
    """
    read = 0
    ended = False
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    while True:
        if file.exists() and file.stat().st_size > read:
            with file.open("rb") as log:
                log.seek(read)
                data = log.read(_BLOCK)
            read += len(data)
            yield decoder.decode(data)
        elif ended:
            return
        else:
            ended = over()
            if not ended:
                time.sleep(min(1.0, pace()))
