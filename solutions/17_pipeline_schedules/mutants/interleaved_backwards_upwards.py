"""Backwards go through the rank's stages in the order of the forwards: each waits for one that comes after it."""

QUESTION = "interleaved"
LOSES = 3
FAILS = "check_interleaved_bubble"
SAYS = "cannot be carried out"


def interleaved_rows(ranks, micro_batches, per_rank):
    rows = []
    groups = [range(first, first + ranks) for first in range(0, micro_batches, ranks)]
    for rank in range(ranks):
        stages = range(rank, ranks * per_rank, ranks)
        forwards = [f"{stage}F{i}" for group in groups for stage in stages for i in group]
        backwards = [f"{stage}B{i}" for group in groups for stage in stages for i in group]
        ahead = min(len(forwards), (per_rank - 1) * ranks + 2 * (ranks - rank - 1))
        row = forwards[:ahead]
        for done, backward in enumerate(backwards):
            row += [*forwards[done + ahead : done + ahead + 1], backward]
        rows.append(row)
    return rows
