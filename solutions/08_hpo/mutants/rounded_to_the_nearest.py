"""A rung's trials are rounded, not rounded down."""

QUESTION = "halving"
LOSES = 2
FAILS = "check_rungs"
SAYS = "rounded down"


def rungs(trials, least, most, eta):
    found = []
    while trials >= 1 and least <= most:
        found.append((trials, least))
        trials, least = round(trials / eta), least * eta
    return found


def survivors(losses, keep):
    return sorted(range(len(losses)), key=lambda i: (math.isnan(losses[i]), losses[i] if losses[i] == losses[i] else 0.0, i))[:keep]
