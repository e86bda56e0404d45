"""The wrong order within a rank: a send comes before the computation whose result it sends."""

QUESTION = "order"
LOSES = 2
FAILS = "check_each_message_once"
SAYS = "Send what has been computed"


def with_messages(rows):
    last, done = len(rows) - 1, set()
    position, written = [0] * len(rows), [[] for _ in rows]
    while any(at < len(row) for at, row in zip(position, rows)):
        for rank, row in enumerate(rows):
            if position[rank] == len(row):
                continue
            cell = row[position[rank]]
            _, kind, i = parse(cell)
            from_rank, to_rank = (rank - 1, rank + 1) if kind == "F" else (rank + 1, rank - 1)
            if 0 <= from_rank <= last and f"{from_rank}{kind}{i}" not in done:
                continue
            position[rank] += 1
            done.add(cell)
            if 0 <= to_rank <= last:
                written[rank].append(f"{rank}SEND_{kind}{i}")
                written[to_rank].append(f"{to_rank}RECV_{kind}{i}")
            written[rank].append(cell)
    return written
