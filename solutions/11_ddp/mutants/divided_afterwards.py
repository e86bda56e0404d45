"""The division comes after the sum, which fp16 cannot hold."""

QUESTION = "average"
LOSES = 1
FAILS = "check_half_precision"
SAYS = "divide before the sum"


def average_gradients(module):
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
