"""The text that ``lab.check`` shows: a table of the checks, the messages and the next step, as HTML and plain
text.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dlo_lib.base.markup import message_html, render
from dlo_lib.base.text import span, tr
from dlo_lib.grading.checks.status import Status

if TYPE_CHECKING:
    from dlo_lib.grading.checks.outcome import Outcome

SHORT = 40
"""A message of at most this number of characters is repeated for each check that has it."""

MARKS = {True: "✓", False: "✗"}


@dataclass(frozen=True)
class Shown:
    """A text for the notebook, with an optional HTML form.

    ``metadata`` is stored with the output in the notebook, and not shown.
    """

    text: str
    html: str = ""
    metadata: Mapping[str, object] = field(default_factory=dict)

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, **_: object) -> tuple[dict[str, str], Mapping[str, object]]:
        page = self.html or render("lines", lines=self.text.splitlines())
        return {"text/plain": self.text, "text/html": page}, self.metadata


@dataclass(frozen=True)
class QuestionVerdict:
    """The outcomes of a question's checks.

    Attributes:
        hidden: the names of the checks that show only the author's words.
        reference: whether the reference answers the question.
        later: title and points of the checks that run only in grading.
        sketch: whether the last hint of the question, its sketch, was opened.
        missing_cell: a sentence on a name whose cell failed when it was run last, or has not run.
        earlier_step: a sentence on a step that the answer uses and whose checks do not all pass.
        checked: the sentence with the time at which the checks ran; "" in a report.
        changed: a sentence on the cell of the answer, which has changed since it ran or since the check.
    """

    question: str
    outcomes: tuple[Outcome, ...]
    hidden: frozenset[str]
    seed: int
    reference: bool = False
    later: tuple[tuple[str, float], ...] = ()
    sketch: bool = False
    missing_cell: str = ""
    earlier_step: str = ""
    checked: str = ""
    changed: str = ""

    @property
    def earned(self) -> float:
        """The points earned; 0 while the reference answers the question."""
        return 0.0 if self.reference else sum(outcome.points for outcome in self.outcomes)

    @property
    def maximum(self) -> float:
        """The points of all these checks."""
        return sum(outcome.check.points for outcome in self.outcomes)

    @property
    def heading(self) -> str:
        """The line with the points of these checks, the time, and what only grading judges."""
        took = span(sum(outcome.milliseconds for outcome in self.outcomes))
        first = tr("{question}: {points} ({time})", question=self.question, points=self.points, time=took)
        if not self.later:
            return first
        titles = "; ".join(tr(title) for title, _ in self.later)
        more = sum(points for _, points in self.later)
        if more == 1:
            return tr("{first}; 1 more point is judged in grading: {titles}", first=first, titles=titles)
        return tr(
            "{first}; {more:g} more points are judged in grading: {titles}",
            first=first, more=more, titles=titles,
        )  # fmt: skip

    @property
    def points(self) -> str:
        """The points of these checks, which are not all points if grading adds others."""
        text = "{earned:g} of {maximum:g} points here" if self.later else "{earned:g} of {maximum:g} points"
        return tr(text, earned=self.earned, maximum=self.maximum)

    @property
    def advice(self) -> str:
        """The line with the next step, and whether the sketch was opened."""
        step = self.missing_cell or self._next_step
        if self.earlier_step and any(not outcome.passed for outcome in self.outcomes):
            step = f"{self.earlier_step} {step}"
        return f"{step} {tr('The sketch was opened.')}" if self.sketch else step

    @property
    def _next_step(self) -> str:
        statuses = {outcome.status for outcome in self.outcomes}
        if self.reference:
            return tr("The reference answers this question: no points. Run your own cell again to check it.")
        if statuses <= {Status.OK}:
            return tr("All checks pass: continue.")
        if statuses <= {Status.OK, Status.NOT_WRITTEN}:
            return tr(
                "Write your code in the cell above, run it, then run this cell again. "
                'lab.hint("{question}") helps.',
                question=self.question,
            )
        return tr(
            'lab.hint("{question}") gives a hint; lab.check("{question}", seed={seed}) repeats these inputs.',
            question=self.question, seed=self.seed,
        )  # fmt: skip

    def rows(self) -> list[tuple[bool, str, str, str]]:
        """Return (passed, title, points, message) of each check."""
        return [
            (
                outcome.passed,
                tr(outcome.check.title),
                f"{outcome.points:g}/{outcome.check.points:g}",
                published(outcome, self.hidden),
            )
            for outcome in self.outcomes
        ]

    def shown(self) -> Shown:
        """Return the table, with the releases of PyTorch and Python in its metadata."""
        lines, rows = [self.heading], once(self.rows())
        width = max((len(title) for _, title, _, _ in rows), default=0)
        for passed, title, points, message in rows:
            lines.append(f"  {MARKS[passed]} {title:<{width}}  {points:>7}  {message}".rstrip())
        age = " ".join(filter(None, (self.checked, self.changed)))
        page = table_html(self.heading, rows, self.advice, self.checked, self.changed)
        text = "\n".join(filter(None, [*lines, self.advice, age]))
        # The feedback compares them with the judge's releases.
        return Shown(text, page, {"dlo": releases()})


def releases() -> dict[str, str]:
    """Return the versions of PyTorch and Python of this process."""
    return {"torch": importlib.metadata.version("torch"), "python": platform.python_version()}


def once(rows: Iterable[tuple[bool, str, str, str]]) -> list[tuple[bool, str, str, str]]:
    """Return the rows, where a long message that an earlier row has is replaced by a reference to it. One
    mistake often fails several checks with the same words."""
    seen: dict[str, str] = {}
    result = []
    for passed, title, points, message in rows:
        first = seen.setdefault(message, title)
        if len(message) > SHORT and first != title:
            message = tr("the same as for “{title}”", title=first)
        result.append((passed, title, points, message))
    return result


def table_html(
    heading: str,
    rows: Iterable[tuple[bool, str, str, str]],
    below: str,
    checked: str = "",
    changed: str = "",
) -> str:
    """Return a heading, a row for each check (passed, title, points, message), and a line below, as HTML.

    ``checked`` and ``changed``, the age of the verdict, stand in a second line below.
    """
    shown = []
    for passed, title, points, message in rows:
        # A message may contain a table below its first line, such as the ranks of a deadlock; it spans the
        # width.
        says, _, more = message.partition("\n")
        shown.append(
            {
                "passed": passed,
                "mark": MARKS[passed],
                "title": title,
                "points": points,
                "says": says,
                "more": message_html(more),
            }
        )
    return render("verdict", heading=heading, rows=shown, below=below, checked=checked, changed=changed)


def published(outcome: Outcome, hidden: frozenset[str]) -> str:
    """Return what a student may read of an outcome.

    Of a hidden check these are only the author's words, because the student's process has its inputs. Where
    the course's solutions ran in that process, it chooses no word of the text.
    """
    if outcome.check.name in hidden:
        return outcome.words
    return outcome.brief or outcome.words if outcome.solutions else outcome.message


def show(shown: Shown) -> None:
    """Display ``shown`` in a notebook; print it elsewhere."""
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
