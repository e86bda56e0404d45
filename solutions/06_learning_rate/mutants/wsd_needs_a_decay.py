"""Without a decay the rate never falls."""

QUESTION = "wsd"
LOSES = 1
FAILS = "check_empty_phases"
SAYS = "may have no steps"


def wsd(step, warm, stable, decay, lowest=0.0):
    if step < warm:
        return lowest + (1 - lowest) * step / warm
    done = step - warm - stable
    if done < 0 or decay == 0:
        return 1.0
    return lowest + (1 - lowest) * (1 - math.sqrt(min(done / decay, 1.0)))
