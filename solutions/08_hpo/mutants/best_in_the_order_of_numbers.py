"""The survivors are right, but in the order of their numbers."""

QUESTION = "halving"
LOSES = 2
FAILS = "check_survivors"
SAYS = "the best first"


def rungs(trials, least, most, eta):
    found = []
    while trials >= 1 and least <= most:
        found.append((trials, least))
        trials, least = trials // eta, least * eta
    return found


def survivors(losses, keep):
    alive = sorted(range(len(losses)), key=lambda i: (math.isnan(losses[i]), losses[i] if losses[i] == losses[i] else 0.0, i))[:keep]
    return sorted(alive)
