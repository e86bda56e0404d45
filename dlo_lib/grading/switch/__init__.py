"""The switch: the judge performs the collectives of judged ranks, and so records the real traffic.

A student could forge a trace that is recorded in the student's process. Judged ranks therefore have no
network. Their process group (``backend``, over a ``link``) sends every call as a message on the judge's
socket. The judge reads it strictly (``request``), matches it with the calls of the other ranks and computes
the result (``exchange``, ``arithmetic``), in one loop for all ranks of a run (``server``). A notebook serves
the same switch for its ranks, so that the same mistake gets the same message.

Cost on two ranks of one machine: about 1 ms for an all-reduce of 4 kB, and each byte crosses a socket twice
(``solutions/CHECKS.md`` has the figures). Nothing is pickled, and no memory is shared: the judge copies what
a rank sends before reading it. Imports ``checks``.
"""
