"""Divided by all tokens, ignored ones included."""

QUESTION = "loss"
LOSES = 1
FAILS = "check_padding"
SAYS = "not by all"


def rank_loss(logits, targets):
    tokens = torch.tensor(targets.numel())
    dist.all_reduce(tokens)
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return total * dist.get_world_size() / tokens
