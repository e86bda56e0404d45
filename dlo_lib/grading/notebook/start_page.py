"""The opening page of the course, shown by a cell of lab 00: all labs in order with minutes, points and
progress, a link that opens each, and buttons that check one or submit it.

The rows come from ``lab.toml`` of each lab and from the student's stored progress. The buttons run
``dlo check`` and ``dlo submit``. The page needs no network, and follows the light or dark theme.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlo_lib.base.errors import UserError
from dlo_lib.base.interpreter import trusted_python
from dlo_lib.base.markup import render
from dlo_lib.base.text import columns, tr
from dlo_lib.grading.checks.verdict import Shown, show
from dlo_lib.grading.lab.course import LAB_FILE, labs
from dlo_lib.grading.notebook.class_state import ClassState, class_states
from dlo_lib.grading.notebook.progress import DONE, Standing, standings

DLO = "from dlo_lib.cli import main; main()"  # also where no `dlo` is in PATH
COMMAND_WIDTH = 110  # characters of a line of a command's output


@dataclass(frozen=True)
class Row:
    """One lab on the page.

    Attributes:
        label: number and title.
        path: core or elective.
        points: earned and possible points, as text.
        share: earned by possible points of the notebook, from 0 to 1.
        link: the notebook, relative to the working directory; "" if the student has no copy.
        here: whether the page is shown in the folder of this lab.
        in_class: what the class knows of the lab, in words; "" without a class that has released it.
        late: the lab is due and nothing is submitted, or the submission is late.
        feedback: the fetched feedback page, relative to the working directory; "" if there is none.
    """

    directory: str
    label: str
    core: bool
    path: str
    minutes: int
    points: str
    share: float
    state: str
    link: str
    here: bool
    in_class: str = ""
    late: bool = False
    feedback: str = ""


class StartPage:
    """The page, read from the disk.

    Args:
        folder: the folder of the student's labs.
    """

    def __init__(self, folder: Path) -> None:
        found = standings()
        states, unknown = {}, ""
        try:
            states = class_states(labs(), folder)
        except UserError as error:  # the map has the labs without the class too
            unknown = str(error)
        self.rows = [_row(standing, folder, states.get(standing.directory)) for standing in found]
        self.has_class = bool(states)
        to_fetch = any(state.feedback and state.fetched is None for state in states.values())
        self.without = numbers_without_lab([standing.number for standing in found])
        self.next = next((row for row in self.rows if row.core and row.state != DONE), None)
        open_core = [standing for standing in found if standing.core and standing.state != DONE]
        minutes = sum(standing.minutes for standing in open_core)
        self.summary = [
            tr(
                "{done} of {all} labs done, {earned:g} of {points:g} points.",
                done=sum(standing.state == DONE for standing in found),
                all=len(found),
                earned=sum(standing.earned for standing in found),
                points=sum(standing.points for standing in found),
            ),
            tr(
                "The core path has {labs} labs left, about {hours:.0f} h of exercises. "
                "Electives are optional. Some points are given only in grading.",
                labs=len(open_core),
                hours=minutes / 60,
            ),
            *([unknown] if unknown else []),
            *(
                [tr("Fetch feedback in JupyterLab: Nbgrader → Assignment List → Fetch Feedback.")]
                if to_fetch
                else []
            ),
        ]

    def shown_summary(self) -> Shown:
        """Return the sums, and the lab to continue with."""
        following = [tr("Continue with {lab}.", lab=self.next.label)] if self.next else []
        return Shown("\n".join([*self.summary, *following]), self._html("summary"))

    def shown_table(self) -> Shown:
        """Return a row for each lab."""
        head = (tr("lab"), tr("path"), tr("minutes"), tr("points"), tr("progress"), tr("class"))
        rows = [
            (row.label, row.path, str(row.minutes), row.points, row.state, row.in_class) for row in self.rows
        ]
        if not self.has_class:
            head, rows = head[:-1], [row[:-1] for row in rows]  # type: ignore[assignment, misc]
        below = f"\n{self.without}" if self.without else ""
        return Shown(columns([head, *rows]) + below, self._html("table"))

    def _html(self, part: str) -> str:
        return render(
            "start_page",
            part=part,
            summary=self.summary,
            next=self.next,
            rows=self.rows,
            has_class=self.has_class,
            without=self.without,
        )


def numbers_without_lab(numbers: Collection[int]) -> str:
    """Return the sentence on the numbers before the last lab that no lab has; "" if there is none."""
    missing = [f"{n:02d}" for n in range(max(numbers, default=0)) if n not in numbers]
    if not missing:
        return ""
    return tr("Numbers without a lab are kept for planned labs: {numbers}.", numbers=", ".join(missing))


def start_page() -> None:
    """Show the page, and below its first lines the buttons.

    A click on a button shows the output of its command and reads the progress again. Without ipywidgets the
    commands are shown in place of the buttons.
    """
    folder = labs_folder()
    page = StartPage(folder)
    if not _in_notebook():
        show(page.shown_summary())
        show(page.shown_table())
        return
    from IPython.display import display

    summary = display(page.shown_summary(), display_id=True)
    if (buttons := _buttons(page, folder)) is None:
        show(Shown(tr("In a terminal, `dlo check 04` checks lab 04 and `dlo submit 04` submits it.")))
        display(page.shown_table())
        return
    display(buttons.box)
    table = display(page.shown_table(), display_id=True)

    def refresh() -> None:
        now = StartPage(folder)
        summary.update(now.shown_summary())
        table.update(now.shown_table())

    buttons.after = refresh


def labs_folder() -> Path:
    """Return the folder of the student's labs: the one above the working directory if that is the folder of a
    lab."""
    here = Path.cwd()
    return here.parent if (here / LAB_FILE).is_file() else here


def run_command(*arguments: str, folder: Path) -> str:
    """Run ``dlo`` with ``arguments`` in ``folder`` and return what it prints."""
    # The kernel asks for colours, and an output in colour would also have each frame of a progress display.
    kept = {
        name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "CLICOLOR_FORCE")
    }
    environment = {**kept, "COLUMNS": str(COMMAND_WIDTH), "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(
        trusted_python(DLO, *arguments),
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout


class _Buttons:
    """The list of labs, the two buttons, and the output of the last command."""

    def __init__(self, widgets: Any, page: StartPage, folder: Path) -> None:
        options = [(row.label, row.directory) for row in page.rows if row.link]
        chosen = page.next.directory if page.next and page.next.link else options[0][1]
        self._folder = folder
        wide = {"width": "26em"}
        self._lab = widgets.Dropdown(options=options, value=chosen, layout=wide)
        self._buttons = {
            command: widgets.Button(description=text, tooltip=f"dlo {command}", layout={"width": "7em"})
            for command, text in (("check", tr("Check")), ("submit", tr("Submit")))
        }
        self._output = widgets.Output()
        note = widgets.Label(tr("Save the notebook first (Ctrl+S)."))
        row = widgets.HBox([self._lab, *self._buttons.values(), note], layout={"flex_flow": "row wrap"})
        self.box = widgets.VBox([row, self._output])
        self.after = lambda: None
        for command, button in self._buttons.items():
            button.on_click(lambda _, command=command: self._run(command))

    def _run(self, command: str) -> None:
        lab = self._lab.value
        self._enable(False)
        self._write(tr("running dlo {command} {lab} ...", command=command, lab=lab))
        try:
            self._write(run_command(command, lab, folder=self._folder))
            self.after()
        finally:
            self._enable(True)

    def _write(self, text: str) -> None:
        self._output.outputs = ({"output_type": "stream", "name": "stdout", "text": f"{text.rstrip()}\n"},)

    def _enable(self, enabled: bool) -> None:
        for button in self._buttons.values():
            button.disabled = not enabled


def _buttons(page: StartPage, folder: Path) -> _Buttons | None:
    try:
        import ipywidgets
    except ImportError:
        return None
    return _Buttons(ipywidgets, page, folder) if any(row.link for row in page.rows) else None


def _row(standing: Standing, folder: Path, in_class: ClassState | None) -> Row:
    notebook = folder / standing.directory / f"{standing.name}.ipynb"
    return Row(
        directory=standing.directory,
        label=f"{standing.number:02d} · {standing.title}",
        core=standing.core,
        path=tr("core") if standing.core else tr("elective"),
        minutes=standing.minutes,
        points=f"{standing.earned:g} / {standing.points:g}",
        share=standing.share,
        state=tr(standing.state),
        link=os.path.relpath(notebook) if notebook.is_file() else "",
        here=notebook.parent == Path.cwd(),
        in_class=in_class.said() if in_class is not None else "",
        late=in_class is not None and in_class.is_late,
        feedback=os.path.relpath(in_class.fetched) if in_class is not None and in_class.fetched else "",
    )


def _in_notebook() -> bool:
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    return get_ipython() is not None
