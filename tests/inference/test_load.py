"""Loads in a simulated clock: times by hand, and what chunks, batches and limits change."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.inference import (
    Arrival,
    Batching,
    BatchScheduler,
    BlockPool,
    DryEngine,
    Engine,
    IterationCost,
    LoadReport,
    SamplingParams,
    poisson_arrivals,
    serve,
)
from tests.inference.models import model, prompts

COST = IterationCost(fixed=1.0, per_token=0.1)


def arrival(time: float, prompt: int, tokens: int) -> Arrival:
    return Arrival(time, (1,) * prompt, SamplingParams(max_tokens=tokens))


def report(arrivals: list[Arrival], budget: int | None = None, **options: object) -> LoadReport:
    scheduler = BatchScheduler(BlockPool(2000, 4), budget, share_prefixes=False, **options)
    return serve(DryEngine(scheduler), arrivals, COST)


def test_times_are_those_computed_by_hand() -> None:
    got = report([arrival(5, 10, 2), arrival(0, 3, 3), arrival(0.5, 4, 1)])
    # 0: prompt of 3 until 1.3; then a decode and a prompt of 4 until 2.8; a decode until 3.9; idle until 5
    # 5: prompt of 10 until 7; a decode until 8.1
    want = [(1.3, 2.8, 3.9), (2.8,), (7.0, 8.1)]
    assert [one.times for one in got.served] == [pytest.approx(times) for times in want]
    assert [one.ttft for one in got.served] == pytest.approx([1.3, 2.3, 2.0])
    assert (got.iterations, got.seconds) == (5, pytest.approx(8.1))
    assert got.throughput == pytest.approx(6 / 8.1)
    assert got.ttft(0.5) == pytest.approx(2.0)
    assert got.itl(1.0) == pytest.approx(1.5)
    assert got.goodput(ttft=2.1, itl=1.2) == pytest.approx(1 / 8.1)
    assert got.goodput(ttft=9, itl=9) == pytest.approx(3 / 8.1)


def test_attention_costs_the_stored_tokens_that_it_reads() -> None:
    cost = IterationCost(fixed=0, per_token=0, per_past=1)
    got = serve(DryEngine(BatchScheduler(BlockPool(9, 4))), [arrival(0, 3, 3)], cost)
    assert got.served[0].times == (3, 7, 12)


def test_chunks_bound_the_time_between_tokens() -> None:
    load = [arrival(0, 4, 40), arrival(3, 200, 4)]
    whole, chunked = report(load), report(load, budget=16)
    assert whole.itl(1.0) == pytest.approx(1 + 0.1 * 201)
    assert chunked.itl(1.0) <= 1 + 0.1 * 16 + 1e-9
    assert chunked.served[1].ttft > whole.served[1].ttft  # where chunks lose


def test_continuous_batches_serve_more_than_static_ones() -> None:
    load = [arrival(0.1 * number, 2, 1 + 7 * (number % 4)) for number in range(24)]
    static = report(load, max_running=4, batching=Batching.STATIC)
    continuous = report(load, max_running=4)
    assert continuous.iterations < static.iterations
    assert continuous.throughput > static.throughput
    assert continuous.ttft(0.9) < static.ttft(0.9)


def test_the_engine_and_the_scheduler_alone_take_the_same_time() -> None:
    given = prompts(6)
    load = poisson_arrivals(0.5, given, [SamplingParams(max_tokens=5)] * 6, seed=1)
    sizes = {"token_budget": 5, "share_prefixes": False}
    real = serve(Engine(model(), blocks=12, block_size=2, **sizes), load, COST)
    assert real == serve(DryEngine(BatchScheduler(BlockPool(12, 2), **sizes)), load, COST)


def test_arrivals_are_a_poisson_process() -> None:
    count = 4000
    load = poisson_arrivals(2.0, [(1,)] * count, [SamplingParams()] * count, seed=7)
    times = [0.0, *(one.time for one in load)]
    gaps = [b - a for a, b in pairwise(times)]
    assert all(gap >= 0 for gap in gaps)
    # Chebyshev and Hoeffding, with a seed that does not change
    assert sum(gaps) / count == pytest.approx(0.5, abs=0.05)
    for t in (0.1, 0.5, 1.5):
        assert sum(gap > t for gap in gaps) / count == pytest.approx(math.exp(-2 * t), abs=0.05)
    assert load == poisson_arrivals(2.0, [(1,)] * count, [SamplingParams()] * count, seed=7)
    assert load[0].time != poisson_arrivals(2.0, [(1,)], [SamplingParams()], seed=8)[0].time


def test_empty_loads_and_wrong_ones() -> None:
    empty = report([])
    assert (empty.throughput, empty.goodput(1, 1), empty.iterations) == (0, 0, 0)
    assert math.isnan(empty.ttft())
    assert math.isnan(empty.itl())
    for rate in (0, -1, math.nan, math.inf):
        with pytest.raises(UserError, match="rate is"):
            poisson_arrivals(rate, [], [])
    with pytest.raises(UserError, match="one for each"):
        poisson_arrivals(1, [(1,)], [])
    with pytest.raises(UserError, match="use more steps"):
        serve(DryEngine(BatchScheduler(BlockPool(9, 4))), [arrival(0, 3, 9)], COST, max_steps=2)
