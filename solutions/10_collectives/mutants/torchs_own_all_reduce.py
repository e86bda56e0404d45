"""The collective that this step replaces."""

QUESTION = "ring"
LOSES = 4
FAILS = "check_all_reduce"
SAYS = "calls all_reduce"


def ring_all_reduce(tensor):
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total
