"""The right answers of the quiz. Never released.

Every requirement of the text is a visible check; in grading the visible checks run again, with the seeds of
the class, so that the images of the race are others.
"""

from __future__ import annotations

from dlo_lib.grading.checks.quiz import Answer

ANSWERS = {
    "q1": Answer("b", "from seed to seed an entry varies by one point and more, so 0.6 points can be chance"),
    "q2": Answer("c", "a hard test set lowers both accuracies, and not their difference"),
    "q3": Answer(
        "a", "the gradient of the weights costs as much as the forward; the image needs no gradient"
    ),
    "q4": Answer(
        "d", "in hidden coordinates only what is computed from the gradients lands where it belongs"
    ),
    "q5": Answer("b", "a mirror turns 36 degrees into 144, which is another class"),
}
