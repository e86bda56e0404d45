"""The settings are not passed on, but for the step."""

QUESTION = "fits"
LOSES = 1
FAILS = "check_settings"
SAYS = "With checkpointing this step fits"


def fits(config, card, batch, seq, **settings):
    step = settings.get("step", "foreach")
    return max(step_peak(config, batch, seq, step=step).values()) <= card.usable_bytes
