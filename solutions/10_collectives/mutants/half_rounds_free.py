"""log2 N rounded down."""

QUESTION = "cost"
LOSES = 1
FAILS = "check_tree_rounds"
SAYS = "round log2 N up"


def predicted_seconds(algorithm, size, ranks, alpha, beta):
    if algorithm == "ring":
        return 2 * (ranks - 1) * (alpha + beta * size / ranks)
    return 2 * (ranks.bit_length() - 1) * (alpha + beta * size)
