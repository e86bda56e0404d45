"""Times of the actions of a step, as each rank measures them: the measured counterpart of ``simulate``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from dlo_lib.base.errors import UserError
from dlo_lib.parallel.pipeline.simulate import Simulation, Span
from dlo_lib.parallel.pipeline.table import COMPUTE, Action, Schedule


class ActionTimes:
    """The start and the end of each action that this rank computes on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._recorded: list[tuple[Action, Span]] | None = None

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record inside the context. On an accelerator, each action is then synchronised."""
        self._recorded = []
        try:
            yield
        finally:
            self._recorded = None

    @contextlib.contextmanager
    def of(self, action: Action) -> Iterator[None]:
        """Record the time that the block inside the context takes, as that of ``action``."""
        recorded = self._recorded
        if recorded is None:
            yield
            return
        began = self._now()
        yield
        recorded.append((action, (began, self._now())))

    def measured(self, schedule: Schedule, rank: int, group: dist.ProcessGroup) -> Simulation:
        """Return the times of the last step on all ranks, in seconds from its first action. All ranks call
        it, inside ``recording``.

        Raises:
            UserError: nothing was recorded.
        """
        if self._recorded is None:
            raise UserError(
                "nothing was recorded: "
                "run a step inside `with pipeline.recording():` and call measured() there",
            )
        actions = sum(action.kind in COMPUTE for action in schedule.rows[rank])
        row = [span for _, span in self._recorded[-actions:]]
        rows: list[list[Span]] = [[] for _ in range(schedule.ranks)]
        dist.all_gather_object(rows, row, group=group)
        began = min(start for spans in rows for start, _ in spans)
        relative = (tuple((start - began, end - began) for start, end in spans) for spans in rows)
        return Simulation(schedule.compute(), tuple(relative))

    def _now(self) -> float:
        """Wait for the device and return the time in seconds. All processes of a machine share this clock."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic()
