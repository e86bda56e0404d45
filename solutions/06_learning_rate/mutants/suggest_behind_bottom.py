"""The steepest place of the whole curve, also behind the bottom."""

QUESTION = "suggest"
LOSES = 1
FAILS = "check_steepest_before_bottom"
SAYS = "before the bottom only"


def suggest(rates, losses):
    bottom = min(range(len(losses)), key=lambda i: losses[i])

    def slope(i):
        return (losses[i + 1] - losses[i - 1]) / math.log(rates[i + 1] / rates[i - 1])

    steepest = min(range(1, len(losses) - 1), key=slope)
    return {"steepest": rates[steepest], "bottom": rates[bottom]}
