"""Every rank puts one weight part more off than its drain needs: it stays open to no use."""

QUESTION = "zb_h1"
LOSES = 1
FAILS = "check_few_open"
SAYS = "only r open weight parts"


def zb_h1_rows(ranks, micro_batches):
    rows = []
    for rank in range(ranks):
        ahead, late = min(ranks - rank - 1, micro_batches), rank + 1
        row = [f"{rank}F{i}" for i in range(ahead)]
        for done in range(micro_batches):
            row += [f"{rank}F{done + ahead}"] * (done + ahead < micro_batches) + [f"{rank}I{done}"]
            row += [f"{rank}W{done - late}"] * (done >= late)
        rows.append(row + [f"{rank}W{i}" for i in range(max(0, micro_batches - late), micro_batches)])
    return rows
