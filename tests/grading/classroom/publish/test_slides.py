"""Slides show the headings, the text and the figures of a lab, and no code; the page needs no other file."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from dlo_lib.base.errors import UserError
from dlo_lib.grading.classroom.publish.slides import Slide, shortened, slides_html, slides_of, write_slides
from dlo_lib.grading.lab.new_lab import new_lab
from dlo_lib.grading.lab.source import LabSource, read_lab

PNG = base64.b64encode(b"a picture").decode()
FIGURE = new_output("display_data", data={"image/png": PNG + "\n", "text/plain": "<Figure>"})


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LabSource:
    """A new lab in an empty course."""
    for room in ("labs", "solutions"):
        (tmp_path / room).mkdir()
    monkeypatch.setenv("DLO_COURSE", str(tmp_path))
    return read_lab(new_lab("19_tensor_parallel", "Tensor parallelism"))


def notebook(*cells):
    return new_notebook(cells=list(cells))


def test_a_section_has_a_slide_and_its_figures_have_one_each():
    slides = slides_of(
        notebook(
            new_markdown_cell("# A lab\n\nWhat you do."),
            new_code_cell("import torch"),
            new_markdown_cell("## 1 · Rings\n\n**Core · 10 min · ●○○**\n\nA ring is a circle."),
            new_code_cell("answer = 42"),
            new_code_cell("draw()", outputs=[FIGURE, FIGURE]),
            new_markdown_cell("The bars are equal.\n\n## 2 · Trees\n\nA tree."),
        )
    )
    assert [(slide.heading, bool(slide.figure)) for slide in slides] == [
        ("A lab", False),
        ("1 · Rings", False),
        ("1 · Rings", True),
        ("1 · Rings", True),
        ("2 · Trees", False),
    ]
    assert [slide.first for slide in slides] == [True, False, False, False, False]
    assert slides[1].text == "**Core · 10 min · ●○○**\n\nA ring is a circle."
    assert [slide.text for slide in slides[2:4]] == ["", "The bars are equal."]
    assert slides[3].figure == PNG


def test_no_code_is_shown(lab):
    slides = slides_of(
        notebook(
            new_markdown_cell("# A lab\n\nText.\n\n```python\nsecret = 1\n```\n\nMore."),
            new_code_cell("answer = 42", outputs=[FIGURE]),
        )
    )
    page = slides_html(lab.info, slides)
    assert "secret" not in page
    assert "answer" not in page
    assert "More." in page


def test_long_text_is_cut_between_paragraphs():
    assert shortened(["one two", "three four", "five"], 4) == "one two\n\nthree four"
    assert shortened(["one two three"], 1) == "one two three"
    assert shortened([], 5) == ""


def test_a_list_stays_with_the_sentence_that_announces_it():
    assert shortened(["one", "two:", "- a\n- b"], 6) == "one\n\ntwo:\n\n- a\n- b"
    assert shortened(["one", "two:", "- a b c d"], 4) == "one"
    assert shortened(["one", "The code:"], 9) == "one"
    assert shortened(["The code:"], 9) == "The code:"
    assert shortened(["one.", "The table must", "- a\n- b"], 9) == "one.\n\nThe table must\n\n- a\n- b"


def test_a_sentence_that_announces_code_is_left_out_with_it():
    text = "one.\n\nThe loop is\n```python\nsecret()\n```\n\ntwo."
    cell = new_markdown_cell(f"# Lab\n\n## 1\n\n**Core · 9 min · ●●○**\n\n{text}")
    assert slides_of(new_notebook(cells=[cell]))[1].text == "**Core · 9 min · ●●○**\n\none.\n\ntwo."


def test_a_paragraph_longer_than_a_slide_has_a_smaller_font(lab: LabSource):
    page = slides_html(lab.info, [Slide("Long", "word " * 131), Slide("Short", "word " * 130)])
    assert re.findall(r'<section class="(.*?)">', page) == ["words long now", "words"]


def test_a_heading_is_html_without_an_anchor():
    slide = Slide("The loop in `run`", "### Below\n\nText.")
    assert slide.heading_html == "The loop in <code>run</code>"
    assert "¶" not in slide.html


@pytest.mark.slow
def test_the_slides_of_a_lab_are_one_file(lab, tmp_path):
    page = write_slides(lab.info, tmp_path / "made" / "slides.html").read_text(encoding="utf-8")
    assert re.search("<h1>.*Tensor parallelism</h1>", page)
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    assert "BEGIN SOLUTION" not in page


def test_a_failing_cell_is_one_line(lab, tmp_path, monkeypatch):
    def fail(client: NotebookClient, **options: object) -> None:
        raise CellExecutionError("a long traceback", "ValueError", "broken")

    monkeypatch.setattr(NotebookClient, "execute", fail)
    with pytest.raises(UserError, match=r"a cell of 19_tensor_parallel failed \(ValueError: broken\)"):
        write_slides(lab.info, tmp_path / "slides.html")
    assert not (tmp_path / "slides.html").exists()
