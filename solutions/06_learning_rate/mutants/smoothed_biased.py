"""The mean begins with 0 and is not corrected."""

QUESTION = "smoothed"
LOSES = 2
FAILS = "check_smoothed"
SAYS = "too low at first"


def smoothed(losses, beta):
    mean, curve = 0.0, []
    for loss in losses:
        mean = beta * mean + (1 - beta) * loss
        curve.append(mean)
    return curve
