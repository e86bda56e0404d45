"""The right answers of the quiz. Never released.

Every requirement of the text is a visible check; in grading the visible checks run again, with the seed of
the class.
"""

from __future__ import annotations

from dlo_lib.grading.checks.quiz import Answer

ANSWERS = {
    "q1": Answer(
        "b",
        "early gradients are large and have very different directions; Adam's second moments are averages "
        "of few gradients",
    ),
    "q2": Answer(
        "c", "the order of magnitude of the rate matters, so each decade needs the same number of steps"
    ),
    "q3": Answer("d", "you can stop, decay or continue without planning the end"),
    "q4": Answer(
        "a",
        "a gradient acts 1 / (1 - momentum) times in total: a lower momentum limits the step while the rate "
        "is high",
    ),
    "q5": Answer(
        "c",
        "far above the noise scale the mean gradient has little noise left, which a larger batch could "
        "reduce",
    ),
}
