"""The tools of a check: seeds repeat inputs, and comparisons are counted, check the type first and
explain.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlo_lib.grading.checks.claimed import ClaimScored
from dlo_lib.grading.checks.contract import Check, Trial, Wrong, check, claimed, scenario
from dlo_lib.grading.checks.outcome import Ended, Outcome, Status, run_check, seed_for
from dlo_lib.grading.judge.report import check_report

elsewhere = 3


def said(compare: Callable[[Trial], object]) -> str:
    with pytest.raises(Wrong) as wrong:
        compare(Trial(0))
    return str(wrong.value)


def draws(t: Trial) -> list[Any]:
    return [
        t.normal(3).tolist(),
        t.integers(1, 6, 4).tolist(),
        t.integer(1, 100),
        t.uniform(2, 3),
        t.choice("abc"),
        t.shuffled(range(9)),
    ]


def test_the_same_seed_draws_the_same_inputs() -> None:
    assert draws(Trial(5)) == draws(Trial(5))
    assert draws(Trial(5)) != draws(Trial(6))


def test_bounds_are_inclusive() -> None:
    t = Trial(0)
    assert set(t.integers(1, 3, 200).tolist()) == {1, 2, 3}


def test_cases_are_drawn_until_one_tells() -> None:
    t, again = Trial(0), Trial(0)
    drawn = t.draw_until(lambda: t.integer(1, 6), lambda number: number == 6)
    assert drawn == 6
    while again.integer(1, 6) != 6:
        pass
    assert t.integer(1, 10**6) == again.integer(1, 10**6)
    with pytest.raises(RuntimeError, match="none of 1000 drawn cases is accepted"):
        t.draw_until(lambda: t.integer(1, 6), lambda number: number == 7)


@pytest.mark.parametrize("passes", [True, False])
def test_what_a_check_measures_is_kept_whether_it_passes_or_not(passes: bool) -> None:
    @check("race", points=1)
    def check_scores(student: Any, t: Trial) -> None:
        t.measure(scores=[0.5, 0.7], steps=3)
        t.that(passes, "too low")

    outcome = run_check(check_scores, SimpleNamespace(), 0)
    assert outcome.passed is passes
    assert check_report(outcome, hidden=False).measured == {"scores": [0.5, 0.7], "steps": 3}


def test_a_claim_is_not_measured() -> None:
    with pytest.raises(ClaimScored):
        Trial(0).measure(scores=[claimed(0.9)])


def test_the_same_numbers_in_every_dtype() -> None:
    assert torch.equal(
        Trial(1).normal(9, dtype=torch.bfloat16), Trial(1).normal(9, dtype=torch.float64).bfloat16()
    )


@pytest.mark.parametrize("truth", [torch.tensor(True), 1, "yes"])
def test_that_accepts_only_a_bool(truth: Any) -> None:
    with pytest.raises(TypeError, match="real bool"):
        Trial(0).that(truth, "")


def test_messages_get_values_by_name() -> None:
    assert said(lambda t: t.that(False, "rank {rank} sent {n:.1f}", rank=3, n=0.25)) == "rank 3 sent 0.2"
    assert said(lambda t: t.that(False, "a {brace} without values")) == "a {brace} without values"


@pytest.mark.parametrize(
    ("got", "want"), [(True, 1), (2.0, 2), ([1], (1,)), ({"a": 1}, {"a": 2}), (None, 0), ("1", 1)]
)
def test_equal_compares_types_too(got: Any, want: Any) -> None:
    assert "expected" in said(lambda t: t.equal(got, want, "it"))
    Trial(0).equal(want, want, "it")


@pytest.mark.parametrize("got", [True, "3", None, torch.tensor(3.0), float("nan"), float("inf"), 10**400])
def test_a_number_is_a_finite_int_or_float(got: Any) -> None:
    assert "number" in said(lambda t: t.number(got, "it"))


def test_close_compares_shape_dtype_and_finiteness() -> None:
    want = torch.tensor([1.0, 2.0])
    assert "shape (1,), expected (2,)" in said(lambda t: t.close(want[:1], want, "it"))
    assert "torch.float64, expected torch.float32" in said(lambda t: t.close(want.double(), want, "it"))
    assert "NaN" in said(lambda t: t.close(want / 0 * 0, want, "it"))
    assert "off by up to 0.5" in said(lambda t: t.close(want + torch.tensor([0.5, 0.0]), want, "it"))
    assert "should be a tensor, not [1.0, 2.0]" in said(lambda t: t.close([1.0, 2.0], want, "it"))
    Trial(0).close(want + 1e-6, want, "it")


def test_close_requires_infinity_where_it_is_expected() -> None:
    want = torch.tensor([1.0, -torch.inf])
    Trial(0).close(want.clone(), want, "it")
    assert "infinity" in said(lambda t: t.close(want.abs(), want, "it"))


def test_close_for_numbers() -> None:
    Trial(0).close(1000, 1000.05, "it", rtol=1e-4)
    assert (
        said(lambda t: t.close(3, 4.0, "{what} of rank {rank}", what="it", rank=1))
        == "it of rank 1 is 3, expected 4"
    )


@pytest.mark.parametrize(
    ("name", "verb"),
    [
        ("the probabilities", "are"),
        ("the weights, divided by their sum,", "are"),
        ("the kept elements of call 2 on rank 1", "are"),
        ("the images of cutmix", "are"),
        ("inputs", "are"),
        ("the sum of the weights", "is"),
        ("the loss on rank 0", "is"),
        ("the bias", "is"),
        ("cos of the positions [1, 2]", "is"),
        ("what linear_backward returns", "is"),
        ("heads_to_sequence on rank 0", "is"),
        ("master 1", "is"),
    ],
)
def test_the_verb_agrees_with_the_name(name: str, verb: str) -> None:
    assert said(lambda t: t.close(2.0, 1.0, name)) == f"{name} {verb} 2, expected 1"
    with pytest.raises(Wrong) as wrong:
        Trial(0).close(torch.ones(1), torch.zeros(1), name)
    assert str(wrong.value).startswith(f"{name} {verb} off by up to 1")


def test_a_hidden_check_shows_no_value() -> None:
    with pytest.raises(Wrong) as wrong:
        Trial(0).equal([1, 2, 3], [1], "the list")
    assert "[1, 2, 3]" in str(wrong.value)
    assert wrong.value.words == "the list is not right"


def test_a_scenario_is_its_source_alone() -> None:
    @scenario
    def sums(student, rank, world, x):
        import math

        return [student.add(x, math.pi) for _ in range(world)], torch.ones(1), [y + 1 for y in x]

    assert sums.source.startswith("def sums(")


def test_a_scenario_that_uses_names_of_its_module_is_refused() -> None:
    with pytest.raises(ValueError, match="elsewhere"):

        @scenario
        def leaning(student, rank, world):
            return [elsewhere for _ in range(3)]


class _Doubled:
    def of(self, x):
        return 2 * x


def _added(x, by):
    return _Doubled().of(x) + by


def test_a_scenario_brings_the_functions_and_classes_of_its_module_that_it_uses() -> None:
    @scenario
    def sums(student, rank, world, x):
        "The title."
        return _added(x, by=student.number())

    scope: dict[str, Any] = {}
    exec(sums.source, scope)
    student = SimpleNamespace(number=lambda: 3)
    assert scope["sums"](student, 0, 1, 4) == 11
    assert list(scope) == ["__builtins__", "sums"]  # a student's code finds no part in the globals


def test_a_scenario_names_the_functions_of_the_student() -> None:
    with pytest.raises(ValueError, match=r"chosen uses `student` in line 2 .* write student\.NAME"):

        @scenario
        def chosen(student, rank, world, name):
            return getattr(student, name)(rank) + student.first(world)


def test_a_check_needs_points_and_time() -> None:
    with pytest.raises(ValueError, match="positive"):
        check("q", points=0)


# -- one check, run


def made(function: Callable[[Any, Trial], None]) -> Outcome:
    return run_check(check("q", points=2)(function), object(), 0)  # type: ignore[arg-type]


def test_the_title_is_the_first_line_of_the_docstring() -> None:
    def check_it(student, t):
        """Title of the check

        and more.
        """

    assert check("q", points=1)(check_it).title == "Title of the check"


def test_a_check_without_comparison_is_a_grader_error() -> None:
    outcome = made(lambda student, t: None)
    assert (outcome.status, outcome.points) == (Status.GRADER_ERROR, 0.0)
    assert "it compared nothing" in outcome.message


def test_an_exception_in_a_check_is_a_grader_error() -> None:
    outcome = made(lambda student, t: t.that(1 / 0 > 0, ""))
    assert outcome.status is Status.GRADER_ERROR
    assert "ZeroDivisionError" in outcome.message
    assert "instructor" in outcome.words


class Answering:
    """A student whose functions return what the check cannot compute with."""

    def text(self) -> str:
        return "text"

    def large(self) -> int:
        return 10**308


@pytest.mark.parametrize(
    "function",
    [
        lambda student, t: t.that(student.text() + 1 > 0, ""),
        lambda student, t: t.that(student.text()["key"] > 0, ""),
        lambda student, t: t.that(1 / len(student.text()[4:]) > 0, ""),
        lambda student, t: t.that(student.text().item() > 0, ""),
    ],
)
def test_an_answer_with_which_a_check_cannot_compute_is_wrong_and_no_error_of_the_grader(
    function: Callable[[Any, Trial], None],
) -> None:
    outcome = run_check(check("q", points=2)(function), Answering(), 0)  # type: ignore[arg-type]
    assert (outcome.status, outcome.points) == (Status.WRONG, 0.0)
    assert outcome.words == "what came back does not have the form that the check reads"
    assert "Error" in outcome.message


def test_a_huge_integer_does_not_stop_the_arithmetic_of_a_check() -> None:
    def function(student: Any, t: Trial) -> None:
        t.that(t.number(student.large(), "it") * 60.5 < 1e9, "too large")

    outcome = run_check(check("q", points=2)(function), Answering(), 0)  # type: ignore[arg-type]
    assert (outcome.status, outcome.words) == (Status.WRONG, "too large")


def test_an_ended_process_keeps_its_status_and_words() -> None:
    def dies(student, t):
        raise Ended(Status.OOM, "too much")

    assert made(dies).status is Status.OOM


def test_all_points_or_none() -> None:
    assert made(lambda student, t: t.that(True, "")).points == 2
    assert made(lambda student, t: (t.that(True, ""), t.that(False, "no"))[0]).points == 0


def test_seeds_depend_on_secret_lab_and_check_and_on_nothing_else() -> None:
    one = check("q", points=1)(lambda student, t: None)
    assert isinstance(one, Check)
    assert seed_for("s", "lab", one) == seed_for("s", "lab", one)
    assert len({seed_for("s", "lab", one), seed_for("z", "lab", one), seed_for("s", "other", one)}) == 3
