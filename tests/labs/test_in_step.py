"""labs/ is what students get: the allow-list and what is built from solutions/, and no answer in it."""

from __future__ import annotations

import pytest

from dlo_lib.grading.lab.course import LabInfo, course_root, labs, source_labs
from dlo_lib.grading.lab.release import NEVER, check_course_in_step, present_files
from dlo_lib.grading.lab.source import CellKind, read_lab, source_folder, text_source


def test_labs_are_in_step_with_their_sources() -> None:
    assert check_course_in_step() == []


def test_every_lab_that_students_get_has_a_source() -> None:
    assert labs() == source_labs()


@pytest.mark.parametrize("lab", source_labs(), ids=lambda lab: lab.directory)
def test_no_answer_is_released(lab: LabInfo) -> None:
    released = course_root() / "labs" / lab.directory
    source = read_lab(source_folder(lab))
    names = present_files(released)
    assert not {name for name in names if name.split("/")[0] in (*NEVER, text_source(source.folder).name)}
    notebook = (released / lab.notebook).read_text(encoding="utf-8")
    assert "SOLUTION" not in notebook
    assert all(cell.source != cell.released for cell in source.cells if cell.kind is CellKind.SOLUTION)


def test_numbers_and_names_of_labs_are_unique() -> None:
    known = source_labs()
    assert len({lab.number for lab in known}) == len({lab.name for lab in known}) == len(known)
