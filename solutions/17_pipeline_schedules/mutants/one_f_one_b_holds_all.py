"""Every forward is a warm-up: the bubble of 1F1B with the memory of AFAB."""

QUESTION = "one_f_one_b"
LOSES = 2
FAILS = "check_1f1b_memory"
SAYS = "A rank goes back as soon as it can"


def one_f_one_b_rows(ranks, micro_batches):
    rows = []
    for rank in range(ranks):
        ahead = micro_batches
        row = [f"{rank}F{i}" for i in range(ahead)]
        for done in range(micro_batches):
            row += [f"{rank}F{done + ahead}"] * (done + ahead < micro_batches) + [f"{rank}B{done}"]
        rows.append(row)
    return rows
