"""The questions of this lab's quiz, without the answers."""

from dlo_lib.grading.quiz import Question

QUIZ = {
    "q1": Question(
        "A ring all-reduce of a large tensor goes from 8 to 64 ranks, on equal links. The time of a large tensor ...",
        {"a": "grows eightfold", "b": "grows by about an eighth", "c": "is divided by 8", "d": "doubles"},
    ),
    "q2": Question(
        "A gradient of one number (a gradient norm) must reach 64 ranks. Which all-reduce?",
        {"a": "ring: it sends the fewest bytes", "b": "all ranks to rank 0", "c": "tree: it has the fewest rounds", "d": "no difference"},
    ),
    "q3": Question(
        "All ranks call dist.send to their right neighbour, then dist.recv. It worked with small tensors. Why may it hang with large ones?",
        {
            "a": "a send may return before it is received only while a buffer holds it",
            "b": "large tensors travel in the wrong order",
            "c": "recv has a size limit",
            "d": "the ring has an odd number of ranks",
        },
    ),
    "q4": Question(
        "Float sums depend on their order. After your ring all-reduce, are the tensors of all ranks the same, bit by bit?",
        {
            "a": "no, each rank sums in its own order",
            "b": "only for a power of two",
            "c": "only with float64",
            "d": "yes: each chunk is summed once, on its way, and copied",
        },
    ),
    "q5": Question(
        "FSDP needs each gradient only as the shard of its owner. Compared with DDP's all-reduce, a reduce-scatter sends ...",
        {"a": "half the bytes", "b": "the same bytes", "c": "1/N of the bytes", "d": "twice the bytes"},
    ),
}
