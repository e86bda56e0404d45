"""The quiz of this lab. Its right answers are hidden."""

from __future__ import annotations

from dlo_lib.grading.quiz import Question

QUIZ = {
    "q1": Question(
        "Eight ranks with DDP, Adam on each. What keeps the replicas equal?",
        {
            "a": "the weights are broadcast after every step",
            "b": "equal start, the same average of gradients, the same step",
            "c": "the weights are averaged after every step",
            "d": "the same random seed",
        },
    ),
    "q2": Question(
        "The model has 1 GB of gradients. What does a rank send in a step, with a ring over N = 8 ranks?",
        {"a": "1 GB", "b": "8 GB", "c": "7 GB", "d": "1.75 GB"},
    ),
    "q3": Question(
        "Why are buckets sent in one fixed order, and not in the order in which they become complete?",
        {
            "a": "all-reduces of the ranks find each other by their order alone",
            "b": "a ring needs messages of equal size",
            "c": "the optimiser needs the first layers first",
            "d": "it saves memory",
        },
    ),
    "q4": Question(
        "Global batch 64 on 4 ranks, then on 8 ranks with the same number of samples on each rank. What has changed for the optimiser?",
        {
            "a": "nothing",
            "b": "the gradient is twice as large",
            "c": "the global batch is 128: fewer, less noisy steps an epoch",
            "d": "the learning rate is divided by two",
        },
    ),
    "q5": Question(
        "One of 4 ranks has one batch more than the others in its epoch. What happens in plain DDP?",
        {
            "a": "the others repeat their last batch",
            "b": "it waits for ever in its last all-reduce",
            "c": "its last gradients are divided by 4",
            "d": "its last batch is skipped",
        },
    ),
}
