"""Every optimiser keeps two moments."""

QUESTION = "state"
LOSES = 1
FAILS = "check_momentum"
SAYS = "keeps one number"


def state_bytes(parameters, world, stage, moments=2):
    share = 4 * parameters / world
    return {
        "weights": share if stage >= 3 else 4 * parameters,
        "gradients": share if stage >= 2 else 4 * parameters,
        "optimizer": 2 * (share if stage >= 1 else 4 * parameters),
    }
