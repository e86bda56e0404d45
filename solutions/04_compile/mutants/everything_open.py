"""The batch is left open too."""

QUESTION = "dynamic"
LOSES = 1
FAILS = "check_only_the_length"
SAYS = "Leave open what changes, and no more"


def mark_length(batch):
    torch._dynamo.mark_dynamic(batch, [0, 1])
    return batch
