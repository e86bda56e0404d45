"""W right after I: the backward is cut in two, and nothing is put off."""

QUESTION = "zb_h1"
LOSES = 3
FAILS = "check_weights_fill_the_bubble"
SAYS = "keeps the last r of them for the drain"


def zb_h1_rows(ranks, micro_batches):
    rows = []
    for rank in range(ranks):
        ahead, late = min(ranks - rank - 1, micro_batches), 0
        row = [f"{rank}F{i}" for i in range(ahead)]
        for done in range(micro_batches):
            row += [f"{rank}F{done + ahead}"] * (done + ahead < micro_batches) + [f"{rank}I{done}"]
            row += [f"{rank}W{done - late}"] * (done >= late)
        rows.append(row + [f"{rank}W{i}" for i in range(max(0, micro_batches - late), micro_batches)])
    return rows
