"""The bubble of the naive table, counted once and not for every micro-batch."""

QUESTION = "bubble"
LOSES = 1
FAILS = "check_waiting_naive"
SAYS = "for every micro-batch"


def waiting(schedule, ranks, micro_batches, per_rank, forward, input_gradient, weight_gradient):
    others, both = ranks - 1, forward + input_gradient + weight_gradient
    if schedule == "naive":
        return others * both
    if schedule == "ZB-H1":
        return others * (forward + input_gradient - weight_gradient)
    return others * both / per_rank
