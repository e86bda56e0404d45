"""The last micro-batch's backward is missing: its gradient never comes."""

QUESTION = "afab"
LOSES = 1
FAILS = "check_afab_complete"
SAYS = "has to be flushed"


def afab_rows(ranks, micro_batches):
    return [[f"{rank}F{i}" for i in range(micro_batches)] + [f"{rank}B{i}" for i in range(micro_batches - 1)] for rank in range(ranks)]
