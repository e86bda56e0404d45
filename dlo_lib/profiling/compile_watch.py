"""What ``torch.compile`` did while a piece of code ran: graphs, graph breaks, recompilations, seconds, and what came from its cache.

The code runs once, as it is; nothing is traced again, and no log is read. Dynamo keeps a record of each graph that it makes
(``CompilationMetrics``), of each place where it had to break (``graph_break_reasons``), and counts its cache's hits: the watch notes what
is new in these between its beginning and its end. The records are Dynamo's own, without a promise for the next release; what a release
does not have is named in ``CompileReport.missing`` and left out.

Cost: none while it runs; compiling is not slowed down.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from dlo_lib.profiling.compile_reasons import BreakCause, GuardCause, break_cause, guard_cause

KEPT = 4096  # records that Dynamo keeps during a watch; by itself it forgets all but the last 64
HITS, MISSES = ("fxgraph_cache_hit", "fxgraph_cache_miss")


@dataclass(frozen=True)
class GraphBreak:
    """Where a graph had to end, and why. ``words`` are the compiler's."""

    cause: BreakCause
    file: str
    line: int
    source: str
    words: str


@dataclass(frozen=True)
class Graph:
    """One graph that was made. ``number``: how many the same code already had, so a recompilation from 1 on."""

    function: str
    file: str
    line: int
    number: int
    operations: int
    seconds: float


@dataclass(frozen=True)
class Recompilation:
    """A graph that was made because a guard of the earlier ones of the same code failed. ``guard`` holds the compiler's words."""

    cause: GuardCause
    function: str
    file: str
    line: int
    guard: str


@dataclass(frozen=True)
class CompileReport:
    """What was compiled.

    Attributes:
        left: functions left to Python as a whole, as where a loop holds a break.
        seconds: of compiling, in all.
        hits, misses: graphs that Inductor's cache had, or had not.
        missing: what this version of torch does not tell.
    """

    graphs: tuple[Graph, ...] = ()
    breaks: tuple[GraphBreak, ...] = ()
    left: tuple[GraphBreak, ...] = ()
    recompilations: tuple[Recompilation, ...] = ()
    seconds: float = 0.0
    hits: int = 0
    misses: int = 0
    missing: tuple[str, ...] = ()

    def __str__(self) -> str:
        """For people: one line of counts, then each break and each recompilation with its cure."""
        counts = ((len(self.graphs), "graph"), (len(self.breaks), "graph break"), (len(self.recompilations), "recompilation"))
        head = ", ".join(f"{count} {name}{'' if count == 1 else 's'}" for count, name in counts)
        lines = [f"{head}, {self.seconds:.2f} s of compiling"]
        for broken in self.breaks:
            lines += [f"graph break at {_place(broken.file, broken.line)}: {broken.source}", *_advice(broken.cause)]
            lines += [f"    compiler: {broken.words}"] if broken.cause is BreakCause.OTHER else []
        for broken in self.left:
            lines += [f"left to Python as a whole, for {_place(broken.file, broken.line)}: {broken.source}", *_advice(broken.cause)]
            lines += [f"    compiler: {broken.words}"] if broken.cause is BreakCause.OTHER else []
        for again in self.recompilations:
            lines += [f"{again.function} ({_place(again.file, again.line)}) compiled again: {again.guard}", *_advice(again.cause)]
        lines += [f"not known with this version of torch: {what}" for what in self.missing]
        return "\n".join(lines)


@dataclass
class CompileWatch:
    """A watch that is running, or was: ``report`` is there once it has ended."""

    report: CompileReport = field(default_factory=CompileReport)


@contextmanager
def watch_compilation() -> Iterator[CompileWatch]:
    """Note what is compiled inside the context; ``report`` is filled at its end, also when the code raises.

    What was compiled before is not compiled again: ``torch.compiler.reset()`` first, to begin from nothing. Watches may be nested.

    >>> import torch
    >>> with watch_compilation() as watch:
    ...     y = torch.compile(lambda x: x.sin() + 1, backend="eager")(torch.ones(3))
    >>> len(watch.report.graphs), len(watch.report.breaks)
    (1, 0)
    """
    from torch._dynamo import utils

    missing: list[str] = []
    before = _take(utils, missing)
    utils.set_compilation_metrics_limit(KEPT + len(before.metrics))
    watch = CompileWatch()
    try:
        yield watch
    finally:
        watch.report = _difference(before, _take(utils, []), tuple(missing))


@dataclass(frozen=True)
class _Records:
    """Dynamo's records at one moment."""

    metrics: tuple[Any, ...]
    breaks: tuple[Any, ...]
    counted: Mapping[str, int]


def _take(utils: Any, missing: list[str]) -> _Records:
    breaks = getattr(utils, "graph_break_reasons", None)
    if breaks is None:
        missing.append("where graphs break")
    return _Records(tuple(utils.get_compilation_metrics()), tuple(breaks or ()), dict(utils.counters["inductor"]))


def _difference(before: _Records, after: _Records, missing: tuple[str, ...]) -> CompileReport:
    known = {id(record) for record in before.metrics}
    records = [record for record in after.metrics if id(record) not in known]
    reasons = {id(reason) for reason in before.breaks}
    made = [record for record in records if record.co_name is not None and record.has_guarded_code]
    return CompileReport(
        graphs=tuple(_graph(record) for record in made if record.graph_op_count),
        breaks=tuple(_breaks(reason for reason in after.breaks if id(reason) not in reasons)),
        left=tuple(_left(record) for record in records if record.fail_type == "Unsupported"),
        recompilations=tuple(_recompilation(record) for record in made if record.cache_size),
        seconds=sum(map(_seconds, records)),
        hits=after.counted.get(HITS, 0) - before.counted.get(HITS, 0),
        misses=after.counted.get(MISSES, 0) - before.counted.get(MISSES, 0),
        missing=missing,
    )


def _graph(record: Any) -> Graph:
    where = (record.co_name, record.co_filename, record.co_firstlineno)
    return Graph(*where, record.cache_size or 0, record.graph_op_count, _seconds(record))


def _recompilation(record: Any) -> Recompilation:
    told = _reason(record)
    guard = " ".join((told or "").split("\nUser stack trace")[0].split("(HINT")[0].split())
    return Recompilation(
        guard_cause(told), record.co_name, record.co_filename, record.co_firstlineno, guard or GuardCause.UNTOLD.explanation
    )


def _reason(record: Any) -> str | None:
    return getattr(record, "recompile_reason", None)


def _left(record: Any) -> GraphBreak:
    file, line = record.fail_user_frame_filename or "", record.fail_user_frame_lineno or 0
    return _broken(file, line, record.fail_reason or "")


def _breaks(reasons: Iterable[Any]) -> Iterator[GraphBreak]:
    """Each place once: a frame that is traced again after a break may report the same one twice."""
    seen = set()
    for reason in reasons:
        stack = list(reason.user_stack)
        file, line = (stack[-1].filename, stack[-1].lineno or 0) if stack else ("", 0)
        found = _broken(file, line, reason.reason)
        if (file, line, found.cause) not in seen:
            seen.add((file, line, found.cause))
            yield found


def _broken(file: str, line: int, words: str) -> GraphBreak:
    return GraphBreak(break_cause(words), file, line, linecache.getline(file, line).strip(), words.strip().partition("\n")[0])


def _seconds(record: Any) -> float:
    if record.entire_frame_compile_time_s is not None:
        return float(record.entire_frame_compile_time_s)
    backward = getattr(record, "backward_cumulative_compile_time_us", None)  # compiled when the backward first runs
    return backward / 1e6 if backward else 0.0


def _advice(cause: BreakCause | GuardCause) -> list[str]:
    return [f"    why: {cause.explanation}", f"    cure: {cause.cure}"]


def _place(file: str, line: int) -> str:
    if "ipykernel" in file:  # a notebook's cells are files with a number for a name
        return f"line {line} of a cell"
    return f"{PurePath(file).name or 'unknown'}:{line}"
