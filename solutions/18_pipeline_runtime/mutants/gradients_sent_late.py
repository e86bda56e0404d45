"""A gradient is sent after the next activations have come: the cure of 1F1B alone."""

QUESTION = "order"
LOSES = 4
FAILS = "check_no_dead_lock"
SAYS = "belongs to one schedule"


def with_messages(rows):
    written, last = [], len(rows) - 1
    for rank, row in enumerate(rows):
        cells = []
        for cell in row:
            _, kind, i = parse(cell)
            from_rank, to_rank = (rank - 1, rank + 1) if kind == "F" else (rank + 1, rank - 1)
            if 0 <= from_rank <= last:
                cells.append(f"{rank}RECV_{kind}{i}")
            cells.append(cell)
            if 0 <= to_rank <= last:
                cells.append(f"{rank}SEND_{kind}{i}")
        for at in range(len(cells) - 1):
            if "SEND_B" in cells[at] and "RECV_F" in cells[at + 1]:
                cells[at : at + 2] = [cells[at + 1], cells[at]]
        written.append(cells)
    return written
