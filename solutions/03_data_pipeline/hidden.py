"""The hidden checks: other sizes, and the right answers of the quiz. Never released."""

from __future__ import annotations

from dlo_lib.grading.checks.contract import check
from dlo_lib.grading.checks.quiz import Answer

from .checks.learning import run_of, same_images
from .checks.mixing import same_boxes


@check("cutmix", points=1)
def check_wide(student, t):
    "Images that are wider than high, in a larger batch"
    same_boxes(student, t, t.integer(12, 16), t.integer(4, 5), t.integer(16, 20))


@check("resume", points=1)
def check_first_epoch(student, t):
    "A stop in the first and in the third epoch"
    for epoch in (0, 2):
        same_images(
            t, run_of(student, t, epoch, 1), "a run that is resumed in another epoch sees other images"
        )


# -- quiz

ANSWERS = {
    "q1": Answer("c", "the step is the slower one, so a faster loader changes nothing"),
    "q2": Answer(
        "b",
        "each worker has a copy of the generator in the same state; only global generators get a separate "
        "seed",
    ),
    "q3": Answer("d", "the border cuts the box off, so the image keeps more than lam of its pixels"),
    "q4": Answer(
        "a", "in use the statistics of future data are not there, so the measured accuracy does not hold"
    ),
    "q5": Answer("b", "workers prefetch: what waits in their queue was given out and never used"),
}
