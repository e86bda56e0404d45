"""The cosine is that of the whole run, as if there had been no warm-up."""

QUESTION = "warmup"
LOSES = 2
FAILS = "check_after_rise"
SAYS = "begins when the warm-up ends"


def warmup_cosine(step, warm, steps, final=0.0):
    return step / warm if step < warm else cosine_factor(step, steps, final)
