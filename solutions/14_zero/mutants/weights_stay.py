"""Stage 3 leaves the weights."""

QUESTION = "state"
LOSES = 1
FAILS = "check_stage3"
SAYS = "nobody has more than 1/N"


def state_bytes(parameters, world, stage, moments=2):
    share = 4 * parameters / world
    return {
        "weights": share if stage >= 4 else 4 * parameters,
        "gradients": share if stage >= 2 else 4 * parameters,
        "optimizer": moments * (share if stage >= 1 else 4 * parameters),
    }
