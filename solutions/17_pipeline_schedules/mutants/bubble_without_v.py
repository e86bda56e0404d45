"""The formula without 1/v."""

QUESTION = "bubble"
LOSES = 2
FAILS = "check_waiting_interleaved"
SAYS = "a stage has one part in v"


def waiting(schedule, ranks, micro_batches, per_rank, forward, input_gradient, weight_gradient):
    others, both = ranks - 1, forward + input_gradient + weight_gradient
    if schedule == "naive":
        return micro_batches * others * both
    if schedule == "ZB-H1":
        return others * (forward + input_gradient - weight_gradient)
    return others * both
