"""Each rank begins with one forward less than it could."""

QUESTION = "table"
LOSES = 1
FAILS = "check_no_more_bubble"
SAYS = "too few forwards"


def my_rows(ranks, micro_batches):
    rows = []
    for rank in range(ranks):
        ahead = min(micro_batches, max(0, ranks - 2 - rank))
        row = [f"{rank}F{i}" for i in range(ahead)]
        for i in range(micro_batches):
            if i + ahead < micro_batches:
                row.append(f"{rank}F{i + ahead}")
            row.append(f"{rank}B{i}")
        rows.append(row)
    return rows
