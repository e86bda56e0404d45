"""In the steady turns the backward comes first: on the last rank before any forward."""

QUESTION = "table"
LOSES = 2
FAILS = "check_nobody_waits_for_ever"
SAYS = "put that before it"


def my_rows(ranks, micro_batches):
    rows = []
    for rank in range(ranks):
        ahead = min(micro_batches, ranks - 1 - rank)
        row = [f"{rank}F{i}" for i in range(ahead)]
        for i in range(micro_batches):
            row.append(f"{rank}B{i}")
            if i + ahead < micro_batches:
                row.append(f"{rank}F{i + ahead}")
        rows.append(row)
    return rows
