"""A rank's own mean, weighted by its share of the tokens: 0 / 0 where it has none."""

QUESTION = "loss"
LOSES = 2
FAILS = "check_empty_rank"
SAYS = "0 / 0"


def rank_loss(logits, targets):
    own = (targets != -100).sum()
    valid = own.clone()
    dist.all_reduce(valid)
    mean = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    return mean * own * dist.get_world_size() / valid
