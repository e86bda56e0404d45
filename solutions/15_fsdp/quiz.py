"""The quiz of this lab. Its right answers are hidden."""

from __future__ import annotations

from dlo_lib.grading.quiz import Question

QUIZ = {
    "q1": Question(
        "8 ranks, 2 billion parameters, fp32 and AdamW. What does a rank hold after backward with FSDP?",
        {"a": "32 GB", "b": "4 GB", "c": "2 GB", "d": "4 GB, and the largest block"},
    ),
    "q2": Question(
        "Why are parameters sharded by rows rather than as one flat buffer?",
        {
            "a": "it needs less padding",
            "b": "it needs no copy after the gather",
            "c": "it sends fewer bytes",
            "d": "optimisers that look at matrices work, and frozen parameters can stand beside trained ones",
        },
    ),
    "q3": Question(
        "A gradient is complete on every rank. Why is a reduce-scatter enough?",
        {
            "a": "each rank updates only its own rows, so it needs the average of those alone",
            "b": "the other ranks have the same gradient",
            "c": "the all-gather of the next forward averages it",
            "d": "it is not: an all-gather must follow before the optimiser's step",
        },
    ),
    "q4": Question(
        "The reshard after forward is left out. What changes?",
        {
            "a": "losses are wrong from the second step on",
            "b": "nothing: autograd frees the weights by itself",
            "c": "each block is gathered once instead of twice, and at the end of forward the whole model is whole",
            "d": "gradients are summed instead of averaged",
        },
    ),
    "q5": Question(
        "Blocks are gathered in bf16, shards are fp32. What would training lose if the shards were bf16 as well?",
        {
            "a": "speed",
            "b": "updates that are small against a weight: they would be rounded away",
            "c": "the average over the ranks",
            "d": "nothing, for computing is in bf16 anyway",
        },
    ),
    "q6": Question(
        "One rank skips a block for its samples, and so does not gather it. What happens?",
        {
            "a": "the others wait for it in the all-gather: a dead-lock, or a mix-up with the next gather",
            "b": "its gradients for this block are zero, all else goes on",
            "c": "the block is gathered from the other ranks only",
            "d": "its rows stay as they are",
        },
    ),
}
