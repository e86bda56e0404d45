"""The quiz of this lab. Its right answers are hidden."""

from __future__ import annotations

from dlo_lib.grading.quiz import Question

QUIZ = {
    "q1": Question(
        "8 ranks, 32 micro-batches, 1F1B. You go to 64 micro-batches of half the size. The bubble, as part of the ideal time ...",
        {"a": "is halved", "b": "stays the same", "c": "is a quarter", "d": "doubles"},
    ),
    "q2": Question(
        "What does 1F1B gain over AFAB?",
        {"a": "a smaller bubble", "b": "fewer messages", "c": "less memory", "d": "a backward in two parts"},
    ),
    "q3": Question(
        "What does interleaving with v stages a rank cost?",
        {
            "a": "v copies of the weights",
            "b": "v times as many messages, and more activations",
            "c": "v times as many micro-batches",
            "d": "nothing: the bubble is divided by v for free",
        },
    ),
    "q4": Question(
        "Why may the weight part of a backward wait, and the input part not?",
        {
            "a": "the weight part is shorter",
            "b": "the input part needs more memory",
            "c": "the input part needs the optimiser",
            "d": "the stage before waits for the input part; only the optimiser waits for the weight part",
        },
    ),
    "q5": Question(
        "In 1F1B with many micro-batches, which rank holds the most activations?",
        {"a": "the first", "b": "the last", "c": "one in the middle", "d": "all the same"},
    ),
}
