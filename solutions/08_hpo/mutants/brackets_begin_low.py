"""Every bracket begins at one epoch."""

QUESTION = "hyperband"
LOSES = 2
FAILS = "check_bracket_resources"
SAYS = "after s more rungs"


def brackets(most, eta):
    boldest = 0
    while eta ** (boldest + 1) <= most:
        boldest += 1
    return [(-(-(boldest + 1) * eta**s // (s + 1)), 1) for s in range(boldest, -1, -1)]
