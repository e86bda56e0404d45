"""Where the tree saves no message the two lines are said to cross at 0 bytes."""

QUESTION = "crossover"
LOSES = 1
FAILS = "check_no_crossover"
SAYS = "saves no message"


def crossover_bytes(ranks, alpha, beta):
    rounds = (ranks - 1).bit_length()
    return (2 * (ranks - 1) - 2 * rounds) * alpha / ((2 * rounds - 2 * (ranks - 1) / ranks) * beta)
