"""A twin is computed once for equal inputs, and no check can change its result for another."""

from __future__ import annotations

import torch

from dlo_lib.grading.checks.twins import MAX_RESULTS, twin


def test_equal_tensors_are_one_argument_and_other_dtypes_are_not() -> None:
    computed = []

    @twin
    def doubled(x: torch.Tensor) -> torch.Tensor:
        computed.append(x.dtype)
        return 2 * x

    x = torch.arange(4.0)
    assert torch.equal(doubled(x), doubled(x.clone()))
    doubled(x.bfloat16())
    doubled(x[::2])
    assert computed == [torch.float32, torch.bfloat16, torch.float32]


def test_an_explicit_default_is_the_same_call() -> None:
    computed = []

    @twin
    def step(batch: int, **settings: object) -> int:
        computed.append(batch)
        return batch

    step(2, fused=True)
    step(batch=2, fused=True)
    step(2, fused=1)
    assert computed == [2, 2]


def test_a_check_that_changes_a_result_does_not_affect_others() -> None:
    @twin
    def made(size: int) -> dict[str, list[torch.Tensor]]:
        return {"grads": [torch.ones(size)]}

    made(3)["grads"][0].zero_()
    assert torch.equal(made(3)["grads"][0], torch.ones(3))


def test_only_the_last_results_are_cached() -> None:
    computed = []

    @twin
    def same(number: int) -> int:
        computed.append(number)
        return number

    for number in range(MAX_RESULTS + 1):
        same(number)
    same(MAX_RESULTS)
    same(0)
    assert computed == [*range(MAX_RESULTS + 1), 0]
