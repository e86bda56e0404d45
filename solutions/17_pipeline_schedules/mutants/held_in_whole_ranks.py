"""Stages are counted as whole ranks: the 1/v is forgotten."""

QUESTION = "memory"
LOSES = 2
FAILS = "check_held_interleaved"
SAYS = "a stage has one part in v"


def held(schedule, ranks, micro_batches, per_rank, rank):
    after = ranks - rank - 1
    if schedule == "interleaved":
        return min(micro_batches * per_rank, (per_rank - 1) * ranks + 2 * after + 1)
    return {"naive": 1, "AFAB": micro_batches, "1F1B": min(micro_batches, after + 1), "ZB-H1": min(micro_batches, after + 1)}[schedule]
