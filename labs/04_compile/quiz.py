"""The quiz of this lab. Its right answers are hidden."""

from __future__ import annotations

from dlo_lib.grading.quiz import Question

QUIZ = {
    "q1": Question(
        "Why is a fused chain of pointwise operations faster?",
        {
            "a": "it does fewer additions and multiplications",
            "b": "what is in between never goes to memory and back",
            "c": "it works in half precision",
            "d": "its operations run at the same time",
        },
    ),
    "q2": Question(
        "Your model spends 95 % of its time in large matrix products. What will compiling gain?",
        {
            "a": "little: products are library calls already, and few bytes are saved beside them",
            "b": "about as much as for a pointwise chain",
            "c": "a factor of two, the products are fused with each other",
            "d": "nothing at all can be gained, it will be slower",
        },
    ),
    "q3": Question(
        "A function has one graph break in its middle. What is lost?",
        {
            "a": "its result is wrong",
            "b": "all of it runs eagerly",
            "c": "the second half runs eagerly",
            "d": "both halves are compiled, but nothing is fused across the break, and Python runs in between",
        },
    ),
    "q4": Question(
        "A graph has been made for x of shape (32, 100). Then x of shape (32, 120) comes. By default ...",
        {
            "a": "the call fails",
            "b": "x is padded",
            "c": "a second graph is made that leaves the length open; a third length fits it",
            "d": "a graph is made for this length, and another for the next",
        },
    ),
    "q5": Question(
        "A function has been compiled again for the eighth time, the limit by default. The ninth kind of input ...",
        {
            "a": "runs eagerly, without an error: only a warning tells",
            "b": "raises an exception",
            "c": "takes the nearest graph",
            "d": "throws the oldest graph away",
        },
    ),
    "q6": Question(
        "A length is marked as dynamic. Sequences of length 1 ...",
        {
            "a": "cannot be computed",
            "b": "get a graph of their own: 0 and 1 are special to the compiler, other lengths share one",
            "c": "are padded to 2",
            "d": "share the graph of all other lengths",
        },
    ),
    "q7": Question(
        "A model has 48 equal blocks. Compiled block by block instead of as a whole ...",
        {
            "a": "compiling takes 48 times as long",
            "b": "every step is 48 times slower",
            "c": "the results differ",
            "d": "compiling takes about as long as one block, and nothing is fused from one block into the next",
        },
    ),
    "q8": Question(
        "Your job of 20 hours is stopped and started again each hour. Compiling takes 4 minutes. First of all you ...",
        {
            "a": "switch the compiler off",
            "b": "put the compiler's cache into a folder that outlives the job",
            "c": "compile with mode='max-autotune'",
            "d": "mark all dimensions as dynamic",
        },
    ),
}
