"""The library's own implementation under the names of this lab: what ``lab.use_reference("question")`` gives a stuck student."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dlo_lib.optim import finder
from dlo_lib.optim.adapter import ScheduleLR
from dlo_lib.optim.schedules import Cosine, OneCycle, Step, Triangular, Triangular2, WarmUp, WarmUpStableDecay


def sweep(lowest: float, highest: float, count: int) -> list[float]:
    """Rates that grow by one factor."""
    return [lowest * (highest / lowest) ** (number / (count - 1)) for number in range(count)]


def range_test(model: nn.Module, loss_of: Callable, batches: Sequence, rates: Sequence[float]) -> list[float]:
    """The loss before each step, while the rate grows; the model is left as it was."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = []
    with finder.as_it_was(model, optimizer):
        for batch, rate in zip(batches, rates):
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def smoothed(losses: Sequence[float], beta: float) -> list[float]:
    """Without the noise."""
    return list(finder.smooth(losses, beta))


def suggest(rates: Sequence[float], losses: Sequence[float]) -> dict[str, float]:
    """Where the loss falls fastest, and where it is lowest."""
    found = finder.RangeTest(tuple(rates), tuple(losses), broke=False, smoothing=0.0).suggestion()
    return {"steepest": found.steepest, "bottom": found.bottom}


def step_factor(step: int, every: int, gamma: float) -> float:
    """Times gamma after each `every` steps."""
    return Step(every, gamma)(step)


def cosine_factor(step: int, steps: int, final: float = 0.0) -> float:
    """Half a cosine."""
    return Cosine(steps, final)(step)


def warmup_cosine(step: int, warm: int, steps: int, final: float = 0.0) -> float:
    """A rise, then a cosine."""
    return WarmUp(warm, Cosine(steps - warm, final))(step)


def triangular(step: int, rise: int, lowest: float, halve: bool) -> float:
    """Triangles."""
    return (Triangular2 if halve else Triangular)(rise, lowest)(step)


def one_cycle(step: int, top: int, steps: int, start: float, final: float, low: float, high: float) -> tuple[float, float]:
    """The factor and the momentum."""
    cycle = OneCycle(steps, rise=(top + 1) / steps, start=start, final=final, least_momentum=low, most_momentum=high)
    return cycle(step), cycle.momentum(step)


def wsd(step: int, warm: int, stable: int, decay: int, lowest: float = 0.0) -> float:
    """Warm-up, stable, decay."""
    return WarmUpStableDecay(warm, stable, decay, lowest)(step)


class Follow(ScheduleLR):
    """Sets the rates of an optimiser."""

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Callable[[int], float]) -> None:
        super().__init__(optimizer, factor)


def snapshot_steps(steps: int, snapshots: int) -> list[int]:
    """After which steps, from 1, a snapshot is taken."""
    length = math.ceil(steps / snapshots)
    return [step for step in range(1, steps + 1) if step % length == 0 or step == steps]


def ensemble(logits: Tensor) -> Tensor:
    """The mean of the members' probabilities."""
    return logits.softmax(-1).mean(0)


REFERENCE: dict[str, dict[str, Any]] = {
    "sweep": {"sweep": sweep},
    "range_test": {"range_test": range_test},
    "smoothed": {"smoothed": smoothed},
    "suggest": {"suggest": suggest},
    "decay": {"step_factor": step_factor, "cosine_factor": cosine_factor},
    "warmup": {"warmup_cosine": warmup_cosine},
    "cyclical": {"triangular": triangular},
    "one_cycle": {"one_cycle": one_cycle},
    "wsd": {"wsd": wsd},
    "follow": {"Follow": Follow},
    "snapshots": {"snapshot_steps": snapshot_steps, "ensemble": ensemble},
}
