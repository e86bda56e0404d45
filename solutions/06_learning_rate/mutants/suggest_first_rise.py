"""The bottom is taken where the loss rises for the first time."""

QUESTION = "suggest"
LOSES = 1
FAILS = "check_bottom"
SAYS = "rises for once"


def suggest(rates, losses):
    first_rise = next(i for i in range(len(losses) - 1) if losses[i + 1] > losses[i])
    bottom = min(range(len(losses)), key=lambda i: losses[i])

    def slope(i):
        return (losses[i + 1] - losses[i - 1]) / math.log(rates[i + 1] / rates[i - 1])

    return {"steepest": rates[min(range(1, bottom), key=slope)], "bottom": rates[first_rise]}
