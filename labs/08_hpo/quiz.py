"""The quiz of this lab. Its right answers are hidden."""

from __future__ import annotations

from dlo_lib.grading.quiz import Question

QUIZ = {
    "q1": Question(
        "Two hyperparameters, one of which hardly matters, and 16 trainings. What is the trouble with a 4 x 4 grid?",
        {
            "a": "it costs more than 16 random trainings",
            "b": "it tries only 4 values of the one that matters",
            "c": "it cannot be run in parallel",
            "d": "it cannot use a logarithmic scale",
        },
    ),
    "q2": Question(
        "Expected Improvement is large at a point where the mean is *above* the best value so far. Why?",
        {
            "a": "the doubt there is large",
            "b": "the length scale is too long",
            "c": "the noise was forgotten",
            "d": "that cannot happen",
        },
    ),
    "q3": Question(
        "On 64 GPUs successive halving keeps most of them waiting. What does ASHA change?",
        {
            "a": "it stops the slow trials",
            "b": "it uses a smaller eta",
            "c": "a trial goes on before its rung is complete",
            "d": "it trains all trials to the end",
        },
    ),
    "q4": Question(
        "After one epoch the ranks of your trials agree with the final ones to 0.1. What is the best choice?",
        {
            "a": "successive halving from one epoch, with many trials",
            "b": "the median rule without warm-up",
            "c": "a larger eta",
            "d": "Hyperband, or trials that are compared later",
        },
    ),
    "q5": Question(
        "Method A was 0.02 better on average over 10 seeds; the interval of the differences is -0.05 to +0.01. What may you say?",
        {
            "a": "A is better",
            "b": "these repeats do not show which one is better",
            "c": "both are equally good",
            "d": "A is better in 95 % of the runs",
        },
    ),
}
