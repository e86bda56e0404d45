"""Every hostile and every odd answer, with the points that it must earn: one home, one format.

``answers/NN_lab/hostile_*.py`` hold answers that avoid the work or attack the judge, ``odd_*.py`` right ones
that look unlike the solution. Each answer says what it does, its question, and its code::

    # == gathers_everything: each rank gathers all tensors and adds them

    # %% levels {"earns": 1}
    def two_level_all_reduce(tensor, inside, between):
        ...

Code between ``# ==`` and the first ``# %%`` begins each answer of that name, which may answer several
questions. A hostile answer earns nothing and an odd one all points, unless ``earns`` says otherwise;
``"earns": "less"`` means less than all. Instead of code there may be

- a patch of the reference solution, as in ``Mutant.replace``: lines ``# - old`` and then ``# + new``;
- a generator, ``{"by": "frozen", "argument": "backoff", "value": "0.5"}``, see ``generators``.

Some answers need no declaration, because ``generated`` makes them for every question of every lab: a new lab
gets them with its first question. A declared answer with the same ``by`` and question takes the place of a
generated one, so that a lab can state other points for it.

``93_survival`` is the lab of ``judge/test_hostile.py``, which judges its answers as whole submissions.
``python -m tests.grading.answers [LAB ...]`` judges the answers and prints a table, ``cost`` measures what
those of ``93_survival`` cost. ``make proofs`` judges all of them, ``make test`` one hostile and one odd
answer to each question (tests/labs).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from dlo_lib.grading.lab.mutants import Mutant
from dlo_lib.grading.lab.source import LabSource

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
SURVIVAL = "93_survival"
SUBMISSION = re.compile(r"^# == (\w+)(?:: ([^\n]*))?\n(.*?)(?=^# == |\Z)", re.MULTILINE | re.DOTALL)
HEADER = re.compile(r"^# %% (\w+)(?: (\{[^\n]*\}))?\n?(.*?)(?=^# %% |\Z)", re.MULTILINE | re.DOTALL)
PATCH = re.compile(r"((?:^# -(?: .*)?\n)+)((?:^# \+(?: .*)?(?:\n|\Z))+)", re.MULTILINE)
LESS = "less"


class Kind(Enum):
    """What an answer is, which is the beginning of its file's name."""

    HOSTILE = "hostile"
    ODD = "odd"


@dataclass(frozen=True)
class Answer:
    """One answer to one question.

    Attributes:
        does: what it does, in one phrase.
        text: its code, or the lines of a patch; empty if a generator makes it.
        file: the name of its file; empty if it is not declared.
        earns: its points; LESS for less than all; None for all of an odd one, and for nothing of another.
        by: the name of the generator that makes it.
        values: what else its header says: arguments of the generator, or what ``93_survival`` expects.
    """

    lab: str
    kind: Kind
    title: str
    question: str
    does: str
    text: str = ""
    file: str = ""
    earns: float | str | None = None
    by: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of its test."""
        return f"{self.lab}-{self.kind.value}-{self.title}-{self.question}"

    def source(self, lab: LabSource) -> str:
        """Return the text that a student hands in.

        Raises:
            UserError: its patch does not fit the solution of ``lab``.
            KeyError: there is no generator of its name.
        """
        if self.by:
            from tests.grading.answers.generators import GENERATORS

            return GENERATORS[self.by](lab, self.question, **self.values)
        if replace := _patch(self.text):
            return Mutant(self.title, "", "", replace, question=self.question).planted(lab).answer
        return self.text

    def as_expected(self, points: float, lab: LabSource) -> bool:
        """Return whether ``points`` are what it must earn."""
        if self.earns == LESS:
            return points < lab.test(self.question).points
        return points == self.most(lab)

    def most(self, lab: LabSource) -> float:
        """Return the points that it must earn, all points for LESS."""
        if self.earns is None:
            return lab.test(self.question).points if self.kind is Kind.ODD else 0.0
        return lab.test(self.question).points if isinstance(self.earns, str) else self.earns


def declared(lab: str, kind: Kind) -> list[Answer]:
    """Return the answers of this kind in the files of ``lab``, which is the name of its folder."""
    return [
        Answer(
            lab, kind, title, question, does or title.replace("_", " "), text, file.stem, **_of_header(header)
        )
        for file in sorted((HERE / lab).glob(f"{kind.value}_*.py"))
        for title, does, body in SUBMISSION.findall(file.read_text(encoding="utf-8"))
        for question, header, text in _answers_of(body)
    ]


def labs_with_answers() -> list[str]:
    """Return the names of the labs' folders that have declared answers, without the lab of the tests."""
    return sorted(folder.name for folder in HERE.glob("[0-9]*") if folder.name != SURVIVAL)


def _of_header(header: str) -> dict[str, Any]:
    said = json.loads(header or "{}")
    return {name: said.pop(name) for name in ("earns", "by") if name in said} | {"values": said}


def _answers_of(body: str) -> Iterator[tuple[str, str, str]]:
    """Yield question, header and text of each answer of one name."""
    common = body.partition("# %% ")[0].strip()
    for question, header, text in HEADER.findall(body):
        own = text.strip()
        yield question, header, f"{common}\n\n\n{own}" if common else own


def _patch(text: str) -> dict[str, str]:
    """Return old text → new text of a patch; nothing if ``text`` is code."""
    found = PATCH.findall(text + "\n")
    if PATCH.sub("", text + "\n").strip():
        return {}
    return {_unmarked(old): _unmarked(new) for old, new in found}


def _unmarked(lines: str) -> str:
    return "\n".join(line[4:] for line in lines.splitlines())
