"""The memory that CUDA sees taken for what is usable."""

QUESTION = "fits"
LOSES = 2
FAILS = "check_usable"
SAYS = "less than memory_bytes"


def fits(config, card, batch, seq, **settings):
    return max(step_peak(config, batch, seq, **settings).values()) <= card.memory_bytes
