"""Right only when the three parts cost the same."""

QUESTION = "bubble"
LOSES = 1
FAILS = "check_waiting_unequal"
SAYS = "What is left of a forward and an input part"


def waiting(schedule, ranks, micro_batches, per_rank, forward, input_gradient, weight_gradient):
    others, both = ranks - 1, forward + input_gradient + weight_gradient
    if schedule == "naive":
        return micro_batches * others * both
    if schedule == "ZB-H1":
        return others * forward
    return others * both / per_rank
