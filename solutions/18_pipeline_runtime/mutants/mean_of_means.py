"""The mean of each micro-batch, divided by their number."""

QUESTION = "loss"
LOSES = 2
FAILS = "check_weight_of_a_sample"
SAYS = "the mean of means"


def loss_part(output, target, targets):
    total = F.cross_entropy(output, target, reduction="sum", ignore_index=-100)
    return total / (target != -100).sum().clamp(min=1) / len(targets)
