"""The last rank goes back through the micro-batches in the reverse order, the others do not."""

QUESTION = "afab"
LOSES = 2
FAILS = "check_afab_fills_and_drains"
SAYS = "Ranks must take micro-batches in the same order"


def afab_rows(ranks, micro_batches):
    rows = [[f"{rank}{kind}{i}" for kind in "FB" for i in range(micro_batches)] for rank in range(ranks)]
    rows[-1][micro_batches:] = reversed(rows[-1][micro_batches:])
    return rows
