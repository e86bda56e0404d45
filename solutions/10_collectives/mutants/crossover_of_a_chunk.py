"""The bytes of a chunk at the crossover, not of the tensor."""

QUESTION = "crossover"
LOSES = 2
FAILS = "check_crossover"
SAYS = "set the costs equal"


def crossover_bytes(ranks, alpha, beta):
    rounds = (ranks - 1).bit_length()
    saved = 2 * (ranks - 1) - 2 * rounds
    if saved <= 0:
        return None
    return saved * alpha / ((2 * rounds - 2 * (ranks - 1) / ranks) * beta) / ranks
