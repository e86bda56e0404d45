"""The weight parts that were put off are never done."""

QUESTION = "zb_h1"
LOSES = 1
FAILS = "check_parts_complete"
SAYS = "Without its weight part"


def zb_h1_rows(ranks, micro_batches):
    rows = []
    for rank in range(ranks):
        ahead = min(ranks - rank - 1, micro_batches)
        row = [f"{rank}F{i}" for i in range(ahead)]
        for done in range(micro_batches):
            row += [f"{rank}F{done + ahead}"] * (done + ahead < micro_batches) + [f"{rank}I{done}"]
            row += [f"{rank}W{done - rank}"] * (done >= rank)
        rows.append(row)
    return rows
