"""The right answers of the quiz. Never released. No other check is hidden: a newcomer sees every result at
once."""

from __future__ import annotations

from dlo_lib.grading.checks.quiz import Answer

ANSWERS = {
    "q1": Answer(
        "b", "rank 2 made two calls and returned, and an all-reduce ends only when every rank has called it"
    ),
    "q2": Answer(
        "c", "the state is 48 GiB for 3.21 billion parameters; the batch changes only activations and logits"
    ),
    "q3": Answer("a", "the seed repeats the inputs of the run that failed"),
}
