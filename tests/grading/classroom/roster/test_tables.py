"""Tables for spreadsheets: text that a student chose is never a formula, and equal rows give equal bytes."""

from __future__ import annotations

import csv
import io

import pytest

from dlo_lib.grading.classroom.gradebook.export import GradeRow, GradeTable
from dlo_lib.grading.classroom.gradebook.moodle import moodle_csv
from dlo_lib.grading.classroom.roster.roster_table import Person
from dlo_lib.grading.classroom.roster.tables import csv_text, escape_formula
from dlo_lib.grading.lab.course import LabInfo

LAB = LabInfo("91_small", 91, "small", "A small lab", core=False, minutes=5)
PEOPLE = {
    "ada": Person("ada", "Ada", 'Lovelace, "Countess"', "ada@uni.example", "1001"),
    "zoe": Person("zoe", "Zoé", '=HYPERLINK("http://evil.example")', "+cmd|' /C calc'!A0", "1002"),
}


def rows_of(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text)))


def grades(*rows: GradeRow) -> GradeTable:
    return GradeTable(LAB, {"scale": 3.0, "mean": 2.0}, rows)


FULL = GradeRow("ada", {"scale": 3.0, "mean": 2.0}, 0.0, 5.0, 5.0, "GRADED")
PART = GradeRow("zoe", {"scale": 1.5, "mean": 2.0}, 0.5, 3.0, 5.0, "GRADED_WARN", seconds_late=7500)


@pytest.mark.parametrize(
    "cell", [
        "=1+1", "+1+1", "-1+1", "@SUM(A1)", "\ttext", "\rtext", "  =1+1", "-", "=", "+ 1",
        "＝1+1", "＋1", "－1+1", "＠SUM(A1)", "﹦1", "\u200b=1", "\ufeff=1", "\u00a0=1", '"=1"',
    ],
)  # fmt: skip
def test_a_cell_that_a_spreadsheet_would_run_is_marked_as_text(cell: str) -> None:
    assert escape_formula(cell) == f"'{cell}"


@pytest.mark.parametrize("separator", [";", "\t", "|", "\n", "\r", "; ", ';"', ";\u200b"])
def test_a_program_with_another_separator_runs_no_part_of_a_cell(separator: str) -> None:
    """Excel in French splits lines at semicolons, also those of a cell that quotation marks enclose."""
    row = [f"small{separator}=1+1.ipynb", "ada"]
    text = csv_text(["file", "student"], [row])
    for split in (";", "\t", "|"):
        parts = [part.strip('" \u200b') for line in text.splitlines() for part in line.split(split)]
        assert not [part for part in parts if part.startswith("=")]


@pytest.mark.parametrize("name", ["a;b.ipynb", "a|b.ipynb", "a\tb.ipynb", 'a"b.ipynb'])
def test_a_name_with_the_separator_of_any_program_is_quoted(name: str) -> None:
    line = csv_text(["file"], [[name]]).splitlines()[1]
    assert line == '"{}"'.format(name.replace('"', '""'))


@pytest.mark.parametrize(
    "cell", ["Ada", "", "-1.5", "+2", "1e-3", "a=b", "5 of 5", "Émilie", "'quoted'", "a; -1.5", "one; two"]
)
def test_numbers_and_plain_text_stay_as_they_are(cell: str) -> None:
    assert escape_formula(cell) == cell


def test_a_csv_reader_reads_every_cell_unchanged() -> None:
    row = ["a,b", 'say "no"', "two\nlines", "Zoé 🎓", ""]
    assert rows_of(csv_text(["one", "two", "three", "four", "five"], [row]))[1] == row


def test_moodle_gets_one_line_per_student_with_its_column_names() -> None:
    header, ada, zoe = rows_of(moodle_csv(grades(FULL, PART), PEOPLE))
    assert header == [
        "Username",
        "ID number",
        "First name",
        "Last name",
        "Email address",
        "91_small",
        "91_small feedback",
    ]
    assert ada == [
        "ada",
        "1001",
        "Ada",
        'Lovelace, "Countess"',
        "ada@uni.example",
        "5",
        "5 of 5 points; GRADED",
    ]
    assert zoe[5:] == ["3", "3 of 5 points; GRADED_WARN; lost: scale 1.5; late by 2 h 5 min: 0.5 points off"]
    assert zoe[3:5] == ['\'=HYPERLINK("http://evil.example")', "'+cmd|' /C calc'!A0"]


def test_moodle_keeps_the_grade_of_a_student_whose_grading_failed() -> None:
    lost = GradeRow("ada", {"scale": 0.0, "mean": 0.0}, 0.0, 0.0, 5.0, "GRADER_ERROR UNSANDBOXED")
    assert rows_of(moodle_csv(grades(lost), PEOPLE))[1][5] == ""  # Moodle ignores an empty grade


def test_a_student_without_a_name_has_a_row() -> None:
    assert rows_of(moodle_csv(grades(FULL), {}))[1][:5] == ["ada", "", "", "", ""]


def test_the_same_grades_are_the_same_bytes() -> None:
    assert moodle_csv(grades(FULL, PART), PEOPLE) == moodle_csv(
        grades(FULL, PART), dict(reversed(PEOPLE.items()))
    )
    assert grades(FULL, PART).csv() == grades(FULL, PART).csv()
    assert rows_of(grades(FULL, PART).csv()) == [
        ["student", "lab", "scale", "mean", "seconds_late", "penalty", "total", "max", "status"],
        ["ada", "91_small", "3", "2", "0", "0", "5", "5", "GRADED"],
        ["zoe", "91_small", "1.5", "2", "7500", "0.5", "3", "5", "GRADED_WARN"],
    ]
