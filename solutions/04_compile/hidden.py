"""The right answers of the quiz. Never released.

Every requirement of the text is a visible check; in grading the visible checks run again, with the seed of
the class.
"""

from __future__ import annotations

from dlo_lib.grading.checks.quiz import Answer

ANSWERS = {
    "q1": Answer(
        "b", "the arithmetic is the same; the intermediate results are not written to memory and read again"
    ),
    "q2": Answer("a", "Amdahl's law: fusion can only save part of the other 5 %"),
    "q3": Answer("d", "a break costs the fusion across it, and the time in Python; the result is the same"),
    "q4": Answer("c", "the first size is a constant; when it changes, it is dynamic in the next graph"),
    "q5": Answer(
        "a",
        "past recompile_limit the inputs that match no compiled graph run eagerly; the others still use "
        "their graphs",
    ),
    "q6": Answer(
        "b", "sizes 0 and 1 are specialised, because they behave differently, for example in broadcasting"
    ),
    "q7": Answer(
        "d",
        "equal blocks share one graph; the cost is the fusion across block boundaries, of which there is "
        "little",
    ),
    "q8": Answer(
        "b",
        "each start finds the graphs of the previous one; 4 minutes per hour are a fifteenth of the budget",
    ),
}
