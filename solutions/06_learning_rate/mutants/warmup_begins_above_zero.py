"""The first step has 1 / warm."""

QUESTION = "warmup"
LOSES = 1
FAILS = "check_rise"
SAYS = "begins at 0"


def warmup_cosine(step, warm, steps, final=0.0):
    if step < warm:
        return (step + 1) / warm
    return cosine_factor(step - warm, steps - warm, final)
