"""The rules on the text of a lab name each fault: minutes, predictions, the instructor's page, hints."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dlo_lib.grading.lab.source import LabSource, read_lab
from dlo_lib.grading.lab.text_rules import (
    core_predictions,
    exercise_faults,
    hint_faults,
    page_faults,
    prediction_faults,
    width_faults,
)
from tests.grading.two_folders import place_of

Edit = Callable[[str, str, str], LabSource]
QUIZ = '# %% nbgrader={"grade_id": "quiz", "solution": true}\n'
PREDICTION = """# %% id="predict_sent" tags=["prediction"]
sent = {"2 ranks": None, "4 ranks": None}

# %% id="measure" tags=["demo"]
import time

require_numbers(sent)
time.sleep(1)
print(compared(sent, {"2 ranks": 1.0, "4 ranks": 1.5}))

"""
ROW = "| `predict_sent` | 2 ranks: 1; 4 ranks: 1.5 | counted |\n"


@pytest.fixture
def edit(tmp_path: Path) -> Edit:
    """Replace a text in a copy of a small lab, and read the lab."""
    shutil.copytree(Path(__file__).parents[1] / "small_course", tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "solutions" / "91_small"

    def replace(name: str, old: str, new: str) -> LabSource:
        text = place_of(folder, name).read_text(encoding="utf-8")
        assert old in text
        place_of(folder, name).write_text(text.replace(old, new), encoding="utf-8")
        return read_lab(folder)

    return replace


def test_a_signature_fits_a_page_of_1280_pixels(edit: Edit) -> None:
    assert width_faults(edit("91_small.py", QUIZ, QUIZ)) == []
    wide = ", ".join(f"another_argument_{n}" for n in range(6))
    lab = edit("91_small.py", "def absmax_scale(", f"def absmax_scale({wide}, ")
    (fault,) = width_faults(lab)
    assert fault.startswith("scale: 'def absmax_scale(another_argument_0, ano'… has 1")
    assert fault.endswith(" columns: wrap it at 100")
    lines = wide.replace(", ", ",\n    ")
    assert width_faults(edit("91_small.py", f"{wide}, ", f"\n    {lines},\n    ")) == []


@pytest.mark.parametrize(
    ("tags", "lines", "faults"),
    [('"demo"', 1, 1), ('"demo"', 13, 0), ('"demo", "read"', 13, 1), ('"prediction"', 1, 1), ("", 1, 1)],
)
def test_code_that_students_see_fits_a_page_of_1280_pixels(
    edit: Edit, tags: str, lines: int, faults: int
) -> None:
    code = "print(1)\n" * (lines - 1) + f'shown = {{"{"a name " * 14}": None}}\n'
    lab = edit("91_small.py", QUIZ, f'# %% id="wide" tags=[{tags}]\n{code}\n{QUIZ}')
    assert [fault.partition("'")[0] for fault in width_faults(lab)] == ["wide: "] * faults


@pytest.fixture
def asking(edit: Edit) -> LabSource:
    """A lab that asks for one prediction."""
    return edit("91_small.py", QUIZ, PREDICTION + QUIZ)


def test_a_prediction_takes_a_minute(asking: LabSource, edit: Edit) -> None:
    (fault,) = exercise_faults(asking)
    assert fault.startswith("the core exercises and predictions take 61 min (60 + 1 predictions of 1 min)")
    assert exercise_faults(edit("lab.toml", "minutes = 60", "minutes = 61")) == []


def test_a_prediction_of_an_optional_section_takes_none_of_the_core(edit: Edit) -> None:
    section = '# %% [markdown] id="more"\n# ## More\n#\n# **Optional · 5 min · ●○○**\n\n'
    lab = edit("91_small.py", QUIZ, section + PREDICTION + QUIZ)
    assert core_predictions(lab) == []
    after = '# %% [markdown] id="after"\n# ## After\n\n'
    lab = edit("91_small.py", PREDICTION, after + PREDICTION)
    assert [cell.id for cell in core_predictions(lab)] == ["predict_sent"]


def test_the_instructors_page_has_a_number_for_each_prediction(asking: LabSource, edit: Edit) -> None:
    first, second = page_faults(asking)
    assert first.startswith("INSTRUCTOR.md has no number for the prediction '2 ranks': write a row")
    assert "'4 ranks'" in second
    assert page_faults(edit("INSTRUCTOR.md", "## Where to cut", ROW + "\n## Where to cut")) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("2 ranks: 1; ", "", "no number for the prediction '2 ranks'"),
        ("4 ranks: 1.5", "4 ranks: more", "no number for the prediction '4 ranks'"),
        ("`predict_sent`", "`predict_send`", "no number for the prediction '2 ranks'"),
        (
            "1.5 |",
            "1.5; 8 ranks: 1.75 |",
            "answers '8 ranks' in the row of predict_sent, which asks for 2 ranks",
        ),
    ],
)
def test_a_row_that_does_not_answer_is_a_fault(
    asking: LabSource, edit: Edit, old: str, new: str, fault: str
) -> None:
    edit("INSTRUCTOR.md", "## Where to cut", ROW + "\n## Where to cut")
    assert fault in page_faults(edit("INSTRUCTOR.md", old, new))[0]


def test_a_measurement_begins_with_its_prediction(asking: LabSource, edit: Edit) -> None:
    assert prediction_faults(asking) == []
    late = edit(
        "91_small.py", "require_numbers(sent)\ntime.sleep(1)\n", "time.sleep(1)\nrequire_numbers(sent)\n"
    )
    assert prediction_faults(late) == [
        "measure reads sent after other work: begin it with require_numbers(sent)"
    ]


def test_a_hint_that_gives_the_solution_away_is_a_fault(edit: Edit) -> None:
    lab = edit("lab.toml", "number = 91", "number = 91")
    in_words = {
        "mean": ["The mean is a sum, divided. dist has a function for sums.", "Copy x first.", "Divide."]
    }
    assert hint_faults(lab, in_words) == []
    hint = "total = x.clone(); then dist.all_reduce(total), and the result is total / dist.get_world_size()"
    (fault,) = hint_faults(lab, {"mean": ["A sum.", hint, "Divide."]})
    assert fault.startswith("hint 2 of mean has ")
    assert fault.endswith("describe a step in words, and leave the code to the student")
