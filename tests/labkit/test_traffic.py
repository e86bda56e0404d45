"""A right result that does not come from the messages is found, although its traffic is right."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dlo_lib.grading.checks.contract import Kind, Trial, Wrong, claimed, scenario
from dlo_lib.grading.checks.runs import KEPT_NUMBERS
from dlo_lib.grading.notebook.local_student import LocalStudent
from dlo_lib.labkit.traffic import sends_one_of, uses_what_arrives


@scenario
def summed(student, rank, world, value, whole):
    return {"total": student.total(value, whole)}


@scenario
def with_a_claim(student, rank, world, value, whole):
    return student.total(value, whole), claimed(float(value.sum()))


@scenario
def gathered(student, rank, world, value, whole):
    packed = torch.empty(2 * value.numel())
    dist.all_gather_into_tensor(packed, value)
    return student.total(packed, whole)


def all_reduced(value: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(value)
    return value


def sends_and_forgets(value: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """The traffic is right; the result came on another way, here with the arguments."""
    dist.all_reduce(value)
    return whole


def sends_zeros(value: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Also what arrives is added to the result, which so depends on it."""
    zeros = torch.zeros_like(value)
    dist.all_reduce(zeros)
    return whole + zeros


def judge(function, kind: Kind | None = None, which=summed, rank: int = 0) -> None:
    values = [torch.arange(3.0), torch.arange(3.0) + 5]
    inputs = [{"value": value, "whole": sum(values)} for value in values]
    run = LocalStudent({"total": function}, 60).ranks(which, inputs)
    uses_what_arrives(Trial(0), run, kind, rank)


@pytest.mark.parametrize("kind", [None, Kind.ALL_REDUCE])
def test_the_received_sum_is_used(kind: Kind | None) -> None:
    judge(all_reduced, kind)


def test_a_result_that_ignores_the_sum_is_wrong() -> None:
    with pytest.raises(Wrong, match="rank 1 does not depend .* of its all_reduce number 1 was changed"):
        judge(sends_and_forgets, rank=1)


def test_a_claim_beside_the_result_is_no_evidence() -> None:
    judge(all_reduced, which=with_a_claim)
    with pytest.raises(Wrong, match="rank 0 does not depend"):
        judge(sends_and_forgets, which=with_a_claim)


def test_a_rank_that_makes_no_call_receives_nothing() -> None:
    with pytest.raises(Wrong, match="rank 0 receives nothing"):
        judge(lambda value, whole: whole)


@pytest.mark.parametrize("rank", [0, 1])
def test_of_a_gather_the_part_of_another_rank_is_changed(rank: int) -> None:
    judge(lambda packed, whole: packed.chunk(2)[1 - rank], Kind.ALL_GATHER, gathered, rank)
    with pytest.raises(Wrong, match="does not depend"):
        judge(lambda packed, whole: packed.chunk(2)[rank].clone(), Kind.ALL_GATHER, gathered, rank)


@pytest.mark.parametrize("size", [3, 2 * KEPT_NUMBERS])
def test_the_numbers_of_a_message_are_compared(size: int) -> None:
    values = [torch.arange(float(size)), torch.arange(float(size)) + 5]
    inputs = [{"value": value, "whole": sum(values)} for value in values]
    for function in (all_reduced, sends_zeros):
        run = LocalStudent({"total": function}, 60).ranks(summed, inputs)
        assert all(torch.equal(result["total"], values[0] + values[1]) for result in run.results)
        uses_what_arrives(Trial(0), run, Kind.ALL_REDUCE)
        if function is all_reduced:
            known = [[torch.ones(2), value] for value in values]
            sends_one_of(Trial(0), run, Kind.ALL_REDUCE, known, "")
        else:
            with pytest.raises(Wrong, match="rank 0 sends other numbers"):
                sends_one_of(
                    Trial(0),
                    run,
                    Kind.ALL_REDUCE,
                    [[value] for value in values],
                    "rank {rank} sends other numbers",
                )


def test_the_order_of_the_numbers_is_free() -> None:
    values = [torch.arange(3.0), torch.arange(3.0) + 5]
    inputs = [{"value": value, "whole": sum(values)} for value in values]
    run = LocalStudent({"total": all_reduced}, 60).ranks(summed, inputs)
    sends_one_of(Trial(0), run, Kind.ALL_REDUCE, [[value.flip(0)] for value in values], "")


@pytest.mark.parametrize(("by", "good"), [(1.0, True), (2.0, True), (1.5, True), (4.0, False), (-1.0, False)])
def test_a_rank_may_divide_what_it_sends(by: float, good: bool) -> None:
    values = [torch.arange(3.0) + 1, torch.arange(3.0) + 5]
    inputs = [{"value": value, "whole": sum(values)} for value in values]
    run = LocalStudent({"total": all_reduced}, 60).ranks(summed, inputs)
    known = [[by * value] for value in values]
    if good:
        sends_one_of(Trial(0), run, Kind.ALL_REDUCE, known, "", divided=2)
    else:
        with pytest.raises(Wrong, match="other numbers"):
            sends_one_of(Trial(0), run, Kind.ALL_REDUCE, known, "other numbers", divided=2)
