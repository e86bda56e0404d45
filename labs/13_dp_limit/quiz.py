"""The quiz of this lab. Its right answers are hidden."""

from __future__ import annotations

from dlo_lib.grading.quiz import Question

QUIZ = {
    "q1": Question(
        "Llama 3.2 3B, batch 1, AdamW with foreach: when is the memory of a rank largest?",
        {"a": "at the end of forward", "b": "in the optimiser's step", "c": "when backward begins", "d": "when the weights are loaded"},
    ),
    "q2": Question(
        "You double the number of ranks and keep the batch of each rank. The memory of a rank ...",
        {"a": "is halved", "b": "loses its gradients", "c": "stays the same", "d": "doubles"},
    ),
    "q3": Question(
        "What does activation checkpointing leave as it is?",
        {"a": "the logits", "b": "the activations of the MLP", "c": "the time of a step", "d": "what attention keeps"},
    ),
    "q4": Question(
        "Four ranks hold 100, 100, 100 and 20 valid tokens. Each calls backward on its own mean. Then a token of the last rank weighs ...",
        {"a": "as much as the others", "b": "a fifth of the others", "c": "four times the others", "d": "five times the others"},
    ),
    "q5": Question(
        "Weights and gradients in bf16, with an fp32 copy of the weights and two fp32 moments: how does the state compare with fp32 weights and AdamW?",
        {"a": "half as large", "b": "the same: 16 bytes a parameter", "c": "12 bytes a parameter", "d": "a quarter smaller"},
    ),
    "q6": Question(
        "A step of 35 GiB on an A100 of 40 GB, PyTorch's DDP with its default options. The counts were made without DDP. What comes on top?",
        {
            "a": "nothing: the gradients are averaged in place",
            "b": "one bucket of 25 MiB",
            "c": "buckets as large as all gradients together",
            "d": "a copy of weights, gradients and optimiser state",
        },
    ),
}
