"""The quiz of this lab. Its right answers are hidden."""

from __future__ import annotations

from dlo_lib.grading.quiz import Question

QUIZ = {
    "q1": Question(
        "A stage with the embedding and four blocks takes 4 ms, three stages of six blocks 6 ms, the last one with the head 9 ms. How often can a "
        "micro-batch leave the pipeline, at best?",
        {"a": "every 4 ms", "b": "every 6 ms", "c": "every 9 ms", "d": "every 6.2 ms, the mean"},
    ),
    "q2": Question(
        "Each micro-batch computes the mean loss of its own tokens, and nobody divides by their number. With 8 equal micro-batches, the gradient is",
        {"a": "right", "b": "8 times too small", "c": "8 times too large", "d": "√8 times too large"},
    ),
    "q3": Question(
        "Two neighbours both call a blocking send first. Why may this work in a test and hang in training?",
        {
            "a": "small messages may be buffered, so that send returns before anyone receives",
            "b": "training uses more ranks",
            "c": "backward changes the order of sends",
            "d": "GPUs are faster than processors",
        },
    ),
    "q4": Question(
        "Why does splitting the backward shorten the bubble?",
        {
            "a": "it does less work",
            "b": "the stage before waits for the gradient of the input alone; the weight part fills time in which a rank would wait",
            "c": "the weight part needs no memory",
            "d": "gradients of weights are sent earlier",
        },
    ),
    "q5": Question(
        "PipeDream without flush, 4 stages. By how many updates are the weights of the first stage older than the newest ones, in its gradients?",
        {"a": "0", "b": "1", "c": "3", "d": "4"},
    ),
    "q6": Question(
        "What does 2BW change against PipeDream?",
        {
            "a": "it needs no second version of the weights",
            "b": "it flushes the pipeline after each batch",
            "c": "it makes the first stage's delay 0",
            "d": "it adds up the gradients of several micro-batches, so that two versions are enough and every stage has the same delay",
        },
    ),
}
