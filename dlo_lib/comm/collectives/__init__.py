"""Collectives written out as messages between two ranks, and a model of their cost.

- ``messages``: a rank in its group, and exchanges with neighbours
- ``ring``: all-gather, reduce-scatter and all-reduce on a ring
- ``tree``: broadcast, reduce and all-reduce on binomial trees
- ``pairwise``: the all-to-all
- ``travelling``: messages round a ring while each rank computes
- ``cost``: the α–β model, which compares algorithms and is fitted to measurements

The room imports no other room.
"""

from dlo_lib.comm.collectives.cost import (
    Algorithm,
    AlphaBeta,
    Measurement,
    cheapest,
    cost,
    crossover,
    fit_alpha_beta,
)
from dlo_lib.comm.collectives.messages import Reduction
from dlo_lib.comm.collectives.pairwise import all_to_all
from dlo_lib.comm.collectives.ring import all_gather, all_reduce, reduce_scatter
from dlo_lib.comm.collectives.tree import all_reduce as tree_all_reduce
from dlo_lib.comm.collectives.tree import broadcast, reduce

__all__ = [
    "Algorithm",
    "AlphaBeta",
    "Measurement",
    "Reduction",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "cheapest",
    "cost",
    "crossover",
    "fit_alpha_beta",
    "reduce",
    "reduce_scatter",
    "tree_all_reduce",
]
