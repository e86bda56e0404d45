"""What is trained becomes equal, but nobody has rank 0's values."""

QUESTION = "replicate"
LOSES = 1
FAILS = "check_parameters"
SAYS = "the weight on rank 0 of 2"


def replicate(module):
    for parameter in module.parameters():
        if parameter.requires_grad:
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size()
        else:
            dist.broadcast(parameter.data, 0)
    for buffer in module.buffers():
        dist.broadcast(buffer, 0)
