"""The mean over all ranks, which DDP then divides by the number of ranks."""

QUESTION = "loss"
LOSES = 2
FAILS = "check_size"
SAYS = "DDP divides by the number of ranks, once"


def rank_loss(logits, targets):
    valid = (targets != -100).sum()
    dist.all_reduce(valid)
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return total / valid
