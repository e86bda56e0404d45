"""The right answers of the quiz. Never released.

Every requirement of the text is a visible check; in grading the visible checks run again, with the seed of
the class.
"""

from __future__ import annotations

from dlo_lib.grading.checks.quiz import Answer

ANSWERS = {
    "q1": Answer(
        "c", "a rate above 2 / curvature diverges in the steepest direction, and all directions share it"
    ),
    "q2": Answer(
        "a", "Adam divides gradient and decay by the size of the gradients, so the decay of these is small"
    ),
    "q3": Answer("b", "Lion keeps one average for each weight, AdamW two"),
    "q4": Answer("d", "U S V^T becomes U V^T: the directions stay, their lengths become equal"),
    "q5": Answer(
        "b", "its update is element by element; LARS and LAMB need norms of layers, Muon whole matrices"
    ),
    "q6": Answer(
        "c", "in a table of six the best pair is above 3 by chance in 17 % of all cases; 5 % is at 3.9"
    ),
}
