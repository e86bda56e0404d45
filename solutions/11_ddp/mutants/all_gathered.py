"""Every rank collects the gradients of all others and takes their mean."""

QUESTION = "average"
LOSES = 1
FAILS = "check_small_traffic"
SAYS = "an all-reduce of each gradient is enough"


def average_gradients(module):
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()
            found = [torch.empty_like(parameter.grad) for _ in range(dist.get_world_size())]
            dist.all_gather(found, parameter.grad)
            parameter.grad = sum(found)
