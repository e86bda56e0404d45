"""Rules on the text of a lab that need no judge: widths of lines, lengths of functions in checks, minutes,
predictions, hints, and the instructor's page.

Each rule returns the faults that it found, one line with the cure for each fault, or none.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from dlo_lib.grading.checks.quiz_question import NAME as QUIZ
from dlo_lib.grading.lab.declared import CHECKS_FOLDER, HIDDEN
from dlo_lib.grading.lab.names import defined_names
from dlo_lib.grading.lab.source import Cell, CellKind, LabSource
from dlo_lib.grading.lab.syntax import parsed_cell

WIDEST = 100  # columns of a line of code
WIDEST_CHECK = 110  # columns of a line in checks/ and hidden.py
LONGEST = 60  # lines of a function there
EXERCISE = re.compile(r"^\*\*(Core|Optional) · (\d+) min · (?:●○○|●●○|●●●)\*\*$")
SECTION = "## "
PREDICTION_MINUTES = 1
CORE_MINUTES = (60, 100)
START_MINUTES = (10, 20)  # of lab 00, which shows the course and asks for little
NO_WORK = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
PAGE = "INSTRUCTOR.md"
PAGE_HAS = (
    "**Goal.**",
    "## Timetable",
    "## Usual mistakes",
    "## Answers to the questions of the text",
    "Where to cut",
    "rojector",
)
ANSWER_ROW = re.compile(r"^\| `([\w-]+)` \| (.+?) \|", re.MULTILINE)
MOST_OF_AN_ANSWER = 0.6  # of the tokens of a reference that a hint may have, in their order
TOKEN = re.compile(r"[A-Za-z_]\w*|\d+(?:\.\d+)?|[^\s\w]")


# -- widths


def width_faults(lab: LabSource) -> list[str]:
    """Return the lines of code that students see and that are wider than ``WIDEST``.

    A notebook at 1280 pixels would need a scroll bar. The code of a folded demo may be wider.
    """
    return [
        f"{cell.id}: {line.strip()[:40]!r}… has {len(line)} columns: wrap it at {WIDEST}"
        for cell in lab.cells
        if cell.kind is not CellKind.TEXT and not cell.folded
        for line in cell.released.splitlines()
        if len(line) > WIDEST
    ]


# -- checks


def check_faults(lab: LabSource) -> list[str]:
    """Return the wide lines and the long functions of ``checks/`` and ``hidden.py``."""
    faults = []
    for file in (*sorted((lab.given / CHECKS_FOLDER).glob("*.py")), lab.folder / f"{HIDDEN}.py"):
        text = file.read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines(), 1):
            if len(line) > WIDEST_CHECK:
                faults.append(
                    f"{file.name}, line {number} has {len(line)} columns: wrap it at {WIDEST_CHECK}"
                )
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > LONGEST:
                    cure = f"divide it into functions of at most {LONGEST}"
                    faults.append(f"{file.name}: {node.name} has {lines} lines: {cure}")
    return faults


# -- minutes


def exercise_faults(lab: LabSource) -> list[str]:
    """Return the faults of the lines that say how long and how difficult each exercise is."""
    lines = [line for cell in lab.cells if cell.kind is CellKind.TEXT for line in _exercise_lines(cell)]
    exercises = [question for question in lab.questions if question != QUIZ]
    faults = []
    if len(lines) < len(exercises):
        faults.append(
            f"{len(lines)} of {len(exercises)} exercises have a line such as **Core · 10 min · ●○○** "
            "below their heading"
        )
    of_exercises = sum(minutes for kind, minutes in lines if kind == "Core")
    predictions = len(core_predictions(lab))
    core = of_exercises + PREDICTION_MINUTES * predictions
    least, most = START_MINUTES if lab.info.number == 0 else CORE_MINUTES
    if core != lab.info.minutes or not least <= core <= most:
        faults.append(
            f"the core exercises and predictions take {core} min ({of_exercises} + {predictions} predictions "
            f"of {PREDICTION_MINUTES} min), and lab.toml gives {lab.info.minutes}: "
            f"both should be the same, from {least} to {most}"
        )
    return faults


def core_predictions(lab: LabSource) -> list[Cell]:
    """Return the cells that ask for a prediction, except those in the section of an optional exercise."""
    found, kind = [], "Core"
    for cell in lab.cells:
        if cell.kind is CellKind.TEXT:
            for line in cell.source.splitlines():
                if line.startswith(SECTION):
                    kind = "Core"
                elif match := EXERCISE.match(line):
                    kind = match[1]
        elif cell.kind is CellKind.PREDICTION and kind == "Core":
            found.append(cell)
    return found


def _exercise_lines(cell: Cell) -> Iterator[tuple[str, int]]:
    for line in cell.source.splitlines():
        if match := EXERCISE.match(line):
            yield match[1], int(match[2])


# -- predictions


def prediction_faults(lab: LabSource) -> list[str]:
    """Return the cells that read a prediction only after other work.

    Otherwise a student waits for a measurement, and then learns that the prediction is missing or no number.
    """
    known: set[str] = set()
    faults = []
    for cell in lab.cells:
        if cell.kind is CellKind.PREDICTION:
            known |= set(defined_names(parsed_cell(cell.source)))
        elif cell.kind is CellKind.DEMO:
            tree = parsed_cell(cell.source)
            first = next((node for node in tree.body if not isinstance(node, NO_WORK)), None)
            late = _names(tree) & known - (set() if first is None else _names(first))
            faults += [
                f"{cell.id} reads {name} after other work: begin it with require_numbers({name})"
                for name in sorted(late)
            ]
    return faults


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


# -- the instructor's page


def page_faults(lab: LabSource) -> list[str]:
    """Return what the instructor's page of the lab lacks: a part, or the answer to a prediction."""
    page = lab.folder / PAGE
    if not page.is_file():
        return [f"{PAGE} is missing: write the instructor's page, see CHECKS.md"]
    text = page.read_text(encoding="utf-8")
    faults = [f"{PAGE} lacks {part!r}: see CHECKS.md" for part in PAGE_HAS if part not in text]
    return faults + _unanswered(lab, text)


def _unanswered(lab: LabSource, page: str) -> list[str]:
    rows = {name: _answers(row) for name, row in ANSWER_ROW.findall(page)}
    faults = []
    for cell in lab.cells:
        if cell.kind is not CellKind.PREDICTION:
            continue
        asked, answers = predicted_names(cell.source), rows.get(cell.id, {})
        faults += [
            f"{PAGE} has no number for the prediction {name!r}: "
            f"write a row | `{cell.id}` | {name}: what is measured; ... |"
            for name in asked
            if not re.search(r"\d", answers.get(name, ""))
        ]
        faults += [
            f"{PAGE} answers {name!r} in the row of {cell.id}, which asks for {', '.join(asked)}"
            for name in answers
            if name not in asked
        ]
    return faults


def predicted_names(source: str) -> list[str]:
    """Return the names whose values a prediction cell asks for: the keys of its dicts."""
    dicts = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Dict)]
    return [str(ast.literal_eval(key)) for each in dicts for key in each.keys if key is not None]


def _answers(row: str) -> Mapping[str, str]:
    parts = (part.partition(": ") for part in row.split("; "))
    return {name.strip(): answer for name, _, answer in parts}


# -- hints


def hint_faults(lab: LabSource, hints: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the hints that give most of a solution away: the third one is a sketch, not the answer."""
    faults = []
    for question in lab.questions:
        if question == QUIZ:
            continue
        cell = lab.solution(question)
        own = TOKEN.findall(_written(cell))
        for number, hint in enumerate(hints.get(question, ()), 1):
            share = _in_order(own, TOKEN.findall(hint)) / max(1, len(own))
            if share >= MOST_OF_AN_ANSWER:
                faults.append(
                    f"hint {number} of {question} has {share:.0%} of its solution: "
                    "describe a step in words, and leave the code to the student"
                )
    return faults


def _written(cell: Cell) -> str:
    """The lines of a solution that a student has to write, without docstrings and comments."""
    given = {"".join(line.split()) for line in cell.released.splitlines()}
    lines = (line.partition("#")[0].strip() for line in cell.answer.splitlines())
    return "\n".join(
        line
        for line in lines
        if "".join(line.split()) not in given and not line.startswith(('"""', "import ", "from ", "def "))
    )


def _in_order(tokens: Sequence[str], text: Sequence[str]) -> int:
    """Return the length of the longest common subsequence."""
    best = [0] * (len(text) + 1)
    for token in tokens:
        row = [0]
        for place, (before, here) in enumerate(pairwise(best)):
            row.append(before + 1 if token == text[place] else max(here, row[-1]))
        best = row
    return best[-1]
