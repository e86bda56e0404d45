"""All forwards first: the small bubble, with every micro-batch in memory."""

QUESTION = "interleaved"
LOSES = 2
FAILS = "check_interleaved_memory"
SAYS = "one backward follows each forward"


def interleaved_rows(ranks, micro_batches, per_rank):
    rows = []
    groups = [range(first, first + ranks) for first in range(0, micro_batches, ranks)]
    for rank in range(ranks):
        stages = range(rank, ranks * per_rank, ranks)
        forwards = [f"{stage}F{i}" for group in groups for stage in stages for i in group]
        backwards = [f"{stage}B{i}" for group in groups for stage in reversed(stages) for i in group]
        ahead = len(forwards)
        row = forwards[:ahead]
        for done, backward in enumerate(backwards):
            row += [*forwards[done + ahead : done + ahead + 1], backward]
        rows.append(row)
    return rows
