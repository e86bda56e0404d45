"""The right answers of the quiz. Never released.

Every requirement of the text is a visible check; in grading the visible checks run again, with the seed of
the class.
"""

from __future__ import annotations

from dlo_lib.grading.checks.quiz import Answer

ANSWERS = {
    "q1": Answer("b", "16 random trials have 16 different values of each hyperparameter, the grid has 4"),
    "q2": Answer("a", "its mean is not low, but its uncertainty is large, which the second term rewards"),
    "q3": Answer(
        "c", "a pruner compares the best loss so far: one good epoch would keep a diverged trial running"
    ),
    "q4": Answer(
        "d",
        "early losses that predict little discard good trials; Hyperband has brackets that start with more "
        "resource",
    ),
    "q5": Answer("b", "0 is inside the interval: these repeats do not determine the sign"),
}
