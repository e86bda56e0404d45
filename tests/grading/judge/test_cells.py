"""Parsing a notebook with very much text needs no more memory and time than the text that is used."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from dlo_lib.grading.judge import cells
from dlo_lib.grading.judge.cells import MAX_OWN, Origin, rebuild_submission
from dlo_lib.grading.lab.source import LabSource, read_lab
from dlo_lib.grading.lab.syntax import MAX_PARSED

SOLUTIONS = Path(__file__).parents[3] / "solutions"


def code(source: str, **more: Any) -> dict[str, Any]:
    return {"cell_type": "code", "metadata": {}, "source": source, **more}


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the parsed texts."""
    lengths: list[int] = []
    parse = ast.parse

    def noting(text: str) -> ast.Module:
        lengths.append(len(text))
        return parse(text)

    monkeypatch.setattr(ast, "parse", noting)
    return lengths


def test_a_text_above_the_limit_is_never_parsed(small: LabSource, parsed: list[int]) -> None:
    lines = "absmax_scale = lab.use_reference\n" * (MAX_PARSED // 16)
    rebuild_submission({"cells": [code(lines), code(lines, id="quantise"), code("absmax_scale = 1")]}, small)
    assert 0 < max(parsed) <= MAX_PARSED


def test_a_long_answer_is_an_answer(small: LabSource) -> None:
    long = "x = 1\n" * (MAX_PARSED // 2) + "def absmax_scale(x):\n    return x"
    taken = rebuild_submission({"cells": [code("def quantise(x):\n    return x"), code(long)]}, small)
    assert taken.attempted == {"scale", "quantise"}
    assert [cell.source == long for cell in taken.cells if cell.id == "scale"] == [True]


def test_answers_above_the_limit_are_left_out_and_the_others_stay(small: LabSource) -> None:
    first, again = (
        code("def quantise(x):\n    return x", id="quantise"),
        code("y = 1\n" * (MAX_OWN // 12), id="scale"),
    )
    taken = rebuild_submission({"cells": [first, *[again] * 20]}, small)
    assert sum(len(cell.source) for cell in taken.cells if cell.origin is Origin.ANSWER) < 3 * MAX_OWN
    assert "your answers hold more than 2 MB of code" in " ".join(taken.warnings)
    assert "quantise" in taken.attempted


def test_cells_above_the_limit_are_not_parsed(
    small: LabSource,
    parsed: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cells, "MAX_OWN", 20_000)
    own = [code(f"quantise\nx{number} = 1\n" + "y = 1\n" * 100) for number in range(200)]
    taken = rebuild_submission({"cells": own}, small)
    assert "cells that you added hold more than" in " ".join(taken.warnings)
    assert 0 < sum(parsed) < 3 * 20_000


def test_an_answer_merged_into_another_is_an_answer(small: LabSource) -> None:
    both = code("def absmax_scale(x):\n    return x\n\n\ndef quantise(x):\n    return x", id="scale")
    taken = rebuild_submission({"cells": [both]}, small)
    assert taken.attempted == {"scale", "quantise"}
    assert [cell.source for cell in taken.cells if cell.id == "quantise"] == [""]  # the stub would replace it
    assert "cell `quantise` was missing" in taken.warnings


def test_the_stub_of_a_missing_answer_stays(small: LabSource) -> None:
    taken = rebuild_submission({"cells": [code("def absmax_scale(x):\n    return x", id="scale")]}, small)
    assert taken.attempted == {"scale"}
    assert [cell.source for cell in taken.cells if cell.id == "quantise"] == [
        small.solution("quantise").released
    ]


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("exec(open('mine.py').read())", "exec"),
        ("import builtins\nrun = builtins.exec", "exec"),
        ("import marshal, types\ng = types.FunctionType(marshal.loads(b''), {})", "marshal, FunctionType"),
        ("# exec would be shorter\nexecutor = 'exec'", ""),
        ("%%time\nmodel.execute()", ""),
    ],
)
def test_code_that_is_not_in_the_notebook_is_named(small: LabSource, source: str, names: str) -> None:
    """A copied reference in base64 has the tokens of nothing."""
    taken = rebuild_submission(
        {"cells": [code(f"{source}\ndef quantise(x):\n    return x", id="quantise")]}, small
    )
    said = [text for text in taken.warnings if "runs code from text" in text]
    assert said == (
        [f"cell `quantise` runs code from text ({names}): `dlo similar` cannot compare that code"]
        if names
        else []
    )


@pytest.mark.parametrize(
    "again",
    ["def context_step(*args):\n    return 0", "context_step = max", 'globals()["context_step"] = max'],
)
def test_the_checks_call_a_given_function_as_it_is_released(again: str) -> None:
    """``context_step`` joins the functions of exercise 8 of lab 20; another one could do without them."""
    lab = read_lab(SOLUTIONS / "20_context_parallel")
    taken = rebuild_submission({"cells": [code("x = 1", id="loss"), code(again)]}, lab)
    last = taken.cells[-1]
    assert (last.id, last.origin) == ("given_context_step", Origin.GIVEN)
    assert last.source.startswith("def context_step(")
    assert "context_step of given cell `given_context_step` is defined again" in " ".join(taken.warnings)
    assert again in [cell.source for cell in taken.cells], "the notebook shows what the student added"


def test_a_given_function_that_no_check_calls_may_be_replaced() -> None:
    lab = read_lab(SOLUTIONS / "20_context_parallel")
    own = "def start_shift(tensor):\n    return Shift(tensor)\n\n\nshown = context_step.__doc__"
    taken = rebuild_submission({"cells": [code("x = 1", id="ring"), code(own)]}, lab)
    assert "is defined again" not in " ".join(taken.warnings)
    assert [cell.id for cell in taken.cells].count("given_shift") == 1
