"""Without a warm-up the first step still has none."""

QUESTION = "warmup"
LOSES = 1
FAILS = "check_no_warm_up"
SAYS = "the first step has factor 1"


def warmup_cosine(step, warm, steps, final=0.0):
    if step <= warm:
        return step / max(1, warm)
    return cosine_factor(step - warm, steps - warm, final)
