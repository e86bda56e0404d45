"""The warm-up of ZB-H2: twice the forwards."""

QUESTION = "zb_h1"
LOSES = 2
FAILS = "check_zb_h1_memory"
SAYS = "only the weight parts move"


def zb_h1_rows(ranks, micro_batches):
    rows = []
    for rank in range(ranks):
        ahead, late = min(2 * (ranks - rank - 1), micro_batches), rank
        row = [f"{rank}F{i}" for i in range(ahead)]
        for done in range(micro_batches):
            row += [f"{rank}F{done + ahead}"] * (done + ahead < micro_batches) + [f"{rank}I{done}"]
            row += [f"{rank}W{done - late}"] * (done >= late)
        rows.append(row + [f"{rank}W{i}" for i in range(max(0, micro_batches - late), micro_batches)])
    return rows
