"""The warm-up begins at 0, not at the lowest rate."""

QUESTION = "wsd"
LOSES = 1
FAILS = "check_stable"
SAYS = "rise from"


def wsd(step, warm, stable, decay, lowest=0.0):
    if step < warm:
        return step / warm
    if step < warm + stable:
        return 1.0
    done = step - warm - stable
    return lowest + (1 - lowest) * (1 - math.sqrt(done / decay)) if done < decay else lowest
