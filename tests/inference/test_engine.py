"""The engine's continuations equal those of the plain loop, in float64, in every schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dlo_lib.base.errors import UserError
from dlo_lib.inference import Batching, Engine, SamplingParams, generate_plain, generate_static
from tests.inference.models import SIZES, model, prompts

SCHEDULES: dict[str, dict[str, Any]] = {
    "whole prompts": {"block_size": 5},
    "budget of 1": {"block_size": 3, "token_budget": 1},
    "budget below a prompt": {"block_size": 4, "token_budget": 5},
    "pre-emption": {"blocks": 9, "block_size": 2},
    "pre-emption, chunks": {"blocks": 9, "block_size": 2, "token_budget": 4},
    "pre-emption, no sharing": {"blocks": 9, "block_size": 2, "share_prefixes": False},
    "pre-emption, watermark": {"blocks": 11, "block_size": 2, "watermark": 2, "token_budget": 6},
    "two at a time": {"block_size": 1, "max_running": 2, "blocks": 64},
    "static": {"block_size": 5, "batching": Batching.STATIC, "max_running": 3},
}
GREEDY = SamplingParams(max_tokens=6)
DRAWN = SamplingParams(temperature=1.2, top_p=0.95, top_k=15, max_tokens=6, seed=5)


def poisoned(engine: Engine) -> Engine:
    """The engine with NaN in all slots."""
    for stored in (*engine.cache.keys, *engine.cache.values):
        stored.fill_(torch.nan)
    return engine


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", SIZES)
def test_continuations_are_those_of_the_plain_loop(name: str, schedule: str) -> None:
    net = model(name)
    given = prompts(1)
    engine = poisoned(Engine(net, **SCHEDULES[schedule]))
    params = [GREEDY, DRAWN] * 3
    got = engine.generate(given, params)
    want = [generate_plain(net, prompt, own) for prompt, own in zip(given, params, strict=True)]
    assert [list(one.tokens) for one in got] == want
    assert [list(one.prompt) for one in got] == given
    assert engine.pool.num_free == engine.pool.num_blocks
    lost = sum(one.preemptions for one in got)
    assert lost == engine.scheduler.preemptions
    assert bool(lost) == schedule.startswith("pre-emption")


def test_a_second_use_finds_the_first_ones_prefixes() -> None:
    net = model()
    given = prompts(2)[:1]
    engine = poisoned(Engine(net, block_size=2))
    first = engine.generate(given, GREEDY)
    engine.add_request(given[0], GREEDY)
    step = engine.step()
    assert step.computed == 1  # 8 of the 9 tokens are in 4 full blocks that are known
    assert engine.generate(given, GREEDY)[0].tokens == first[0].tokens


@pytest.mark.parametrize("budget", [None, 2])
def test_a_stop_token_ends_a_sequence_even_as_the_first(budget: int | None) -> None:
    net = model()
    given = prompts(3)
    plain = [generate_plain(net, prompt, GREEDY) for prompt in given]
    stop = (plain[0][0], plain[2][2])
    params = SamplingParams(max_tokens=6, stop=stop)
    got = Engine(net, token_budget=budget).generate(given, params)
    assert [list(one.tokens) for one in got] == [generate_plain(net, prompt, params) for prompt in given]
    assert len(got[0].tokens) == 1
    assert [one.stopped for one in got] == [one.tokens[-1] in stop for one in got]


def test_one_token_is_one_iteration() -> None:
    net = model()
    engine = Engine(net)
    number = engine.add_request([1, 2, 3], SamplingParams(max_tokens=1))
    step = engine.step()
    assert (step.computed, step.past) == (3, 3)
    assert [done.number for done in step.completed] == [number]
    assert list(step.completed[0].tokens) == [step.tokens[number]]
    assert engine.step().computed == 0
    assert engine.generate([], GREEDY) == []


def test_requests_that_can_never_be_served_are_refused_in_one_sentence() -> None:
    engine = Engine(model(), blocks=3, block_size=4)
    for prompt, tokens, said in (
        ([], 1, "the prompt is empty"),
        ([23], 1, "use tokens from 0 to 22"),
        ([-1], 1, "not in the vocabulary"),
        ([1] * 8, 6, "needs 4 blocks of 4 tokens and the pool has 3"),
        ([1] * 60, 6, "64 positions"),
    ):
        with pytest.raises(UserError, match=said):
            engine.add_request(prompt, SamplingParams(max_tokens=tokens))
    # 12 tokens are stored, and the 13th is returned only
    assert len(engine.generate([[1] * 8], SamplingParams(max_tokens=5))[0].tokens) == 5
    with pytest.raises(UserError, match="empty"):
        engine.generate([[1], []], GREEDY)
    assert not engine.scheduler.has_work
    with pytest.raises(UserError, match="one for each"):
        engine.generate([[1], [2]], [GREEDY])


@pytest.mark.parametrize("batch", [1, 4, 9])
def test_static_batches_give_the_same_tokens_and_wait_for_the_longest(batch: int) -> None:
    net = model()
    given = prompts(4)
    stop = generate_plain(net, given[0], GREEDY)[1]
    for params in (SamplingParams(max_tokens=6, stop=(stop,)), DRAWN):
        want = [generate_plain(net, prompt, params) for prompt in given]
        got, iterations = generate_static(net, given, params, batch)
        assert got == want
        lengths = [len(tokens) for tokens in want]
        assert iterations == sum(max(lengths[first : first + batch]) for first in range(0, 6, batch))
