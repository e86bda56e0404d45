"""Nobody divides by the number of micro-batches: each part is the mean over a micro-batch's share."""

QUESTION = "loss"
LOSES = 2
FAILS = "check_equal_parts"
SAYS = "nobody divides"


def loss_part(output, target, targets):
    valid = sum((each != -100).sum() for each in targets) / len(targets)
    return F.cross_entropy(output, target, reduction="sum", ignore_index=-100) / valid
