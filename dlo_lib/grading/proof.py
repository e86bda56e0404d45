"""What a lab has to show before students get it: its checks are proved on the solution, on nothing, and on every planted mistake.

A rule of :data:`ON_PAPER` reads files and runs nothing; the three proofs judge. Each gives the faults it found, one line a fault with the
cure, and nothing when the lab is in order. `dlo release` and the tests hold every lab to the same functions. Cost: about a second a mutant.
"""

from __future__ import annotations

import ast
import inspect
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from nbformat import NotebookNode

from dlo_lib.errors import UserError
from dlo_lib.files import write_text
from dlo_lib.grading.course import course_root
from dlo_lib.grading.host import Zygote
from dlo_lib.grading.judge import judge_mutant, judge_notebook
from dlo_lib.grading.lint import lint_lab
from dlo_lib.grading.modules import LabChecks, load_checks, load_reference
from dlo_lib.grading.mutants import mutants_of, read_mutant
from dlo_lib.grading.outcome import Status
from dlo_lib.grading.release import NEVER, check_in_step, present_files, release_notebook
from dlo_lib.grading.report import GRADED, Report
from dlo_lib.grading.source import BEGIN, END, CellKind, LabSource, notebook_text, source_notebook, text_source
from dlo_lib.text import tr

LEAST_MUTANTS = 5
HINTS = 3
SECRET = "proof"  # any: the proofs must hold for every class

Rule = Callable[[LabSource], list[str]]


@dataclass(frozen=True)
class Proof:
    """One thing that was looked at, such as ``mutant off_by_one``, and the faults found; none when it holds."""

    name: str
    faults: tuple[str, ...]


def prove(lab: LabSource, zygote: Zygote) -> Iterator[Proof]:
    """Every rule and proof in turn, :func:`number_of_proofs` of them; those that run nothing come first."""
    for name, rule in ON_PAPER.items():
        yield Proof(name, tuple(rule(lab)))
    yield Proof("reference", tuple(reference_faults(lab, zygote)))
    yield Proof("untouched notebook", tuple(untouched_faults(lab, zygote)))
    for file in mutants_of(lab):
        yield Proof(f"mutant {file.stem}", tuple(mutant_faults(lab, file, zygote)))


def number_of_proofs(lab: LabSource) -> int:
    """How many :func:`prove` gives."""
    return len(ON_PAPER) + 2 + len(mutants_of(lab))


# -- what is judged


def reference_faults(lab: LabSource, zygote: Zygote) -> list[str]:
    """The solution must pass every check."""
    report = _judged(lab, source_notebook(lab.folder), zygote)
    lost = _lost(report)
    faults = [f"the solution fails {name}: {message}" for name, message in lost.items()]
    if not lost and (report.status != GRADED or report.points != lab.points):
        faults.append(f"the solution is {report.status} with {report.points:g} of {lab.points:g} points")
    return faults


def untouched_faults(lab: LabSource, zygote: Zygote) -> list[str]:
    """The notebook as it is released must earn nothing, also when a comment in each answer makes it an attempt."""
    notebook = release_notebook(lab.folder)
    for cell in notebook.cells:
        if cell.metadata.get("nbgrader", {}).get("solution"):
            cell.source += "\n# I was here"
    report = _judged(lab, notebook, zygote)
    given = [check.name for question in report.questions.values() for check in question.checks if check.points > 0]
    faults = [f"{name} gives points for the untouched notebook" for name in given]
    if not given and (report.status != GRADED or report.points != 0):
        faults.append(f"the untouched notebook is {report.status} with {report.points:g} points")
    return faults


def mutant_faults(lab: LabSource, file: Path, zygote: Zygote) -> list[str]:
    """A planted mistake must lose its points, by the one check it is aimed at, with its message."""
    mutant = read_mutant(file)
    if mutant.question not in lab.questions:
        return [f"{file.name} answers {mutant.question!r}, which is no question of the lab"]
    question = judge_mutant(lab, mutant, SECRET, zygote).questions[mutant.question]
    failed = {check.name: check.message for check in question.checks if check.status != Status.OK.value}
    if list(failed) != [mutant.fails]:
        return [f"{file.name} should fail {mutant.fails} and no other check, it fails {failed or 'none'}"]
    faults = []
    if mutant.says not in failed[mutant.fails]:
        faults.append(f"{file.name} should be told {mutant.says!r}, it is told {failed[mutant.fails]!r}")
    if question.maximum - question.points != mutant.loses:
        faults.append(f"{file.name} should lose {mutant.loses:g} points, it loses {question.maximum - question.points:g}")
    return faults


def _judged(lab: LabSource, notebook: NotebookNode, zygote: Zygote) -> Report:
    with tempfile.TemporaryDirectory(prefix="dlo-proof-") as folder:
        path = Path(folder) / lab.info.notebook
        write_text(path, notebook_text(notebook))
        return judge_notebook(path, lab, SECRET, zygote=zygote)


def _lost(report: Report) -> dict[str, str]:
    checks = [check for question in report.questions.values() for check in question.checks]
    return {check.name: check.message for check in checks if check.status != Status.OK.value}


# -- what is read


def in_step_faults(lab: LabSource) -> list[str]:
    """``labs/`` is what the source releases."""
    return check_in_step(lab.info)


def leak_faults(lab: LabSource) -> list[str]:
    """``labs/`` holds no hidden check, mutant or source, and no answer."""
    folder = course_root() / "labs" / lab.info.directory
    names = sorted(present_files(folder))
    faults = [f"{folder / name} must never be released" for name in names if name.split("/")[0] in (*NEVER, text_source(lab.folder).name)]
    for name in names:
        content = (folder / name).read_bytes()
        faults += [f"{folder / name} holds {mark!r}: it shows a solution" for mark in (BEGIN, END) if mark.encode() in content]
    same = [cell.id for cell in lab.cells if cell.kind is CellKind.SOLUTION and cell.answer.split() == cell.released.split()]
    return faults + [f"solution cell {name!r} is released as it is" for name in same]


def mutants_faults(lab: LabSource) -> list[str]:
    """There are enough mutants."""
    number = len(mutants_of(lab))
    return [] if number >= LEAST_MUTANTS else [f"{number} mutants: plant at least {LEAST_MUTANTS}, see CHECKS.md"]


def points_faults(lab: LabSource) -> list[str]:
    """The points of a test cell are those of its checks."""
    checks = _checks(lab)
    faults = []
    for question in dict.fromkeys([*lab.questions, *checks.questions]):
        cell = lab.test(question).points if question in lab.questions else 0.0
        of_checks = sum(check.points for check in checks.of(question))
        if cell != of_checks:
            faults.append(f"{question}: its test cell gives {cell:g} points, its checks {of_checks:g}: make them agree")
    return faults


def help_faults(lab: LabSource) -> list[str]:
    """Every question can be tried in the notebook and has three hints; every check says in a title what it looks at."""
    checks = _checks(lab)
    tried = {check.question for check in checks.visible}
    faults = [f"{question} has no visible check" for question in lab.questions if question not in tried]
    for question in dict.fromkeys([*lab.questions, *checks.hints]):
        number = len(checks.hints.get(question, ()))
        if number != HINTS or question not in lab.questions:
            faults.append(f"HINTS[{question!r}] has {number} hints: each question has {HINTS}, a nudge, a pointer, a sketch")
    own = [check for check in (*checks.visible, *checks.hidden) if check.function.__module__.startswith("_dlo_lab")]
    return faults + [f"{check.name} has no docstring: students read its first line" for check in own if not inspect.getdoc(check.function)]


def reference_names_faults(lab: LabSource) -> list[str]:
    """A step that others build on has a reference, which takes what the solution takes."""
    references = load_reference(lab.folder)
    needed = dict.fromkeys(step for steps in lab.info.needs.values() for step in steps)
    faults = [f"{step} has no entry in REFERENCE, and others build on it" for step in needed if step not in references]
    for question, adapters in references.items():
        tree = ast.parse(lab.solution(question).source)
        solutions = {node.name: _taken(node) for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        for name, adapter in adapters.items():
            if name not in solutions:
                faults.append(f"REFERENCE[{question!r}] has {name}, which the solution does not define")
                continue
            parameters = inspect.signature(adapter).parameters.values()
            wanted = [one.name for one in parameters if one.name in solutions[name] or one.default is one.empty]
            if wanted != solutions[name]:
                faults.append(f"the reference of {name} takes {wanted}, the solution {solutions[name]}")
    return faults


def lint_faults(lab: LabSource) -> list[str]:
    """The checks compare, draw their inputs, and measure the run that they verify."""
    return [str(finding) for finding in lint_lab(lab.folder)]


ON_PAPER: dict[str, Rule] = {
    "labs/ in step": in_step_faults,
    "nothing leaks": leak_faults,
    "enough mutants": mutants_faults,
    "points": points_faults,
    "hints and titles": help_faults,
    "references": reference_names_faults,
    "check lint": lint_faults,
}


def refuse(lab: LabSource, proofs: list[Proof]) -> None:
    """Raises:
    UserError: a proof failed."""
    failed = [proof for proof in proofs if proof.faults]
    if failed:
        first = " ".join(failed[0].faults[0].split())
        raise UserError(
            tr("{lab} is not released: {number} of {all} proofs failed, first {name}: {fault}",
               lab=lab.info.directory, number=len(failed), all=len(proofs), name=failed[0].name, fault=first)
        )  # fmt: skip


def _checks(lab: LabSource) -> LabChecks:
    return load_checks(lab.folder, lab.folder)


def _taken(node: ast.FunctionDef | ast.ClassDef) -> list[str]:
    """What a call of it takes: of a class, its ``__init__`` without ``self``."""
    if isinstance(node, ast.FunctionDef):
        return _arguments(node.args)
    made = (part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__")
    return next((_arguments(part.args)[1:] for part in made), [])


def _arguments(node: ast.arguments) -> list[str]:
    """The names of all arguments, in the order of ``inspect.signature``."""
    own = [*node.posonlyargs, *node.args, node.vararg, *node.kwonlyargs, node.kwarg]
    return [argument.arg for argument in own if argument is not None]
