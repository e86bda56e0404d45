"""Formulas are drawn into the page; every formula of every lab can be drawn."""

from __future__ import annotations

import re

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.grading.classroom.publish.formulas import svg, with_formulas
from dlo_lib.grading.lab.course import source_labs
from dlo_lib.grading.lab.source import CellKind, read_lab, source_folder


def test_a_formula_is_a_picture_with_its_tex_as_label():
    drawn = with_formulas(r"The length $\ell$ and $$k = e^{-x}$$ follow.")
    assert "$" not in drawn
    assert drawn.startswith(r'The length <svg role="img" aria-label="\ell" ')
    assert re.search(r'\n\n<div class="formula"><svg .*aria-label="k = e\^{-x}".*</svg></div>\n\n', drawn)
    assert drawn.endswith("follow.")


def test_code_and_prices_stay():
    text = "`$HOME` and ``a $b$ c`` cost 5 $ or 6 $."
    assert with_formulas(text) == text


def test_two_formulas_have_two_pictures():
    assert svg("a") != svg("b")
    assert svg(r"\frac{a}{b}").count("M") > svg("a").count("M")


def test_what_cannot_be_set_is_one_line():
    with pytest.raises(UserError, match=r"cannot set the formula \\nothing{x}"):
        svg(r"\nothing{x}")


@pytest.mark.parametrize("lab", source_labs(), ids=lambda lab: lab.directory)
def test_the_formulas_of_a_lab_can_be_drawn(lab):
    for cell in read_lab(source_folder(lab)).cells:
        if cell.kind is CellKind.TEXT:
            assert "$$" not in with_formulas(cell.source)
