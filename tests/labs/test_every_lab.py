"""Every lab below solutions/, found by itself: the reference earns everything, the untouched notebook nothing, a mutant loses what it says.

A new lab needs no new test. A mutant that no longer loses its points, or loses others, says that a check has gone soft or hard.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from dlo_lib.files import write_text
from dlo_lib.grading.course import LabInfo, source_labs
from dlo_lib.grading.host import Zygote
from dlo_lib.grading.judge import judge_mutant, judge_notebook, zygote_for
from dlo_lib.grading.modules import LabChecks, load_checks, load_reference
from dlo_lib.grading.mutants import mutants_of, read_mutant
from dlo_lib.grading.release import release_notebook
from dlo_lib.grading.source import LabSource, notebook_text, read_lab, source_folder, source_notebook

LEAST_MUTANTS = 5
HINTS = 3
LABS = source_labs()
SOURCES = {lab.directory: read_lab(source_folder(lab)) for lab in LABS}
MUTANTS = [(lab, file) for lab in LABS for file in mutants_of(SOURCES[lab.directory])]

every_lab = pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.directory)


def source(lab: LabInfo) -> LabSource:
    return SOURCES[lab.directory]


@cache
def checks_in(folder: Path) -> LabChecks:
    return load_checks(folder, folder)


def checks(lab: LabInfo) -> LabChecks:
    return checks_in(source(lab).folder)


@pytest.fixture(scope="module")
def zygote_of() -> Iterator[Callable[[LabInfo], Zygote]]:
    """One zygote a lab, shared by its tests."""
    started: dict[str, Zygote] = {}

    def get(lab: LabInfo) -> Zygote:
        if lab.directory not in started:
            started[lab.directory] = zygote_for(source(lab))
        return started[lab.directory]

    yield get
    for zygote in started.values():
        zygote.close()


@every_lab
def test_the_reference_scores_full_marks(lab: LabInfo, tmp_path: Path, zygote_of: Callable[[LabInfo], Zygote]) -> None:
    write_text(tmp_path / lab.notebook, notebook_text(source_notebook(source(lab).folder)))
    report = judge_notebook(tmp_path / lab.notebook, source(lab), "test", zygote=zygote_of(lab))
    lost = [check for question in report.questions.values() for check in question.checks if check.status != "OK"]
    assert not lost
    assert report.status == "GRADED"
    assert report.points == source(lab).points


@every_lab
def test_the_untouched_notebook_scores_nothing(lab: LabInfo, tmp_path: Path, zygote_of: Callable[[LabInfo], Zygote]) -> None:
    """Also when it counts as an attempt, because of a comment in each answer."""
    notebook = release_notebook(source(lab).folder)
    for cell in notebook.cells:
        if cell.metadata.get("nbgrader", {}).get("solution"):
            cell.source += "\n# I was here"
    write_text(tmp_path / lab.notebook, notebook_text(notebook))
    report = judge_notebook(tmp_path / lab.notebook, source(lab), "test", zygote=zygote_of(lab))
    assert report.status == "GRADED"
    assert report.points == 0


@pytest.mark.parametrize(("lab", "file"), MUTANTS, ids=[f"{lab.directory}-{file.stem}" for lab, file in MUTANTS])
def test_each_mutant_loses_exactly_its_points(lab: LabInfo, file: Path, zygote_of: Callable[[LabInfo], Zygote]) -> None:
    mutant = read_mutant(file)
    question = judge_mutant(source(lab), mutant, zygote=zygote_of(lab)).questions[mutant.question]
    failed = {check.name: check.message for check in question.checks if check.status != "OK"}
    assert list(failed) == [mutant.fails], failed
    assert mutant.says in failed[mutant.fails]
    assert question.maximum - question.points == mutant.loses


@every_lab
def test_there_are_enough_mutants(lab: LabInfo) -> None:
    assert len(mutants_of(source(lab))) >= LEAST_MUTANTS


@every_lab
def test_points_of_test_cells_are_those_of_their_checks(lab: LabInfo) -> None:
    by_cell = {question: source(lab).test(question).points for question in source(lab).questions}
    by_check = {question: sum(check.points for check in checks(lab).of(question)) for question in checks(lab).questions}
    assert by_cell == by_check


@every_lab
def test_every_question_has_a_visible_check_and_graded_hints(lab: LabInfo) -> None:
    assert {check.question for check in checks(lab).visible} == set(source(lab).questions)
    assert {question: len(hints) for question, hints in checks(lab).hints.items()} == dict.fromkeys(source(lab).questions, HINTS)


@every_lab
def test_every_step_that_is_built_on_has_a_reference(lab: LabInfo) -> None:
    needed = {step for steps in lab.needs.values() for step in steps}
    assert needed <= load_reference(source(lab).folder).keys()


def arguments(node: ast.arguments) -> list[str]:
    """The names of all arguments, in the order of ``inspect.signature``."""
    own = [*node.posonlyargs, *node.args, node.vararg, *node.kwonlyargs, node.kwarg]
    return [argument.arg for argument in own if argument is not None]


@every_lab
def test_reference_adapters_take_what_the_solutions_take(lab: LabInfo) -> None:
    for question, adapters in load_reference(source(lab).folder).items():
        tree = ast.parse(source(lab).solution(question).source)
        solutions = {node.name: arguments(node.args) for node in tree.body if isinstance(node, ast.FunctionDef)}
        for name, adapter in adapters.items():
            parameters = inspect.signature(adapter).parameters.values()
            wanted = [
                parameter.name for parameter in parameters if parameter.name in solutions[name] or parameter.default is parameter.empty
            ]
            assert wanted == solutions[name], name


@every_lab
def test_every_check_has_a_title(lab: LabInfo) -> None:
    """Of a hidden check it may be all that a student reads."""
    written = [check for check in (*checks(lab).visible, *checks(lab).hidden) if check.function.__module__.startswith("_dlo_lab")]
    assert [check.name for check in written if not inspect.getdoc(check.function)] == []
