"""No drain: the backwards of the warm-up's micro-batches never come."""

QUESTION = "one_f_one_b"
LOSES = 1
FAILS = "check_1f1b_complete"
SAYS = "has to be flushed"


def one_f_one_b_rows(ranks, micro_batches):
    rows = []
    for rank in range(ranks):
        ahead = min(ranks - rank - 1, micro_batches)
        row = [f"{rank}F{i}" for i in range(ahead)]
        for done in range(micro_batches - ahead):
            row += [f"{rank}F{done + ahead}"] * (done + ahead < micro_batches) + [f"{rank}B{done}"]
        rows.append(row)
    return rows
