"""Each message of the ring taken to carry the whole tensor."""

QUESTION = "cost"
LOSES = 2
FAILS = "check_ring_cost"
SAYS = "each with a chunk"


def predicted_seconds(algorithm, size, ranks, alpha, beta):
    if algorithm == "ring":
        return 2 * (ranks - 1) * (alpha + beta * size)
    return 2 * (ranks - 1).bit_length() * (alpha + beta * size)
