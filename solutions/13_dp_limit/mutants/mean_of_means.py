"""Each rank's own mean; a rank without tokens gives 0."""

QUESTION = "loss"
LOSES = 2
FAILS = "check_weighing"
SAYS = "another weight"


def rank_loss(logits, targets):
    valid = (targets != -100).sum()
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return total / valid.clamp(min=1)
