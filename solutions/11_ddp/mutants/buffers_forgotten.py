"""Only the parameters are sent."""

QUESTION = "replicate"
LOSES = 1
FAILS = "check_buffers"
SAYS = "running_mean, a buffer"


def replicate(module):
    for parameter in module.parameters():
        dist.broadcast(parameter.data, 0)
