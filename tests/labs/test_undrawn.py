"""What the checks of a lab never vary is listed beside its solutions (``undrawn.json``), with reasons."""

from __future__ import annotations

import pytest

from dlo_lib.grading.judge.judge import zygote_for
from dlo_lib.grading.judge.undrawn_values import undrawn
from dlo_lib.grading.lab.course import LabInfo, source_folder, source_labs
from dlo_lib.grading.lab.source import read_lab
from dlo_lib.grading.lab.undrawn_record import FILE, key_of, read_undrawn

every_lab = pytest.mark.parametrize("info", source_labs(), ids=lambda info: info.directory)


@every_lab
def test_the_lists_are_the_last_ones_and_each_entry_has_a_reason(info: LabInfo) -> None:
    lab = read_lab(source_folder(info))
    record = read_undrawn(lab.folder)
    assert record is not None, f"no {FILE}: run `dlo release {info.number} --prove-only`"
    assert record.without_reason() == [], f"give a reason under because in {lab.folder / FILE}"
    assert record.unused_reasons() == []
    assert record.of == key_of(lab), (
        f"checks or solutions have changed: run `dlo release {info.number} --prove-only`, which writes {FILE}"
    )


@every_lab
def test_the_lists_are_what_the_solution_shows(info: LabInfo, pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--every-check"):
        pytest.skip("NOT TESTED HERE: the lists of eight class secrets (make proofs does)")
    lab = read_lab(source_folder(info))
    written = read_undrawn(lab.folder)
    assert written is not None
    with zygote_for(lab) as zygote:
        made = undrawn(lab, zygote)
    assert (made.arguments, made.constants) == (written.arguments, written.constants)
