"""What the process of a rank holds at a mark of the scenario, compared with what the technique needs.

A process needs up to 0.4 MiB besides its tensors, and 2 MiB more in the rare case that a table of the
interpreter grows meanwhile: use tensors of several MiB, and leave 1 to 2 MiB of room in the limit.
"""

from __future__ import annotations

from collections.abc import Sequence

from dlo_lib.grading.checks.contract import Run, Trial
from dlo_lib.labkit.compare import fields

MIB = 2**20


def holds_at_most(
    t: Trial,
    run: Run,
    mark: str,
    most: float | Sequence[float],
    message: str,
    unit: float = MIB,
    **values: object,
) -> None:
    """No rank holds more than ``most`` bytes (one number, or one for each rank) at ``mark("...")``.

    Args:
        unit: bytes of the unit in which ``{held}`` and ``{most}`` of the message are given; the message may
            also use ``{rank}`` and ``values``.
    """
    for rank in range(run.world):
        limit = most[rank] if isinstance(most, Sequence) else most
        held = run.memory(rank, mark)
        shown = fields(message, rank=rank, held=held / unit, most=limit / unit, **values)
        t.that(bool(held < limit), message, **shown)
