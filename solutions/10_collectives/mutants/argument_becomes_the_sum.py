"""The sum replaces the argument."""

QUESTION = "ring"
LOSES = 1
FAILS = "check_all_reduce_argument"
SAYS = "the argument of rank"


def ring_all_reduce(tensor):
    flat = tensor.reshape(-1)
    return tensor.copy_(ring_all_gather(ring_reduce_scatter(flat), flat.numel()).view_as(tensor))
