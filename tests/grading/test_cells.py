"""However much text a notebook holds, taking it apart costs no more than what is taken: the judge's own memory and time are limited too."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from dlo_lib.grading import cells
from dlo_lib.grading.cells import MAX_OWN, MAX_PARSED, Origin, take
from dlo_lib.grading.source import LabSource


def code(source: str, **more: Any) -> dict[str, Any]:
    return {"cell_type": "code", "metadata": {}, "source": source, **more}


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of what is parsed."""
    lengths: list[int] = []
    parse = ast.parse

    def noting(text: str) -> ast.Module:
        lengths.append(len(text))
        return parse(text)

    monkeypatch.setattr(ast, "parse", noting)
    return lengths


def test_a_text_that_no_person_wrote_is_never_parsed(small: LabSource, parsed: list[int]) -> None:
    lines = "absmax_scale = lab.use_reference\n" * (MAX_PARSED // 16)
    take({"cells": [code(lines), code(lines, id="quantise"), code("absmax_scale = 1")]}, small)
    assert 0 < max(parsed) <= MAX_PARSED


def test_a_long_answer_is_an_answer_all_the_same(small: LabSource) -> None:
    long = "x = 1\n" * MAX_PARSED + "def absmax_scale(x):\n    return x"
    taken = take({"cells": [code("def quantise(x):\n    return x"), code(long)]}, small)
    assert taken.attempted == {"scale", "quantise"}
    assert [cell.source == long for cell in taken.cells if cell.id == "scale"] == [True]


def test_answers_beyond_all_measure_are_left_out_and_the_others_stay(small: LabSource) -> None:
    first, again = code("def quantise(x):\n    return x", id="quantise"), code("y = 1\n" * (MAX_OWN // 12), id="scale")
    taken = take({"cells": [first, *[again] * 20]}, small)
    assert sum(len(cell.source) for cell in taken.cells if cell.origin is Origin.ANSWER) < 2 * MAX_OWN
    assert "your answers hold more than 4 MB of code" in " ".join(taken.warnings)
    assert "quantise" in taken.attempted


def test_what_is_too_much_to_be_taken_is_not_parsed_either(small: LabSource, parsed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "MAX_OWN", 20_000)
    own = [code(f"quantise\nx{number} = 1\n" + "y = 1\n" * 100) for number in range(200)]
    taken = take({"cells": own}, small)
    assert "cells of your own hold more than 4 MB of code" in " ".join(taken.warnings)
    assert 0 < sum(parsed) < 3 * 20_000


def test_an_answer_merged_into_another_is_an_answer(small: LabSource) -> None:
    both = code("def absmax_scale(x):\n    return x\n\n\ndef quantise(x):\n    return x", id="scale")
    taken = take({"cells": [both]}, small)
    assert taken.attempted == {"scale", "quantise"}
    assert [cell.source for cell in taken.cells if cell.id == "quantise"] == [""]  # the stub would undo it
    assert "cell `quantise` was missing" in taken.warnings


def test_the_stub_of_an_answer_that_nobody_gave_stays(small: LabSource) -> None:
    taken = take({"cells": [code("def absmax_scale(x):\n    return x", id="scale")]}, small)
    assert taken.attempted == {"scale"}
    assert [cell.source for cell in taken.cells if cell.id == "quantise"] == [small.solution("quantise").released]
