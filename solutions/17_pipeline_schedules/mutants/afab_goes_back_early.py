"""That is 1F1B."""

QUESTION = "afab"
LOSES = 1
FAILS = "check_forwards_first"
SAYS = "only when all its forwards are done"


def afab_rows(ranks, micro_batches):
    rows = []
    for rank in range(ranks):
        ahead = min(ranks - rank - 1, micro_batches)
        row = [f"{rank}F{i}" for i in range(ahead)]
        for done in range(micro_batches):
            row += [f"{rank}F{done + ahead}"] * (done + ahead < micro_batches) + [f"{rank}B{done}"]
        rows.append(row)
    return rows
