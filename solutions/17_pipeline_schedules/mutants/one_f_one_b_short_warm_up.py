"""The warm-up is one forward too short: rank r waits for the way to the last rank and back."""

QUESTION = "one_f_one_b"
LOSES = 3
FAILS = "check_1f1b_bubble"
SAYS = "before a rank's first backward"


def one_f_one_b_rows(ranks, micro_batches):
    rows = []
    for rank in range(ranks):
        ahead = min(max(ranks - rank - 2, 0), micro_batches)
        row = [f"{rank}F{i}" for i in range(ahead)]
        for done in range(micro_batches):
            row += [f"{rank}F{done + ahead}"] * (done + ahead < micro_batches) + [f"{rank}B{done}"]
        rows.append(row)
    return rows
