"""s_max by a logarithm in floating point, cut off."""

QUESTION = "hyperband"
LOSES = 1
FAILS = "check_whole_logarithms"
SAYS = "count in whole numbers"


def brackets(most, eta):
    boldest = int(math.log(most) / math.log(eta))
    return [(-(-(boldest + 1) * eta**s // (s + 1)), most // eta**s) for s in range(boldest, -1, -1)]
