"""What the scheduler chooses in each iteration: budget, decodes first, order, pre-emption."""

from __future__ import annotations

import random

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.inference import Batching, BatchScheduler, BlockPool, GenerationRequest, SamplingParams


def request(number: int, prompt: int, tokens: int) -> GenerationRequest:
    return GenerationRequest(number, [number] * prompt, SamplingParams(max_tokens=tokens))


def run(scheduler: BatchScheduler, requests: list[GenerationRequest]) -> list[list[tuple[int, int]]]:
    """Serve all requests; return for each iteration the pairs (request, tokens)."""
    for one in requests:
        scheduler.add(one)
    iterations = []
    while scheduler.has_work:
        parts = scheduler.schedule()
        assert parts, "an iteration computes something while there is work"
        iterations.append([(part.request.number, part.count) for part in parts])
        scheduler.update(parts, {part.request.number: 0 for part in parts if part.last})
    return iterations


def test_a_long_prompt_is_computed_in_chunks_beside_the_decodes() -> None:
    scheduler = BatchScheduler(BlockPool(99, 4), token_budget=4)
    assert run(scheduler, [request(1, 2, 5), request(2, 9, 2)]) == [
        [(1, 2), (2, 2)],
        [(1, 1), (2, 3)],
        [(1, 1), (2, 3)],
        [(1, 1), (2, 1)],
        [(1, 1), (2, 1)],
    ]


def test_without_a_budget_a_prompt_is_one_iteration() -> None:
    assert run(BatchScheduler(BlockPool(99, 4)), [request(1, 2, 2), request(2, 9, 1)]) == [
        [(1, 2), (2, 9)],
        [(1, 1)],
    ]


def test_a_complete_sequence_gives_its_place_to_a_waiting_one() -> None:
    def iterations(batching: Batching) -> int:
        scheduler = BatchScheduler(BlockPool(99, 4), max_running=2, batching=batching)
        return len(run(scheduler, [request(1, 1, 8), request(2, 1, 2), request(3, 1, 2), request(4, 1, 4)]))

    assert iterations(Batching.CONTINUOUS) == 8
    assert iterations(Batching.STATIC) == 8 + 4


def test_the_sequence_admitted_last_is_preempted_and_computed_again() -> None:
    scheduler = BatchScheduler(BlockPool(4, 1), share_prefixes=False)
    assert run(scheduler, [request(1, 1, 4), request(2, 1, 3)]) == [
        [(1, 1), (2, 1)],
        [(1, 1), (2, 1)],
        [(1, 1)],  # needs the third block, and the pool has 4
        [(1, 1)],
        [(2, 3)],
    ]
    assert scheduler.preemptions == 1


@pytest.mark.parametrize("seed", range(8))
def test_random_loads_keep_every_promise(seed: int) -> None:
    draw = random.Random(seed)
    pool = BlockPool(draw.randint(6, 20), draw.randint(1, 4), watermark=draw.randrange(3))
    budget = draw.choice([None, 1, 3, 7])
    scheduler = BatchScheduler(pool, budget, max_running=draw.randint(1, 6))
    room = pool.num_blocks * pool.block_size
    requests = []
    for number in range(20):
        prompt = draw.randint(1, room - 1)
        requests.append(request(number, min(prompt, 8), draw.randint(1, max(1, min(9, room - 8)))))
    pending, begun = list(requests), []
    done: list[GenerationRequest] = []
    while pending or scheduler.has_work:
        if pending:
            scheduler.add(pending.pop(0))
        decoding = [one for one in scheduler.running if one.left == 1]
        before = list(scheduler.running)
        parts = scheduler.schedule()
        assert parts
        assert budget is None or sum(part.count for part in parts) <= budget
        assert len(scheduler.running) <= scheduler.max_running
        chosen = [part.request for part in parts]
        if len(scheduler.running) > 1 and any(one not in before for one in scheduler.running):
            assert pool.num_free >= pool.watermark
        assert len(set(map(id, chosen))) == len(chosen)
        # Decodes are first, and none that kept its blocks waits while the budget lasts.
        alive = [one for one in decoding if one in scheduler.running]
        assert chosen[: len(alive)] == alive[: len(chosen)]
        assert [one.number for one in scheduler.running] == sorted(one.number for one in scheduler.running)
        begun += [one.number for one in chosen if one.number not in begun]
        done += scheduler.update(parts, {part.request.number: 0 for part in parts if part.last})
    assert begun == sorted(begun)  # first come, first served
    assert {one.number for one in done} == set(range(20))
    assert all(len(one.output) == one.params.max_tokens for one in done)
    assert pool.num_free == pool.num_blocks
    assert sum(one.preemptions for one in done) == scheduler.preemptions


def test_sizes_outside_their_range_are_refused() -> None:
    with pytest.raises(UserError, match="token_budget"):
        BatchScheduler(BlockPool(1, 1), token_budget=0)
    with pytest.raises(UserError, match="max_running"):
        BatchScheduler(BlockPool(1, 1), max_running=0)
    with pytest.raises(UserError, match="the pool has 2"):
        BatchScheduler(BlockPool(2, 2)).add(request(0, 4, 2))
