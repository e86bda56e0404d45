"""The switch: collectives of judged ranks pass through the judge, which does them, and so knows what really passed.

A trace that is kept in the student's own process can be forged. Judged ranks therefore have no network; their process group
(``backend``, over a ``link``) sends every call as a message on the socket that the judge holds. There it is read strictly (``request``),
matched with those of the other ranks and computed (``exchange``, ``arithmetic``), in one loop for all ranks of a run (``service``). The
notebook serves the same switch for its own ranks, so that the same mistake gets the same words.

Cost on two ranks of one machine: about 1 ms for an all-reduce of 4 kB, and each byte crosses a socket twice (``solutions/CHECKS.md`` has
the figures). Nothing is pickled, and no memory is shared: what a rank sends is copied before it is looked at.
"""
