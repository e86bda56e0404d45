"""The mean of a micro-batch, weighted by its share: 0 / 0 where there is nothing to learn."""

QUESTION = "loss"
LOSES = 1
FAILS = "check_nothing_to_learn"
SAYS = "a mean over nothing"


def loss_part(output, target, targets):
    valid = sum((each != -100).sum() for each in targets)
    return F.cross_entropy(output, target, ignore_index=-100) * (target != -100).sum() / valid
