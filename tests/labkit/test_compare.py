"""What checks of several labs say of results, traffic, memory and order, with runs
whose contents are known."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dlo_lib.comm.calls import Call, Kind
from dlo_lib.grading.checks.contract import Run, Trial, Wrong
from dlo_lib.labkit.compare import EXACT, double, each_rank, entry, every_rank, is_near, near, same, wrong_if
from dlo_lib.labkit.memory import MIB, holds_at_most
from dlo_lib.labkit.order import comes_before, first_difference
from dlo_lib.labkit.traffic import (
    kinds_of,
    makes_calls,
    passes_at_least,
    passes_at_most,
    passes_exactly,
    passes_only,
)

ONE = torch.ones(3)


@pytest.mark.parametrize(
    ("got", "want", "expected"),
    [
        (ONE + 1e-9, ONE, True),
        (ONE + 1e-3, ONE, False),
        (ONE.double(), ONE, False),
        (torch.ones(1, 3), ONE, False),
        (None, ONE, False),
        ([ONE, ONE], [ONE, ONE], True),
        ([ONE], [ONE, ONE], False),
        ([ONE, 2 * ONE], [ONE, ONE], False),
        ([torch.ones(0)], [torch.ones(0)], False),
        (1.0 + 1e-9, 1.0, True),
        (1.1, 1.0, False),
        ("1.0", 1.0, False),
    ],
)
def test_near_compares_values_shapes_and_types(got: object, want: Any, expected: bool) -> None:
    assert near(got, want) is expected


def test_a_known_mistake_gets_its_name() -> None:
    t = Trial(0)
    with pytest.raises(Wrong, match="summed on 3 ranks"):
        wrong_if(t, 3 * ONE, ONE, {"summed on {world} ranks": 3 * ONE}, world=3)
    wrong_if(t, 2 * ONE, ONE, {"summed": 3 * ONE})


def test_a_mistake_that_gives_the_right_value_is_none() -> None:
    wrong_if(Trial(0), ONE, ONE, {"summed": 1 * ONE})


def test_the_values_of_a_message_may_have_the_names_of_arguments() -> None:
    with pytest.raises(Wrong, match="the sum of two ranks is 3, not 2"):
        wrong_if(
            Trial(0), 3, 2, {"{what} is {got}, not {want}": 3}, what="the sum of two ranks", got=3, want=2
        )
    with pytest.raises(Wrong, match="the sum of two ranks is off by up to 1"):
        same(Trial(0), 2 * ONE, ONE, "{what}", what="the sum of two ranks")


def test_exact_is_the_tolerance_of_drawn_float64() -> None:
    drawn = double(Trial(0), 2, 3)
    assert drawn.dtype == torch.float64
    assert drawn.shape == (2, 3)
    assert near(drawn * (1 + 1e-10), drawn, **EXACT)
    assert not near(drawn * (1 + 1e-7), drawn, **EXACT)


def test_a_number_that_is_not_near_is_named_with_what_it_should_be() -> None:
    is_near(Trial(0), 2.1, 2.0, "{what} is {got}, not {want}", rtol=0.1, what="the sum")
    with pytest.raises(Wrong, match=r"the sum is 2\.1, not 2\.0"):
        is_near(Trial(0), 2.1, 2.0, "{what} is {got}, not {want}", {"only one": 1.0}, what="the sum")
    with pytest.raises(Wrong, match="only one of the sum"):
        is_near(Trial(0), 1.0, 2.0, "", {"only one of {what}": 1.0}, what="the sum")


def run(*results: object, calls: tuple[tuple[Call, ...], ...] = (), memory: Any = None) -> Run:
    return Run(list(results), calls or ((),) * len(results), memory or {})


def test_every_rank_is_compared_with_its_twin() -> None:
    every_rank(Trial(0), run(ONE, ONE), ONE, "the mean on rank {rank}")
    every_rank(Trial(0), run((ONE, 0), (2 * ONE, 0)), [ONE, 2 * ONE], "the mean", of=lambda result: result[0])
    with pytest.raises(Wrong, match="the mean on rank 1 of 2 is off by up to 1"):
        every_rank(Trial(0), run(ONE, 2 * ONE), ONE, "the mean on rank {rank} of {world}")


def test_the_result_of_each_rank_has_its_parts() -> None:
    assert list(each_rank(Trial(0), run((1, 2), [3, 4]), 2, "the result")) == [(0, [1, 2]), (1, [3, 4])]
    with pytest.raises(Wrong, match="the result should be 2 values, not None"):
        list(each_rank(Trial(0), run((1, 2), None), 2, "the result"))


def test_lists_and_dicts_are_compared_value_by_value() -> None:
    same(Trial(0), {"a": [ONE, 2.0]}, {"a": [ONE, 2.0]}, "value {i} of {name}")
    for got, words in (
        ({"a": [ONE, 3.0]}, "value 1 of a is 3"),
        ({"a": [ONE]}, "should be 2 values"),
        ({}, "should be 2 values"),
        ([ONE], "should be a dict"),
        ({"a": [2 * ONE, 2.0]}, "summed 0"),
    ):
        with pytest.raises(Wrong, match=words):
            same(
                Trial(0), got, {"a": [ONE, 2.0]}, "value {i} of {name}", {"summed {i}": {"a": [2 * ONE, 4.0]}}
            )


def test_a_mistake_of_one_rank_has_the_value_of_this_rank() -> None:
    wrong = {"summed on rank {rank}": [3 * ONE, 4 * ONE]}
    every_rank(Trial(0), run(ONE, ONE), ONE, "the mean", mistakes=wrong)
    with pytest.raises(Wrong, match="summed on rank 1"):
        every_rank(Trial(0), run(ONE, 4 * ONE), ONE, "the mean", mistakes=wrong)


def test_an_entry_of_a_dict_is_a_number() -> None:
    assert entry(Trial(0), {"weights": 3}, "weights", "the parts") == 3
    for got, words in (
        (None, "should be a dict"),
        ({}, "has no entry"),
        ({"weights": "3"}, "should be a number"),
    ):
        with pytest.raises(Wrong, match=words):
            entry(Trial(0), got, "weights", "the parts")


def call(kind: Kind, numel: int, in_backward: bool = False) -> Call:
    return Call(
        1,
        kind,
        "world",
        (0, 1),
        1,
        shape=(numel,),
        numel=numel,
        payload_bytes=4 * numel,
        in_backward=in_backward,
    )


TWO = run(
    None, None, calls=((call(Kind.ALL_REDUCE, 2), call(Kind.BROADCAST, 1)), (call(Kind.ALL_REDUCE, 2),))
)


def test_traffic_is_compared_on_every_rank() -> None:
    t = Trial(0)
    assert kinds_of(TWO, 0) == "all_reduce, broadcast"
    assert kinds_of(TWO, 0, [Kind.BROADCAST]) == "all_reduce"
    passes_exactly(t, TWO, [12, 8], "no")
    passes_exactly(t, TWO, 8, "no", kind=Kind.ALL_REDUCE, calls=1)
    passes_at_most(t, TWO, 12, "no")
    passes_only(t, TWO, [Kind.ALL_REDUCE, Kind.BROADCAST], "no")
    with pytest.raises(Wrong, match="rank 0 passed 12 bytes in 2 calls, 8 are enough"):
        passes_exactly(t, TWO, 8, "rank {rank} passed {got} bytes in {count} calls, {want} are enough")
    with pytest.raises(Wrong, match="rank 0 passed 12"):
        passes_at_most(t, TWO, 8, "rank {rank} passed {got}")
    passes_at_least(t, TWO, 8, "no")
    with pytest.raises(Wrong, match="rank 1 passed 8 bytes in 3 steps"):
        passes_at_least(t, TWO, 12, "rank {rank} passed {got} bytes in {steps} steps", steps=3)
    with pytest.raises(Wrong, match="rank 0 also calls broadcast"):
        passes_only(t, TWO, [Kind.ALL_REDUCE], "rank {rank} also calls {kinds}")


def test_calls_are_counted_in_forward_and_in_backward() -> None:
    of_a_rank = call(Kind.ALL_REDUCE, 2), call(Kind.ALL_REDUCE, 2, in_backward=True), call(Kind.BROADCAST, 1)
    step = run(None, None, calls=(of_a_rank, of_a_rank))
    makes_calls(Trial(0), step, Kind.ALL_REDUCE, 2, "no")
    for backward in (False, True):
        makes_calls(Trial(0), step, Kind.ALL_REDUCE, 1, "no", in_backward=backward)
    with pytest.raises(Wrong, match="rank 0 makes 1 all-reduces in forward, 2 are needed"):
        message = "rank {rank} makes {count} all-reduces in {moment}, {want} are needed"
        makes_calls(Trial(0), step, Kind.ALL_REDUCE, 2, message, in_backward=False, moment="forward")


def test_memory_is_compared_in_the_unit_of_the_message() -> None:
    measured = run(None, None, memory={"at rest": {0: 2 * MIB, 1: 6 * MIB}})
    holds_at_most(Trial(0), measured, "at rest", [3 * MIB, 7 * MIB], "no")
    with pytest.raises(Wrong, match="rank 1 holds 6 MiB, 4 are enough for two rows"):
        message = "rank {rank} holds {held:.0f} MiB, {most:.0f} are enough for {what}"
        holds_at_most(Trial(0), measured, "at rest", 4 * MIB, message, what="two rows")


def test_a_message_without_fields_is_shown_for_a_hidden_check_too() -> None:
    with pytest.raises(Wrong) as wrong:
        passes_exactly(Trial(0), TWO, 8, "one all-reduce is enough")
    assert wrong.value.words == "one all-reduce is enough"


def test_the_first_difference_of_two_orders() -> None:
    want = ["gather", "compute", "free"]
    assert first_difference(["gather", "free"], want) == ("gather", "free", "compute")
    assert first_difference([], want) == ("nothing", "nothing", "gather")
    assert comes_before(want, "gather", "free")
    assert not comes_before(want, "free", "gather")
