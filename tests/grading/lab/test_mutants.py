"""Mutants as patches: where a patch fits, what it becomes, and the one line that says why it does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.grading.lab.course import LabInfo
from dlo_lib.grading.lab.mutant_table import mutant_table
from dlo_lib.grading.lab.mutants import Mutant, read_mutants
from dlo_lib.grading.lab.source import Cell, CellKind, LabSource

MEAN = '''\
class Mean:
    """The mean of what came."""

    def __init__(self) -> None:
        ### BEGIN SOLUTION
        self.total = 0.0
        self.number = 0
        ### END SOLUTION

    def add(self, value: float) -> None:
        ### BEGIN SOLUTION
        if value == value:
            self.total += value
            self.number += 1
        ### END SOLUTION


def mean(values: list[float]) -> float:
    """The mean of these values."""
    ### BEGIN SOLUTION
    return sum(values) / len(values)
    ### END SOLUTION
'''
SPREAD = '''\
def spread(values: list[float]) -> float:
    """Largest minus smallest."""
    ### BEGIN SOLUTION
    if not values:
        return 0.0
    return max(values) - min(values)
    ### END SOLUTION
'''


@pytest.fixture
def lab(tmp_path: Path) -> LabSource:
    info = LabInfo("07_sums", 7, "sums", "Sums", core=True, minutes=10)
    cells = (
        Cell("setup", CellKind.GIVEN, "values = [1.0]", "values = [1.0]"),
        Cell("mean", CellKind.SOLUTION, MEAN, ""),
        Cell("test_mean", CellKind.TEST, "", "", 1.0),
        Cell("spread", CellKind.SOLUTION, SPREAD, ""),
        Cell("test_spread", CellKind.TEST, "", "", 1.0),
    )
    return LabSource(info, tmp_path, tmp_path, cells)


def planted(lab: LabSource, **patch: Any) -> tuple[str, list[str]]:
    """The question of a mutant, and the lines in which its answer differs from the solution: those that
    go, then those that come."""
    found = Mutant("A mistake", "check_it", says="", **patch).planted(lab)
    old, new = lab.solution(found.question).answer.splitlines(), found.answer.splitlines()
    return found.question, [f"- {line}" for line in old if line not in new] + [
        f"+ {line}" for line in new if line not in old
    ]


def refusal(lab: LabSource, **patch: Any) -> str:
    with pytest.raises(UserError) as refused:
        planted(lab, **patch)
    return str(refused.value).removeprefix("mutant 'A mistake': ")


def test_the_cell_that_holds_the_text_is_the_question(lab: LabSource) -> None:
    assert planted(lab, replace={"len(values)": "2"}) == (
        "mean",
        ["-     return sum(values) / len(values)", "+     return sum(values) / 2"],
    )
    assert planted(lab, replace={"max(values) -": "max(values) +"})[0] == "spread"


def test_several_texts_are_replaced_at_once(lab: LabSource) -> None:
    # The first new text holds the second old one: all are found in the unchanged solution.
    question, lines = planted(
        lab, replace={"self.number = 0": "self.total = 0.0", "self.total = 0.0": "self.number = 1"}
    )
    assert question == "mean"
    assert lines == ["-         self.number = 0", "+         self.number = 1"]


def test_a_block_matches_at_any_indentation_and_what_comes_is_indented(lab: LabSource) -> None:
    block = """
    if value == value:
        self.total += value
    """
    longer = """
                for _ in range(2):
                    self.total += value
    """
    _, lines = planted(lab, replace={block: longer})
    assert lines == ["-         if value == value:", "+         for _ in range(2):"]


def test_one_line_becomes_many(lab: LabSource) -> None:
    _, lines = planted(
        lab, replace={"self.number += 1": "self.number += 1\nif value > 3:\n    self.number += 2"}
    )
    assert lines == ["+             if value > 3:", "+                 self.number += 2"]


def test_an_empty_text_removes(lab: LabSource) -> None:
    _, lines = planted(lab, replace={"if not values:\n    return 0.0": ""})
    assert lines[:2] == ["-     if not values:", "-         return 0.0"]


def test_an_answer_replaces_definitions_of_the_same_names_and_brings_helpers(lab: LabSource) -> None:
    answer = """
    def half(value):
        return value / 2

    def mean(values):
        return half(sum(values))
    """
    found = Mutant("A mistake", "check_it", says="", answer=answer).planted(lab)
    names: dict[str, Any] = {}
    exec(found.answer, names)
    assert found.question == "mean"
    assert names["mean"]([1.0, 2.0, 3.0]) == 3.0
    assert names["Mean"]().total == 0.0, "the rest of the cell stays"


def test_a_text_that_is_not_there_is_named(lab: LabSource) -> None:
    assert (
        refusal(lab, replace={"sum(values)": "0", "median(values)": "0"})
        == "'median(values)' is not in any solution cell"
    )
    assert refusal(lab, replace={"max(values)": "0"}, question="mean") == "'max(values)' is not in mean"
    assert refusal(lab, replace={"values = [1.0]": "values = []"}).endswith("is not in any solution cell"), (
        "a given cell is no answer"
    )
    assert refusal(lab, replace={"if not values:\n    return 0": "pass"}).endswith(
        "is not in any solution cell"
    ), "a block has whole lines"


def test_a_text_that_fits_twice_is_named(lab: LabSource) -> None:
    assert refusal(lab, replace={"(values: list[float])": "(values)"}).startswith(
        "it fits mean, spread: give more of the text"
    )
    assert refusal(lab, replace={"value == value": "True", "self.total": "self.sum"}).startswith(
        "'self.total' occurs 2 times"
    )
    assert planted(lab, replace={"(values: list[float])": "(values)"}, question="spread")[0] == "spread"


def test_a_mutant_is_of_one_question(lab: LabSource) -> None:
    assert refusal(lab, replace={"sum(values)": "0", "max(values)": "0"}).startswith(
        "no solution cell has all"
    )
    assert (
        refusal(lab, answer="def mode(values):\n    return 0")
        == "its answer defines no name of a solution cell"
    )


def test_texts_that_overlap_are_refused(lab: LabSource) -> None:
    assert (
        refusal(lab, replace={"max(values) - min": "min", "- min(values)": ""})
        == "two texts to replace overlap at '- min': make them one"
    )


def test_a_mutant_is_python_and_another_solution(lab: LabSource) -> None:
    assert refusal(lab, replace={"if not values:": "if not values"}).startswith(
        "its answer to spread is not Python: expected ':'"
    )
    assert refusal(lab, answer="def mean(values) return 0").startswith("its answer is not Python")
    assert (
        refusal(lab, replace={"sum(values) / len": "(sum(values)) / len"})
        == "its answer to mean is the reference solution"
    )


def test_a_mutant_has_a_patch_or_an_answer(lab: LabSource) -> None:
    assert refusal(lab) == "give either replace or answer"
    assert refusal(lab, replace={"sum(values)": "0"}, answer="mean = sum") == "give either replace or answer"
    with pytest.raises(UserError, match="spraed.*did you mean spread"):
        planted(lab, replace={"sum(values)": "0"}, question="spraed")


def test_the_file_of_a_lab_lists_its_mutants(lab: LabSource) -> None:
    assert read_mutants(lab.folder) == ()
    head = "from dlo_lib.grading.lab.mutants import Mutant\n"
    first = 'Mutant("Values are cut, not rounded", "check_round", says="", replace={"a": "b"})'
    (lab.folder / "mutants.py").write_text(f"{head}MUTANTS = [{first}]")
    assert [mutant.name for mutant in read_mutants(lab.folder)] == ["values_are_cut_not_rounded"]
    for text, said in (
        (f"{head}MUTANTS = [{first}, {first}]", "two mutants are called 'values_are_cut_not_rounded'"),
        (f"{head}MUTANTS = {first}", "MUTANTS must be a list of"),
        (head, "MUTANTS must be a list of"),
        ("MUTANTS = [Mutant()]", "does not load: NameError"),
    ):
        (lab.folder / "mutants.py").write_text(text)
        with pytest.raises(UserError, match=said):
            read_mutants(lab.folder)


def test_a_table_of_text_has_the_same_mutants() -> None:
    assert mutant_table("""
        # the first question
        [mean]
        Two values are taken for granted
            check_mean: the mean: of three values
            len(values)  =>  2
        Values that are not a number count
            check_finite, check_total, check_hidden: not a number
            if value == value:  =>
                for _ in range(2):
                    value += 0
            self.number += 1  =>
        [spread]
        Nothing is spread
            check_spread: the spread
            answer:
                def spread(values):

                    return 0.0
        """) == [
        Mutant(
            "Two values are taken for granted",
            "check_mean",
            "the mean: of three values",
            {"len(values)": "2"},
            question="mean",
        ),
        Mutant(
            "Values that are not a number count",
            "check_finite",
            "not a number",
            {"if value == value:": "for _ in range(2):\n    value += 0", "self.number += 1": ""},
            question="mean",
            also=("check_total", "check_hidden"),
        ),
        Mutant(
            "Nothing is spread",
            "check_spread",
            "the spread",
            answer="def spread(values):\n\n    return 0.0",
            question="spread",
        ),
    ]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("", "its second line should be"),
        ("    len(values)  =>  2", "its second line should be"),
        ("    check_mean: words\n    len(values), 2", "'len(values), 2' is neither"),
    ],
)
def test_a_line_of_a_table_that_has_no_form_is_named(body: str, error: str) -> None:
    with pytest.raises(UserError, match="^mutant 'A title': ") as refused:
        mutant_table(f"A title\n{body}\n")
    assert error in str(refused.value)
