"""What a DataLoader costs a training: the time that each step waits for its batch.

The time to load a batch does not matter while it is hidden behind the computation of other steps. What
matters is the wait, and it depends on the step: workers hide at most ``workers`` steps' worth of loading.
Therefore the loader is measured with a stand-in for the step that takes as long.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from dlo_lib.base.errors import UserError


@dataclass(frozen=True)
class LoaderProfile:
    """Seconds.

    Attributes:
        first: the wait for the first batch, with the start of the workers.
        waits: the wait before each later step.
        step: the duration of the step that was given.
    """

    first: float
    waits: tuple[float, ...]
    step: float

    @property
    def wait(self) -> float:
        """The mean wait of a step; the mean, because a queue makes some steps wait for several batches."""
        return statistics.fmean(self.waits)

    @property
    def share(self) -> float:
        """The share of the training time that is waiting."""
        return self.wait / (self.wait + self.step)


def profile_loader(
    loader: Iterable[Any],
    step_seconds: float = 0.0,
    batches: int = 20,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.perf_counter,
) -> LoaderProfile:
    """Read ``batches`` batches, with a step of ``step_seconds`` after each, and return the waits.

    Args:
        loader: a DataLoader, or any iterable of batches.
        step_seconds: how long a training step takes; it leaves the CPU free, as a step on a GPU does. 0
        measures
            the throughput of the loader alone.
        sleep, clock: the functions that wait and that return the present time.

    Raises:
        UserError: there are fewer than 2 batches, or the step is negative.
    """
    if batches < 2 or step_seconds < 0:
        raise UserError(f"batches={batches}, step_seconds={step_seconds}: use at least 2, and at least 0")
    waits = []
    before = clock()
    for _ in itertools.islice(loader, batches):
        waits.append(clock() - before)
        if step_seconds:
            sleep(step_seconds)
        before = clock()
    if len(waits) < 2:
        raise UserError(f"the loader has {len(waits)} batches: at least 2 are needed")
    return LoaderProfile(waits[0], tuple(waits[1:]), step_seconds)
