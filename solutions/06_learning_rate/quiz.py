"""The quiz of this lab. Its right answers are hidden."""

from __future__ import annotations

from dlo_lib.grading.quiz import Question

QUIZ = {
    "q1": Question(
        "Why does a run begin with a warm-up?",
        {
            "a": "to read the data in order",
            "b": "early gradients are large and noisy, and a large rate could break the run there",
            "c": "to spare the GPU",
            "d": "it makes the end converge better",
        },
    ),
    "q2": Question(
        "Why does the range test grow the rate exponentially?",
        {
            "a": "it is faster to compute",
            "b": "so that the loss falls in a straight line",
            "c": "good rates may lie in any decade, and it gives each decade the same number of steps",
            "d": "because gradients grow exponentially",
        },
    ),
    "q3": Question(
        "What does warm-up - stable - decay have that a cosine has not?",
        {
            "a": "a lower final loss, always",
            "b": "no warm-up",
            "c": "a momentum of its own",
            "d": "a plateau from which one can decay, or train on, whenever one likes",
        },
    ),
    "q4": Question(
        "In OneCycle the momentum falls while the rate rises. Why?",
        {
            "a": "step size is about rate / (1 - momentum): a high rate with a high momentum would break the run",
            "b": "the momentum must end at 0",
            "c": "weight decay needs it",
            "d": "to use less memory",
        },
    ),
    "q5": Question(
        "When is a snapshot of the ensemble taken?",
        {
            "a": "just after a restart",
            "b": "just before a restart, where the rate is lowest",
            "c": "in the middle of a cycle",
            "d": "at the end of every epoch",
        },
    ),
}
