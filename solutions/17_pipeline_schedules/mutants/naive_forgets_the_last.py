"""The last micro-batch is forgotten: counting began with 1."""

QUESTION = "naive"
LOSES = 1
FAILS = "check_naive_complete"
SAYS = "micro-batch goes through every stage"


def naive_rows(ranks, micro_batches):
    return [[f"{rank}{kind}{i}" for i in range(max(1, micro_batches - 1)) for kind in "FB"] for rank in range(ranks)]
