"""Slides for a lab, from its notebook: a slide for each section, and a slide for each figure.

The reference notebook runs once. The slides show its headings, the first paragraphs of its text and its
figures, and no code. The slides of a section come before those of its figures, which may show the result of
an exercise. The page is one HTML file without external files. ``dlo slides LAB``.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from markupsafe import Markup
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbformat import NotebookNode

from dlo_lib.base.errors import UserError
from dlo_lib.base.files import write_text
from dlo_lib.base.markup import render
from dlo_lib.base.text import language, tr
from dlo_lib.grading.classroom.publish.formulas import with_formulas
from dlo_lib.grading.lab.course import LabInfo
from dlo_lib.grading.lab.release import write_release
from dlo_lib.grading.lab.source import source_folder, source_notebook
from dlo_lib.grading.lab.text_rules import EXERCISE

HEADING = re.compile(r"^(#{1,2}) +(.+)$", re.MULTILINE)
CELL_SECONDS = 600
WORDS = 130  # of text on one slide
CAPTION_WORDS = 45  # below a figure
LEFT_OUT = "\0"
"""A paragraph in place of a block of code."""


@dataclass
class Slide:
    """A slide: its heading, its text in Markdown, and its figure as base64 of a PNG file, or ""."""

    heading: str
    text: str = ""
    figure: str = ""
    first: bool = False

    @property
    def html(self) -> Markup:
        """The text as HTML, with formulas that need no network."""
        return _html(self.text)

    @property
    def long(self) -> bool:
        """Whether the text needs a smaller font, because one paragraph has more words than a slide."""
        return not self.figure and len(self.text.split()) > WORDS

    @property
    def heading_html(self) -> Markup:
        """The heading as HTML of one line."""
        return Markup(_html(self.heading).strip().removeprefix("<p>").removesuffix("</p>"))


@dataclass
class _Section:
    heading: str
    first: bool
    paragraphs: list[str] = field(default_factory=list)
    figures: list[tuple[str, list[str]]] = field(default_factory=list)  # each with the paragraphs after it

    def slides(self) -> Iterable[Slide]:
        yield Slide(self.heading, shortened(self.paragraphs, WORDS), first=self.first)
        for figure, after in self.figures:
            caption = [part for part in after if not EXERCISE.match(part.strip())]
            yield Slide(self.heading, shortened(caption, CAPTION_WORDS), figure)


def write_slides(lab: LabInfo, target: Path, *, reduced: bool = False) -> Path:
    """Run the reference notebook of ``lab`` and write its slides to ``target``, an HTML file.

    Args:
        reduced: run at the sizes of the tests, which takes less time.

    Raises:
        UserError: a cell of the notebook failed, or ``target`` cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        ran = run_notebook(lab, lab.reduced if reduced else {})
        write_text(target, slides_html(lab, slides_of(ran)))
    except OSError as error:
        raise UserError(
            tr("cannot write {file} ({reason}): choose another file", file=target, reason=error.strerror)
        ) from error
    return target


def run_notebook(lab: LabInfo, settings: Mapping[str, object]) -> NotebookNode:
    """Return the notebook with solutions and outputs, run beside a copy of the released files.

    Raises:
        UserError: a cell failed.
    """
    notebook = source_notebook(source_folder(lab))
    with tempfile.TemporaryDirectory(prefix="dlo-slides-") as folder:
        write_release(lab, Path(folder))
        client = NotebookClient(
            notebook,
            timeout=CELL_SECONDS,
            startup_timeout=CELL_SECONDS,
            resources={"metadata": {"path": folder}},
        )
        environment = {**os.environ, **{name: str(value) for name, value in settings.items()}}
        try:
            client.execute(env=environment)
        except CellExecutionError as error:
            raise UserError(
                tr(
                    "a cell of {lab} failed ({error}): run `dlo release {number} --prove-only`",
                    lab=lab.directory, error=f"{error.ename}: {error.evalue}", number=lab.number,
                )
            ) from error  # fmt: skip
    return notebook


def slides_of(notebook: NotebookNode) -> list[Slide]:
    """Return the slides of a notebook with outputs; its code is not shown."""
    sections: list[_Section] = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            _read(cell.source, sections)
            continue
        for output in cell.get("outputs", ()):
            png = output.get("data", {}).get("image/png")
            if png and sections:
                sections[-1].figures.append((str(png).strip().replace("\n", ""), []))
    return [slide for section in sections for slide in section.slides()]


def shortened(paragraphs: Iterable[str], words: int) -> str:
    """Return whole paragraphs up to a number of words, at least one; a list is one paragraph.

    A paragraph that ends inside a sentence or with a colon stays with the next one. It is left out with a
    block of code that it announces, and if nothing follows.
    """
    chosen: list[str] = []
    for paragraph in _announced(paragraphs):
        if chosen and sum(len(part.split()) for part in [*chosen, paragraph]) > words:
            break
        chosen.append(paragraph)
    return "\n\n".join(chosen)


def _announced(paragraphs: Iterable[str]) -> list[str]:
    """Join a paragraph that announces the next one to it, and leave out what announces a block of code."""
    joined: list[str] = []
    for paragraph in paragraphs:
        announced = bool(joined) and _announces(joined[-1], paragraph)
        if paragraph == LEFT_OUT:
            del joined[len(joined) - announced :]
        elif announced:
            joined[-1] += f"\n\n{paragraph}"
        else:
            joined.append(paragraph)
    return joined[:-1] if len(joined) > 1 and joined[-1].endswith(":") else joined


def _announces(paragraph: str, following: str) -> bool:
    """Return whether ``paragraph`` ends with a colon, or inside a sentence that a list or a block of code
    continues."""
    continued = following == LEFT_OUT or re.match(r"[-*] |\d+\. ", following) is not None
    return paragraph.endswith(":") or (continued and paragraph[-1].isalnum())


def slides_html(lab: LabInfo, slides: Iterable[Slide]) -> str:
    """Return the page."""
    return render("slides", lab=lab, slides=list(slides), language=language())


def _read(text: str, sections: list[_Section]) -> None:
    """Add the text of a cell to the last section, or below its last figure; a heading opens a section."""
    parts = HEADING.split(text)
    for paragraph in _paragraphs(parts[0]) if sections else ():
        last = sections[-1]
        (last.figures[-1][1] if last.figures else last.paragraphs).append(paragraph)
    for level, heading, below in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        sections.append(_Section(heading.strip(), level == "#", list(_paragraphs(below))))


def _paragraphs(text: str) -> list[str]:
    """Return the paragraphs of Markdown. A block of code, which may belong to an answer, is ``LEFT_OUT``."""
    marked = re.sub(r"^```.*?^```$", f"\n\n{LEFT_OUT}\n\n", text, flags=re.MULTILINE | re.DOTALL)
    return [part.strip("\n") for part in re.split(r"\n\s*\n", marked) if part.strip()]


def _html(markdown: str) -> Markup:
    """Return the HTML of a text of a lab, which is not from a student."""
    renderer = IPythonRenderer(escape=False, exclude_anchor_links=True)
    return Markup(MarkdownWithMath(renderer=renderer).render(with_formulas(markdown)))
