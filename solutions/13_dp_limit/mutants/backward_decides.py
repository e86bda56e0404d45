"""Only forward and backward have to fit."""

QUESTION = "fits"
LOSES = 1
FAILS = "check_optimizer_decides"
SAYS = "the optimiser's step does not"


def fits(config, card, batch, seq, **settings):
    moments = step_peak(config, batch, seq, **settings)
    return max(moments["loss"], moments["loss gradient"], moments["last gradient"]) <= card.usable_bytes
