"""The labs that measure a GPU, without Jupyter: which cells run, and what is kept of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.card_labs import LABS, ROOT, SEVERAL_CARDS, Cell, cells, run_cell, run_labs

TEXT = """# %% [markdown] id="title"
# # A lab

# %% id="setup"
a = 1

# %% nbgrader={"grade_id": "answer", "solution": true}
def answer():
    ### BEGIN SOLUTION
    return a + 1
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_answer", "grade": true}
lab.check("answer")

# %% id="sliders" tags=["demo"]
explore(draw, n=[1, 2])

# %% id="show_quiz" tags=["demo"]
lab.quiz()

# %% id="shown" tags=["demo"]
print("the answer")
answer()
"""


def test_cells_that_check_or_have_sliders_are_left_out():
    found = cells(TEXT)
    assert [cell.name for cell in found] == ["setup", "answer", "shown"]
    assert TEXT.splitlines()[found[1].line] == "def answer():"


def test_a_cell_shows_what_it_prints_and_the_value_of_its_last_line(tmp_path):
    namespace: dict[str, object] = {}
    shown = [run_cell(cell, namespace, tmp_path, "lab.py") for cell in cells(TEXT)]
    assert shown == [("", True), ("", True), ("the answer\n2\n", True)]


def test_an_error_names_the_line_of_the_lab(tmp_path):
    text, right = run_cell(Cell("wrong", "\n1 / 0\n", 7), {}, tmp_path, "lab.py")
    assert not right
    assert 'File "lab.py", line 8' in text
    assert "ZeroDivisionError" in text


def test_of_a_figure_the_text_and_the_picture_are_kept(tmp_path):
    class Figure:
        def alternative_text(self) -> str:
            return "three bars."

        def get_facecolor(self) -> str:
            return "white"

        def savefig(self, path: Path, **options: object) -> None:
            path.write_bytes(b"png")

    shown = run_cell(Cell("bars", "figure", 1), {"figure": Figure()}, tmp_path / "lab", "lab.py")
    assert shown == ("[figure: three bars.]\n", True)
    assert (tmp_path / "lab" / "bars.png").exists()


def test_a_lab_that_is_complete_is_left_out(tmp_path, capsys):
    (tmp_path / "05_fused_kernels.json").write_text(json.dumps({"complete": True}))
    assert run_labs(tmp_path, ["05_fused_kernels"], 100, True) == 0
    assert run_labs(tmp_path, ["05_fused_kernels", "02_profiler"], 1, True) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "05_fused_kernels: complete before",
        "02_profiler: no time left",
    ]


@pytest.mark.parametrize("name", [*LABS, *SEVERAL_CARDS])
def test_the_cells_of_the_labs_are_found(name):
    text = (ROOT / "solutions" / name / f"{name}.py").read_text(encoding="utf-8")
    assert (ROOT / "labs" / name / "lab.toml").exists()
    assert len(cells(text)) > 10
