"""The number of trials is rounded down."""

QUESTION = "hyperband"
LOSES = 2
FAILS = "check_bracket_trials"
SAYS = "rounded *up*"


def brackets(most, eta):
    boldest = 0
    while eta ** (boldest + 1) <= most:
        boldest += 1
    return [((boldest + 1) * eta**s // (s + 1), most // eta**s) for s in range(boldest, -1, -1)]
