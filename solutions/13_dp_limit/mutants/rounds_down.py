"""The share rounded the wrong way."""

QUESTION = "ranks"
LOSES = 2
FAILS = "check_ranks"
SAYS = "but only"


def ranks_needed(config, card, global_batch, seq, **settings):
    largest = largest_batch(lambda batch: fits(config, card, batch, seq, **settings))
    return max(global_batch // largest, 1) if largest else None
