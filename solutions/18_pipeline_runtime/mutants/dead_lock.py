"""Receive just before, send right after: two neighbours send first."""

QUESTION = "order"
LOSES = 4
FAILS = "check_no_dead_lock"
SAYS = "each waits for the other"


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
        written.append(cells)
    return written
