"""The fall is a straight line."""

QUESTION = "wsd"
LOSES = 2
FAILS = "check_cool_down"
SAYS = "1 - sqrt"


def wsd(step, warm, stable, decay, lowest=0.0):
    if step < warm:
        return lowest + (1 - lowest) * step / warm
    if step < warm + stable:
        return 1.0
    done = step - warm - stable
    return lowest + (1 - lowest) * (1 - done / decay) if done < decay else lowest
