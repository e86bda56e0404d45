"""Divided by all targets, padding included."""

QUESTION = "loss"
LOSES = 1
FAILS = "check_padding"
SAYS = "not by all"


def loss_part(output, target, targets):
    return F.cross_entropy(output, target, reduction="sum", ignore_index=-100) / sum(len(each) for each in targets)
