"""A quiz: questions and options are in ``lab.toml``, the right answers only in ``hidden.py``.

The student's answers are a dict in a solution cell. A visible check tests that each question has an answer;
one hidden check per question tests that the answer is right. In ``lab.toml``::

    [quiz.q1]
    text = "What limits data parallelism?"
    a = "the memory of one GPU"
    b = "the number of ranks"

and in ``hidden.py``::

    ANSWERS = {"q1": Answer("a", "every rank holds the whole model")}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

NAME = "quiz"  # the name of the question, of its cell and of the student's dict
POINTS = 1.0  # of each check


@dataclass(frozen=True)
class Question:
    """A question and its options by letter."""

    text: str
    options: Mapping[str, str]


@dataclass(frozen=True)
class Answer:
    """The letter of the right option, and the reason in one sentence, which the feedback shows."""

    option: str
    why: str
