"""Every rank is taken for the first."""

QUESTION = "memory"
LOSES = 1
FAILS = "check_held_1f1b"
SAYS = "The rank matters"


def held(schedule, ranks, micro_batches, per_rank, rank):
    if schedule == "interleaved":
        return min(micro_batches * per_rank, (per_rank - 1) * ranks + 2 * (ranks - rank - 1) + 1) / per_rank
    after = 0 if micro_batches <= 2 else rank
    return {"naive": 1, "AFAB": micro_batches}.get(schedule, min(micro_batches, ranks - rank + after))
