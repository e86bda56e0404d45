"""The warm-up does not ask how many micro-batches there are."""

QUESTION = "one_f_one_b"
LOSES = 1
FAILS = "check_few_micro_batches"
SAYS = "counted from 0"


def one_f_one_b_rows(ranks, micro_batches):
    rows = []
    for rank in range(ranks):
        ahead = ranks - rank - 1
        row = [f"{rank}F{i}" for i in range(ahead)]
        for done in range(micro_batches):
            row += [f"{rank}F{done + ahead}"] * (done + ahead < micro_batches) + [f"{rank}B{done}"]
        rows.append(row)
    return rows
