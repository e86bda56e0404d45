"""More is held than there is: 1F1B is not asked how many micro-batches it has."""

QUESTION = "memory"
LOSES = 1
FAILS = "check_held_few"
SAYS = "holds all of them"


def held(schedule, ranks, micro_batches, per_rank, rank):
    after = ranks - rank - 1
    if schedule == "interleaved":
        return min(micro_batches * per_rank, (per_rank - 1) * ranks + 2 * after + 1) / per_rank
    return {"naive": 1, "AFAB": micro_batches}.get(schedule, after + 1)
