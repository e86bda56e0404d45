"""The slope is taken over the rate itself, which favours the lowest rates."""

QUESTION = "suggest"
LOSES = 2
FAILS = "check_steepest"
SAYS = "logarithmic axis"


def suggest(rates, losses):
    bottom = min(range(len(losses)), key=lambda i: losses[i])

    def slope(i):
        return (losses[i + 1] - losses[i - 1]) / (rates[i + 1] - rates[i - 1])

    return {"steepest": rates[min(range(1, bottom), key=slope)], "bottom": rates[bottom]}
