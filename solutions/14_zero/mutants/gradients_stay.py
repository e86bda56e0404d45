"""Stage 2 is written as stage 1."""

QUESTION = "state"
LOSES = 1
FAILS = "check_stage2"
SAYS = "Each rank keeps the gradients of the parameters that it updates"


def state_bytes(parameters, world, stage, moments=2):
    share = 4 * parameters / world
    return {
        "weights": share if stage >= 3 else 4 * parameters,
        "gradients": share if stage >= 3 else 4 * parameters,
        "optimizer": moments * (share if stage >= 1 else 4 * parameters),
    }
