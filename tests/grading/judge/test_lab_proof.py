"""A lab is released only when it is proved: each kind of fault is found and named in one line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from nbgrader.apps.api import NbGraderAPI

from dlo_lib.base.errors import UserError
from dlo_lib.grading.classroom.gradebook.nbgrader_course import open_course
from dlo_lib.grading.classroom.publish.publication import check_unpublished, place_in_exchange, publish
from dlo_lib.grading.judge.lab_proof import (
    STATIC_RULES,
    Proof,
    mutant_faults,
    number_of_proofs,
    proof_secrets,
    prove,
    reference_faults,
    require_proofs,
    untouched_faults,
)
from dlo_lib.grading.lab.course import find_lab, source_labs
from dlo_lib.grading.lab.mutants import read_mutants
from dlo_lib.grading.lab.release import release_lab
from dlo_lib.grading.lab.source import LabSource, read_lab
from dlo_lib.grading.sandbox.host import Zygote
from tests.grading.two_folders import place_of

Edit = Callable[[str, str, str], None]


MORE = """
import torch


def check_more(student, t):
    "One more"


more = __import__("dlo_lib.grading.checks.contract", fromlist=["check"]).check("mean", points=1)(check_more)
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with a correct small lab."""
    shutil.copytree(Path(__file__).parents[1] / "small_course", tmp_path / "checkout")
    monkeypatch.setenv("DLO_COURSE", str(tmp_path / "checkout"))
    release_lab(find_lab("91", source_labs()))
    return tmp_path / "checkout"


@pytest.fixture
def edit(root: Path) -> Edit:
    """Replace a text in a file of the lab's source, and update the release."""

    def replace(name: str, old: str, new: str) -> None:
        file = place_of(root / "solutions" / "91_small", name)
        text = file.read_text(encoding="utf-8")
        assert old in text
        file.write_text(text.replace(old, new), encoding="utf-8")
        release_lab(find_lab("91", source_labs()))

    return replace


def lab(root: Path) -> LabSource:
    return read_lab(root / "solutions" / "91_small")


def on_paper(root: Path) -> dict[str, list[str]]:
    return {name: faults for name, rule in STATIC_RULES.items() if (faults := rule(lab(root)))}


def test_a_correct_lab_has_no_static_fault(root: Path) -> None:
    assert on_paper(root) == {}
    assert number_of_proofs(lab(root)) == len(STATIC_RULES) + 3 + 5


def test_labs_out_of_step_are_named(root: Path) -> None:
    (root / "labs" / "91_small" / "small.ipynb").write_text("{}")
    assert "small.ipynb differs from its source: run `make labs`" in on_paper(root)["labs/ in step"][0]


@pytest.mark.parametrize("name", ["hidden.py", "mutants.py", "INSTRUCTOR.md", "91_small.py"])
def test_files_that_students_must_not_have_are_leaks(root: Path, name: str) -> None:
    place = root / "labs" / "91_small" / name
    place.parent.mkdir(exist_ok=True)
    place.write_text("x = 1")
    assert [
        fault for fault in on_paper(root)["nothing leaks"] if fault.endswith(f"{name} must never be released")
    ]


def test_an_answer_in_a_released_file_is_a_leak(root: Path) -> None:
    with open(root / "labs" / "91_small" / "checks" / "questions.py", "a", encoding="utf-8") as file:
        file.write("### BEGIN SOLUTION\n")
    assert "it shows a solution" in on_paper(root)["nothing leaks"][0]


def test_a_solution_released_with_its_answer_is_a_leak(root: Path, edit: Edit) -> None:
    edit(
        "91_small.py",
        '### BEGIN SOLUTION: quiz = {"q1": "", "q2": ""}',
        '### BEGIN SOLUTION: quiz = {"q1": "b", "q2": "a"}',
    )
    assert on_paper(root)["nothing leaks"] == ["solution cell 'quiz' is released with its answer"]


def test_too_many_hidden_points_are_a_fault(root: Path, edit: Edit) -> None:
    edit("hidden.py", '@check("scale", points=1)', '@check("scale", points=2)')
    (fault,) = on_paper(root)["hidden points"]
    assert fault.startswith("4 of 13 points are hidden: at most 25% may be")


def test_an_exercise_without_minutes_is_a_fault(root: Path, edit: Edit) -> None:
    edit("91_small.py", "# **Core · 20 min · ●●○**\n", "# **Core · 20 min · ●○●**\n")
    missing, minutes = on_paper(root)["minutes"]
    assert missing.startswith("2 of 3 exercises have a line such as **Core · 10 min · ●○○**")
    assert minutes.startswith(
        "the core exercises and predictions take 40 min (40 + 0 predictions of 1 min), and lab.toml gives 60"
    )


def test_optional_exercises_do_not_count_for_the_minutes(root: Path, edit: Edit) -> None:
    edit("91_small.py", "# **Core · 20 min · ●●●**\n", "# **Optional · 20 min · ●●●**\n")
    (fault,) = on_paper(root)["minutes"]
    assert fault.startswith("the core exercises and predictions take 40 min")


def test_an_instructors_page_is_needed_with_all_its_parts(root: Path, edit: Edit) -> None:
    edit("INSTRUCTOR.md", "## Usual mistakes", "## Mistakes")
    assert on_paper(root)["instructor's page"] == ["INSTRUCTOR.md lacks '## Usual mistakes': see CHECKS.md"]
    (root / "solutions" / "91_small" / "INSTRUCTOR.md").unlink()
    (fault,) = on_paper(root)["instructor's page"]
    assert fault.startswith("INSTRUCTOR.md is missing")


def test_a_lab_that_does_not_exist_is_no_foundation(root: Path, edit: Edit) -> None:
    edit("lab.toml", "minutes = 60\n", 'minutes = 60\nbuilds_on = ["01_first_device"]\n')
    assert on_paper(root)["builds on"] == ["builds_on names 01_first_device, which is no lab of this course"]


def test_too_few_mutants_are_a_fault(root: Path, edit: Edit) -> None:
    edit("mutants.py", "MUTANTS = [", "MUTANTS = [][:0] and [")
    assert on_paper(root)["mutants"] == ["0 mutants: plant at least 5, see CHECKS.md"]


def test_a_mutant_that_does_not_fit_is_found_before_anything_runs(
    root: Path, edit: Edit, zygote: Zygote
) -> None:
    edit(
        "91_small.py",
        "    return total / dist.get_world_size()",
        "    return total.div(dist.get_world_size())",
    )
    edit("mutants.py", '"check_largest"', '"check_row_of_zeros"')
    first, second = on_paper(root)["mutants"]
    assert first.endswith(
        "check_row_of_zeros is no check of scale, "
        "which has check_scale_shape, check_largest, check_scale_dtype"
    )
    title = "The sum is divided by two, whatever the number of ranks"
    assert second == f"mutant {title!r}: 'return total / dist.get_world_size()' is not in any solution cell"
    assert mutant_faults(lab(root), read_mutants(lab(root).folder)[-1], zygote) == [second]


def test_a_check_that_is_not_written_as_a_decorated_function_is_found(root: Path, edit: Edit) -> None:
    edit("hidden.py", "import torch\n", MORE)
    (fault,) = on_paper(root)["points"]
    assert fault.startswith("mean: its test cell gives 2 points, its checks 3: write a check as a function")


def test_every_question_has_hints_and_every_check_a_title(root: Path, edit: Edit) -> None:
    edit("lab.toml", '["A sum is nearly a mean.", ', "[")
    edit("checks/questions.py", '    """Every rank gets the mean"""\n', "")
    first, second = on_paper(root)["hints and titles"]
    assert "mean has 2 hints" in first
    assert "check_mean_everywhere has no docstring" in second


def test_a_question_whose_functions_a_solution_calls_is_named_as_needed(root: Path, edit: Edit) -> None:
    edit("lab.toml", '[steps.quantise]\nneeds = ["scale"]\n', "")
    assert on_paper(root)["needs"] == [
        "quantise calls what scale defines: add 'scale' to needs under [steps.quantise] in lab.toml"
    ]


def test_a_lab_of_many_files_is_found(root: Path) -> None:
    for number in range(8):
        (root / "labs" / "91_small" / "checks" / f"part_{number}.py").write_text("")
    (fault,) = on_paper(root)["number of files"]
    assert fault.startswith("13 files of code: a lab has at most 10")


def test_a_solution_that_fails_its_own_checks_is_found(root: Path, edit: Edit, zygote: Zygote) -> None:
    assert reference_faults(lab(root), zygote) == []
    edit("91_small.py", "    return total / dist.get_world_size()", "    return total")
    faults = reference_faults(lab(root), zygote)
    assert [fault.split(":")[0] for fault in faults] == [
        "the solution fails check_mean_everywhere",
        "the solution fails check_three_ranks",
    ]


def test_a_question_that_communicates_needs_a_check_of_what_arrives(
    root: Path, edit: Edit, zygote: Zygote
) -> None:
    """Its results and its traffic are right also if the numbers come to a rank on another way."""
    edit("checks/questions.py", "    uses_what_arrives(t, run)\n", "")
    assert reference_faults(lab(root), zygote) == [
        "mean: its checks pass ranks that do not use what they receive: "
        "add uses_what_arrives(t, run) to one of them, see the nudge in CHECKS.md"
    ]


def test_a_nudge_whose_effect_is_predicted_is_such_a_check(root: Path, edit: Edit, zygote: Zygote) -> None:
    edit("checks/questions.py", "    uses_what_arrives(t, run)\n", "")
    edit(
        "hidden.py",
        '    run = student.ranks(mean, [{"x": x} for x in xs])\n',
        "    nudge = Nudge(Kind.ALL_REDUCE, rank=1, element=2, by=6.0)\n"
        '    run = student.ranks(mean, [{"x": x} for x in xs], nudge)\n',
    )
    edit("hidden.py", "import check\n", "import Kind, Nudge, check\n")
    edit(
        "hidden.py",
        'sum(xs) / 3, "the mean on rank {rank} of 3"',
        'sum(xs) / 3 + (rank == 1) * 2.0 * torch.eye(4)[2], "rank {rank} of 3"',
    )
    assert reference_faults(lab(root), zygote) == []


def test_a_check_without_condition_gives_points_for_the_untouched_notebook(
    root: Path,
    edit: Edit,
    zygote: Zygote,
) -> None:
    assert untouched_faults(lab(root), zygote) == []
    edit(
        "hidden.py",
        "    xs = [t.normal(4) for _ in range(3)]",
        "    return t.that(True, 'always')\n    xs = [t.normal(4) for _ in range(3)]",
    )
    assert untouched_faults(lab(root), zygote) == [
        "check_three_ranks gives points for the untouched notebook"
    ]


def test_a_mutant_that_passes_its_check_is_a_fault(root: Path, edit: Edit, zygote: Zygote) -> None:
    assert mutant_faults(lab(root), read_mutants(lab(root).folder)[-1], zygote) == []
    for old, new, said in (
        ('says="of 3"', 'says="of 5"', "should get the message 'of 5', it gets"),
        (
            '"return total / 2"',
            '"return total / len([total, total, total][: dist.get_world_size()])"',
            "and no other check, it fails none",
        ),
    ):
        edit("mutants.py", old, new)
        (fault,) = mutant_faults(lab(root), read_mutants(lab(root).folder)[-1], zygote)
        assert said in fault
        edit("mutants.py", new, old)


def test_only_the_full_proof_of_a_mutant_finds_that_it_fails_another_check(
    root: Path, edit: Edit, zygote: Zygote
) -> None:
    edit("mutants.py", '"return total / 2"', '"return total / 5"')
    mutant = read_mutants(lab(root).folder)[-1]
    (fault,) = mutant_faults(lab(root), mutant, zygote)
    assert "should fail check_three_ranks and no other check, it fails {'check_mean_everywhere'" in fault
    assert mutant_faults(lab(root), mutant, zygote, every_check=False) == []

    edit(
        "mutants.py",
        '"return total / 5"',
        '"return total / len([total, total, total][: dist.get_world_size()])"',
    )
    (fault,) = mutant_faults(lab(root), read_mutants(lab(root).folder)[-1], zygote, every_check=False)
    assert "should fail check_three_ranks" in fault


def test_a_mutant_that_passes_with_another_class_secret_is_a_fault(
    root: Path, edit: Edit, zygote: Zygote
) -> None:
    """Of one drawn row, the largest element by absolute value is positive with half of the secrets."""
    edit("checks/questions.py", "x = t.normal(4, 30)", "x = t.normal(1, 30)")
    edit("checks/questions.py", "shape=(4,)", "shape=(1,)")
    edit("checks/questions.py", "x.new_full((4,), 127.0)", "x.new_full((1,), 127.0)")
    secrets = proof_secrets(4)
    assert len(set(secrets)) == 4
    proofs = list(prove(lab(root), zygote, secrets))
    assert len(proofs) == number_of_proofs(lab(root), secrets=4)
    faulty = [proof for proof in proofs if proof.faults]
    name = f"mutant {read_mutants(lab(root).folder)[0].name}"
    assert 0 < len(faulty) < 4
    assert {proof.name for proof in faulty} <= {name, *(f"{name}, class secret {it}" for it in secrets[1:])}


def test_a_lab_is_refused_in_one_line(root: Path) -> None:
    require_proofs(lab(root), [Proof("reference", ())])
    with pytest.raises(UserError) as refused:
        require_proofs(lab(root), [Proof("reference", ()), Proof("mutant x", ("x should lose\n 1 point",))])
    assert (
        str(refused.value)
        == "91_small is not released: 1 of 2 proofs failed, first mutant x: x should lose 1 point"
    )


@pytest.fixture
def unreleased(course: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> NbGraderAPI:
    """A course of the checkout ``root``, which has one lab."""
    shutil.rmtree(course / "source" / "92_sharded")
    monkeypatch.setenv("DLO_COURSE", str(root))
    (course / "solutions").unlink()
    (course / "solutions").symlink_to(root / "solutions")
    return open_course(course)


def test_a_release_that_students_can_fetch_is_replaced_only_when_asked(
    unreleased: NbGraderAPI, root: Path
) -> None:
    course, info = unreleased, find_lab("91", source_labs())
    check_unpublished(course, info)
    place = publish(course, info)
    assert place == place_in_exchange(course, info)
    names = {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()}
    assert names == {"small.ipynb", "checks/questions.py", "references.json", "in_grading.json", "lab.toml"}
    with pytest.raises(UserError, match=r"91_small is released already, in .*: --again replaces it"):
        publish(course, info)
    (place / "checks" / "questions.py").chmod(0o644)
    (place / "checks" / "questions.py").write_text("# old")
    publish(course, info, again=True)
    assert (place / "checks" / "questions.py").read_bytes() == (
        root / "labs" / "91_small" / "checks" / "questions.py"
    ).read_bytes()


def test_guides_beside_the_labs_are_no_labs(unreleased: NbGraderAPI, root: Path) -> None:
    for name in ("README.md", "CHECKS.md"):
        (root / "solutions" / name).write_text("# A guide")
    assert [info.directory for info in source_labs()] == ["91_small"]
    course, info = unreleased, find_lab("91", source_labs())
    assert course.get_source_assignments() == {"91_small"}
    place = publish(course, info)
    assert not list(place.rglob("*.md"))
    assert {assignment["name"] for assignment in course.get_assignments()} == {"91_small"}
