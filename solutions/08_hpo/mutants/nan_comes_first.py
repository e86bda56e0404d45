"""NaN counts as 0: what diverged has the lowest loss."""

QUESTION = "halving"
LOSES = 2
FAILS = "check_diverged"
SAYS = "puts it last"


def rungs(trials, least, most, eta):
    found = []
    while trials >= 1 and least <= most:
        found.append((trials, least))
        trials, least = trials // eta, least * eta
    return found


def survivors(losses, keep):
    return sorted(range(len(losses)), key=lambda i: losses[i] if losses[i] == losses[i] else -math.inf)[:keep]
