"""What passed between the ranks of a run, compared with what the technique needs.

A message may use ``{rank}``, ``{got}`` (bytes), ``{want}`` (bytes), ``{count}`` (calls) and ``{kinds}``
(their names). Compare the results of the run first: traffic of a run whose results are wrong proves nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dlo_lib.comm.calls import Kind
from dlo_lib.grading.checks.contract import Run, Trial
from dlo_lib.labkit.compare import fields


def kinds_of(run: Run, rank: int, besides: Collection[Kind] = ()) -> str:
    """Return the names of the calls that ``rank`` made, sorted, without those of ``besides``;
    empty when there are none."""
    return ", ".join(sorted({call.kind.value for call in run.calls(rank)} - {kind.value for kind in besides}))


def passes_only(t: Trial, run: Run, allowed: Collection[Kind], message: str) -> None:
    """No rank makes calls of other kinds than ``allowed``; ``{kinds}`` of the message are the others."""
    for rank in range(run.world):
        others = kinds_of(run, rank, allowed)
        t.that(not others, message, **fields(message, rank=rank, kinds=others))


def passes_exactly(
    t: Trial,
    run: Run,
    want: int | Sequence[int],
    message: str,
    kind: Kind | None = None,
    calls: int | None = None,
) -> None:
    """Every rank passes ``want`` bytes (one number, or one for each rank), in
    ``calls`` calls if that is given.

    Args:
        kind: count the calls of this kind alone.
    """
    for rank in range(run.world):
        right = want if isinstance(want, int) else want[rank]
        got, count = run.bytes(rank, kind), len(run.calls(rank, kind))
        good = got == right and (calls is None or count == calls)
        t.that(good, message, **_fields(message, run, rank, got, right, count))


def passes_at_most(
    t: Trial, run: Run, most: int, message: str, kind: Kind | None = None, calls: int | None = None
) -> None:
    """No rank passes more than ``most`` bytes; if ``calls`` is given, each makes this number of calls."""
    for rank in range(run.world):
        got, count = run.bytes(rank, kind), len(run.calls(rank, kind))
        good = got <= most and (calls is None or count == calls)
        t.that(good, message, **_fields(message, run, rank, got, most, count))


def _fields(message: str, run: Run, rank: int, got: int, want: int, count: int) -> dict[str, object]:
    return fields(message, rank=rank, got=got, want=want, count=count, kinds=kinds_of(run, rank) or "no call")
