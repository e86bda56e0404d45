"""A lab is released only when it is proved: each thing that can be wrong with it is found, and named in a line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from nbgrader.apps.api import NbGraderAPI

from dlo_lib.errors import UserError
from dlo_lib.grading.course import find_lab, source_labs
from dlo_lib.grading.host import Zygote
from dlo_lib.grading.nbgrader_course import open_course
from dlo_lib.grading.proof import ON_PAPER, Proof, mutant_faults, number_of_proofs, reference_faults, refuse, untouched_faults
from dlo_lib.grading.publish import check_unpublished, place_in_exchange, publish
from dlo_lib.grading.release import release_lab
from dlo_lib.grading.source import LabSource, read_lab

Edit = Callable[[str, str, str], None]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with a small lab that is in order."""
    shutil.copytree(Path(__file__).parent / "small_course", tmp_path / "checkout")
    (tmp_path / "checkout" / "labs").mkdir()
    monkeypatch.setenv("DLO_COURSE", str(tmp_path / "checkout"))
    release_lab(find_lab("91", source_labs()))
    return tmp_path / "checkout"


@pytest.fixture
def edit(root: Path) -> Edit:
    """Replace a text in a file of the lab's source; the release is brought in step."""

    def replace(name: str, old: str, new: str) -> None:
        file = root / "solutions" / "91_small" / name
        text = file.read_text(encoding="utf-8")
        assert old in text
        file.write_text(text.replace(old, new), encoding="utf-8")
        release_lab(find_lab("91", source_labs()))

    return replace


def lab(root: Path) -> LabSource:
    return read_lab(root / "solutions" / "91_small")


def on_paper(root: Path) -> dict[str, list[str]]:
    return {name: faults for name, rule in ON_PAPER.items() if (faults := rule(lab(root)))}


def test_a_lab_in_order_has_no_fault_on_paper(root: Path) -> None:
    assert on_paper(root) == {}
    assert number_of_proofs(lab(root)) == len(ON_PAPER) + 2 + 5


def test_labs_out_of_step_are_named(root: Path) -> None:
    (root / "labs" / "91_small" / "checks.py").write_text("# by hand")
    assert "checks.py differs from its source: run `make labs`" in on_paper(root)["labs/ in step"][0]


@pytest.mark.parametrize("name", ["hidden.py", "mutants/wrong.py", "91_small.py"])
def test_what_students_must_not_have_is_a_leak(root: Path, name: str) -> None:
    place = root / "labs" / "91_small" / name
    place.parent.mkdir(exist_ok=True)
    place.write_text("x = 1")
    assert [fault for fault in on_paper(root)["nothing leaks"] if fault.endswith(f"{name} must never be released")]


def test_an_answer_in_a_released_file_is_a_leak(root: Path) -> None:
    with open(root / "labs" / "91_small" / "checks.py", "a", encoding="utf-8") as file:
        file.write("### BEGIN SOLUTION\n")
    assert "it shows a solution" in on_paper(root)["nothing leaks"][0]


def test_a_solution_that_is_released_as_it_is_is_a_leak(root: Path, edit: Edit) -> None:
    edit("91_small.py", '### BEGIN SOLUTION: quiz = {"q1": "", "q2": ""}', '### BEGIN SOLUTION: quiz = {"q1": "b", "q2": "a"}')
    assert on_paper(root)["nothing leaks"] == ["solution cell 'quiz' is released as it is"]


def test_too_few_mutants_are_a_fault(root: Path) -> None:
    (root / "solutions" / "91_small" / "mutants" / "divides_by_two.py").unlink()
    assert "enough mutants" in on_paper(root)


def test_points_of_checks_and_test_cells_must_agree(root: Path, edit: Edit) -> None:
    edit("hidden.py", '@check("mean", points=1', '@check("mean", points=2')
    assert on_paper(root)["points"] == ["mean: its test cell gives 2 points, its checks 3: make them agree"]


def test_every_question_has_hints_and_every_check_a_title(root: Path, edit: Edit) -> None:
    edit("checks.py", '["A sum is nearly a mean.", ', "[")
    edit("checks.py", '    """Every rank gets the mean"""\n', "")
    first, second = on_paper(root)["hints and titles"]
    assert "HINTS['mean'] has" in first
    assert "check_mean_everywhere has no docstring" in second


def test_a_step_that_others_build_on_needs_its_reference(root: Path, edit: Edit) -> None:
    edit("reference.py", 'REFERENCE = {"scale": {"absmax_scale": _absmax_scale}}', "REFERENCE = {}")
    assert on_paper(root)["references"] == ["scale has no entry in REFERENCE, and others build on it"]


def test_a_solution_that_fails_its_own_checks_is_found(root: Path, edit: Edit, zygote: Zygote) -> None:
    assert reference_faults(lab(root), zygote) == []
    edit("91_small.py", "    return total / dist.get_world_size()", "    return total")
    faults = reference_faults(lab(root), zygote)
    assert [fault.split(":")[0] for fault in faults] == ["the solution fails check_mean_everywhere", "the solution fails check_three_ranks"]


def test_a_check_that_asks_nothing_gives_points_for_nothing(root: Path, edit: Edit, zygote: Zygote) -> None:
    assert untouched_faults(lab(root), zygote) == []
    edit(
        "hidden.py",
        "    xs = [t.normal(4) for _ in range(3)]",
        "    return t.that(True, 'always')\n    xs = [t.normal(4) for _ in range(3)]",
    )
    assert untouched_faults(lab(root), zygote) == ["check_three_ranks gives points for the untouched notebook"]


def test_a_mutant_that_loses_nothing_says_that_a_check_went_soft(root: Path, edit: Edit, zygote: Zygote) -> None:
    mutant = root / "solutions" / "91_small" / "mutants" / "divides_by_two.py"
    assert mutant_faults(lab(root), mutant, zygote) == []
    for old, new, said in (
        ('SAYS = "of 3"', 'SAYS = "nobody says this"', "should be told 'nobody says this'"),
        ("LOSES = 1", "LOSES = 2", "should lose 2 points, it loses 1"),
        ("return total / 2", "return total / dist.get_world_size()", "should fail check_three_ranks and no other check, it fails none"),
    ):
        edit("mutants/divides_by_two.py", old, new)
        (fault,) = mutant_faults(lab(root), mutant, zygote)
        assert said in fault
        edit("mutants/divides_by_two.py", new, old)


def test_a_lab_is_refused_in_one_line(root: Path) -> None:
    refuse(lab(root), [Proof("reference", ())])
    with pytest.raises(UserError) as refused:
        refuse(lab(root), [Proof("reference", ()), Proof("mutant x", ("x should lose\n 1 point",))])
    assert str(refused.value) == "91_small is not released: 1 of 2 proofs failed, first mutant x: x should lose 1 point"


@pytest.fixture
def unreleased(course: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> NbGraderAPI:
    """A course of the checkout ``root``."""
    monkeypatch.setenv("DLO_COURSE", str(root))
    (course / "solutions").unlink()
    (course / "solutions").symlink_to(root / "solutions")
    return open_course(course)


def test_a_release_that_students_can_fetch_is_replaced_only_when_asked(unreleased: NbGraderAPI, root: Path) -> None:
    course, info = unreleased, find_lab("91", source_labs())
    check_unpublished(course, info)
    place = publish(course, info)
    assert place == place_in_exchange(course, info)
    names = {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()}
    assert names == {"small.ipynb", "checks.py", "reference.py", "lab.toml"}
    with pytest.raises(UserError, match=r"91_small is released already, in .*: --again replaces it"):
        publish(course, info)
    (place / "checks.py").chmod(0o644)
    (place / "checks.py").write_text("# old")
    publish(course, info, again=True)
    assert (place / "checks.py").read_bytes() == (root / "labs" / "91_small" / "checks.py").read_bytes()


def test_guides_beside_the_labs_are_no_labs(unreleased: NbGraderAPI, root: Path) -> None:
    for name in ("README.md", "CHECKS.md"):
        (root / "solutions" / name).write_text("# A guide")
    assert [info.directory for info in source_labs()] == ["91_small"]
    course, info = unreleased, find_lab("91", source_labs())
    assert course.get_source_assignments() == {"91_small"}
    place = publish(course, info)
    assert not list(place.rglob("*.md"))
    assert {assignment["name"] for assignment in course.get_assignments()} == {"91_small"}
