"""Two stages a rank, whatever is asked."""

QUESTION = "interleaved"
LOSES = 1
FAILS = "check_more_stages"
SAYS = "is missing on rank"


def interleaved_rows(ranks, micro_batches, per_rank):
    rows = []
    groups = [range(first, first + ranks) for first in range(0, micro_batches, ranks)]
    for rank in range(ranks):
        stages = (rank, rank + ranks)
        forwards = [f"{stage}F{i}" for group in groups for stage in stages for i in group]
        backwards = [f"{stage}B{i}" for group in groups for stage in reversed(stages) for i in group]
        ahead = min(len(forwards), ranks + 2 * (ranks - rank - 1))
        row = forwards[:ahead]
        for done, backward in enumerate(backwards):
            row += [*forwards[done + ahead : done + ahead + 1], backward]
        rows.append(row)
    return rows
