"""`dlo new-lab` writes a lab in which every rule and every proof holds, and refuses what
would damage the course."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.grading.judge.judge import zygote_for
from dlo_lib.grading.judge.lab_proof import number_of_proofs, prove
from dlo_lib.grading.lab.course import source_labs
from dlo_lib.grading.lab.new_lab import new_lab
from dlo_lib.grading.lab.release import release_lab
from dlo_lib.grading.lab.source import read_lab


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "labs").mkdir()
    (tmp_path / "solutions").mkdir()
    monkeypatch.setenv("DLO_COURSE", str(tmp_path))
    return tmp_path


def test_a_new_lab_proves_itself_green(course: Path) -> None:
    folder = new_lab("19_tensor_parallel", 'Tensor parallelism, "by hand"')
    (info,) = source_labs()
    assert (info.number, info.name, info.title) == (19, "tensor_parallel", "Tensor parallelism, 'by hand'")
    release_lab(info)
    lab = read_lab(folder)
    assert len([path for path in folder.rglob("*") if path.suffix in (".py", ".toml")]) <= 10
    with zygote_for(lab) as zygote:
        proofs = list(prove(lab, zygote))
    assert [fault for proof in proofs for fault in proof.faults] == []
    assert len(proofs) == number_of_proofs(lab)


@pytest.mark.parametrize(
    "name", ["tensor_parallel", "19", "19_", "19_Tensor", "19_a/../../b", "1_a", "19-a", ""]
)
def test_a_name_of_another_form_is_refused(course: Path, name: str) -> None:
    with pytest.raises(UserError, match="is no name of a lab: give two digits and a lower-case name"):
        new_lab(name)
    assert list((course / "solutions").iterdir()) == []


@pytest.mark.parametrize("name", ["19_other", "20_tensor_parallel", "19_tensor_parallel"])
def test_a_number_or_a_name_that_is_taken_is_refused(course: Path, name: str) -> None:
    before = sorted(path for path in new_lab("19_tensor_parallel").rglob("*"))
    with pytest.raises(
        UserError, match="19_tensor_parallel is there already: choose another number and name"
    ):
        new_lab(name)
    assert sorted(path for path in (course / "solutions" / "19_tensor_parallel").rglob("*")) == before


def test_a_folder_that_is_no_lab_is_not_overwritten(course: Path) -> None:
    (course / "solutions" / "19_notes").mkdir()
    with pytest.raises(UserError, match="19_notes is there already: choose another name, or remove it"):
        new_lab("19_notes")


def test_a_students_copy_has_no_place_for_a_lab(course: Path) -> None:
    (course / "solutions").rmdir()
    with pytest.raises(UserError, match="a lab is made in an instructor's copy of the course"):
        new_lab("19_tensor_parallel")
