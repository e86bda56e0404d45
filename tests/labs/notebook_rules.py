"""What a reference notebook must show after it has run, and what its kernel records for that."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat

INSTEAD = re.compile(r"^lab\.check\(.*\binstead=", re.MULTILINE)
VERDICT = re.compile(r"\A\w+: ([\d.]+) of ([\d.]+) points?\b")
ROW = re.compile(r"^  ([✓✗]) (.+?) +[\d.]+/[\d.]+", re.MULTILINE)


def write_startup(folder: Path) -> Path:
    """Write a profile of IPython below ``folder``: a kernel with this ``IPYTHONDIR`` writes the faults of its
    figures to the file returned.
    """
    startup = folder / ".ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    target = folder / ".faults.jsonl"
    source = Path(__file__).with_name("figure_faults.py")
    begin = f"import runpy; runpy.run_path({str(source)!r})['record_faults']({str(target)!r})"
    (startup / "faults.py").write_text(begin)
    return target


def faults_of_figures(record: Path, folder: Path) -> Iterator[str]:
    """The faults in a file of :func:`write_startup`; a lab in ``folder`` with figures.py shows figures."""
    figures = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    if not figures and (folder / "figures.py").exists():
        yield "figures.py is there, and no figure was shown"
    for figure in figures:
        yield from (f"{figure['text'].split('. ')[0]}: {fault}" for fault in figure["faults"])


def points(notebook: nbformat.NotebookNode) -> tuple[float, float]:
    """The points that the checks of a notebook gave, and those that they can give."""
    verdicts = [
        VERDICT.match(text)
        for cell in notebook.cells
        if cell.cell_type == "code" and cell.metadata.get("nbgrader", {}).get("grade")
        for text in texts(cell)
    ]
    pairs = [(float(found[1]), float(found[2])) for found in verdicts if found]
    return sum(got for got, _ in pairs), sum(most for _, most in pairs)


def is_graded(cell: nbformat.NotebookNode) -> bool:
    """Whether the cell runs the checks of a question for points."""
    return cell.cell_type == "code" and bool(cell.metadata.get("nbgrader", {}).get("grade"))


def below_full_marks(notebook: nbformat.NotebookNode) -> Iterator[str]:
    """The headings of the checks whose points are not all of those that the notebook can give."""
    for cell in notebook.cells:
        if not is_graded(cell):
            continue
        shown = texts(cell)
        if not any("All checks pass" in text for text in shown):
            yield f"{cell.metadata.nbgrader.grade_id}: {shown}"


def unlike_the_text(notebook: nbformat.NotebookNode) -> Iterator[str]:
    """Where ``lab.check(..., instead=...)`` shows another result than the text before the cell says.

    A standard form passes all checks, except those whose titles this text has between “ and ”: they fail.
    """
    text = ""
    for cell in notebook.cells:
        text = cell.source if cell.cell_type == "markdown" else text
        checks = len(INSTEAD.findall(cell.source)) if cell.cell_type == "code" else 0
        if not checks:
            continue
        shown = texts(cell)
        verdicts = [each for each in shown if VERDICT.match(each)]
        if len(verdicts) != checks:
            yield f"{cell.id}: {len(verdicts)} verdicts of {checks} checks: {shown}"
        named = {" ".join(title.split()) for title in re.findall("“([^”]+)”", text)}
        for verdict in verdicts:
            for mark, title in ROW.findall(verdict):
                if (mark == "✗") != (title in named):
                    yield f"{cell.id}: {mark} {title}. The text before names {named or 'no check'}: {verdict}"


def texts(cell: nbformat.NotebookNode) -> list[str]:
    """What a cell displayed, as plain text, without what it printed."""
    return [output.data["text/plain"] for output in cell.outputs if "text/plain" in output.get("data", ())]
