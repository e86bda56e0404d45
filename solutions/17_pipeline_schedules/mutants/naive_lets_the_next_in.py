"""The next forward is done before the last micro-batch has come back: that is a pipeline."""

QUESTION = "naive"
LOSES = 2
FAILS = "check_one_at_a_time"
SAYS = "Without a pipeline the next micro-batch begins"


def naive_rows(ranks, micro_batches):
    return [[f"{rank}{kind}{i}" for kind in "FB" for i in range(micro_batches)] for rank in range(ranks)]
