"""The sum comes back flat."""

QUESTION = "ring"
LOSES = 1
FAILS = "check_all_reduce_shape"
SAYS = "matrices of whole numbers"


def ring_all_reduce(tensor):
    flat = tensor.reshape(-1)
    return ring_all_gather(ring_reduce_scatter(flat), flat.numel())
