"""Requests that arrive over time, served in a simulated clock: latency, throughput and goodput.

Requests arrive as a Poisson process. An iteration takes the time that a cost model states, so that results
do not depend on the machine. The metrics of a request are

    TTFT = time of its first token − arrival        (time to first token)
    ITL  = time between two of its tokens           (inter-token latency)

Throughput is tokens per second. Goodput is completed requests per second whose TTFT and longest ITL are
within limits: a system with a high throughput can have a low goodput, because a long prompt delays all
sequences that decode.

Paper: Y. Zhong et al., DistServe (arXiv:2401.09670), goodput.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dlo_lib.base.errors import UserError, require_count
from dlo_lib.inference.engine import Iteration, iteration_of
from dlo_lib.inference.sampling import SamplingParams, uniform
from dlo_lib.inference.scheduler import BatchScheduler, GenerationRequest


@dataclass(frozen=True)
class Arrival:
    """A request that arrives at ``time`` seconds."""

    time: float
    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class IterationCost:
    """The seconds of an iteration: ``fixed`` (reading the weights), ``per_token`` for each token that is
    computed, and ``per_past`` for each stored token that attention reads.
    """

    fixed: float
    per_token: float
    per_past: float = 0.0

    def __call__(self, step: Iteration) -> float:
        """Return the seconds of an iteration."""
        return self.fixed + self.per_token * step.computed + self.per_past * step.past


class Serves(Protocol):
    """What ``serve`` needs of an engine."""

    def add_request(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Queue a request and return its number."""
        ...

    def step(self) -> Iteration:
        """Run one iteration."""
        ...


class DryEngine:
    """An engine without a model: a scheduler whose next tokens ``answer`` gives, 0 by default.

    A continuation then has ``max_tokens`` tokens, so that a load of many requests costs no computation.
    """

    def __init__(
        self, scheduler: BatchScheduler, answer: Callable[[GenerationRequest], int] = lambda request: 0
    ) -> None:
        self.scheduler, self.answer = scheduler, answer
        self._next_number = 0

    def add_request(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Queue a request and return its number.

        Raises:
            UserError: the scheduler refuses it.
        """
        self.scheduler.add(GenerationRequest(self._next_number, list(prompt), params))
        self._next_number += 1
        return self._next_number - 1

    def step(self) -> Iteration:
        """Run one iteration."""
        parts = self.scheduler.schedule()
        tokens = {part.request.number: self.answer(part.request) for part in parts if part.last}
        complete = self.scheduler.update(parts, tokens)
        return iteration_of(parts, tokens, complete)


@dataclass(frozen=True)
class Served:
    """The times of one request, in seconds: its arrival and each of its tokens."""

    arrival: float
    times: tuple[float, ...]

    @property
    def ttft(self) -> float:
        """Time from the arrival to the first token."""
        return self.times[0] - self.arrival

    @property
    def gaps(self) -> tuple[float, ...]:
        """Times between consecutive tokens; empty for one token."""
        return tuple(b - a for a, b in zip(self.times, self.times[1:], strict=False))


@dataclass(frozen=True)
class LoadReport:
    """All requests of a load, in the order of arrival; ``seconds`` until the last token."""

    served: tuple[Served, ...]
    seconds: float
    iterations: int

    @property
    def throughput(self) -> float:
        """Tokens per second."""
        return sum(len(one.times) for one in self.served) / self.seconds if self.seconds else 0.0

    def ttft(self, quantile: float = 0.5) -> float:
        """Return a quantile of the times to the first token, by the nearest rank; NaN without requests."""
        return _quantile([one.ttft for one in self.served], quantile)

    def itl(self, quantile: float = 0.5) -> float:
        """Return a quantile of the times between tokens, by the nearest rank; NaN without such times."""
        return _quantile([gap for one in self.served for gap in one.gaps], quantile)

    def goodput(self, ttft: float, itl: float) -> float:
        """Return the requests per second whose TTFT and all ITLs are at most these limits."""
        good = sum(one.ttft <= ttft and max(one.gaps, default=0.0) <= itl for one in self.served)
        return good / self.seconds if self.seconds else 0.0


def poisson_arrivals(
    rate: float, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], seed: int = 0
) -> list[Arrival]:
    """Return requests whose distances in time are exponential with mean 1 / ``rate`` seconds.

    Raises:
        UserError: the rate is not positive, or the numbers of prompts and parameters differ.
    """
    if not 0 < rate < math.inf:
        raise UserError(f"rate is {rate}: use a positive number of requests per second")
    if len(prompts) != len(params):
        raise UserError(f"{len(prompts)} prompts and {len(params)} parameters: give one for each prompt")
    time, arrivals = 0.0, []
    for number, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        time -= math.log1p(-uniform(seed, "arrival", number)) / rate
        arrivals.append(Arrival(time, tuple(prompt), own))
    return arrivals


def serve(
    engine: Serves,
    arrivals: Sequence[Arrival],
    cost: Callable[[Iteration], float],
    max_steps: int = 1_000_000,
) -> LoadReport:
    """Serve requests in a simulated clock, which advances by ``cost(step)`` for each iteration.

    An idle engine waits for the next arrival. A request that arrives during an iteration is queued after it.

    Raises:
        UserError: a request is refused, or not all are complete after ``max_steps`` iterations.
    """
    require_count("max_steps", max_steps)
    pending = sorted(arrivals, key=lambda arrival: arrival.time)[::-1]
    came: dict[int, float] = {}
    times: dict[int, list[float]] = {}
    open_requests: set[int] = set()
    clock, iterations = 0.0, 0
    while pending or open_requests:
        if not open_requests:
            clock = max(clock, pending[-1].time)
        while pending and pending[-1].time <= clock:
            arrival = pending.pop()
            number = engine.add_request(arrival.prompt, arrival.params)
            came[number], times[number] = arrival.time, []
            open_requests.add(number)
        if iterations == max_steps:
            raise UserError(f"{len(open_requests)} requests are open after {max_steps} steps: use more steps")
        step = engine.step()
        clock += cost(step)
        iterations += 1
        for number in step.tokens:
            times[number].append(clock)
        open_requests -= {completion.number for completion in step.completed}
    served = tuple(Served(came[number], tuple(times[number])) for number in sorted(came))
    return LoadReport(served, clock, iterations)


def _quantile(values: Sequence[float], quantile: float) -> float:
    ordered = sorted(values)
    return ordered[max(0, math.ceil(quantile * len(ordered)) - 1)] if ordered else math.nan
