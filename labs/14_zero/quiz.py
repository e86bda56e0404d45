"""The quiz of this lab. Its right answers are hidden."""

from __future__ import annotations

from dlo_lib.grading.quiz import Question

QUIZ = {
    "q1": Question(
        "Which stage of ZeRO sends more bytes a step than DDP does, all of them written well?",
        {"a": "stage 1", "b": "stage 2", "c": "stage 3", "d": "none"},
    ),
    "q2": Question(
        "8 ranks, fp32, AdamW: what is left of DDP's 16 bytes a parameter on a rank with stage 2?",
        {"a": "5.5", "b": "2", "c": "9", "d": "4"},
    ),
    "q3": Question(
        "Why is clipping by the global norm not free under ZeRO-2?",
        {
            "a": "gradients must be gathered first",
            "b": "the norm of a piece needs fp64",
            "c": "it needs the weights",
            "d": "each rank knows only the squares of its pieces, so one number must be added over all ranks",
        },
    ),
    "q4": Question(
        "ZeRO-3 and a pipeline (lab 17) both leave a rank 1/N of the model. What must ZeRO-3 gather in each step that a pipeline need not?",
        {
            "a": "activations",
            "b": "weights: here each rank computes all layers, so each must be gathered",
            "c": "the batch",
            "d": "nothing",
        },
    ),
    "q5": Question(
        "ZeRO-2 with the optimiser's state in the processor's memory. What travels over PCIe in a step, per parameter of the rank's share?",
        {"a": "nothing", "b": "the moments, both ways", "c": "the gradient down, the new weight up", "d": "the activations"},
    ),
}
