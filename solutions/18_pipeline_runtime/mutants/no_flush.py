"""The row ends with the last forward: the micro-batches that are still in flight are left there."""

QUESTION = "table"
LOSES = 1
FAILS = "check_everything_once"
SAYS = "has to be flushed"


def my_rows(ranks, micro_batches):
    rows = []
    for rank in range(ranks):
        ahead = min(micro_batches, ranks - 1 - rank)
        row = [f"{rank}F{i}" for i in range(ahead)]
        for i in range(micro_batches - ahead):
            row += [f"{rank}F{i + ahead}", f"{rank}B{i}"]
        rows.append(row)
    return rows
