"""Written for two ranks."""

QUESTION = "average"
LOSES = 2
FAILS = "check_mean"
SAYS = "gradient 0 on rank 0 of 1"


def average_gradients(module):
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad /= 2
            dist.all_reduce(parameter.grad)
