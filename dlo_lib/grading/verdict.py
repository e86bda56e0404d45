"""What a student reads after ``lab.check``: a small table, what is wrong, and what to do next; as HTML and as plain text."""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlo_lib.grading.status import Status
from dlo_lib.text import tr

if TYPE_CHECKING:
    from dlo_lib.grading.outcome import Outcome

MARKS = {True: "✓", False: "✗"}
CELL_STYLE = "text-align:left;vertical-align:top;padding:0.1em 1em 0.1em 0"
MARK_STYLE = "vertical-align:top;padding:0.1em 0.5em 0.1em 0"


@dataclass(frozen=True)
class Shown:
    """A text for the notebook, with an HTML form where it has one."""

    text: str
    html: str = ""

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        paragraphs = "".join(f"<div>{html.escape(line)}</div>" for line in self.text.splitlines())
        return {"text/plain": self.text, "text/html": self.html or paragraphs}


@dataclass(frozen=True)
class Verdict:
    """The outcomes of a question's checks. ``hidden`` names the checks of which only the author's words are shown."""

    question: str
    outcomes: tuple[Outcome, ...]
    hidden: frozenset[str]
    seed: int
    reference: bool = False

    @property
    def earned(self) -> float:
        """Points; none while the reference answers the question."""
        return 0.0 if self.reference else sum(outcome.points for outcome in self.outcomes)

    @property
    def maximum(self) -> float:
        """Points of all these checks."""
        return sum(outcome.check.points for outcome in self.outcomes)

    @property
    def heading(self) -> str:
        """Points and time, in one line."""
        milliseconds = sum(outcome.milliseconds for outcome in self.outcomes)
        return tr(
            "{question}: {earned:g} of {maximum:g} points ({milliseconds:.0f} ms)",
            question=self.question, earned=self.earned, maximum=self.maximum, milliseconds=milliseconds,
        )  # fmt: skip

    @property
    def advice(self) -> str:
        """What to do next."""
        statuses = {outcome.status for outcome in self.outcomes}
        if self.reference:
            return tr("The reference answers here, so there are no points. Run your own cell again to have it checked.")
        if statuses <= {Status.OK}:
            return tr("All checks pass: go on.")
        if statuses <= {Status.OK, Status.NOT_WRITTEN}:
            return tr(
                'Write your code in the cell above, run it, then run this cell again. lab.hint("{question}") helps.', question=self.question
            )
        return tr(
            'lab.hint("{question}") gives a hint; lab.check("{question}", seed={seed}) repeats these inputs.',
            question=self.question, seed=self.seed,
        )  # fmt: skip

    def rows(self) -> list[tuple[bool, str, str, str]]:
        """For each check: passed, title, points, message."""
        return [
            (outcome.passed, tr(outcome.check.title), f"{outcome.points:g}/{outcome.check.points:g}", published(outcome, self.hidden))
            for outcome in self.outcomes
        ]

    def shown(self) -> Shown:
        """The table."""
        lines = [self.heading]
        width = max((len(title) for _, title, _, _ in self.rows()), default=0)
        for passed, title, points, message in self.rows():
            lines.append(f"  {MARKS[passed]} {title:<{width}}  {points:>7}  {message}".rstrip())
        page = table_html(self.heading, self.rows(), self.advice)
        return Shown("\n".join([*lines, self.advice]), page)


def table_html(heading: str, rows: Iterable[tuple[bool, str, str, str]], below: str) -> str:
    """A heading, a row for each check (passed, title, points, message), and a line below."""
    body = []
    for passed, title, points, message in rows:
        says, _, table = message.partition("\n")
        cells = "".join(f"<td style='{CELL_STYLE}'>{html.escape(text)}</td>" for text in (title, points, says))
        body.append(f"<tr><td style='{MARK_STYLE};color:{'green' if passed else 'crimson'}'>{MARKS[passed]}</td>{cells}</tr>")
        if table:  # such as the ranks of a dead-lock: its lines and columns are kept, over the whole width
            body.append(
                f"<tr><td></td><td colspan='3' style='{CELL_STYLE}'><pre style='white-space:pre'>{html.escape(table)}</pre></td></tr>"
            )
    return f"<b>{html.escape(heading)}</b><table>{''.join(body)}</table><div>{html.escape(below)}</div>"


def published(outcome: Outcome, hidden: frozenset[str]) -> str:
    """What a student may read of an outcome: of a hidden check only what its author wrote."""
    return outcome.words if outcome.check.name in hidden else outcome.message


def show(shown: Shown) -> None:
    """Display in a notebook, print elsewhere."""
    try:
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:
        print(shown.text)
        return
    if get_ipython() is None:
        print(shown.text)
    else:
        display(shown)
