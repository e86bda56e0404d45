"""As many ranks as sequences, where not even one sequence fits."""

QUESTION = "ranks"
LOSES = 2
FAILS = "check_the_limit"
SAYS = "the answer is None"


def ranks_needed(config, card, global_batch, seq, **settings):
    largest = largest_batch(lambda batch: fits(config, card, batch, seq, **settings))
    return math.ceil(global_batch / max(largest, 1))
