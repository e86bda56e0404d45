"""The cure of one pattern: even ranks send first. Where even ranks send to even ones, it dead-locks."""

QUESTION = "exchange"
LOSES = 2
FAILS = "check_any_pattern"
SAYS = "DEAD-LOCK"


def exchange(outgoing, to, incoming, source):
    if dist.get_rank() % 2 == 0:
        dist.send(outgoing, to)
        dist.recv(incoming, source)
    else:
        dist.recv(incoming, source)
        dist.send(outgoing, to)
