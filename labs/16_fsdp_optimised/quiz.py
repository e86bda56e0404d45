"""The quiz of this lab. Its right answers are hidden."""

from __future__ import annotations

from dlo_lib.grading.quiz import Question

QUIZ = {
    "q1": Question(
        "A unit's gather takes 3 ms, its forward 5 ms, with the next unit gathered ahead. 20 equal units: how long is the forward pass?",
        {"a": "100 ms", "b": "103 ms", "c": "160 ms", "d": "60 ms"},
    ),
    "q2": Question(
        "With `reshard_after_forward=False`, FSDP sends a third less. What does it still save, compared with DDP?",
        {
            "a": "nothing",
            "b": "the weights, at any time",
            "c": "activations",
            "d": "gradients and the optimiser's state; weights only outside of forward and backward",
        },
    ),
    "q3": Question(
        "Each FSDP unit is one checkpointed block. How many gathers does checkpointing add to a step?",
        {
            "a": "none: the block is computed again while it is whole for backward",
            "b": "one a unit",
            "c": "two a unit",
            "d": "one for the whole model",
        },
    ),
    "q4": Question(
        "HSDP on 4 nodes of 8 GPUs. A rank's state of the model (fp32, AdamW) is",
        {"a": "16Ψ/32 bytes", "b": "16Ψ/4 bytes", "c": "16Ψ/8 bytes", "d": "16Ψ bytes"},
    ),
    "q5": Question(
        "A colleague calls torch.compile on the module that FSDP has wrapped, and it is hardly faster. The likely reason is",
        {
            "a": "the model is too deep for a graph",
            "b": "hooks break the graph, or are taken into it; compile each block's forward",
            "c": "sharded weights cannot be compiled",
            "d": "compiling wants larger units",
        },
    ),
}
