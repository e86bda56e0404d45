"""The switch: the judge performs the collectives of judged ranks, and so records the real traffic.

A student could forge a trace that is recorded in the student's process. Judged ranks therefore have no
network. Their process group sends every call as a message on the judge's socket, and a notebook serves the
same switch for its ranks, so that the same mistake gets the same message.

In a rank:

- ``backend``: a backend of ``torch.distributed``
- ``link``: the connection of a rank
- ``wire``: frames of JSON and tensor bytes
- ``own_memory``: returns what a process has freed

In the judge:

- ``server``: one loop for all ranks of a run
- ``request``: reads the messages strictly
- ``exchange``: matches the calls of the ranks
- ``arithmetic``: computes the result
- ``memory``: reads the memory of a rank

For both:

- ``scenario``: runs a scenario
- ``local``: the switch in a notebook

Cost on two ranks of one machine: about 1 ms for an all-reduce of 4 kB, and each byte crosses a socket twice
(``solutions/CHECKS.md`` has the figures). Nothing is pickled, and no memory is shared: the judge copies what
a rank sends before reading it. Imports ``checks``, ``comm`` and ``launch``.
"""
