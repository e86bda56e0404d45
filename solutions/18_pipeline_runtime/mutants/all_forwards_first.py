"""AFAB: every micro-batch is in flight at once."""

QUESTION = "table"
LOSES = 1
FAILS = "check_in_flight"
SAYS = "too many micro-batches"


def my_rows(ranks, micro_batches):
    return [[f"{rank}{kind}{i}" for kind in "FB" for i in range(micro_batches)] for rank in range(ranks)]
