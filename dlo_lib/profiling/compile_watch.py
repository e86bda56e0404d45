"""Reports the work of ``torch.compile`` while code runs: graphs, graph breaks, recompilations, seconds, and
cache hits.

The code runs once and unchanged; it is not traced again, and no log is parsed. Dynamo stores a record of each
graph (``CompilationMetrics``) and of each graph break (``graph_break_reasons``), and counts the hits of its
cache. The watch compares these records before and after the code. The records are internal to Dynamo and may
change between releases; ``CompileReport.missing`` names those that the release does not have.

Cost: none during the run; the compilation is not slower.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from dlo_lib.profiling.compile_reasons import BreakCause, GuardCause, break_cause, guard_cause

MAX_RECORDS = 4096  # the records that Dynamo keeps during a watch; its default is 64
HITS, MISSES = ("fxgraph_cache_hit", "fxgraph_cache_miss")


@dataclass(frozen=True)
class GraphBreak:
    """The position and the cause of a graph break. ``words`` is the message of the compiler."""

    cause: BreakCause
    file: str
    line: int
    source: str
    words: str


@dataclass(frozen=True)
class Graph:
    """One compiled graph. ``number`` counts the graphs of the same code from 0; a graph above 0 is a
    recompilation."""

    function: str
    file: str
    line: int
    number: int
    operations: int
    seconds: float


@dataclass(frozen=True)
class Recompilation:
    """A graph that was compiled because a guard of the earlier graphs of the same code failed. ``guard`` is
    the message of the compiler."""

    cause: GuardCause
    function: str
    file: str
    line: int
    guard: str


@dataclass(frozen=True)
class CompileReport:
    """The result of a watch.

    Attributes:
        graphs, breaks, recompilations: in the order of compilation.
        left: functions that run in Python as a whole, for example because a loop contains a graph break.
        seconds: the total time of compilation.
        hits, misses: the number of graphs that were found, or not found, in the cache of Inductor.
        missing: the information that this version of torch does not report.
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
        """Return a line of counts, and each graph break and recompilation with its cure."""
        kinds = ((self.graphs, "graph"), (self.breaks, "graph break"), (self.recompilations, "recompilation"))
        counts = [(len(found), name) for found, name in kinds]
        head = ", ".join(f"{count} {name}{'' if count == 1 else 's'}" for count, name in counts)
        lines = [f"{head}, {self.seconds:.2f} s of compiling"]
        for broken in self.breaks:
            lines += [
                f"graph break at {_place(broken.file, broken.line)}: {broken.source}",
                *_advice(broken.cause),
            ]
            lines += [f"    compiler: {broken.words}"] if broken.cause is BreakCause.OTHER else []
        for broken in self.left:
            place = _place(broken.file, broken.line)
            lines += [
                f"left to Python as a whole, because of {place}: {broken.source}",
                *_advice(broken.cause),
            ]
            lines += [f"    compiler: {broken.words}"] if broken.cause is BreakCause.OTHER else []
        for again in self.recompilations:
            place = _place(again.file, again.line)
            lines += [f"{again.function} ({place}) compiled again: {again.guard}", *_advice(again.cause)]
        lines += [f"not known with this version of torch: {what}" for what in self.missing]
        return "\n".join(lines)


@dataclass
class CompileWatch:
    """A watch. ``report`` is filled at its end."""

    report: CompileReport = field(default_factory=CompileReport)


@contextmanager
def watch_compilation() -> Iterator[CompileWatch]:
    """Record the compilations inside the context. ``report`` is filled at its end, also if the code raises.

    Code that was compiled before is not compiled again; call ``torch.compiler.reset()`` first to compile
    everything. Watches may be nested.

    >>> import torch
    >>> with watch_compilation() as watch:
    ...     y = torch.compile(lambda x: x.sin() + 1, backend="eager")(torch.ones(3))
    >>> len(watch.report.graphs), len(watch.report.breaks)
    (1, 0)
    """
    from torch._dynamo import utils

    missing: list[str] = []
    before = _read_records(utils, missing)
    utils.set_compilation_metrics_limit(MAX_RECORDS + len(before.metrics))
    watch = CompileWatch()
    try:
        yield watch
    finally:
        watch.report = _difference(before, _read_records(utils, []), tuple(missing))


@dataclass(frozen=True)
class _Records:
    """The records of Dynamo at one time."""

    metrics: tuple[Any, ...]
    breaks: tuple[Any, ...]
    counted: Mapping[str, int]


def _read_records(utils: Any, missing: list[str]) -> _Records:
    breaks = getattr(utils, "graph_break_reasons", None)
    if breaks is None:
        missing.append("where graphs break")
    if not hasattr(utils.CompilationMetrics, "recompile_reason"):
        missing.append("why code is compiled again")
    return _Records(
        tuple(utils.get_compilation_metrics()), tuple(breaks or ()), dict(utils.counters["inductor"])
    )


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
    reason = _reason(record)
    guard = " ".join((reason or "").split("\nUser stack trace")[0].split("(HINT")[0].split())
    return Recompilation(
        guard_cause(reason),
        record.co_name,
        record.co_filename,
        record.co_firstlineno,
        guard or GuardCause.UNKNOWN.explanation,
    )


def _reason(record: Any) -> str | None:
    return getattr(record, "recompile_reason", None)


def _left(record: Any) -> GraphBreak:
    file, line = record.fail_user_frame_filename or "", record.fail_user_frame_lineno or 0
    return _broken(file, line, record.fail_reason or "")


def _breaks(reasons: Iterable[Any]) -> Iterator[GraphBreak]:
    """Yield each graph break once. A frame that is traced again after a break may report the same break
    twice."""
    seen = set()
    for reason in reasons:
        stack = list(reason.user_stack)
        file, line = (stack[-1].filename, stack[-1].lineno or 0) if stack else ("", 0)
        found = _broken(file, line, reason.reason)
        if (file, line, found.cause) not in seen:
            seen.add((file, line, found.cause))
            yield found


def _broken(file: str, line: int, words: str) -> GraphBreak:
    source, first_line = linecache.getline(file, line).strip(), words.strip().partition("\n")[0]
    return GraphBreak(break_cause(words), file, line, source, first_line)


def _seconds(record: Any) -> float:
    if record.entire_frame_compile_time_s is not None:
        return float(record.entire_frame_compile_time_s)
    backward = record.backward_cumulative_compile_time_us  # of the first backward
    return backward / 1e6 if backward else 0.0


def _advice(cause: BreakCause | GuardCause) -> list[str]:
    return [f"    why: {cause.explanation}", f"    cure: {cause.cure}"]


def _place(file: str, line: int) -> str:
    if "ipykernel" in file:  # the file name of a notebook cell is a number
        return f"line {line} of a cell"
    return f"{PurePath(file).name or 'unknown'}:{line}"
