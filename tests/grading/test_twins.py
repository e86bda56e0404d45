"""A twin is computed once for the same inputs, and no check can spoil it for another."""

from __future__ import annotations

import torch

from dlo_lib.grading.twins import KEPT, twin


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


def test_a_default_that_is_written_out_is_the_same_call() -> None:
    computed = []

    @twin
    def step(batch: int, **settings: object) -> int:
        computed.append(batch)
        return batch

    step(2, fused=True)
    step(batch=2, fused=True)
    step(2, fused=1)
    assert computed == [2, 2]


def test_a_check_that_changes_a_result_spoils_no_other() -> None:
    @twin
    def made(size: int) -> dict[str, list[torch.Tensor]]:
        return {"grads": [torch.ones(size)]}

    made(3)["grads"][0].zero_()
    assert torch.equal(made(3)["grads"][0], torch.ones(3))


def test_a_notebook_that_draws_new_inputs_all_day_keeps_only_the_last() -> None:
    computed = []

    @twin
    def same(number: int) -> int:
        computed.append(number)
        return number

    for number in range(KEPT + 1):
        same(number)
    same(KEPT)
    same(0)
    assert computed == [*range(KEPT + 1), 0]
